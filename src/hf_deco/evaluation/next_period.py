"""How well GEAR answers the period that comes next, before anything of it is trained on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..data.events import EventLog
from ..data.gear_batches import GearCollator
from ..data.requests import Requests
from ..items.index import ItemIndex
from ..items.reranking import best_first, log_softmax, spread
from ..items.sid_keys import sid_keys
from ..models.modeling_gear import GearForSIDRetrieval
from .set_metrics import set_metrics, share_found
from .stream_floors import rank_last, rank_popular

USERS_AT_ONCE = 64
PRECISIONS = ("int8", "int4")


class NextPeriodEvaluator:
    """Retrieves for users at the start of a period and compares with the items of their events in it.

    Metrics of items: `recall@k` and `ndcg@k`, see [`set_metrics`]; `cold/recall@k` over the items without an event
    before the period, see [`share_found`]; `sid/recall@k` and `sid/ndcg@k` of SIDs as the beam ranks them;
    `dot/recall@k` and `dot/ndcg@k` of the same candidates ranked by the reranker's products alone. With the vectors of
    the items, what packing costs: `int8/...` and `int4/...`, `recall@k` and `ndcg@k` of the same candidates,
    and `kept@k`, the share of the best `k` by fp32 that stays; `fp32/...` beside them.

    Args:
        log ([`EventLog`]): The log.
        requests ([`Requests`]): Its requests, for histories.
        collator ([`GearCollator`]): Makes the users' batches.
        num_users (`int`): Users with events in the period that are drawn, at most; 0 takes all.
        ks (sequence of `int`): Cutoffs.
        num_beams (`list[int]`): Beam width of every level; as many SIDs are expanded as the last says.
        per_sid_limit (`int`): Items of one SID, at most.
        rerank (`bool`): Whether the reranking head tells the items of a SID apart: items are then ranked by
            `log p(SID) + log softmax(u . v)` over the items of the SID. Without it they stand in the order of their
            SIDs, and those of one SID in random order.
        seed (`int`): What the draws depend on, together with the period.
    """

    def __init__(
        self,
        log: EventLog,
        requests: Requests,
        collator: GearCollator,
        *,
        num_users: int = 256,
        ks: Sequence[int] = (10, 50),
        num_beams: Sequence[int] = (32, 32, 64),
        per_sid_limit: int = 8,
        rerank: bool = True,
        seed: int = 0,
    ):
        self.log, self.requests, self.collator = log, requests, collator
        self.num_users, self.ks, self.num_beams = num_users, tuple(ks), list(num_beams)
        self.per_sid_limit, self.rerank, self.seed = per_sid_limit, rerank, seed

    def users(self, period: int) -> np.ndarray:
        """The users who are asked about in a period, ascending."""
        users = np.unique(self.log.users[self.log.events_of(period)])
        if not self.num_users or len(users) <= self.num_users:
            return users
        return np.sort(np.random.default_rng((self.seed, period)).choice(users, self.num_users, replace=False))

    def relevant(self, users: np.ndarray, period: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Distinct items of each user's events in a period, and those of them that had no event before."""
        here = self.log.events_of(period)
        old = np.unique(self.log.items[: here.start])
        owner, items = self.log.users[here], self.log.items[here]
        bought = [np.unique(items[owner == user]) for user in users]
        return bought, [some[~np.isin(some, old)] for some in bought]

    def floors(self, period: int) -> dict[str, dict[str, float]]:
        """Metrics of the popularity and the repeat-last floor."""
        users, k = self.users(period), max(self.ks)
        ranked = {
            "popularity": rank_popular(self.log, users, period, k),
            "repeat_last": rank_last(self.log, users, period, k),
        }
        return {name: self.item_metrics(items, users, period) for name, items in ranked.items()}

    def item_metrics(self, ranked: np.ndarray, users: np.ndarray, period: int) -> dict[str, float]:
        """Metrics of items `(E, R)`, best first, -1 for none."""
        bought, cold = self.relevant(users, period)
        found = {f"cold/{name}": value for name, value in share_found(ranked, cold, self.ks).items()}
        return set_metrics(ranked, bought, self.ks) | found

    def __call__(
        self, model: GearForSIDRetrieval, index: ItemIndex, period: int, vectors: np.ndarray | None = None
    ) -> dict[str, float]:
        """Metrics of a model whose catalog is that of an index.

        Args:
            model ([`GearForSIDRetrieval`]): The model.
            index ([`ItemIndex`]): The index that its search is expanded with.
            period (`int`): The period that comes next.
            vectors (`np.ndarray` of shape `(n, d)`, *optional*): Output of the item tower for the first items of the
                log, all those of the index; for the comparison of precisions.

        Raises:
            ValueError: If the index was made with another tokenizer than the model's catalog.
        """
        index.check_made_for(model.config.catalog_version, index.model_id)
        users = self.users(period)
        numbers = self._numbers(index)
        sequences, log_probs, queries = self._search(model, users, period)
        if queries is None:
            ranked = self._shuffled(index, sequences, period)
        else:
            ranked = index.rerank(queries, sequences, self.per_sid_limit, max(self.ks), log_probs=log_probs).rows
        metrics = self.item_metrics(np.where(ranked >= 0, numbers[ranked], -1), users, period)
        metrics |= self._sid_metrics(index, numbers, sequences, users, period)
        if queries is not None:
            bought, _ = self.relevant(users, period)
            rows = index.rerank(queries, sequences, self.per_sid_limit, max(self.ks)).rows
            alone = set_metrics(np.where(rows >= 0, numbers[rows], -1), bought, self.ks)
            metrics |= {f"dot/{name}": value for name, value in alone.items()}
            if vectors is not None:
                metrics |= self._precisions(index, numbers, sequences, log_probs, queries, vectors, users, period)
        return metrics

    def _numbers(self, index: ItemIndex) -> np.ndarray:
        """Number in the log of every row of the index, `(n,)`."""
        number_of = {item_id: number for number, item_id in enumerate(self.log.item_ids.tolist())}
        return np.array([number_of[index.item_ids[row]] for row in range(len(index))])

    def _search(self, model, users: np.ndarray, period: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """SIDs `(E, R, K)` of users, best first, -1 for none; their log-probabilities `(E, R)`; and the vectors
        `(E, R, d)` that rank their items."""
        start = self.log.times[self.log.events_of(period)][0]
        histories = [self.requests.history(user, start) for user in users.tolist()]
        number, training = self.num_beams[-1], model.training
        model.eval()
        sequences, log_probs, queries = [], [], []
        for first in range(0, len(users), USERS_AT_ONCE):
            here = slice(first, first + USERS_AT_ONCE)
            batch = self.collator.users(users[here].tolist(), histories[here])
            output = model.generate(
                **_to(batch, model.device),
                num_beams=self.num_beams,
                num_return_sequences=number,
                rerank=self.rerank,
                return_dict_in_generate=True,
            )
            sequences.append(output.sequences.unflatten(0, (-1, number)).cpu().numpy())
            log_probs.append(output.sequences_scores.unflatten(0, (-1, number)).cpu().numpy())
            if self.rerank:
                queries.append(output.rerank_vectors.unflatten(0, (-1, number)).cpu().numpy())
        model.train(training)
        queries = np.concatenate(queries) if self.rerank else None
        return np.concatenate(sequences), np.concatenate(log_probs), queries

    def _shuffled(self, index: ItemIndex, sequences: np.ndarray, period: int) -> np.ndarray:
        """Rows of the index in the order of their SIDs, `(E, max(ks))`, -1 for none; those of one SID in random
        order."""
        random, k = np.random.default_rng((self.seed, period, 1)), max(self.ks)
        ranked = np.full((len(sequences), k), -1)
        for row, starts, ends in zip(ranked, *index.find_codes(sequences), strict=True):
            groups, rows = spread(starts, ends)
            rows = rows[np.lexsort((random.random(len(rows)), groups))]  # shuffled within each SID
            places = np.arange(len(rows)) - np.searchsorted(groups, groups)
            kept = rows[places < self.per_sid_limit][:k]
            row[: len(kept)] = kept
        return ranked

    def _sid_metrics(self, index, numbers: np.ndarray, sequences, users: np.ndarray, period: int) -> dict[str, float]:
        """Metrics of SIDs; users whose items are all outside the index are left out."""
        sid_of = np.full(len(self.log.item_ids), -1)
        sid_of[numbers] = np.repeat(np.arange(index.num_sids), np.diff(index.offsets))
        there = (sequences >= 0).all(2)
        keys = sid_keys(np.where(there[..., None], sequences, 0), index.codebook_sizes)
        ranked = np.where(there, np.searchsorted(index.keys, keys), -1)
        bought, _ = self.relevant(users, period)
        relevant = [np.unique(sid_of[items][sid_of[items] >= 0]) for items in bought]
        kept = [place for place, sids in enumerate(relevant) if len(sids)]
        if not kept:
            return {}
        metrics = set_metrics(ranked[kept], [relevant[place] for place in kept], self.ks)
        return {f"sid/{name}": value for name, value in metrics.items()}

    def _precisions(self, index, numbers, sequences, log_probs, queries, vectors, users, period) -> dict[str, float]:
        """Metrics of the same candidates, scored by vectors of every precision."""
        k, metrics = max(self.ks), {}
        found = [spread(*pair) for pair in zip(*index.find_codes(sequences), strict=True)]
        exact = np.full((len(users), k), -1)
        for user, (groups, rows) in enumerate(found):
            scores = np.einsum("nd,nd->n", vectors[numbers[rows]], queries[user][groups]).astype(np.float32)
            scores = log_probs[user, groups] + log_softmax(scores, groups)
            best = best_first(scores, groups, self.per_sid_limit, k)
            exact[user, : len(best)] = numbers[rows[best]]
        rankings = {"fp32": exact}
        for precision in PRECISIONS:
            packed = _repack(index, vectors[numbers], precision)
            rows = packed.rerank(queries, sequences, self.per_sid_limit, k, log_probs=log_probs).rows
            rankings[precision] = np.where(rows >= 0, numbers[rows], -1)
        bought, _ = self.relevant(users, period)
        for precision, ranked in rankings.items():
            own = set_metrics(ranked, bought, self.ks)
            if precision != "fp32":
                own |= {f"kept@{cut}": _kept(exact[:, :cut], ranked[:, :cut]) for cut in self.ks}
            metrics |= {f"{precision}/{name}": value for name, value in own.items()}
        return metrics


def _repack(index: ItemIndex, vectors: np.ndarray, precision: str) -> ItemIndex:
    """The same index with its rows' vectors in another precision."""
    codes = np.repeat(index.codes(), np.diff(index.offsets), axis=0)
    ids = [index.item_ids[row] for row in range(len(index))]
    names = {"tokenizer_version": index.tokenizer_version, "model_id": index.model_id}
    return ItemIndex.build(ids, codes, vectors, index.codebook_sizes, precision=precision, **names)


def _kept(exact: np.ndarray, ranked: np.ndarray) -> float:
    """Share of the items of one ranking, `(E, k)`, that are in the other."""
    kept = sum(np.isin(row[row >= 0], other).sum() for row, other in zip(exact, ranked, strict=True))
    return float(kept / max(1, (exact >= 0).sum()))


def _to(batch: dict, device: torch.device) -> dict:
    return {
        name: [part.to(device) for part in value] if isinstance(value, list) else value.to(device)
        for name, value in batch.items()
    }
