"""The prefix tree of a catalog's semantic IDs, as flat arrays.

The sorted unique SIDs decide everything: the nodes of level `k` are the distinct prefixes of length `k` in
lexicographic order, so the children of a node are one contiguous range of the next level, and the leaves under a node
are one contiguous range of leaves. Memory and build are `O(N K)`, a step of a search never depends on `N`.
"""

import torch

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class SIDTrie:
    """Children, node paths and items of every SID prefix of a catalog.

    Level 0 holds one node, the root; level `K` holds the leaves, one per distinct SID. Nodes of a level are numbered in
    lexicographic order of their prefixes.

    Attributes:
        num_codebooks (`int`): Depth `K`.
        codebook_sizes (`tuple[int, ...]`): Codes per level `V_k`.
        child_offsets (`list[torch.LongTensor]`): For level `k`, shape `(nodes_k + 1,)`: the children of node `j` are
            the nodes `child_offsets[k][j] .. child_offsets[k][j + 1] - 1` of level `k + 1`.
        child_codes (`list[torch.IntTensor]`): For level `k`, shape `(nodes_{k+1},)`: last code of every node of level
            `k + 1`.
        leaf_offsets (`list[torch.LongTensor]`): For level `k`, shape `(nodes_k + 1,)`: range of leaves under every
            node.
        item_offsets (`torch.LongTensor`): Shape `(leaves + 1,)`: range in `item_rows` of the items of every leaf.
        item_rows (`torch.LongTensor`): Shape `(N,)`: catalog rows, grouped by leaf, ascending inside a leaf.

    Example:
        ```python
        >>> trie = SIDTrie(torch.tensor([[0, 1], [2, 0], [0, 3]]), codebook_sizes=(3, 4))
        >>> nodes, codes = trie.children(level=0, node=0)
        >>> codes.tolist()
        [0, 2]
        >>> trie.rows(torch.tensor([[0, 3], [2, 0], [1, 1]])).tolist()
        [2, 1, -1]

        ```
    """

    def __init__(self, codes: torch.Tensor, codebook_sizes: tuple[int, ...] | list[int]):
        """Build the trie.

        Args:
            codes (`torch.Tensor` of shape `(N, K)`): Integer codes of every item; several items may share a SID.
            codebook_sizes (`tuple[int, ...]` of length `K`): Codes per level.

        Raises:
            ValueError: If `codes` is empty, is not an integer matrix, or holds a code outside its level; or a level is
                too large.
        """
        self.codebook_sizes = tuple(int(size) for size in codebook_sizes)
        self.num_codebooks = len(self.codebook_sizes)
        if any(size > 2**31 for size in self.codebook_sizes):
            raise ValueError(f"`codebook_sizes` must not exceed 2**31 (codes are int32), got {self.codebook_sizes}.")
        check_codes(codes, self.codebook_sizes)
        order = _lexicographic_order(codes, self.codebook_sizes)
        codes = codes.to(torch.int32)[order]

        # first[i] is the first level at which sorted row i leaves its predecessor (K where it repeats it).
        differs = codes[1:] != codes[:-1]
        first = torch.where(differs.any(1), differs.to(torch.int8).argmax(1), self.num_codebooks)
        first = torch.cat([first.new_zeros(1), first])

        starts = [
            torch.nonzero(first < level).squeeze(1) if level else first.new_zeros(1)
            for level in range(self.num_codebooks + 1)
        ]
        leaf_of_row = torch.cumsum(first < self.num_codebooks, 0) - 1
        end = torch.tensor([codes.shape[0]], device=codes.device)
        num_leaves = starts[-1].shape[0]

        self.child_codes = [codes[starts[k + 1], k].contiguous() for k in range(self.num_codebooks)]
        self.child_offsets = [
            torch.cat(
                [torch.searchsorted(starts[k + 1], starts[k]), starts[k + 1].new_tensor([starts[k + 1].shape[0]])]
            )
            for k in range(self.num_codebooks)
        ]
        self.leaf_offsets = [torch.cat([leaf_of_row[start], leaf_of_row.new_tensor([num_leaves])]) for start in starts]
        self.item_offsets = torch.cat([starts[-1], end])
        self.item_rows = order
        self._forget_derived()

    def _forget_derived(self) -> None:
        """Arrays that are made when first asked for."""
        self._edge_keys: list[torch.Tensor | None] = [None] * self.num_codebooks
        self._child_penalties: list[torch.Tensor | None] = [None] * self.num_codebooks
        self._most_children: list[int | None] = [None] * self.num_codebooks
        self._item_positions: torch.Tensor | None = None

    def __repr__(self) -> str:
        nodes = "/".join(str(self.num_nodes(level)) for level in range(1, self.num_codebooks + 1))
        return f"SIDTrie(items={self.num_items}, codebook_sizes={self.codebook_sizes}, nodes={nodes})"

    @property
    def num_items(self) -> int:
        """Number of items `N`, counting those that share a SID."""
        return self.item_rows.shape[0]

    @property
    def num_leaves(self) -> int:
        """Number of distinct SIDs."""
        return self.item_offsets.shape[0] - 1

    @property
    def device(self) -> torch.device:
        return self.item_rows.device

    def num_nodes(self, level: int) -> int:
        """Number of nodes at a level (0 is the root's)."""
        return self.leaf_offsets[level].shape[0] - 1

    def to(self, device: torch.device | str) -> "SIDTrie":
        """Return this trie with its arrays on `device` (itself when they are there already)."""
        if torch.device(device) == self.device:
            return self
        moved = object.__new__(SIDTrie)
        moved.codebook_sizes, moved.num_codebooks = self.codebook_sizes, self.num_codebooks
        for name in ("child_codes", "child_offsets", "leaf_offsets"):
            setattr(moved, name, [array.to(device) for array in getattr(self, name)])
        moved.item_offsets, moved.item_rows = self.item_offsets.to(device), self.item_rows.to(device)
        moved._forget_derived()
        return moved

    def children(self, level: int, node: int) -> tuple[torch.LongTensor, torch.LongTensor]:
        """Children of one node.

        Args:
            level (`int`): Level of the node, `0 .. K - 1`.
            node (`int`): Its number in the level.

        Returns:
            Node numbers in level `level + 1` and their codes, both of shape `(children,)`.
        """
        start, end = self.child_offsets[level][node : node + 2].tolist()
        return torch.arange(start, end, device=self.device), self.child_codes[level][start:end].long()

    def num_children(self, level: int, nodes: torch.LongTensor) -> torch.LongTensor:
        """Number of children of every node, of the shape of `nodes`."""
        offsets = self.child_offsets[level]
        return offsets[nodes + 1] - offsets[nodes]

    def most_children(self, level: int) -> int:
        """Number of children of the node of a level that has most; counted when first asked for."""
        if self._most_children[level] is None:
            self._most_children[level] = int(self.child_offsets[level].diff().max())
        return self._most_children[level]

    def child_penalties(self, level: int) -> torch.Tensor:
        """What to add to logits over all codes, so that children remain: 0 where a node has a child of a code, `-inf`
        elsewhere, `(nodes, V)` bfloat16; made when first asked for."""
        if self._child_penalties[level] is None:
            shape = (self.num_nodes(level), self.codebook_sizes[level])
            penalties = torch.full(shape, -torch.inf, dtype=torch.bfloat16, device=self.device)
            penalties.view(-1)[self._level_edge_keys(level)] = 0
            self._child_penalties[level] = penalties  # whole: another thread may ask meanwhile
        return self._child_penalties[level]

    def expand(
        self, level: int, nodes: torch.LongTensor
    ) -> tuple[torch.LongTensor, torch.LongTensor, torch.LongTensor]:
        """Children of many nodes at once, ragged.

        Args:
            level (`int`): Level of the nodes, `0 .. K - 1`.
            nodes (`torch.LongTensor` of shape `(R,)`): Node numbers.

        Returns:
            Three tensors of shape `(C,)`, `C` the number of all children: the position in `nodes` of each child's
            parent, the child's node number in level `level + 1`, the child's code. Children of one parent lie together,
            in order.
        """
        parents, children = spread_ranges(self.child_offsets[level][nodes], self.num_children(level, nodes))
        return parents, children, self.child_codes[level][children].long()

    def leaf_counts(self, level: int, nodes: torch.LongTensor) -> torch.LongTensor:
        """Number of distinct SIDs under every node, of the shape of `nodes`."""
        offsets = self.leaf_offsets[level]
        return offsets[nodes + 1] - offsets[nodes]

    def child_nodes(self, level: int, nodes: torch.LongTensor, codes: torch.LongTensor) -> torch.LongTensor:
        """Child of every node along a code.

        Args:
            level (`int`): Level of the nodes.
            nodes (`torch.LongTensor`): Node numbers; -1 stands for no node.
            codes (`torch.LongTensor` of the same shape): Next codes.

        Returns:
            `torch.LongTensor` of the same shape: node numbers in level `level + 1`, -1 where there is no such child.
        """
        size = self.codebook_sizes[level]
        keys = self._level_edge_keys(level)
        valid = (nodes >= 0) & (codes >= 0) & (codes < size)
        wanted = torch.where(valid, nodes * size + codes, -1)
        found = torch.searchsorted(keys, wanted).clamp_(max=keys.shape[0] - 1)
        return torch.where(keys[found] == wanted, found, -1)

    def node_paths(self, codes: torch.Tensor) -> torch.LongTensor:
        """Nodes that each SID passes.

        Args:
            codes (`torch.Tensor` of shape `(..., L)`, `L <= K`): SIDs or prefixes.

        Returns:
            `torch.LongTensor` of shape `(..., L)`: node number at levels `1 .. L`, -1 from the first level on at which
            the prefix is not in the catalog.
        """
        codes = codes.long()
        nodes = torch.zeros(codes.shape[:-1], dtype=torch.long, device=codes.device)
        path = []
        for level in range(codes.shape[-1]):
            nodes = self.child_nodes(level, nodes, codes[..., level].contiguous())
            path.append(nodes)
        return torch.stack(path, -1) if path else codes.new_zeros(codes.shape)

    def rows(self, codes: torch.Tensor) -> torch.LongTensor:
        """Catalog row of every SID: its first item where several share it, -1 where the SID is not in the catalog.

        Args:
            codes (`torch.Tensor` of shape `(..., K)`): SIDs.

        Returns:
            `torch.LongTensor` of shape `(...)`.

        Raises:
            ValueError: If `codes` are not whole SIDs.
        """
        if codes.shape[-1] != self.num_codebooks:
            raise ValueError(f"`codes` must hold SIDs of {self.num_codebooks} codes, got shape {tuple(codes.shape)}.")
        leaves = self.node_paths(codes)[..., -1]
        return torch.where(leaves >= 0, self.item_rows[self.item_offsets[leaves.clamp(min=0)]], -1)

    def item_ranges(self, level: int, nodes: torch.LongTensor) -> tuple[torch.LongTensor, torch.LongTensor]:
        """Items under every node, as a range of positions in `item_rows`: first and past the last, of the shape of
        `nodes`."""
        offsets = self.leaf_offsets[level]
        return self.item_offsets[offsets[nodes]], self.item_offsets[offsets[nodes + 1]]

    def nodes_at(self, level: int, positions: torch.LongTensor) -> torch.LongTensor:
        """Node of a level over every position in `item_rows`, of the shape of `positions`; the inverse of
        `item_ranges`."""
        leaves = torch.searchsorted(self.item_offsets, positions, right=True) - 1
        return torch.searchsorted(self.leaf_offsets[level], leaves, right=True) - 1

    def item_positions(self) -> torch.LongTensor:
        """Position in `item_rows` of every catalog row, `(N,)`; made when first asked for."""
        if self._item_positions is None:
            positions = torch.empty_like(self.item_rows)
            positions[self.item_rows] = torch.arange(self.num_items, device=self.device)
            self._item_positions = positions  # whole: another thread may ask meanwhile
        return self._item_positions

    def _level_edge_keys(self, level: int) -> torch.Tensor:
        """Ascending keys `parent * V + code` of the nodes of level `level + 1`; made when first asked for."""
        if self._edge_keys[level] is None:
            counts = self.child_offsets[level].diff()
            parents = torch.repeat_interleave(torch.arange(counts.shape[0], device=self.device), counts)
            self._edge_keys[level] = parents * self.codebook_sizes[level] + self.child_codes[level]
        return self._edge_keys[level]


def spread_ranges(starts: torch.LongTensor, counts: torch.LongTensor) -> tuple[torch.LongTensor, torch.LongTensor]:
    """Ranges of integers, one behind the other.

    Args:
        starts (`torch.LongTensor` of shape `(R,)`): First integer of every range.
        counts (`torch.LongTensor` of shape `(R,)`): Their lengths.

    Returns:
        Two tensors of shape `(C,)`, `C` the sum of the lengths: the range of every integer, and the integer.
    """
    ranges = torch.repeat_interleave(torch.arange(starts.shape[0], device=starts.device), counts)
    before = torch.cumsum(counts, 0) - counts
    return ranges, torch.arange(ranges.shape[0], device=starts.device) + (starts - before)[ranges]


def check_codes(codes: torch.Tensor, codebook_sizes: tuple[int, ...]) -> None:
    """Raise a `ValueError` unless `codes` is a non-empty integer `(N, K)` matrix with every code inside its level."""
    if codes.dim() != 2 or codes.shape[1] != len(codebook_sizes):
        raise ValueError(
            f"`codes` must have shape (items, {len(codebook_sizes)}), one column per codebook, got "
            f"{tuple(codes.shape)}."
        )
    if codes.dtype not in _INTEGERS:
        raise ValueError(f"`codes` must hold integers (int8 to int64, or uint8), got {codes.dtype}.")
    if codes.shape[0] == 0:
        raise ValueError("`codes` is empty: a catalog needs at least one item.")
    low, high = codes.amin(0).tolist(), codes.amax(0).tolist()
    for level, size in enumerate(codebook_sizes):
        if low[level] < 0 or high[level] >= size:
            raise ValueError(
                f"`codes` of level {level + 1} must lie in 0..{size - 1}, got {low[level]}..{high[level]}."
            )


def _lexicographic_order(codes: torch.Tensor, codebook_sizes: tuple[int, ...]) -> torch.LongTensor:
    """Row order that sorts `(N, K)` codes lexicographically, equal rows by row number.

    Levels are packed into 63-bit words; few words need sorting, the last one first, each sort stable.
    """
    bits = [max(1, (size - 1).bit_length()) for size in codebook_sizes]
    words, used = [[]], 0
    for level, width in enumerate(bits):
        if used + width > 63:
            words.append([])
            used = 0
        words[-1].append(level)
        used += width
    order = None
    for levels in reversed(words):
        key = torch.zeros(codes.shape[0], dtype=torch.long, device=codes.device)
        for level in levels:
            key = (key << bits[level]) | codes[:, level]
        order = key.argsort(stable=True) if order is None else order[key[order].argsort(stable=True)]
    return order
