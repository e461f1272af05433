"""Which items a search may return, told inside the trie.

Items lie in the order of the trie's leaves, so those under a node are one contiguous range of positions, and a set of
items is the ascending list of its positions: two binary searches count its members under a node. A node is out when
nothing that is allowed is left under it. Such nodes are found from the lists, which name few items next to the many
nodes that a search asks about.
"""

from dataclasses import dataclass

import torch

from .trie import SIDTrie, spread_ranges


@dataclass
class NodeSet:
    """A set of nodes of a level: one for all users, or one for each.

    Attributes:
        num_nodes (`int`): Nodes of the level.
        keys (`torch.LongTensor` of shape `(n,)`): Ascending `user * num_nodes + node`, `user` 0 in a shared set.
        table (`torch.BoolTensor` of shape `(num_nodes,)`, *optional*): The same, of a shared set.
    """

    num_nodes: int
    keys: torch.LongTensor
    table: torch.BoolTensor | None = None

    @classmethod
    def of(cls, keys: torch.LongTensor, num_nodes: int, shared: bool) -> "NodeSet":
        table = None
        if shared:
            table = torch.zeros(num_nodes, dtype=torch.bool, device=keys.device)
            table[keys] = True
        return cls(num_nodes, keys, table)

    def contains(self, users: torch.LongTensor, nodes: torch.LongTensor) -> torch.BoolTensor:
        """Whether every node is in its user's set; all of shape `(R,)`."""
        if not self.keys.shape[0]:
            return torch.zeros_like(nodes, dtype=torch.bool)
        if self.table is not None:
            return self.table[nodes]
        keys = users * self.num_nodes + nodes
        return self.keys[torch.searchsorted(self.keys, keys).clamp_(max=self.keys.shape[0] - 1)] == keys

    def most(self) -> int:
        """Nodes of the user who has most of them."""
        if self.table is not None or not self.keys.shape[0]:
            return self.keys.shape[0]
        return int(torch.bincount(self.keys // self.num_nodes).max())


class ItemSet:
    """A set of items of a catalog: one for all users, or one for each.

    `generate` makes them of the rows that it is given. A large set that serves many calls, such as all items in stock,
    is worth making once: `model.item_set(rows)`.

    Args:
        rows: Catalog rows. A flat list or tensor `(L,)` is one set for all users; a list of lists or a tensor `(U, L)`
            holds one for each of `U` users. Rows of -1 stand for no item, as they do in what `generate` returns.
        trie ([`SIDTrie`]): The catalog: `model.trie`.
        name (`str`, *optional*, defaults to `"rows"`): Name of the argument in error messages.

    Attributes:
        num_users (`int`, *optional*): Number of users `U`, None where all share the set.
        keys (`torch.LongTensor` of shape `(D,)`): Ascending `user * N + position` of the members, `user` 0 where the
            set is shared.

    Raises:
        ValueError: If rows are no integers, or lie outside the catalog.

    Example:
        ```python
        >>> import torch
        >>> from hf_deco import DecoConfig, DecoForSIDRetrieval
        >>> model = DecoForSIDRetrieval(DecoConfig.from_preset("S", num_codebooks=2, codebook_size=16)).eval()
        >>> model.set_catalog(torch.tensor([[0, 1], [0, 2], [7, 3]]))
        >>> in_stock = model.item_set([0, 2])
        >>> output = model.generate(torch.tensor([[[0, 1]]]), allow_rows=in_stock, return_dict_in_generate=True)
        >>> sorted(set(output.item_rows.tolist()))
        [-1, 0, 2]

        ```
    """

    def __init__(self, rows, trie: SIDTrie, name: str = "rows"):
        rows, users, self.num_users = _parse_rows(rows, name)
        low, high = (int(rows.min()), int(rows.max())) if rows.numel() else (0, 0)
        if low < -1 or high >= trie.num_items:
            raise ValueError(
                f"`{name}` must hold rows of the catalog, 0..{trie.num_items - 1} (-1: no item), got {low}..{high}."
            )
        self.trie, self._nodes = trie, {}
        kept = rows >= 0
        positions = trie.item_positions()[rows[kept].to(trie.device)]
        if users is not None:
            positions = positions + users[kept].to(trie.device) * trie.num_items
        self.keys = positions.unique()

    @classmethod
    def of_codes(cls, codes: torch.LongTensor, trie: SIDTrie) -> "ItemSet":
        """The items that have one of the SIDs `(U, T, K)` of each user; SIDs outside the catalog have none."""
        leaves = trie.node_paths(codes)[..., -1]
        users, places = (leaves >= 0).nonzero(as_tuple=True)
        starts, ends = trie.item_ranges(trie.num_codebooks, leaves[users, places])
        owners, positions = spread_ranges(starts, ends - starts)
        return cls._of_keys((users[owners] * trie.num_items + positions).unique(), codes.shape[0], trie)

    @classmethod
    def _of_keys(cls, keys: torch.LongTensor, num_users: int | None, trie: SIDTrie) -> "ItemSet":
        made = object.__new__(cls)
        made.keys, made.num_users, made.trie, made._nodes = keys, num_users, trie, {}
        return made

    def __repr__(self) -> str:
        users = "all" if self.num_users is None else self.num_users
        return f"ItemSet(items={self.keys.shape[0]}, users={users})"

    def count(self, users: torch.LongTensor, starts: torch.LongTensor, ends: torch.LongTensor) -> torch.LongTensor:
        """Members among the items at positions `starts .. ends - 1`, for every user; all of shape `(R,)`."""
        if self.num_users is not None:
            starts, ends = starts + users * self.trie.num_items, ends + users * self.trie.num_items
        return torch.searchsorted(self.keys, ends) - torch.searchsorted(self.keys, starts)

    def nodes(self, level: int) -> NodeSet:
        """The nodes of a level over some member; made when first asked for."""
        if level not in self._nodes:
            users, positions = self.members()
            num_nodes = self.trie.num_nodes(level)
            keys = torch.unique_consecutive(users * num_nodes + self.trie.nodes_at(level, positions))
            self._nodes[level] = NodeSet.of(keys, num_nodes, self.num_users is None)
        return self._nodes[level]

    def members(self) -> tuple[torch.LongTensor, torch.LongTensor]:
        """User and position of every member, each `(D,)`; user 0 where the set is shared."""
        return self.keys // self.trie.num_items, self.keys % self.trie.num_items

    def keep(self, chosen: torch.BoolTensor) -> "ItemSet":
        """The set of the chosen members."""
        return self._of_keys(self.keys[chosen], self.num_users, self.trie)

    def within(self, other: "ItemSet") -> torch.BoolTensor:
        """Which members are members of another set too, `(D,)`; not of a shared set against one of users."""
        users, positions = self.members()
        return other.count(users, positions, positions + 1) > 0


class ItemFilter:
    """The items that each user may be given: those of an allow-list, less those of deny-lists.

    The lists are made disjoint, so that what is left under a node is a difference of counts.

    Args:
        trie ([`SIDTrie`]): The catalog.
        allow ([`ItemSet`], *optional*): The only items that may come; all by default.
        deny (`list[ItemSet]`): Items that may not; a shared list stands before those of users.
    """

    def __init__(self, trie: SIDTrie, allow: ItemSet | None, deny: list[ItemSet]):
        self.trie, self.allow, self.deny = trie, allow, []
        for items in deny:
            if self.allow is not None and self.allow.num_users is not None and items.num_users is None:
                self.allow = self.allow.keep(~self.allow.within(items))
                continue
            if self.allow is not None:
                items = items.keep(items.within(self.allow))
            for earlier in self.deny:
                items = items.keep(~items.within(earlier))
            self.deny.append(items)
        self._exhausted: dict[int, list[NodeSet]] = {}

    @classmethod
    def build(cls, trie: SIDTrie, num_users: int, allow_rows=None, deny_rows=None, seen_codes=None):
        """The filter of one call of `generate`; None where nothing is filtered.

        Args:
            trie ([`SIDTrie`]): The catalog.
            num_users (`int`): Users of the call.
            allow_rows, deny_rows ([`ItemSet`] or what makes one, *optional*): Lists; several sets may be denied.
            seen_codes (`torch.LongTensor` of shape `(U, T, K)`, *optional*): SIDs whose items are denied, -1 at
                padding.

        Raises:
            ValueError: If a list has other users than the call, or was made for another catalog.
        """
        several = isinstance(deny_rows, list | tuple) and all(isinstance(rows, ItemSet) for rows in deny_rows)
        allow = _sets("allow_rows", [] if allow_rows is None else [allow_rows], trie, num_users)
        denied = [] if deny_rows is None else deny_rows if several else [deny_rows]
        deny = _sets("deny_rows", denied, trie, num_users)
        deny.sort(key=lambda items: items.num_users is not None)
        if seen_codes is not None:
            deny.append(ItemSet.of_codes(seen_codes, trie))
        return cls(trie, allow[0] if allow else None, deny) if deny or allow else None

    def alive(self, level: int, users: torch.LongTensor, nodes: torch.LongTensor) -> torch.BoolTensor:
        """Whether a user may be given some item under a node of a level; all of shape `(R,)`."""
        if self.allow is None:
            alive = torch.ones_like(nodes, dtype=torch.bool)
        else:
            alive = self.allow.nodes(level).contains(users, nodes)
        for exhausted in self._exhausted_nodes(level):
            alive &= ~exhausted.contains(users, nodes)
        return alive

    def most_out(self, level: int) -> int | None:
        """So many nodes of a level, or fewer, are out for every user. None under an allow-list, which names what is
        not."""
        if self.allow is not None:
            return None
        return sum(exhausted.most() for exhausted in self._exhausted_nodes(level))

    def _exhausted_nodes(self, level: int) -> list[NodeSet]:
        """Nodes of a level under which items are denied, and none is left: those of all users, and those of each."""
        if level not in self._exhausted:
            self._exhausted[level] = []
            for shared in (True, False):
                lists = [items for items in self.deny if (items.num_users is None) == shared]
                if lists:
                    keys = torch.cat([items.nodes(level).keys for items in lists]).unique()
                    users, nodes = keys // self.trie.num_nodes(level), keys % self.trie.num_nodes(level)
                    denied = lists if shared else self.deny
                    left = self._count(users, *self.trie.item_ranges(level, nodes), denied)
                    self._exhausted[level].append(NodeSet.of(keys[left == 0], self.trie.num_nodes(level), shared))
        return self._exhausted[level]

    def first_rows(self, users: torch.LongTensor, leaves: torch.LongTensor) -> torch.LongTensor:
        """First catalog row of every leaf that its user may be given, `(R,)`; there must be one."""
        starts, ends = self.trie.item_ranges(self.trie.num_codebooks, leaves)
        owners, positions = spread_ranges(starts, ends - starts)
        given = self.allows(users[owners], positions)
        first = torch.full_like(leaves, self.trie.num_items)
        first = first.scatter_reduce(0, owners[given], positions[given], "amin")
        return self.trie.item_rows[first]

    def allows(self, users: torch.LongTensor, positions: torch.LongTensor) -> torch.BoolTensor:
        """Whether every user may be given the item at a position in `item_rows`; all of shape `(R,)`."""
        return self._count(users, positions, positions + 1, self.deny) > 0

    def _count(self, users, starts: torch.LongTensor, ends: torch.LongTensor, deny: list[ItemSet]) -> torch.LongTensor:
        """Items at positions `starts .. ends - 1` that the users may be given but for some deny-lists, `(R,)`."""
        count = ends - starts if self.allow is None else self.allow.count(users, starts, ends)
        for items in deny:
            count = count - items.count(users, starts, ends)
        return count


def _sets(name: str, lists: list, trie: SIDTrie, num_users: int) -> list[ItemSet]:
    """The sets of lists of rows, checked against the catalog and the users of a call."""
    sets = [rows if isinstance(rows, ItemSet) else ItemSet(rows, trie, name) for rows in lists]
    for items in sets:
        if items.trie is not trie:
            raise ValueError(f"`{name}` was made for another catalog or device: make it by `model.item_set`.")
        if items.num_users not in (None, num_users):
            raise ValueError(
                f"`{name}` holds a list for each of {items.num_users} users, but there are {num_users}: give one for "
                "each, or a flat list for all."
            )
    return sets


def _parse_rows(rows, name: str) -> tuple[torch.LongTensor, torch.LongTensor | None, int | None]:
    """Rows `(L,)`, user of each and number of users; None and None where all users share them."""
    if isinstance(rows, list | tuple) and rows and all(is_list(entry) for entry in rows):
        lists = [_flat_rows(entry, name) for entry in rows]
        lengths = torch.tensor([len(entry) for entry in lists])
        return torch.cat(lists), torch.arange(len(lists)).repeat_interleave(lengths), len(lists)
    if getattr(rows, "ndim", 1) == 2:
        users = torch.arange(rows.shape[0]).repeat_interleave(rows.shape[1])
        return _flat_rows(rows.reshape(-1), name), users, rows.shape[0]
    return _flat_rows(rows, name), None, None


def is_list(value) -> bool:
    """Whether an argument is a list of any kind: tuples, ranges, arrays and tensors are."""
    return isinstance(value, list | tuple | range) or getattr(value, "ndim", 0) > 0


def _flat_rows(rows, name: str) -> torch.LongTensor:
    """A flat list of integers as a tensor on the CPU."""
    try:
        flat = torch.as_tensor(rows if is_list(rows) else None).cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        flat = None
    inexact = flat is not None and (flat.is_floating_point() or flat.is_complex() or flat.dtype == torch.bool)
    if flat is None or flat.dim() != 1 or (inexact and flat.numel()):
        what = type(rows).__name__ if flat is None else f"{flat.dtype} of shape {tuple(flat.shape)}"
        raise ValueError(
            f"`{name}` must hold integers, rows of the catalog: a flat list for all users, or one list for each user; "
            f"got {what}."
        )
    return flat.long()


__all__ = ["ItemSet"]
