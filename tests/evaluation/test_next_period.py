"""The evaluation of the next period against one user, one SID and one item at a time."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from hf_deco import GearForSIDRetrieval
from hf_deco.data.events import read_event_log, read_item_texts
from hf_deco.data.gear_batches import GearCollator
from hf_deco.data.requests import Requests
from hf_deco.data.roles import read_roles
from hf_deco.evaluation.next_period import NextPeriodEvaluator
from hf_deco.evaluation.set_metrics import set_metrics
from hf_deco.items.index import ItemIndex
from hf_deco.training.gear import make_config
from hf_deco.training.gear_arguments import GearTrainingArguments

PERIOD = 4


@pytest.fixture(scope="module")
def world(stream_folder, stream_options, tmp_path_factory):
    """Log, requests, collator, and a random model with the catalog and the index of the period."""
    roles = read_roles(stream_folder / "log.yaml")
    log = read_event_log(roles, read_item_texts(roles.items), np.load(stream_folder / "embeddings.npy"))
    args = GearTrainingArguments(**stream_options, output_dir=str(tmp_path_factory.mktemp("run")))
    torch.manual_seed(0)
    model = GearForSIDRetrieval(make_config(args, log)).eval()
    with torch.no_grad():
        for parameter in model.decoder.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    requests, collator = Requests(log, (6, 4)), GearCollator(log)
    items = collator.items(log.num_known(PERIOD))
    model.init_quantizer(items["content"], items["item_ids"])
    encoded = model.encode_items(items["content"], items["item_ids"])
    model.set_catalog(encoded.codes)
    vectors = encoded.vectors.numpy()
    index = ItemIndex.build(
        log.item_ids[: len(vectors)], encoded.codes, vectors, (6, 4),
        tokenizer_version=model.tokenizer_version, model_id="gear", precision="fp16",
    )  # fmt: skip
    return log, requests, collator, model, index, vectors


def make(world, **options):
    log, requests, collator, *_ = world
    options = {"num_users": 0, "ks": (3, 10), "num_beams": (6, 8), "per_sid_limit": 2} | options
    return NextPeriodEvaluator(log, requests, collator, **options)


def reference(world, user, limit):
    """SIDs of a user, best first, and the items that are found, ranked by their log-probability and by the product
    alone, by plain loops."""
    log, requests, collator, model, _, vectors = world
    start = log.times[log.periods == PERIOD].min()
    mine = (log.users == user) & (log.times < start)
    history = log.items[mine][-6:], log.items[mine & (log.grades == 2)][-4:]
    batch = collator.users([user], [history])
    output = model.generate(**batch, num_beams=[6, 8], num_return_sequences=8, return_dict_in_generate=True)
    sids = output.sequences
    queries = model.rerank_vectors(model.encode_memory(**batch), sids[None])[0]
    found, alone = [], []
    for sid, log_prob, query in zip(sids, output.sequences_scores.tolist(), queries.numpy(), strict=True):
        if (sid < 0).any():
            continue
        items = (model.catalog_codes == sid).all(1).nonzero()[:, 0].numpy()
        products = [float(vectors[item] @ query) for item in items]
        whole = np.log(np.sum(np.exp(products)))
        scored = sorted(zip(products, items, strict=True), reverse=True)[:limit]
        alone += scored
        found += [(log_prob + product - whole, item) for product, item in scored]
    return sids, *([int(item) for _, item in sorted(some, reverse=True)] for some in (found, alone))


def test_items_and_sids_are_those_of_plain_loops(world):
    log, _, _, model, index, vectors = world
    evaluator = make(world)
    users = evaluator.users(PERIOD)
    assert users.tolist() == sorted(set(log.users[log.periods == PERIOD].tolist()))
    ranked, alone, sids, relevant, relevant_sids, cold = [], [], [], [], [], []
    sid_of = {item: tuple(code) for item, code in enumerate(model.catalog_codes.tolist())}
    number = {sid: place for place, sid in enumerate(sorted(set(sid_of.values())))}
    for user in users:
        found, items, by_product = reference(world, user, 2)
        ranked.append((items + [-1] * 10)[:10])
        alone.append((by_product + [-1] * 10)[:10])
        sids.append([number.get(tuple(sid), -1) for sid in found.tolist()])
        bought = sorted(set(log.items[(log.users == user) & (log.periods == PERIOD)].tolist()))
        relevant.append(np.array(bought))
        relevant_sids.append(np.unique([number[sid_of[item]] for item in bought]))
        cold.append([item for item in bought if item not in log.items[log.periods < PERIOD]])
    metrics = evaluator(model, index, PERIOD, vectors)
    for name, value in set_metrics(np.array(ranked), relevant, (3, 10)).items():
        assert metrics[f"fp32/{name}"] == pytest.approx(value)
    assert not np.array_equal(ranked, alone)
    for name, value in set_metrics(np.array(alone), relevant, (3, 10)).items():
        assert metrics[f"dot/{name}"] == pytest.approx(value, abs=0.02)  # fp16 may swap two
    for name, value in set_metrics(np.array(sids), relevant_sids, (3, 10)).items():
        assert metrics[f"sid/{name}"] == pytest.approx(value)
    # only what no event touched before is cold, however often it was shown
    number_cold = sum(map(len, cold))
    assert metrics["cold/num_targets"] == number_cold > 0
    hits = sum(item in row for row, items in zip(ranked, cold, strict=True) for item in items)
    assert metrics["cold/recall@10"] == pytest.approx(hits / number_cold, abs=1 / number_cold)  # fp16 may swap two
    assert metrics["int8/kept@10"] > 0.9 and 0 < metrics["int4/kept@10"] <= 1


def test_users_are_drawn_alike_every_time(world):
    evaluator = make(world, num_users=5)
    users = evaluator.users(PERIOD)
    assert len(users) == 5 and users.tolist() == evaluator.users(PERIOD).tolist() != evaluator.users(3).tolist()


def test_without_a_reranker_items_of_a_sid_are_cut_at_random(world):
    log, _, _, model, index, _ = world
    evaluator = make(world, rerank=False, per_sid_limit=1)
    users, numbers = evaluator.users(PERIOD), evaluator._numbers(index)
    sequences, _, queries = evaluator._search(model, users, PERIOD)
    assert queries is None
    ranked = evaluator._shuffled(index, sequences, PERIOD)
    codes = model.catalog_codes.numpy()
    for row, sids in zip(ranked, sequences, strict=True):
        found = codes[numbers[row[row >= 0]]]
        assert np.array_equal(found, sids[(sids >= 0).all(1)][: len(found)])  # one item a SID, in their order
    other = make(world, rerank=False, per_sid_limit=1)
    other.seed = 1
    assert not np.array_equal(other._shuffled(index, sequences, PERIOD), ranked)


def test_an_item_outside_the_index_is_never_found(world):
    _, _, _, model, index, _ = world
    whole, codes = make(world)(model, index, PERIOD), model.catalog_codes.clone()
    try:
        model.set_catalog(codes[:3])  # the rest has not been published
        log = world[0]
        kept = index.update(removed=log.item_ids[3 : log.num_known(PERIOD)].tolist())
        metrics = make(world)(model, kept, PERIOD)
        assert metrics["recall@10"] < whole["recall@10"] and metrics["cold/recall@10"] == 0
        assert metrics["sid/recall@10"] > whole["sid/recall@10"]  # among few SIDs, and users who bought of them
    finally:
        model.set_catalog(codes)


def test_an_index_of_another_tokenizer_is_refused(world):
    _, _, _, model, index, _ = world
    with pytest.raises(ValueError, match="index was made with tokenizer version 'other', but is asked by"):
        make(world)(model, replace(index, tokenizer_version="other"), PERIOD)


def test_floors_are_judged_on_the_same_users(world):
    floors = make(world, num_users=7).floors(PERIOD)
    assert set(floors) == {"popularity", "repeat_last"}
    assert floors["repeat_last"]["recall@10"] > floors["popularity"]["recall@10"] > 0
