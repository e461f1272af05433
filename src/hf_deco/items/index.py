"""The index of a catalog: from semantic IDs to items, and to the embeddings that tell items of one SID apart."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from ..models.strings_sid import PackedStrings
from ..models.trie import SIDTrie
from .index_arguments import as_floats, as_integers, check_denied, check_items, check_log_probs, some, to_numpy
from .index_order import join_strings, merged_order, sorted_order, take_strings
from .packing import PackedRows, check_precision
from .reranking import Reranked, best_first, drop_repeated, log_softmax, spread
from .rq_kmeans import check_codebook_sizes
from .sid_keys import check_key_space, key_codes, last_keys, sid_keys
from .sid_table import check_item_ids


@dataclass(frozen=True, eq=False)
class ItemIndex:
    """An immutable snapshot of a catalog: which items every SID has, and their embeddings.

    Items stand in one canonical order, by SID and then by id, so the items of a SID, and those of any prefix, are one
    range of rows; and an index that was updated equals, bit for bit, one that was built anew from the same items. Any
    number of threads may read it. Make one with `build`, the next with `update`; publish them with [`IndexWriter`].

    Attributes:
        keys (`np.ndarray` of shape `(S,)`): the distinct SIDs, ascending, uint64; see `sid_keys`. Position `s` is leaf
            `s` of `trie()`.
        offsets (`np.ndarray` of shape `(S + 1,)`): rows of SID `s` are `offsets[s] .. offsets[s + 1] - 1`; int64.
        item_ids ([`PackedStrings`] of length N): id of every row.
        embeddings ([`PackedRows`] of length N): embedding of every row.
        codebook_sizes (`tuple[int, ...]`): codes of every level.
        tokenizer_version (`str`): `ItemTokenizer.version_id` of the tokenizer that chose the codes.
        model_id (`str`): name of the model whose item tower gave the embeddings, and whose users it answers.
        generation (`int`, *optional*): the number it was published under; `None` where it was not.
        base (`int`, *optional*): the generation it was updated from, or is; `None` where it was built anew.

    Raises:
        ValueError: the parts do not fit together.
    """

    keys: np.ndarray
    offsets: np.ndarray
    item_ids: PackedStrings
    embeddings: PackedRows
    codebook_sizes: tuple[int, ...]
    tokenizer_version: str
    model_id: str
    generation: int | None = None
    base: int | None = None

    def __post_init__(self):
        sizes = check_codebook_sizes(self.codebook_sizes)
        check_key_space(sizes)
        object.__setattr__(self, "codebook_sizes", sizes)
        for name in ("tokenizer_version", "model_id"):
            if not isinstance(value := getattr(self, name), str) or not value:
                raise ValueError(f"`{name}` must be a non-empty string, got {value!r}.")
        for name, dtype in (("keys", np.dtype(np.uint64)), ("offsets", np.dtype(np.int64))):
            array = getattr(self, name)
            if array.dtype != dtype or array.ndim != 1:
                raise ValueError(f"`{name}` must be {dtype} of one dimension, got {array.dtype} of {array.shape}.")
        self._check_directory()
        ids, rows = self.item_ids, self.embeddings
        for array in (self.keys, self.offsets, ids.data, ids.offsets, rows.data, rows.scales):
            if array is not None:
                array.flags.writeable = False

    def _check_directory(self) -> None:
        rows, keys, offsets = len(self.item_ids), self.keys, self.offsets
        if not len(keys) or (keys[1:] <= keys[:-1]).any() or keys[-1] > last_keys(np.uint64(0), 0, self.codebook_sizes):
            raise ValueError("`keys` must be SIDs within `codebook_sizes`, ascending, at least one.")
        whole = len(offsets) == len(keys) + 1 and offsets[0] == 0 and offsets[-1] == rows
        if not whole or (offsets[1:] <= offsets[:-1]).any():
            raise ValueError(f"`offsets` must give each of the {len(keys)} SIDs a range of the {rows} rows.")
        if len(self.embeddings) != rows:
            raise ValueError(f"`embeddings` has {len(self.embeddings)} rows for {rows} `item_ids`.")

    def __len__(self) -> int:
        return len(self.item_ids)

    def __repr__(self) -> str:
        packed = f"{self.embeddings.precision}[{self.embeddings.width}]"
        return f"ItemIndex(items={len(self)}, sids={self.num_sids}, {packed}, generation={self.generation})"

    @property
    def num_sids(self) -> int:
        """Number of distinct SIDs `S`."""
        return len(self.keys)

    @classmethod
    def build(
        cls,
        item_ids,
        codes,
        embeddings,
        codebook_sizes,
        *,
        tokenizer_version: str,
        model_id: str,
        precision: str = "int8",
    ) -> ItemIndex:
        """Builds an index of a whole catalog.

        Args:
            item_ids (array-like of shape `(N,)`): distinct item ids.
            codes (array-like of shape `(N, K)`): SID of every item; items may share one.
            embeddings (array-like of shape `(N, d)`): what users are multiplied with.
            codebook_sizes (sequence of K `int`): codes of every level.
            tokenizer_version, model_id (`str`): see above.
            precision (`str`): `"fp16"`, `"int8"` or `"int4"`; see [`PackedRows`].

        Raises:
            ValueError: an argument is malformed.
        """
        sizes = check_codebook_sizes(codebook_sizes)
        check_key_space(sizes)
        check_precision(precision)
        item_ids, names, keys, embeddings = check_items(item_ids, codes, embeddings, sizes)
        order = sorted_order(keys, item_ids)
        rows = PackedRows.pack(embeddings, precision).take(order)
        return cls(*_directory(keys[order]), take_strings(names, order), rows, sizes, tokenizer_version, model_id)

    def update(
        self, item_ids=(), codes=None, embeddings=None, *, removed=(), tokenizer_version: str | None = None
    ) -> ItemIndex:
        """The next snapshot; this one stays as it is.

        Args:
            item_ids (array-like of shape `(n,)`): new items, and those whose SID or embedding changed.
            codes (array-like of shape `(n, K)`): their SIDs.
            embeddings (array-like of shape `(n, d)`): their embeddings, of the same model as all others. When that
                changes, build the index anew.
            removed (array-like of shape `(r,)`): ids of items that leave.
            tokenizer_version (`str`, *optional*): the version that holds from now on, where a tokenizer was published
                anew. `item_ids` must then name all items whose codes differ in it, which [`SIDUpdate`] lists.

        Returns:
            `ItemIndex`, equal to one that is built anew from the items as they are now.

        Raises:
            ValueError: an argument is malformed, an item that is not in the index is removed, or none is left.
        """
        item_ids, names, keys, rows = self._check_changes(item_ids, codes, embeddings)
        keep = np.ones(len(self), dtype=bool)
        keep[self._rows_of_removed(removed, item_ids)] = False
        known = np.array(self.item_ids.find(item_ids.tolist()), dtype=np.int64)
        keep[known[known >= 0]] = False
        if not keep.any() and not len(item_ids):
            raise ValueError(f"`removed` names all {len(self)} items; an index needs at least one.")
        old_keys = np.repeat(self.keys, np.diff(self.offsets))
        order = merged_order(old_keys, self.item_ids, np.flatnonzero(keep), keys, item_ids)
        new_keys, offsets = _directory(np.concatenate([old_keys, keys])[order])
        return replace(
            self,
            keys=new_keys,
            offsets=offsets,
            item_ids=take_strings(join_strings(self.item_ids, names), order),
            embeddings=self.embeddings.merge(rows, order),
            tokenizer_version=self.tokenizer_version if tokenizer_version is None else tokenizer_version,
            generation=None,
        )

    def _check_changes(self, item_ids, codes, embeddings) -> tuple[np.ndarray, PackedStrings, np.ndarray, PackedRows]:
        """Ids, the same packed, keys and packed embeddings of changed items."""
        if not len(item_ids):
            if codes is not None and len(codes) or embeddings is not None and len(embeddings):
                raise ValueError("`codes` and `embeddings` are given without `item_ids`; name the items.")
            nothing = np.empty(0, dtype=np.int64)
            return np.empty(0, dtype=str), PackedStrings.pack([]), self.keys[nothing], self.embeddings.take(nothing)
        if codes is None or embeddings is None:
            raise ValueError("`item_ids` is given without `codes` or `embeddings`; give both, one row an item.")
        item_ids, names, keys, embeddings = check_items(item_ids, codes, embeddings, self.codebook_sizes)
        self._check_width(embeddings, "embeddings")
        return item_ids, names, keys, PackedRows.pack(embeddings, self.embeddings.precision)

    def _check_width(self, vectors: np.ndarray, name: str) -> None:
        if vectors.shape[1] != self.embeddings.width:
            raise ValueError(f"`{name}` must have width {self.embeddings.width} here, got {vectors.shape[1]}.")

    def _rows_of_removed(self, removed, item_ids: np.ndarray) -> np.ndarray:
        if not len(removed):
            return np.empty(0, dtype=np.int64)
        removed = check_item_ids(removed)
        both = np.intersect1d(removed, item_ids)
        if both.size:
            raise ValueError(f"`removed` and `item_ids` both name {some(both)}; an item stays or leaves.")
        rows = np.array(self.item_ids.find(removed.tolist()), dtype=np.int64)
        if (rows < 0).any():
            raise ValueError(f"`removed` names {some(removed[rows < 0])} not in this index of {len(self)} items.")
        return rows

    def check_made_for(self, tokenizer_version: str, model_id: str) -> None:
        """Raises `ValueError` unless the index was made with this tokenizer and model, whose codes and vectors alone it
        can answer."""
        asked = {"tokenizer version": tokenizer_version, "model": model_id}
        made = {"tokenizer version": self.tokenizer_version, "model": self.model_id}
        for name, value in asked.items():
            if value != made[name]:
                raise ValueError(
                    f"the index was made with {name} {made[name]!r}, but is asked by {name} {value!r}, whose codes and "
                    "vectors mean other items. Build the index anew with it, or load what the index was made with."
                )

    def find(self, sids) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the items of SIDs by position, as ranges.

        Args:
            sids (array-like of shape `(...)`): positions in the directory, which are the leaves of `trie()`.

        Returns:
            Two arrays of shape `(...)`: first row, and the row past the last. Both 0 for a position of -1.

        Raises:
            ValueError: `sids` is malformed or a position is not in the directory.
        """
        sids = as_integers(sids, "sids")
        if sids.size and not -1 <= sids.min() <= sids.max() < self.num_sids:
            raise ValueError(
                f"`sids` must be positions 0..{self.num_sids - 1}, or -1 for none, got {sids.min()}..{sids.max()}."
            )
        here = sids >= 0
        return np.where(here, self.offsets[sids], 0), np.where(here, self.offsets[sids + here], 0)

    def find_codes(self, codes) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the items of SIDs by codes, or of all items under prefixes, as ranges.

        Args:
            codes (array-like of shape `(..., L)`): codes of the first `L <= K` levels.

        Returns:
            Two arrays of shape `(...)`: first row, and the row past the last; equal where there are no items.

        Raises:
            ValueError: `codes` is malformed. Codes outside their level are no error: no item has them.
        """
        codes = as_integers(codes, "codes")
        if not codes.ndim or not 1 <= codes.shape[-1] <= len(self.codebook_sizes):
            raise ValueError(
                f"`codes` must hold 1 to {len(self.codebook_sizes)} codes in the last dimension, got {codes.shape}."
            )
        length = codes.shape[-1]
        valid = ((codes >= 0) & (codes < np.array(self.codebook_sizes[:length]))).all(-1)
        first_keys = sid_keys(np.where(valid[..., None], codes, 0), self.codebook_sizes)
        first = np.searchsorted(self.keys, first_keys)
        last = np.searchsorted(self.keys, last_keys(first_keys, length, self.codebook_sizes), side="right")
        return np.where(valid, self.offsets[first], 0), np.where(valid, self.offsets[last], 0)

    def expand(self, sids) -> tuple[np.ndarray, np.ndarray]:
        """All items of many SIDs.

        Args:
            sids (array-like): positions `(S,)`, see `find`; or codes `(S, L)`, see `find_codes`.

        Returns:
            Two arrays of shape `(C,)`, `C` the number of items: which of the SIDs each comes from, and its row.
        """
        sids = as_integers(sids, "sids")
        if sids.ndim not in (1, 2):
            raise ValueError(f"`sids` must be positions (S,) or codes (S, L), got shape {sids.shape}.")
        return spread(*(self.find(sids) if sids.ndim == 1 else self.find_codes(sids)))

    def rerank(
        self, users, sids, per_sid_limit: int | None = None, k: int = 10, deny_rows=None, log_probs=None
    ) -> Reranked:
        """Scores the items of every user's candidate SIDs by dot products, and returns the best.

        Products of different SIDs are hardly comparable where a vector of its own ranks the items of each. With
        `log_probs`, the score of an item is its log-probability, `log p(SID) + log softmax(u . v)` over all items of
        the SID: the generator chooses among SIDs, the reranker among the items of one.

        Args:
            users (array-like of shape `(B, d)`, or `(B, S, d)`): vector of every user; or of every candidate SID, as
                GEAR's reranking head gives them.
            sids (array-like): candidates of every user: positions `(B, S)`, see `find`; or codes `(B, S, L)`, see
                `find_codes`. A SID without items, or that stood before in the list, gives none.
            per_sid_limit (`int`, *optional*): items of one SID at most.
            k (`int`): items of a user.
            deny_rows (sequence of B sequences of `int`, *optional*): rows that each user may not be given, such as
                `rows_of` gives for the ids of what they have seen; -1 stands for none. They take nobody's place.
            log_probs (array-like of shape `(B, S)`, *optional*): log-probabilities of the candidate SIDs, such as
                `sequences_scores` of a search. A SID at `-inf` gives no items.

        Returns:
            [`Reranked`]: best first; equal scores in the order of the user's SIDs, then of rows.

        Raises:
            ValueError: an argument is malformed, a user is not finite, or a score is beyond float32.
        """
        users, sids = self._check_users(users), as_integers(sids, "sids")
        if sids.ndim not in (2, 3) or sids.shape[: users.ndim - 1] != users.shape[:-1]:
            raise ValueError(
                f"`sids` must be positions (B, S) or codes (B, S, L) for {len(users)} `users`, got shape {sids.shape} "
                f"for {users.shape}."
            )
        for name, number in (("k", k), ("per_sid_limit", 1 if per_sid_limit is None else per_sid_limit)):
            if not isinstance(number, int | np.integer) or number < 1:
                raise ValueError(f"`{name}` must be an integer of at least 1, got {number!r}.")
        ranges = self.find(sids) if sids.ndim == 2 else self.find_codes(sids)
        denied = check_denied(deny_rows, len(users), len(self))
        if log_probs is not None:
            log_probs = check_log_probs(log_probs, sids.shape[:2])
        result = Reranked.empty(len(users), k, self.generation)
        for number, (user, starts, ends) in enumerate(zip(users, *ranges, strict=True)):
            groups, rows = spread(starts, drop_repeated(starts, ends))
            if user.ndim == 1:
                scores = self.embeddings.scores(rows, user)
            else:
                scores = self.embeddings.pair_scores(rows, user, groups)
            if not np.isfinite(scores).all():
                raise ValueError(f"`users` row {number} gives scores beyond float32; normalise it and the embeddings.")
            if log_probs is not None:
                scores = log_probs[number, groups] + log_softmax(scores, groups)
            if len(denied[number]):
                allowed = np.isin(rows, denied[number], invert=True)
                groups, rows, scores = groups[allowed], rows[allowed], scores[allowed]
            best = best_first(scores, groups, per_sid_limit, k)
            for array, values in ((result.rows, rows), (result.scores, scores), (result.sids, groups)):
                array[number, : len(best)] = values[best]
        return result

    def _check_users(self, users) -> np.ndarray:
        """Vectors `(B, d)` or `(B, S, d)`, finite float32 of the width of the index."""
        users = to_numpy(users)
        if users.ndim != 3:
            users = as_floats(users, "users")
            self._check_width(users, "users")
            return users
        flat = as_floats(users.reshape(-1, users.shape[2]), "users")
        self._check_width(flat, "users")
        return flat.reshape(users.shape)

    def ids(self, rows) -> list[list[str]]:
        """Item ids of rows `(B, k)`, without those that are -1."""
        return [[self.item_ids[row] for row in user if row >= 0] for user in np.asarray(rows).tolist()]

    def rows_of(self, item_ids) -> list[list[int]]:
        """Rows of the items of every user, -1 for ids that are not in the index.

        They are what `rerank` takes as `deny_rows`. They are catalog rows, too, which `generate` takes as `deny_rows`
        and `allow_rows`, of a model that was given the catalog of this index:

        ```python
        model.set_catalog(index.item_codes(), index.tokenizer_version)
        ```

        Args:
            item_ids (sequence of B sequences): ids of every user, strings or integers.

        Raises:
            ValueError: a string stands in place of a user's ids.
        """
        if isinstance(item_ids, str) or any(isinstance(ids, str) for ids in item_ids):
            raise ValueError("`item_ids` must hold one list of item ids per user, got a string in place of a list.")
        lengths = np.array([len(ids) for ids in item_ids], dtype=np.int64)
        rows = self.item_ids.find(str(item_id) for ids in item_ids for item_id in ids)
        ends = np.cumsum(lengths)
        return [rows[start:end] for start, end in zip((ends - lengths).tolist(), ends.tolist(), strict=True)]

    def codes(self) -> np.ndarray:
        """Codes of all SIDs, `(S, K)` int64, in the order of the directory."""
        return key_codes(self.keys, self.codebook_sizes)

    def item_codes(self) -> np.ndarray:
        """SID of every item, `(N, K)` int64, in the order of rows."""
        return np.repeat(self.codes(), np.diff(self.offsets), axis=0)

    def trie(self) -> SIDTrie:
        """The trie of all SIDs, for a beam search. Its leaves are positions in the directory, and so are its rows."""
        return SIDTrie(torch.from_numpy(self.codes()), self.codebook_sizes)


def _directory(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct keys `(S,)` and the offsets `(S + 1,)` of their rows, from the ascending keys `(N,)` of all rows."""
    first = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
    return keys[first], np.append(first, len(keys))
