"""`generate` of GEAR: the beam search, and one more step of the decoder for the vectors that rank a SID's items."""

from dataclasses import dataclass

import torch

from .beam_search_sid import Beams, BeamSearch
from .decoder_gear import GearScorer
from .filters_sid import ItemFilter, ItemSet
from .generation_config_sid import SIDGenerationConfig, SIDGenerationOutput
from .generation_sid import SIDGenerationMixin, collect_results, read_on
from .memory_gear import GearMemory
from .selection_sid import ranks

# Beam widths of all levels but the last, and of the last.
NUM_BEAMS, NUM_LAST_BEAMS = 256, 512


@dataclass
class GearGenerationOutput(SIDGenerationOutput):
    """
    Result of a search, as [`SIDGenerationOutput`], and:

    Args:
        rerank_vectors (`torch.FloatTensor` of shape `(batch_size * R, tower_size)`, *optional*): Vector of every user
            and SID that ranks the items under the SID, by its product with theirs; zeros for rows of -1.
    """

    rerank_vectors: torch.FloatTensor | None = None


class GearGenerationMixin(SIDGenerationMixin):
    """Gives GEAR its `generate`; the model supplies `decoder`, `trie`, `config` and `encode_memory`."""

    @torch.no_grad()
    def generate(
        self,
        content: torch.Tensor | None = None,
        item_ids: torch.LongTensor | None = None,
        user_ids: torch.LongTensor | None = None,
        behaviors: list[torch.LongTensor] | None = None,
        memory: GearMemory | None = None,
        rerank: bool = False,
        allow_rows: ItemSet | torch.LongTensor | list | None = None,
        deny_rows: ItemSet | torch.LongTensor | list | None = None,
        generation_config: SIDGenerationConfig | None = None,
        **kwargs,
    ) -> torch.LongTensor | GearGenerationOutput:
        """Retrieve the most likely SIDs of every user; items that share a SID come with it.

        Args:
            content, item_ids, user_ids, behaviors (*optional*): Users, as in [`GearForSIDRetrieval.encode_memory`].
            memory ([`GearMemory`], *optional*): Stored memories of users, instead.
            rerank (`bool`, *optional*, defaults to `False`): Whether every SID found is read to its end, for the vector
                that ranks its items.
            allow_rows, deny_rows (*optional*): Catalog rows that alone may be returned, and that may not, as in
                [`SIDGenerationMixin.generate`]: a SID is out when all its items are.
            generation_config ([`SIDGenerationConfig`], *optional*): Options; the checkpoint's own by default.
            kwargs: Any option of [`SIDGenerationConfig`], over both. `num_beams` defaults to 256 for all levels but the
                last, and 512 for that.

        Returns:
            `torch.LongTensor` of shape `(B * num_return_sequences, K)`, best first for every user, or a
            [`GearGenerationOutput`] where `return_dict_in_generate` is set.

        Raises:
            ValueError: For an unknown argument, more returned sequences than beams, a model without a catalog, neither
                or both of users and memories, or rows that are not of the catalog.
        """
        options = self._prepare_generation_config(generation_config, **kwargs)
        if options.exclude_seen:
            raise ValueError("`exclude_seen` needs catalog rows, which `behaviors` are not: give them as `deny_rows`.")
        if options.num_beams is None:
            options.num_beams = [NUM_BEAMS] * (self.config.num_codebooks - 1) + [NUM_LAST_BEAMS]
        widths, number = options.resolve(self.config.num_codebooks)
        if (memory is None) == (behaviors is None):
            raise ValueError("Give `generate` either users (`behaviors` with what belongs to them) or a `memory`.")
        if memory is None:
            memory = self.encode_memory(content, item_ids, user_ids, behaviors)
        trie, num_users = self.trie, len(memory.states)
        item_filter = ItemFilter.build(trie, num_users, allow_rows, deny_rows, None)
        beams = Beams.none(trie)
        if num_users:
            # The reranker reads on from the state of every beam, so none may be spared its states.
            skip = options.skip_forced_levels is not False and not rerank
            search = BeamSearch(
                GearScorer(self.decoder, memory),
                trie,
                widths,
                number,
                self.config.normalize_over,
                skip,
                None,
                item_filter,
            )
            beams = search.run()
        output = GearGenerationOutput(**collect_results(beams, trie, num_users, number, item_filter))
        if rerank:
            output.rerank_vectors = self._read_on(search, beams, number) if num_users else self._no_vectors(0)
        return output if options.return_dict_in_generate else output.sequences

    def _read_on(self, search: BeamSearch, beams: Beams, number: int) -> torch.Tensor:
        """Vectors `(U * number, tower_size)` of the best SIDs of every user: one more step of the decoder (Eq. 11)."""
        places = ranks(beams.users, search.num_users)
        kept = places < number
        vectors = self._no_vectors(search.num_users * number)
        found = self.decoder.rerank_head(read_on(search, beams, kept)).float()
        vectors[beams.users[kept] * number + places[kept]] = found
        return vectors

    def _no_vectors(self, rows: int) -> torch.Tensor:
        return torch.zeros((rows, self.config.tower_size), device=self.device)
