"""Items that share SIDs: their probabilities, their loss and their search, against each written out by hand."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event, Lock

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel, pipeline

from hf_deco import DecoForSIDRetrieval, DecoProcessor
from hf_deco.models import catalog_sid, modeling_deco
from hf_deco.models.losses_gear import lambda_loss
from hf_deco.serving.engine import RetrievalEngine

SIZES, WIDTH = (4, 3, 5), 7
ALL = {"num_beams": 60, "num_return_sequences": 60, "return_dict_in_generate": True}
close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
VARIANTS = [
    {},
    {"history_format": "flat", "copy_pointer": True},
    {"decoder_input": "item_states_cross", "normalize_over": "vocabulary"},
    {"decoder_input": "item_states_prefix"},
    {"text_config": {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}},
]


@pytest.fixture
def make(make_model, make_codes):
    """A model with 30 items on 17 SIDs: one has 8 items, some have 2, most are their item's alone."""

    def make(num_sids=17, **options):
        options = {"content_size": WIDTH, "rerank_size": 6, **options}
        model = make_model(sizes=SIZES, catalog=False, **options)
        codes = make_codes(SIZES, num_sids)
        owners = [*range(num_sids), *[3] * 7, *[5, 9, 11, 2, 16, 0]][:30]
        order = torch.randperm(len(owners), generator=torch.Generator().manual_seed(1))
        codes = codes[torch.tensor(owners)[order]]
        model.set_catalog(codes, make_content(len(codes)) if model.config.content_size else None)
        return model

    return make


def make_content(number, seed=0):
    return torch.randn(number, WIDTH, generator=torch.Generator().manual_seed(seed))


def same_sid(model, row):
    """Rows of the items that have an item's SID."""
    codes = model.catalog_codes
    return (codes == codes[row]).all(1).nonzero().squeeze(1).tolist()


class ByHand:
    """`p(item)` of the whole catalog for one history: one SID and one item at a time."""

    def __init__(self, model, make_reference):
        self.model, self.reference = model, make_reference(model)

    def state(self, history, sid):
        """The decoder's state behind a whole SID."""
        model, decoder = self.model, self.model.decoder
        users, mask = torch.tensor([0]), torch.ones((1, len(history)), dtype=torch.bool)
        item_codes, mask = model._with_a_column(history[None], mask)
        context = model._context(model._read(item_codes, mask), mask, users, users + len(history) - 1)
        tables = [table.weight[code] for table, code in zip(decoder.tables, sid, strict=True)]
        tokens = torch.cat([context.tokens, torch.stack(tables)[None]], 1)
        return decoder.read(context, tokens, use_cache=False)[0, -1]

    def item_vector(self, row):
        content = self.model.catalog_content[row]
        return self.model.reranker.item_proj.weight @ (content / content.square().mean().sqrt())

    def scores(self, history, rows):
        """`u . v` of some items of one SID."""
        sid = self.model.catalog_codes[rows[0]].tolist()
        head = self.model.reranker.rerank_head
        user = head.down_proj(F.silu(head.up_proj(self.state(history, sid))))
        return torch.stack([user @ self.item_vector(row) for row in rows])

    def sid_log_prob(self, history, sid):
        return self.reference.log_likelihood(history, tuple(sid))

    def log_probs(self, history):
        """`log p(item)` of all items."""
        found = torch.empty(len(self.model.catalog_codes))
        for row, sid in enumerate(self.model.catalog_codes.tolist()):
            rows = same_sid(self.model, row)
            choice = self.scores(history, rows).log_softmax(0)[rows.index(row)]
            found[row] = self.sid_log_prob(history, sid) + choice
        return found


@pytest.fixture
def by_hand(make_reference):
    return partial(ByHand, make_reference=make_reference)


def assert_ranking(rows, scores, expected):
    """Rows and scores of one user are the items by log-probability; -inf in `expected` never come."""
    number = int((expected > -torch.inf).sum())
    order = expected.argsort(descending=True)[:number]
    assert rows[:number].tolist() == order.tolist() and (rows[number:] == -1).all()
    close(scores[:number], expected[order])
    assert (scores[number:] == -torch.inf).all()


def test_a_wide_search_ranks_the_whole_catalog_by_the_probability_of_every_item(make, by_hand, make_histories):
    model = make()
    hand, (codes, mask) = by_hand(model), make_histories(model, [3, 0, 2])
    output = model.generate(codes, mask, **ALL, rerank=True)
    for user, length in enumerate((3, 0, 2)):
        expected = hand.log_probs(codes[user, 3 - length :])
        close(expected.exp().sum(), torch.tensor(1.0))
        here = slice(60 * user, 60 * user + 60)
        assert_ranking(output.item_rows[here], output.sequences_scores[here], expected)
    found = output.item_rows >= 0
    assert torch.equal(output.sequences[found], model.catalog_codes[output.item_rows[found]].long())
    assert (output.sequences[~found] == -1).all() and (~found).sum() == 3 * 30


@pytest.mark.parametrize("variant", VARIANTS[1:])
def test_every_variant_ranks_by_the_probability_of_every_item(make, make_reference, make_histories, variant):
    """SIDs are scored as ever, so those of a search without the head are the reference of the SIDs here."""
    model = make(**variant)
    hand, (codes, mask) = ByHand(model, make_reference), make_histories(model, [3, 2])
    plain = model.generate(codes, mask, **ALL, rerank=False)
    output = model.generate(codes, mask, **ALL)
    for user, length in enumerate((3, 2)):
        here = slice(60 * user, 60 * user + 60)
        sids = dict(zip(map(tuple, plain.sequences[here].tolist()), plain.sequences_scores[here], strict=True))
        hand.sid_log_prob = lambda history, sid, sids=sids: sids[tuple(sid)]
        expected = hand.log_probs(codes[user, 3 - length :])
        assert_ranking(output.item_rows[here], output.sequences_scores[here], expected)


def test_items_of_all_beams_compete(make, by_hand, make_histories):
    """Of a SID with eight items each may be less likely than the item of a SID that comes later."""
    model = make()
    hand, (codes, mask) = by_hand(model), make_histories(model, [3, 1, 2, 0])
    options = {"num_return_sequences": 3, "return_dict_in_generate": True}
    whole, sids = model.generate(codes, mask, num_beams=60, **options), 0
    for user, length in enumerate((3, 1, 2, 0)):
        expected = hand.log_probs(codes[user, 3 - length :])
        here = slice(3 * user, 3 * user + 3)
        assert whole.item_rows[here].tolist() == expected.argsort(descending=True)[:3].tolist()
        close(whole.sequences_scores[here], expected.sort(descending=True).values[:3])
        best = model.generate(codes[user : user + 1], mask[user : user + 1], num_beams=60, rerank=False, **options)
        sids += not set(map(tuple, whole.sequences[here].tolist())) <= set(map(tuple, best.sequences.tolist()))
    assert sids  # else the three best SIDs would have been enough


def test_without_the_head_a_sid_comes_once_with_the_first_of_its_items(make, make_histories):
    model, (codes, mask) = make(content_size=0), make_histories(make(), [3, 2])
    output = model.generate(codes, mask, **ALL)
    for user in range(2):
        rows = output.item_rows[60 * user : 60 * user + 60]
        rows = rows[rows >= 0].tolist()
        assert len(rows) == 17 and all(same_sid(model, row)[0] == row for row in rows)
    with pytest.raises(ValueError, match="`rerank` is set, but the model has no reranking head"):
        model.generate(codes, mask, rerank=True)
    assert model.reranker is None and len(model.decoder.tables) == 2


def test_sequences_alone_hold_every_sid_once(make, make_histories):
    model = make()
    codes, mask = make_histories(model, [3, 2])
    options = {"num_beams": 60, "num_return_sequences": 60}
    plain = model.generate(codes, mask, **options)
    assert torch.equal(plain, model.generate(codes, mask, **ALL, rerank=False).sequences)
    for user in range(2):
        sids = [tuple(sid) for sid in plain[60 * user : 60 * user + 60].tolist() if sid[0] >= 0]
        assert len(sids) == len(set(sids)) == 17
    for wanted in ({}, {"return_dict_in_generate": False}):
        with pytest.raises(ValueError, match="`rerank` is set, but sequences alone .* `return_dict_in_generate`"):
            model.generate(codes, mask, **options, **wanted, rerank=True)


def test_the_head_leaves_the_sids_of_a_search_as_they_are(make, make_histories):
    model = make()
    codes, mask = make_histories(model, [3, 0, 2])
    plain = make(content_size=0)
    own = model.state_dict()
    plain.load_state_dict({name: own[name] for name in plain.state_dict()})
    expected = plain.generate(codes, mask, **ALL)
    output = model.generate(codes, mask, **ALL, rerank=False)
    assert all(torch.equal(output[name], expected[name]) for name in ("sequences", "sequences_scores", "item_rows"))


@pytest.mark.parametrize("width", [1, 2, 5])
def test_a_narrow_search_ranks_the_items_of_its_beams(make, by_hand, make_histories, width):
    model = make()
    hand, (codes, mask) = by_hand(model), make_histories(model, [3, 2])
    options = {"num_beams": width, "num_return_sequences": width, "return_dict_in_generate": True}
    plain, output = model.generate(codes, mask, **options, rerank=False), model.generate(codes, mask, **options)
    for user, length in enumerate((3, 2)):
        here = slice(width * user, width * user + width)
        kept = {row for first in plain.item_rows[here].tolist() if first >= 0 for row in same_sid(model, first)}
        expected = hand.log_probs(codes[user, 3 - length :])
        outside = torch.tensor([row not in kept for row in range(30)])
        best = expected.masked_fill(outside, -torch.inf).argsort(descending=True)[: min(width, len(kept))]
        assert output.item_rows[here].tolist() == [*best.tolist(), *[-1] * (width - len(best))]


def test_filters_take_out_items_and_leave_scores(make, by_hand, make_histories):
    model = make()
    hand, (codes, mask) = by_hand(model), make_histories(model, [3, 2])
    crowd = max((same_sid(model, row) for row in range(30)), key=len)
    assert len(crowd) == 8
    allowed = [*crowd[1:4], *[row for row in range(30) if row not in crowd][:9]]
    denied = [[crowd[2], crowd[5]], [row for row in crowd if row != crowd[6]]]
    for options, kept in (
        ({"allow_rows": allowed}, [set(allowed)] * 2),
        ({"deny_rows": denied}, [set(range(30)) - set(rows) for rows in denied]),
        ({"allow_rows": allowed, "deny_rows": denied}, [set(allowed) - set(rows) for rows in denied]),
        ({"deny_rows": list(range(29))}, [{29}] * 2),
        ({"allow_rows": []}, [set()] * 2),
    ):
        output = model.generate(codes, mask, **ALL, **options)
        for user, length in enumerate((3, 2)):
            expected = hand.log_probs(codes[user, 3 - length :])
            expected[[row for row in range(30) if row not in kept[user]]] = -torch.inf
            here = slice(60 * user, 60 * user + 60)
            assert_ranking(output.item_rows[here], output.sequences_scores[here], expected)
    output = model.generate(codes, mask, **ALL, exclude_seen=True)  # by SID, as ever
    seen = {row for sid in codes[0].tolist() for row in range(30) if model.catalog_codes[row].tolist() == sid}
    assert set(output.item_rows[:60].tolist()) == set(range(30)) - seen | {-1}


def test_stored_concepts_are_searched_as_their_histories(make, make_histories):
    model = make(copy_pointer=True)
    codes, mask = make_histories(model, [3, 0, 2])
    state = model.encode(codes, mask)
    direct, stored = model.generate(codes, mask, **ALL), model.generate(**state, **ALL)
    assert torch.equal(direct.item_rows, stored.item_rows)
    close(direct.sequences_scores, stored.sequences_scores)
    empty = model.generate(codes[:0], mask[:0], **ALL)
    assert empty.item_rows.shape == (0,) and empty.sequences.shape == (0, 3)


@pytest.fixture
def make_batch():
    """Training batches with the rows of their targets, padded on a side."""

    def make_batch(model, lengths, seed=0, right=False):
        generator, width = torch.Generator().manual_seed(seed), max(lengths)
        rows = torch.full((len(lengths), width + 1), -1)
        for user, length in enumerate(lengths):
            here = slice(0, length + 1) if right else slice(width - length, width + 1)
            rows[user, here] = torch.randint(0, 30, (length + 1,), generator=generator)
        codes, there = model.catalog_codes[rows.clamp(min=0)].long(), rows >= 0
        mask = (there[:, 1:] & there[:, :-1]).long()
        return {
            "item_codes": codes[:, :-1] * mask.unsqueeze(-1),
            "attention_mask": mask,
            "labels": codes[:, 1:].masked_fill(mask.unsqueeze(-1) == 0, -100),
            "target_rows": rows,
        }

    return make_batch


def pair_loss(scores, bought):
    """Eq. 11 on a list of which one item was bought, pair by pair."""
    places = sorted(range(len(scores)), key=lambda item: (-scores[item].item(), item))
    discount = {item: 1 / torch.log2(torch.tensor(2.0 + place)) for place, item in enumerate(places)}
    others = [item for item in range(len(scores)) if item != bought]
    return sum(F.softplus(scores[item] - scores[bought]) * (discount[item] - discount[bought]).abs() for item in others)


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("from_start", [None, torch.tensor([True, False, True])])
def test_the_loss_tells_the_target_from_the_items_of_its_sid(make, by_hand, make_batch, right, from_start):
    model = make()
    hand, batch = by_hand(model), make_batch(model, [4, 2, 3], right=right)
    output = model(**batch, from_start=from_start, return_target_scores=True)
    sids, lists = [], []
    for user in range(3):
        rows = batch["target_rows"][user]
        rows = rows[rows >= 0].tolist()
        first = 0 if from_start is None or from_start[user] else 1
        for place in range(first, len(rows)):
            history, together = model.catalog_codes[rows[:place]].long(), same_sid(model, rows[place])
            sids.append(-hand.sid_log_prob(history, model.catalog_codes[rows[place]].tolist()))
            if len(together) > 1:
                lists.append(pair_loss(hand.scores(history, together), together.index(rows[place])))
    assert 3 < len(lists) < len(sids)
    close(output.rerank_loss, torch.stack(lists).mean())
    close(output.loss, torch.stack(sids).mean() + torch.stack(lists).mean())
    assert len(output.target_scores.targets) == len(sids)
    assert model(**batch, from_start=from_start).target_scores is None


def test_the_scores_of_least_loss_are_log_odds():
    """The gradient over lists of items bought with probability p vanishes where the softmax of the scores is p."""
    for chances in ([0.6, 0.3, 0.1], [0.1, 0.15, 0.25, 0.5]):
        chances = torch.tensor(chances, dtype=torch.float64)
        scores = (chances.log() + 3).requires_grad_()
        labels = torch.eye(len(chances), dtype=torch.float64)
        loss = sum(p * lambda_loss(scores[None], label[None]) for p, label in zip(chances, labels, strict=True))
        gradient = torch.autograd.grad(loss, scores)[0]
        assert gradient.abs().max() < 1e-12
        moved = (scores.detach() + torch.arange(len(chances)) / 10).requires_grad_()
        loss = sum(p * lambda_loss(moved[None], label[None]) for p, label in zip(chances, labels, strict=True))
        assert torch.autograd.grad(loss, moved)[0].abs().max() > 1e-3


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_learns_from_its_loss_alone_and_teaches_what_it_reads(make, make_batch, tied):
    model = make(tie_code_tables=tied).train()
    batch = make_batch(model, [4, 3])
    head = [parameter for name, parameter in model.named_parameters() if name.startswith("reranker.")]
    assert len(head) == 5
    output = model(**batch)
    (output.loss - output.rerank_loss).backward(retain_graph=True)
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in head)
    model.zero_grad()
    output.rerank_loss.backward()
    reached = {
        name for name, parameter in model.named_parameters() if parameter.grad is not None and parameter.grad.any()
    }
    assert {name for name, _ in model.named_parameters() if name.startswith("reranker.")} <= reached
    assert {"concept_head.concept_proj.weight", "backbone.layers.0.mlp.up_proj.weight"} <= reached
    last = "decoder.heads.2.weight" if tied else "decoder.tables.2.weight"
    assert last in reached and ("decoder.heads.1.weight" in reached) == tied


def test_lists_of_one_have_no_loss(make, make_batch):
    model = make(num_sids=30)  # every item alone
    batch = make_batch(model, [4, 2])
    output = model(**batch)
    assert output.rerank_loss.item() == 0
    output.loss.backward()
    assert not any(parameter.grad is not None and parameter.grad.any() for parameter in model.reranker.parameters())
    rows = batch.pop("target_rows")
    plain = make(num_sids=30, content_size=0)
    plain.load_state_dict({name: model.state_dict()[name] for name in plain.state_dict()})
    assert torch.equal(output.loss, plain(**batch).loss) and rows.shape == (2, 5)
    options = ALL | {"num_beams": 7, "num_return_sequences": 5}
    ranked, expected = (each.generate(batch["item_codes"], **options) for each in (model, plain))
    assert torch.equal(ranked.item_rows, expected.item_rows)
    close(ranked.sequences_scores, expected.sequences_scores)


def test_a_model_learns_which_of_the_items_follows(make_model, make_codes):
    """Every SID has two items; the user whose first two SIDs stand in the other order buys the second of each."""
    model = make_model(sizes=SIZES, catalog=False, content_size=WIDTH)
    codes = make_codes(SIZES, 6).repeat_interleave(2, 0)
    model.set_catalog(codes, make_content(12))
    rows = torch.tensor([[0, 2, 4, 6, 8, 10], [2, 0, 5, 7, 9, 11]])
    batch = {"item_codes": codes[rows[:, :-1]].long(), "labels": codes[rows[:, 1:]].long(), "target_rows": rows}
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=3e-3)
    for _ in range(100):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    options = {"num_beams": 6, "num_return_sequences": 1, "return_dict_in_generate": True}
    output = model.eval().generate(batch["item_codes"], **options)
    assert output.item_rows.tolist() == [10, 11] and (output.sequences_scores.exp() > 0.6).all()


def test_checkpoints_carry_the_content(make, make_histories, make_batch, tmp_path):
    model = make()
    model.save_pretrained(tmp_path)
    names = {path.name for path in tmp_path.glob("*.py")}
    assert {"reranking_sid.py", "feed_forward_sid.py", "losses_gear.py"} <= names
    histories, batch = make_histories(model, [3, 2]), make_batch(model, [3, 2])
    for kind in (DecoForSIDRetrieval, AutoModel):
        loaded = kind.from_pretrained(tmp_path)
        assert loaded.config.content_size == WIDTH and torch.equal(loaded.catalog_content, model.catalog_content)
        assert torch.equal(loaded(**batch).loss, model(**batch).loss)
        first, second = (each.generate(*histories, **ALL) for each in (model, loaded))
        assert torch.equal(first.item_rows, second.item_rows)
        close(first.sequences_scores, second.sequences_scores)
    fresh = AutoModel.from_config(loaded.config)
    assert fresh.catalog_content.shape == (30, WIDTH) and not fresh.catalog_content.any()


def test_the_catalog_is_replaced_whole_or_not(make, make_codes):
    model = make()
    codes, content = make_codes(SIZES, 20, seed=3), make_content(20, seed=3)
    before = model.catalog_codes
    for wrong, message in (
        (None, r"`content` must hold the embeddings of all items, of shape \(20, 7\), .* got None"),
        (content[:19], r"of shape \(20, 7\), for the reranking head, got \(19, 7\)"),
        (content[:, :6], r"got \(20, 6\)"),
        (content.where(content < 1, torch.nan), "`content` holds NaN or infinite values"),
    ):
        with pytest.raises(ValueError, match=message):
            model.set_catalog(codes, wrong)
        assert model.catalog_codes is before and model.catalog_content.shape == (30, WIDTH)
    with pytest.raises(ValueError, match="`codes` of level 1"):
        model.set_catalog(codes + 4, content)
    assert model.catalog_content.shape == (30, WIDTH)
    model.set_catalog(codes, content.numpy())
    assert model.config.num_items == 20 and torch.equal(model.catalog_content, content)
    assert model.catalog_content.data_ptr() != content.data_ptr()
    with pytest.raises(ValueError, match="`content` is what a reranking head reads, and the model has none"):
        make(content_size=0).set_catalog(codes, content)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("options", [{}, {"copy_pointer": True}, {"copy_pointer": True, "content_size": 0}])
def test_a_search_ends_in_the_catalog_that_it_began_with(make, make_histories, options, stored):
    model = make(**options)
    codes, mask = make_histories(model, [3, 2])
    inputs = model.encode(codes, mask) if stored else {"item_codes": codes, "attention_mask": mask}
    expected, start = model.generate(**inputs, **ALL), model._start_search
    content = make_content(30, seed=5) if model.config.content_size else None
    others = (model.catalog_codes + 1) % torch.tensor(SIZES)  # as many items, on other SIDs
    swap = partial(model.set_catalog, others, *([] if content is None else [content]))

    def replace_first(*args):
        swap()
        return start(*args)

    def replace_then(*args):
        found = start(*args)
        swap()
        return found

    before = model.catalog_codes, getattr(model, "catalog_content", None)
    for replaced in (replace_first, replace_then):
        model._start_search = replaced
        found = model.generate(**inputs, **ALL)
        assert torch.equal(found.item_rows, expected.item_rows)
        close(found.sequences_scores, expected.sequences_scores)
        model._start_search = start
        assert not torch.equal(model.generate(**inputs, **ALL).item_rows, expected.item_rows)
        model.set_catalog(*(part for part in before if part is not None))


def test_codes_and_content_are_taken_together_or_not(make, make_codes, monkeypatch):
    """A thread that asks for the catalog while its parts are put in place waits for all of them."""
    model, waits, found = make(), Event(), []
    codes, content = make_codes(SIZES, 20, seed=3), make_content(20, seed=3)

    class Watched:
        lock = Lock()

        def __enter__(self):
            if not self.lock.acquire(blocking=False):
                waits.set()
                self.lock.acquire()

        def __exit__(self, *error):
            self.lock.release()

    def ask_between(self, name, value):
        torch.nn.Module.__setattr__(self, name, value)
        if name in ("catalog_codes", "_trie", "catalog_content"):
            waits.clear()
            found.append(threads.submit(self._take_catalog))
            found[-1].add_done_callback(lambda _: waits.set())
            waits.wait()

    for module in (catalog_sid, modeling_deco):
        monkeypatch.setattr(module, "SWAP", Watched())
    monkeypatch.setattr(DecoForSIDRetrieval, "__setattr__", ask_between)
    with ThreadPoolExecutor(3) as threads:
        model.set_catalog(codes, content)
    assert len(found) == 3
    for trie, items in (asked.result() for asked in found):
        assert trie is model.trie and torch.equal(items, content)


def test_content_that_cannot_be_moved_leaves_the_old_catalog(make, make_codes):
    class Unmoved(torch.Tensor):
        def to(self, *args, **kwargs):
            raise MemoryError

    model = make()
    before = model.catalog_codes, model.trie, model.catalog_content
    with pytest.raises(MemoryError):
        model.set_catalog(make_codes(SIZES, 20, seed=3), make_content(20).as_subclass(Unmoved))
    now = model.catalog_codes, model.trie, model.catalog_content
    assert all(kept is part for kept, part in zip(now, before, strict=True))
    assert model.config.num_items == 30


def test_targets_without_their_rows_are_refused(make, make_batch):
    model = make()
    batch = make_batch(model, [4, 2])
    rows = batch.pop("target_rows")
    wrong = rows.clone()
    wrong[0, 2] = next(row for row in range(30) if row not in same_sid(model, int(rows[0, 2])))
    for given, message in (
        (None, r"`target_rows` must hold catalog rows of the targets, of shape \(2, 5\), .* got None"),
        (rows[:, 1:], r"of shape \(2, 5\), for the reranking head, got \(2, 4\)"),
        (wrong, "`target_rows` name other items than the targets in 1 places"),
        (rows + 30, "name other items than the targets in 8 places"),
        (rows.fill_diagonal_(-1), "name other items than the targets in 1 places"),
    ):
        with pytest.raises(ValueError, match=message):
            model(**batch, target_rows=given)


def test_pipeline_and_engine_rank_items(make, by_hand):
    model = make()
    names = [f"i{row}" for row in range(30)]
    processor = DecoProcessor(names, model.catalog_codes, SIZES)
    history = ["i4", "i9", "i20"]
    expected = by_hand(model).log_probs(model.catalog_codes[[4, 9, 20]].long())
    order = expected.argsort(descending=True)
    answers = pipeline("sid-retrieval", model=model, processor=processor)(history, top_k=30, num_beams=60)
    assert [answer["item_id"] for answer in answers] == [names[row] for row in order]
    close(torch.tensor([answer["score"] for answer in answers]), expected[order])
    unseen = [row for row in order.tolist() if row not in (4, 9, 20)]
    for options, rows in (({}, order.tolist()), ({"exclude_seen": True}, unseen)):
        options = {"k": 30, "num_beams": 60, **options}
        engine = RetrievalEngine(model, processor, dtype=torch.float32, compile=False, warm_up=False)
        found = engine.retrieve([history, []], **options)
        assert [row for row in found.rows[0].tolist() if row >= 0] == rows
        close(found.scores[0, : len(rows)], expected[rows])
    stored = engine.search(engine.concepts([history]), k=30, num_beams=60)
    assert stored.rows[0].tolist() == order.tolist()
