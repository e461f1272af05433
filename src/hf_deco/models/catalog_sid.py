"""The catalog that travels with a model: the codes of all items, and the trie made of them."""

import threading

import torch

from .trie import SIDTrie, check_codes

# Held while the parts of any catalog are put in place or taken out together: moments. Not a part of the model, for a
# lock can be neither copied nor pickled.
SWAP = threading.Lock()


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
        trie = self._trie
        if trie is None:
            trie = self._trie = SIDTrie(self.catalog_codes, self.config.codebook_sizes)
        if trie.device != self.catalog_codes.device:  # else nothing is written: another thread may set a catalog
            trie = self._trie = trie.to(self.catalog_codes.device)
        return trie

    def set_catalog(self, codes: torch.Tensor) -> None:
        """Replace the catalog; weights stay as they are.

        Args:
            codes (`torch.Tensor` or array of shape `(N, K)`): SID of every item, row `i` for item row `i`.

        Raises:
            ValueError: If the codes do not fit the model's codebooks. The old catalog then stays.
        """
        self._replace_catalog(codes)

    def _replace_catalog(self, codes: torch.Tensor, **beside: torch.Tensor) -> None:
        """Check codes and build their trie, then put them in place, with the other buffers of the catalog, at once."""
        codes, device = torch.as_tensor(codes), self.catalog_codes.device
        check_codes(codes, self.config.codebook_sizes)
        trie = SIDTrie(codes.to(device), self.config.codebook_sizes)
        codes = codes.to(device=device, dtype=torch.int32).clone()
        with SWAP:
            self.catalog_codes, self._trie, self.config.num_items = codes, trie, codes.shape[0]
            for name, tensor in beside.items():
                setattr(self, name, tensor)
