"""The catalog that travels with a model: the codes of all items, and the trie made of them."""

import torch

from .trie import SIDTrie, check_codes


class CatalogMixin:
    """Gives a model its catalog: a persistent buffer `catalog_codes` `(N, K)`, and the trie of it.

    The model calls `_add_catalog` in its constructor and zeros the buffer in `_init_weights`; its configuration has
    `num_items`, `num_codebooks` and `codebook_sizes`.
    """

    def _add_catalog(self) -> None:
        shape = (self.config.num_items, self.config.num_codebooks)
        self.register_buffer("catalog_codes", torch.zeros(shape, dtype=torch.int32))
        self._trie: SIDTrie | None = None

    def _load_from_state_dict(self, *args, **kwargs):
        super()._load_from_state_dict(*args, **kwargs)
        self._trie = None  # the catalog may be another one

    @property
    def trie(self) -> SIDTrie:
        """Trie of the catalog, on the model's device; built when first asked for."""
        if self.config.num_items == 0:
            raise ValueError("The model carries no catalog: call `model.set_catalog(codes)` first.")
        if self._trie is None:
            self._trie = SIDTrie(self.catalog_codes, self.config.codebook_sizes)
        self._trie = self._trie.to(self.catalog_codes.device)
        return self._trie

    def set_catalog(self, codes: torch.Tensor) -> None:
        """Replace the catalog; weights stay as they are.

        Args:
            codes (`torch.Tensor` or array of shape `(N, K)`): SID of every item, row `i` for item row `i`.

        Raises:
            ValueError: If the codes do not fit the model's codebooks. The old catalog then stays.
        """
        codes = torch.as_tensor(codes)
        check_codes(codes, self.config.codebook_sizes)
        trie = SIDTrie(codes.to(self.catalog_codes.device), self.config.codebook_sizes)
        self.catalog_codes = codes.to(device=self.catalog_codes.device, dtype=torch.int32).clone()
        self.config.num_items, self._trie = codes.shape[0], trie
