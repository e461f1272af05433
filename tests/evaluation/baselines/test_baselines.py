"""The rivals of the benchmark find what the package finds: they differ in cost alone."""

import pytest
import torch

from hf_deco.evaluation.baselines.dense_masking import dense_beam_search
from hf_deco.evaluation.baselines.padded_training import padded_loss
from hf_deco.evaluation.baselines.stock_generate import StockGenerate


@pytest.mark.parametrize("num_beams", [7, 40])
def test_stock_generate_ranks_as_ours_does(make_model, make_histories, num_beams):
    model = make_model((6, 5, 4), 40, kind="backbone", history_format="flat")
    item_codes, mask = make_histories(model, [5, 3, 1])
    sequences, scores = StockGenerate(model).generate(item_codes, mask.long(), num_beams)
    output = model.generate(
        item_codes, mask, num_beams=num_beams, num_return_sequences=num_beams, return_dict_in_generate=True
    )
    assert sequences.tolist() == output.sequences.tolist()
    torch.testing.assert_close(scores, output.sequences_scores, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["deco", "backbone"])
def test_dense_masking_ranks_as_ours_does(make_model, make_histories, kind):
    model = make_model((6, 5, 4), 100, kind=kind)
    item_codes, mask = make_histories(model, [5, 3, 1])
    scorer, _ = model._start_search(item_codes, mask, None, None, model.trie)
    sequences, scores = dense_beam_search(scorer, model.trie, 12)
    output = model.generate(item_codes, mask, num_beams=12, num_return_sequences=12, return_dict_in_generate=True)
    assert sequences.flatten(0, 1).tolist() == output.sequences.tolist()
    torch.testing.assert_close(scores.flatten(), output.sequences_scores)


def test_other_models_are_refused(make_model):
    for options in ({"history_format": "fused"}, {"history_format": "flat", "tie_code_tables": True}):
        with pytest.raises(ValueError, match="must be a FlatGR on a Qwen2 backbone"):
            StockGenerate(make_model(kind="backbone", **options))
    with pytest.raises(ValueError, match="without a copy pointer"):
        StockGenerate(make_model(kind="backbone", history_format="flat", copy_pointer=True))


def test_padded_training_has_the_same_loss(make_model, make_histories):
    model = make_model((6, 5, 4), 40, normalize_over="vocabulary")
    item_codes, mask = make_histories(model, [5, 3, 1, 4])
    labels = torch.full_like(item_codes, -100)
    labels[:, :-1] = item_codes[:, 1:]
    labels[~mask.bool()] = -100
    labels[2, -1] = item_codes[0, -1]
    ours = model(item_codes, mask, labels, from_start=torch.zeros(4, dtype=torch.bool)).loss
    torch.testing.assert_close(padded_loss(model, item_codes, mask, labels), ours)
