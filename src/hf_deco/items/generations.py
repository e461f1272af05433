"""Generations of an index on disk: published whole or not at all, followed while the next is written."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from .index import ItemIndex
from .index_files import MANIFEST, read_index, sync_folder, write_index, write_synced

CURRENT, LOCK = "CURRENT", ".lock"
INDEX_FOLDER = "index"  # beside the weights of a checkpoint
_GENERATION, _LEFTOVER = re.compile(r"gen-([1-9][0-9]*)"), re.compile(r"\.(gen-[0-9]+|CURRENT)\.[0-9a-f]{32}")


class IndexWriter:
    """The one writer of a folder of generations.

    A generation is written to a folder aside, `gen-<n>`, never to be changed; then the small file `CURRENT` is replaced
    by one that names it. A writer that dies at any point leaves the old generation or the new one. Use it from one
    thread, as a context:

    ```python
    with IndexWriter("index") as writer:
        index = writer.publish(index.update(item_ids, codes, embeddings), keep=2)
    ```

    Args:
        folder (`str` or `Path`): made if it does not exist.

    Raises:
        RuntimeError: another writer, of this process or another, has the folder. Its lock ends with its process.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.folder / LOCK, thread_local=False)
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise RuntimeError(
                f"another writer has {str(self.folder)!r}; an index has one at a time, so wait until it closes."
            ) from error
        for path in self.folder.iterdir():
            if _LEFTOVER.fullmatch(path.name):  # of a writer that died; the lock says that none is alive
                _remove(path)

    def __enter__(self) -> IndexWriter:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Lets another writer have the folder."""
        self._lock.release()

    def publish(self, index: ItemIndex, keep: int | None = None) -> ItemIndex:
        """Makes an index the current generation.

        Args:
            index ([`ItemIndex`]): built anew, or updated from the current generation.
            keep (`int`, *optional*): call `prune` afterwards.

        Returns:
            `ItemIndex`: the same, with its generation.

        Raises:
            ValueError: it was updated from another generation than the current one, whose changes would be lost.
            RuntimeError: this writer is closed.
        """
        self._check_open()
        if keep is not None:
            _check_keep(keep)
        current = _read_current(self.folder) if (self.folder / CURRENT).exists() else None
        number = None if current is None else current.generation
        if index.base not in (None, number):
            raise ValueError(
                f"`index` was updated from generation {index.base}, but generation {number} is current, whose changes "
                "would be lost; read that one and update it."
            )
        generation = max(self._generations(), default=0) + 1
        before = None if current is None else replace(current, previous=None)  # a chain would grow for ever
        self._point_to(_Current(generation, self._write(index, generation), before))
        if keep is not None:
            self.prune(keep)
        return replace(index, generation=generation, base=generation)

    def adopt(self, folder: str | Path) -> ItemIndex:
        """Makes the current generation of another folder, such as one that was downloaded, the current one here, under
        its own number.

        Args:
            folder (`str` or `Path`): where it was published. It is read, and may be read-only.

        Returns:
            `ItemIndex`: that generation.

        Raises:
            ValueError: it is damaged, there or in a copy that is here; or a generation of that number is here that is
                another one.
            FileNotFoundError: nothing was published there, or a file is missing.
            RuntimeError: this writer is closed.
        """
        self._check_open()
        named = replace(_read_current(Path(folder)), previous=None)
        index, here = _open(Path(folder), named, verify=True), self.folder / f"gen-{named.generation}"
        if here.exists():
            if hashlib.sha256((here / MANIFEST).read_bytes()).hexdigest() != named.manifest_sha256:
                raise ValueError(
                    f"{str(self.folder)!r} has a generation {named.generation} of its own: publish the index of "
                    f"{str(folder)!r} as its next one, or adopt it in another folder."
                )
            _open(self.folder, named, verify=True)  # it may have been damaged since
        else:
            self._write(index, named.generation)
        current = _read_current(self.folder) if (self.folder / CURRENT).exists() else None
        if not named.same_as(current):
            before = None if current is None else replace(current, previous=None)
            self._point_to(replace(named, previous=before))
        return index

    def rollback(self) -> int:
        """Makes the generation before the current one current again, after reading it, and returns its number.

        Raises:
            ValueError: there is none, or it is damaged.
            FileNotFoundError: no generation is current, or the one before is gone.
            RuntimeError: this writer is closed.
        """
        self._check_open()
        current = _read_current(self.folder)
        if current.previous is None:
            raise ValueError(f"generation {current.generation} in {str(self.folder)!r} names none before it.")
        _open(self.folder, current.previous, verify=True)
        self._point_to(current.previous)
        return current.previous.generation

    def prune(self, keep: int = 2) -> list[int]:
        """Deletes old generations, and such as never became current; neither the current one nor the one before it.

        Args:
            keep (`int`): how many to keep, the current one included; at least 2.

        Returns:
            list of `int`: the numbers of those that are gone.

        Raises:
            ValueError: `keep` is smaller.
            FileNotFoundError: no generation is current.
            RuntimeError: this writer is closed.
        """
        self._check_open()
        _check_keep(keep)
        current, numbers = _read_current(self.folder), self._generations()
        kept = [current.generation] + ([] if current.previous is None else [current.previous.generation])
        older = [number for number in reversed(numbers) if number < current.generation and number not in kept]
        kept += older[: keep - len(kept)]
        gone = [number for number in numbers if number not in kept]
        for number in gone:
            # Renamed first, so that a half-deleted one is never taken for a generation.
            aside = self._aside(f"gen-{number}")
            os.rename(self.folder / f"gen-{number}", aside)
            _remove(aside)
        return gone

    def _write(self, index: ItemIndex, generation: int) -> str:
        """Puts a generation into its folder, and returns the hash of its manifest."""
        aside = self._aside(f"gen-{generation}")
        try:
            aside.mkdir()
            digest = write_index(index, aside, generation)
            os.rename(aside, self.folder / f"gen-{generation}")
        finally:
            _remove(aside)
        sync_folder(self.folder)
        return digest

    def _point_to(self, current: _Current) -> None:
        aside = self._aside(CURRENT)
        try:
            write_synced(aside, json.dumps(asdict(current)).encode() + b"\n")
            os.replace(aside, self.folder / CURRENT)
        finally:
            _remove(aside)
        sync_folder(self.folder)

    def _aside(self, name: str) -> Path:
        return self.folder / f".{name}.{uuid.uuid4().hex}"

    def _generations(self) -> list[int]:
        """Numbers of the generations that are there, ascending."""
        found = (_GENERATION.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def _check_open(self) -> None:
        if not self._lock.is_locked:
            raise RuntimeError(f"this writer of {str(self.folder)!r} is closed; make another.")


class IndexReader:
    """Follows the generations of a folder.

    Queries go to `index`, which stays what it is until `refresh` has read, checked and tried out the next generation
    beside it; the swap is one assignment. Whoever took `index` before goes on with that one. Call `refresh` every few
    seconds, from a thread that answers no queries.

    Args:
        folder (`str` or `Path`): one that an [`IndexWriter`] publishes to.
        tokenizer_version, model_id (`str`): those of the model that asks; see `ItemIndex.check_made_for`.
        verify (`bool`): compare hashes. Reading without takes about half the time, and may serve what a disk or a copy
            has corrupted.

    Raises:
        FileNotFoundError: nothing was published, or a file is missing.
        ValueError: the current generation is damaged, or made with another tokenizer or model.
    """

    def __init__(self, folder: str | Path, tokenizer_version: str, model_id: str, verify: bool = True):
        self.folder, self.verify = Path(folder), verify
        self._asker = tokenizer_version, model_id
        self._lock = threading.Lock()
        self._rejected: _Current | None = None
        # The current and the previous index, each with what named it, in one reference that is swapped.
        self._state = (self._read(_read_current(self.folder)), None)

    @property
    def index(self) -> ItemIndex:
        """The index in use. Take it once a request, and answer the whole request with it."""
        return self._state[0][1]

    @property
    def previous(self) -> ItemIndex | None:
        """The one before it, kept for `rollback`."""
        return None if self._state[1] is None else self._state[1][1]

    def refresh(self) -> bool:
        """Goes over to the current generation; returns whether there was another one.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: the generation is damaged, or made with another tokenizer or model. The index in use stays.
        """
        with self._lock:
            named = _read_current(self.folder)
            if named.same_as(self._state[0][0]) or named.same_as(self._rejected):
                return False
            self._state = (self._read(named), self._state[0])
            self._rejected = None
            return True

    def rollback(self) -> ItemIndex:
        """Goes back to the previous index, and returns it. `refresh` then skips the generation that was left.

        Raises:
            RuntimeError: there is no previous one.
        """
        with self._lock:
            current, previous = self._state
            if previous is None:
                raise RuntimeError(f"there is nothing before generation {current[0].generation} to roll back to.")
            self._state, self._rejected = (previous, None), current[0]
            return previous[1]

    def _read(self, named: _Current) -> tuple[_Current, ItemIndex]:
        while True:
            try:
                index = _open(self.folder, named, self.verify)
                break
            except FileNotFoundError:
                later = _read_current(self.folder)
                if later.same_as(named):
                    raise
                named = later  # two were published, and that one deleted, while it was read
        index.check_made_for(*self._asker)
        return named, index


@dataclass(frozen=True)
class _Current:
    """What `CURRENT` names: a generation, the hash of its manifest, and the generation that was current before."""

    generation: int
    manifest_sha256: str
    previous: _Current | None = None

    def same_as(self, other: _Current | None) -> bool:
        return other is not None and self.manifest_sha256 == other.manifest_sha256


def open_index(folder: str | Path, verify: bool = True) -> ItemIndex:
    """Reads the current generation of a folder, whoever asks.

    Raises:
        FileNotFoundError: nothing was published, or a file is missing.
        ValueError: the generation is damaged.
    """
    return _open(Path(folder), _read_current(Path(folder)), verify)


def current_generation(folder: str | Path) -> int:
    """Number of the current generation of a folder, which is not read.

    Raises:
        FileNotFoundError: nothing was published.
        ValueError: the file that names it is damaged.
    """
    return _read_current(Path(folder)).generation


def _open(folder: Path, named: _Current, verify: bool) -> ItemIndex:
    return read_index(folder / f"gen-{named.generation}", named.generation, named.manifest_sha256, verify)


def _read_current(folder: Path) -> _Current:
    path = folder / CURRENT
    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r} is missing; `folder` must be one that an `IndexWriter` published to.")
    try:
        return _parse_current(json.loads(path.read_bytes()))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is truncated or damaged ({error}); publish the index again.") from error


def _parse_current(value: dict) -> _Current:
    if not isinstance(value, dict) or set(value) != {"generation", "manifest_sha256", "previous"}:
        raise ValueError("it names no generation")
    if type(value["generation"]) is not int or not isinstance(value["manifest_sha256"], str):
        raise ValueError("it names no generation")
    previous = value["previous"]
    return _Current(value["generation"], value["manifest_sha256"], previous and _parse_current(previous))


def _check_keep(keep: int) -> None:
    if keep < 2:
        raise ValueError(f"`keep` must be at least 2, the current generation and the one before it, got {keep}.")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
