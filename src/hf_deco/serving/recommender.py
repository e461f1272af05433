"""A checkpoint that answers item ids with item ids."""

from __future__ import annotations

import os
from dataclasses import dataclass

from transformers import AutoModel

from ..models.modeling_sid import SIDRetrievalModel
from ..models.processing_deco import DecoProcessor, check_pair


@dataclass(frozen=True)
class Recommendation:
    """One retrieved item: its place from 1 on, log-probability, id, and title where the catalog has titles."""

    rank: int
    score: float
    item_id: str
    title: str | None


class Recommender:
    """Model and processor of one checkpoint.

    Args:
        model ([`SIDRetrievalModel`]): The model; put into evaluation mode.
        processor ([`DecoProcessor`]): Its processor.

    Raises:
        ValueError: If the two do not hold one catalog.
    """

    def __init__(self, model: SIDRetrievalModel, processor: DecoProcessor):
        check_pair(model, processor)
        self.model, self.processor = model.eval(), processor

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike) -> Recommender:
        """Open a checkpoint folder or a repository of the Hub."""
        return cls(AutoModel.from_pretrained(path), DecoProcessor.from_pretrained(path))

    def recommend(
        self, histories: list[list[str]], top_k: int = 10, num_beams: int = 100
    ) -> list[list[Recommendation]]:
        """Retrieve the most likely next items.

        Args:
            histories (`list[list[str]]`): Item ids of every user, oldest first.
            top_k (`int`, *optional*, defaults to 10): Items returned.
            num_beams (`int`, *optional*, defaults to 100): Beam width; never narrower than `top_k`.

        Returns:
            A list for every history, best first; shorter than `top_k` where the catalog is.

        Raises:
            ValueError: If an item id is not known.
        """
        for name, value in (("top_k", top_k), ("num_beams", num_beams)):
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        inputs = self.processor(histories).to(self.model.device)
        output = self.model.generate(
            **inputs, num_beams=max(num_beams, top_k), num_return_sequences=top_k, return_dict_in_generate=True
        )
        items = self.processor.batch_decode(output.sequences)
        scores = output.sequences_scores.tolist()
        answers = []
        for start in range(0, len(items), top_k):
            found = [
                (item, score)
                for item, score in zip(items[start : start + top_k], scores[start:], strict=False)
                if item is not None
            ]
            answers.append(
                [
                    Recommendation(rank, score, item, self.processor.title(item))
                    for rank, (item, score) in enumerate(found, 1)
                ]
            )
        return answers

    @staticmethod
    def format(recommendations: list[Recommendation]) -> str:
        """Recommendations as lines of rank, score, id and title."""
        width = max((len(entry.item_id) for entry in recommendations), default=0)
        return "\n".join(
            f"{entry.rank:>4}  {entry.score:8.3f}  {entry.item_id:<{width}}  {entry.title or ''}".rstrip()
            for entry in recommendations
        )
