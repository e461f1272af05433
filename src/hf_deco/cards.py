"""Cards on disk: rendered from the package's templates, never over what a user wrote, without a user's folders."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from huggingface_hub import CardData, RepoCard

TEMPLATES = Path(__file__).parent / "templates"
_MARK = "hf_deco wrote this file and renews it while it stays as it is"
_MARKS = {".md": "<!-- {}; digest {} -->", ".yaml": "# {}; digest {}"}
_ABSOLUTE = re.compile(r"[/\\~]|[A-Za-z]:[/\\]")
_ABSOLUTE_INSIDE = re.compile(r"""(?:^|[\s'"=,({\[]|:(?!//))(?:[/\\~]|[A-Za-z]:[/\\]|\.\.[/\\])""")
_SECRET = re.compile(r"token|secret|password|credential|api[_-]?key", re.IGNORECASE)
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")


def fill_template(card_class: type[RepoCard], data: CardData, template: str, facts: dict) -> str:
    """A card as text: metadata on top, the filled template of that name below."""
    card = card_class.from_template(data, template_path=str(TEMPLATES / template), **facts)
    return re.sub(r"\n{3,}", "\n\n", str(card)).rstrip() + "\n"


def save_rendered(path: str | Path, text: str) -> bool:
    """Write a rendered file, unless one is there that somebody wrote or edited.

    The last line holds a digest of the others, which an edit no longer fits.

    Args:
        path (`str` or path): A `.md` or `.yaml` file.
        text (`str`): Its content.

    Returns:
        `bool`: whether it was written.
    """
    path = Path(path)
    if path.exists() and not _is_as_rendered(path.read_text(encoding="utf-8")):
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text + _MARKS[path.suffix].format(_MARK, _digest(text)) + "\n", encoding="utf-8")
    os.replace(temporary, path)
    return True


def _is_as_rendered(content: str) -> bool:
    text, newline, last = content.rstrip("\n").rpartition("\n")
    return _MARK in last and f"digest {_digest(text + newline)}" in last


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def without_folders(value):
    """An option as a card may show it: of a path outside the working directory the last part alone.

    Returns:
        The option, or None where a path stands somewhere inside a longer text.
    """
    if isinstance(value, list):
        return [without_folders(entry) for entry in value]
    if not isinstance(value, str):
        return value
    if _ABSOLUTE.match(value) or ".." in re.split(r"[/\\]", value):
        return re.split(r"[/\\]", value.rstrip("/\\"))[-1]
    return None if _ABSOLUTE_INSIDE.search(value) else _HUB_TOKEN.sub("...", value)


def is_secret(name: str) -> bool:
    """Whether an option of this name holds what nobody else should see."""
    return bool(_SECRET.search(name))


def shown_command(words: list[str]) -> str | None:
    """A command as a card may show it: without folders outside the working directory, without secrets.

    Args:
        words (`list[str]`): The interpreter, the program and its arguments.

    Returns:
        `str`: the command, or None where it is not one to be typed, as in a notebook.
    """
    program = re.split(r"[/\\]", words[1])[-1] if len(words) > 1 and words[0] == "python" else words[0]
    if program == "hf-deco":
        shown, rest = [program], words[2:] if words[0] == "python" else words[1:]
    elif program.endswith(".py") and not program.startswith(("_", "ipykernel")) and len(words) > 1:
        shown, rest = ["python", without_folders(words[1])], words[2:]
    else:
        return None
    secret = False
    for word in rest:
        flag, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
        hidden = secret or (equals and is_secret(flag))
        secret = is_secret(flag) and not equals
        shown.append(flag + equals + ("..." if hidden else without_folders(value) or "..." * bool(value)))
    return " ".join(f'"{word}"' if re.search(r"\s", word) else word for word in shown)
