"""GEAR's features and towers: what is missing, unseen or hashed, and an item's encoding in any company."""

import pytest
import torch
from gear_models import Reference, hash_in_python, make_batch, make_gear, make_items, users_of

from hf_deco import GearConfig, GearForSIDRetrieval
from hf_deco.models.features_gear import CategoricalEmbeddings, hash_ids


@pytest.fixture(scope="module")
def model():
    return make_gear()


def test_hash_is_the_same_whole_numbers_everywhere_and_spreads():
    values = torch.tensor([0, 1, 2, 12345, 2**31, 2**62 + 7, 2**63 - 1])
    for feature, size in ((0, 7), (3, 1000), (27, 1 << 20)):
        expected = [hash_in_python(value, feature, size) for value in values.tolist()]
        assert hash_ids(values, feature, size).tolist() == expected
    counts = torch.bincount(hash_ids(torch.arange(64_000), 0, 64), minlength=64)
    assert 850 < counts.min() and counts.max() < 1150  # 1000 expected, a standard deviation of 31
    assert hash_ids(torch.arange(5), 0, 1000).tolist() != hash_ids(torch.arange(5), 1, 1000).tolist()
    assert hash_ids(values[:4], 0, 1000).tolist() == [529, 722, 269, 987]  # checkpoints hold tables of these rows


def test_missing_and_unseen_values_are_zeros_and_known_ones_are_their_row():
    features = [{"name": "town", "size": 4}, {"name": "brand", "size": 3, "hashed": True}]
    torch.manual_seed(0)
    tables = CategoricalEmbeddings(features, 2, "item_ids")
    found = tables(torch.tensor([[0, -1], [3, 0], [4, 10**15], [-1, -1]]), 4, torch.device("cpu"))
    assert torch.equal(found[0], torch.stack([tables.tables[0].weight[1], torch.zeros(2)]))
    assert torch.equal(found[1, 0], tables.tables[0].weight[4])
    assert (found[2, 0] == 0).all() and (found[2, 1] != 0).all() and (found[3] == 0).all()
    assert torch.equal(tables(None, 3, torch.device("cpu")), torch.zeros(3, 2, 2))
    found.square().sum().backward()
    assert all((table.weight.grad[0] == 0).all() for table in tables.tables)  # zeros stay zeros


def test_towers_are_the_reference(model):
    batch, reference = make_batch(), Reference(model)
    encoded = model.encode_items(batch["content"], batch["item_ids"])
    users = model.encode_users(**users_of(batch))
    for row in range(12):
        hidden, vector = reference.item_tower(reference.item(batch, row))
        torch.testing.assert_close(encoded.vectors[row], vector)
        assert torch.equal(encoded.codes[row], model.quantizer.encode(hidden[None])[0])
    for user in range(4):
        torch.testing.assert_close(users[user], reference.user_tower(batch, user))
    assert len(encoded.codes.unique(dim=0)) > 6


def test_users_without_features_are_users_whose_features_are_missing(model):
    batch = make_batch()
    batch["user_ids"] = torch.full((4, 3), -1)
    with_none = {**users_of(batch), "user_ids": None}
    assert torch.equal(model.encode_users(**users_of(batch)), model.encode_users(**with_none))
    assert torch.equal(model.encode_memory(**users_of(batch)).states, model.encode_memory(**with_none).states)
    assert not torch.equal(model.encode_users(**users_of(batch)), model.encode_users(**users_of(make_batch())))


def test_an_unseen_value_reads_as_a_missing_one(model):
    content, item_ids = make_items(3, 5)
    item_ids[:, 1] = torch.tensor([3, 4, 99, 2**40, 3])
    missing = item_ids.clone()
    missing[:, 1] = -1
    found, expected = model.encode_items(content, item_ids), model.encode_items(content, missing)
    assert torch.equal(found.vectors, expected.vectors) and torch.equal(found.codes, expected.codes)


def test_an_item_is_encoded_alike_in_every_batch():
    """At the paper's widths, where products of other shapes round otherwise; across pieces and places in them."""
    torch.manual_seed(0)
    model = GearForSIDRetrieval(GearConfig(codebook_size=[64, 32, 16])).eval()
    content = torch.randn(1100, 384)
    model.init_quantizer(content)
    expected = model.encode_items(content)
    assert len(expected.codes.unique(dim=0)) > 500
    order = torch.randperm(1100)
    shuffled = model.encode_items(content[order])
    assert torch.equal(shuffled.codes, expected.codes[order]) and torch.equal(shuffled.vectors, expected.vectors[order])
    for size in (1, 7, 513):
        for start in range(0, 1100, max(size, 150)):
            part = model.encode_items(content[start : start + size])
            assert torch.equal(part.codes, expected.codes[start : start + size])
            assert torch.equal(part.vectors, expected.vectors[start : start + size])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model.encode_items(content).codes, expected.codes)
    none = model.encode_items(content[:0])
    assert none.vectors.shape == (0, 96) and none.codes.shape == (0, 3)


def test_quantiser_starts_from_the_hidden_states_of_the_items():
    model = make_gear()
    content, item_ids = make_items(20, 50)
    model.init_quantizer(content, item_ids, seed=4)
    reference = Reference(model)
    batch = {"content": content, "item_ids": item_ids}
    hidden = torch.stack([reference.item_tower(reference.item(batch, row))[0] for row in range(50)])
    torch.testing.assert_close(model.quantizer.mean, hidden.mean(0))
    error = (model.quantizer.decode(model.encode_items(content, item_ids).codes) - hidden).square().sum(1).mean()
    assert error < 0.2 * hidden.var(0).sum()
    with pytest.raises(ValueError, match="`x` has 4 rows, fewer than the 5 codes of a level"):
        model.init_quantizer(content[:4], item_ids[:4])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"content": torch.zeros(12, 4)}, r"`content` must have shape \(num_items, 5\), got \(12, 4\)"),
        ({"content": torch.full((12, 5), torch.nan)}, "`content` holds NaN or infinite values, first in row 0"),
        ({"item_ids": torch.zeros(12, 3, dtype=torch.long)}, r"`item_ids` must be integers of shape \(12, 2\), got"),
        ({"item_ids": torch.zeros(12, 2)}, r"`item_ids` must be integers of shape \(12, 2\), got torch.float32"),
        (
            {"item_ids": torch.full((12, 2), -2)},
            r"`item_ids` must be -1 \(missing\) or not negative, got -2 .* 'brand'",
        ),
        ({"user_ids": torch.zeros(3, 3, dtype=torch.long)}, r"`user_ids` must be integers of shape \(4, 3\), got"),
        ({"behaviors": None}, "`behaviors` must hold a tensor for each of clicks, conversions, got None"),
        ({"behaviors": [torch.zeros(4, 1).long()]}, "`behaviors` must hold a tensor for each .*, got 1"),
        ({"behaviors": [torch.full((4, 1), 12)] * 2}, r"`behaviors\['clicks'\]` must be rows of the batch's 12 items"),
        ({"behaviors": [torch.full((4, 1), -2)] * 2}, r"`behaviors\['clicks'\]` must be rows .* got -2 to -2"),
        ({"behaviors": [torch.zeros(4, 6).long()] * 2}, r"`behaviors\['clicks'\]` may have 5 items, got 6: keep the"),
        ({"behaviors": [torch.zeros(4, 1).long(), torch.zeros(3, 1).long()]}, r"'conversions'.* of shape \(4, items\)"),
        ({"behaviors": [torch.zeros(4, 1)] * 2}, r"`behaviors\['clicks'\]` must be integers .* got torch.float32"),
    ],
)
def test_bad_users_and_items_are_named(model, change, message):
    users = {**users_of(make_batch()), **change}
    for method in (model.encode_users, model.encode_memory):
        with pytest.raises(ValueError, match=message):
            method(**users)
