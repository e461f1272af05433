"""Distillation: the loss against formulas written out, the teacher's stillness, the fixed weights, whole runs."""

import json
import math

import pytest
import torch
from transformers import AutoModel

from hf_deco import BackboneConfig, BackboneForSIDRetrieval, DecoConfig, DecoForSIDRetrieval
from hf_deco.training import DecoTrainingArguments, train
from hf_deco.training.distillation import distillation_loss, init_from_teacher, load_teacher

SIZES = (4, 3, 5)


def tiny(seed, kind=BackboneForSIDRetrieval, catalog=None, **options):
    shape = {"model_type": "qwen2", "vocab_size": 1, "hidden_size": 16, "intermediate_size": 32}
    shape |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    config_class = BackboneConfig if kind is BackboneForSIDRetrieval else DecoConfig
    if config_class is DecoConfig:
        options |= {"decoder_config": shape}
    config = config_class(text_config=shape, num_codebooks=3, codebook_size=list(SIZES), **options)
    torch.manual_seed(seed)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    model.set_catalog(ragged_catalog() if catalog is None else catalog)
    return model


def ragged_catalog():
    """A catalog whose SIDs branch to different depths."""
    codes = torch.cartesian_prod(*[torch.arange(size) for size in SIZES])
    return codes[[0, 1, 2, 7, 11, 16, 17, 23, 30, 31, 36, 44, 45, 50, 59]]


@pytest.fixture
def batch():
    codes = ragged_catalog()
    items = torch.tensor([[4, 0, 9, 2], [3, 3, 7, 11]])
    labels = torch.tensor([[0, 9, 2, 8], [3, 7, 11, 1]])
    return {"item_codes": codes[items], "attention_mask": torch.ones(2, 4).long(), "labels": codes[labels]}


def distributions(scores, temperature):
    """Distribution over the children of every gold prefix, by target and level."""
    found = {}
    for entry, log_probs in zip(scores.levels, scores.level_log_probs(), strict=True):
        ends = [*entry.starts.tolist()[1:], len(log_probs)]
        for row, start, end in zip(entry.rows.tolist(), entry.starts.tolist(), ends, strict=True):
            found[row, entry.level] = (log_probs[start:end].double() / temperature).softmax(0)
    return found


def naive_terms(student, teacher, batch, temperature):
    """Cross-entropy and temperature^2 KL per target, one prefix at a time, from level distributions as dictionaries."""
    ours, theirs = (model.score_targets(**batch) for model in (student, teacher))
    p, q = distributions(ours, temperature), distributions(theirs, temperature)
    assert p.keys() == q.keys() and len(p) > len(ours.targets)
    kl = sum((q[key] * (q[key] / p[key]).log()).sum() for key in p)
    return -ours.log_likelihood().mean(), temperature**2 * kl / len(ours.targets)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 0.5])
@pytest.mark.parametrize("pointer", [False, True])
@pytest.mark.parametrize("normalize_over", ["children", "vocabulary"])
def test_the_loss_is_the_divergence_along_gold_prefixes(batch, temperature, pointer, normalize_over):
    options = {"copy_pointer": pointer, "normalize_over": normalize_over}
    student, teacher = tiny(0, DecoForSIDRetrieval, **options), tiny(1, **options)
    ours, theirs = student.score_targets(**batch), teacher.score_targets(**batch)
    _, expected = naive_terms(student, teacher, batch, temperature)
    torch.testing.assert_close(distillation_loss(ours, theirs, temperature).double(), expected, rtol=1e-4, atol=1e-5)
    assert distillation_loss(ours, ours, temperature).abs() < 1e-6


def test_at_temperature_one_it_is_cross_entropy_against_the_mixed_target_up_to_a_constant(batch):
    student, teacher = tiny(0, DecoForSIDRetrieval), tiny(1)
    w_ce, w_kd = 0.3, 0.9
    alpha = w_kd / (w_ce + w_kd)

    def both(model):
        scores, taught = model.score_targets(**batch), teacher.score_targets(**batch)
        total = w_ce * -scores.log_likelihood().mean() + w_kd * distillation_loss(scores, taught)
        mixed = 0.0
        for mine, theirs in zip(scores.levels, taught.levels, strict=True):
            assert torch.equal(mine.rows, theirs.rows)
            target = alpha * theirs.log_probs.exp()
            target[mine.gold] += 1 - alpha
            mixed = mixed - (target * mine.log_probs).sum() / len(scores.targets)
        return total, (w_ce + w_kd) * mixed

    differences, gradients = [], []
    for seed in (0, 5, 6):
        model = student if seed == 0 else tiny(seed, DecoForSIDRetrieval)
        total, mixed = both(model)
        differences.append((total - mixed).item())
        gradients.append(
            [
                torch.autograd.grad(value, model.concept_head.concept_proj.weight, retain_graph=True)[0]
                for value in both(model)
            ]
        )
    assert max(differences) - min(differences) < 1e-4  # the teacher's entropy, whatever the student is
    for first, second in gradients:
        torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-6)


def test_a_teacher_gets_no_gradient_and_stays_in_eval_mode(batch, tmp_path):
    tiny(1, dropout=0.5).save_pretrained(tmp_path)
    student = tiny(0, DecoForSIDRetrieval)
    teacher = load_teacher(tmp_path, student)
    taught = teacher.score_targets(**batch)
    assert not taught.levels[0].log_probs.requires_grad
    assert not teacher.training and not any(parameter.requires_grad for parameter in teacher.parameters())
    torch.testing.assert_close(taught.log_likelihood(), teacher.score_targets(**batch).log_likelihood())


def test_teachers_that_cannot_teach_are_refused(tmp_path):
    student = tiny(0, DecoForSIDRetrieval)
    tiny(1, catalog=ragged_catalog().flip(0)).save_pretrained(tmp_path / "order")
    with pytest.raises(ValueError, match="`teacher` .*order.* carries another catalog"):
        load_teacher(tmp_path / "order", student)
    tiny(1, max_history_length=5).save_pretrained(tmp_path / "short")
    with pytest.raises(ValueError, match="reads 5 items of a history, fewer than"):
        load_teacher(tmp_path / "short", student)
    tiny(1, normalize_over="vocabulary").save_pretrained(tmp_path / "norm")
    with pytest.raises(ValueError, match="normalises over vocabulary, the student over children"):
        load_teacher(tmp_path / "norm", student)
    config = BackboneConfig.from_preset("S", num_codebooks=2, codebook_size=8)
    other = BackboneForSIDRetrieval(config)
    other.set_catalog(torch.tensor([[0, 1], [3, 4]]))
    other.save_pretrained(tmp_path / "shape")
    with pytest.raises(ValueError, match=r"`teacher` .* has SIDs of \(8, 8\) codes, the student of \(4, 3, 5\)"):
        load_teacher(tmp_path / "shape", student)


def test_a_student_may_start_from_its_teacher():
    student, teacher = tiny(0, DecoForSIDRetrieval), tiny(1)
    before = student.decoder.heads[0].weight.clone()
    init_from_teacher(student, teacher)
    for name in ("fuser", "backbone"):
        mine, theirs = getattr(student, name).state_dict(), getattr(teacher, name).state_dict()
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    assert torch.equal(student.start_state, teacher.start_state)
    assert torch.equal(student.decoder.heads[0].weight, before)
    with pytest.raises(ValueError, match="one shape of `fuser`"):
        init_from_teacher(student, tiny(1, history_format="flat"))


@pytest.fixture(scope="module")
def teacher_run(options, tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    chosen = options | {"search_in": "backbone", "output_dir": str(folder / "run"), "num_train_epochs": 20}
    return folder / "run", train(DecoTrainingArguments(**chosen))


def test_runs_are_named_after_what_they_train(teacher_run, options, tmp_path):
    folder, metrics = teacher_run
    assert set(metrics) == {"fused_gr", "popularity", "text_neighbors", "cooccurrence"}
    assert metrics["fused_gr"]["ndcg@10"] > metrics["popularity"]["ndcg@10"] + 0.2
    names = {
        "deco_ce": {},
        "deco": {"teacher": str(folder / "model")},
        "flat_gr": {"search_in": "backbone", "history_format": "flat"},
        "deco_flat": {"history_format": "flat", "teacher": str(folder / "model")},
        "fused_gr/kd": {"search_in": "backbone", "teacher": str(folder / "model")},
        "mine": {"system": "mine"},
    }
    for name, changes in names.items():
        assert DecoTrainingArguments(**(options | {"output_dir": str(tmp_path)} | changes)).system == name


@pytest.mark.parametrize("changes", [{}, {"search_in": "backbone"}, {"objective": "kd", "temperature": 2.0}])
def test_a_student_learns_from_its_teacher_and_keeps_the_weights(teacher_run, options, tmp_path, changes):
    folder, _ = teacher_run
    chosen = options | {"teacher": str(folder / "model"), "sids": str(folder / "sids"), "num_train_epochs": 25}
    args = DecoTrainingArguments(**(chosen | {"output_dir": str(tmp_path / "run")} | changes))
    metrics = train(args)
    assert metrics[args.system]["ndcg@10"] > metrics["popularity"]["ndcg@10"] + 0.2
    kept = AutoModel.from_pretrained(tmp_path / "run/model").config.distillation
    assert kept["temperature"] == args.temperature
    state = json.loads(next((tmp_path / "run").glob("checkpoint-*/trainer_state.json")).read_text())
    if args.objective == "ce+kd":
        # 1/3 from the one term and 2/3 from the other, before the first step.
        first = next(entry["loss"] for entry in state["log_history"] if "loss" in entry)
        assert 0.2 < first < 1.1
        assert math.isclose(1 / (3 * kept["ce_weight"]), math.log(40), rel_tol=0.2)
    else:
        assert kept["ce_weight"] == 0.0


def test_temperatures_and_objectives_are_checked(options, tmp_path):
    for changes, message in (
        ({"temperature": 0.0}, "`temperature` must be positive"),
        ({"objective": "kl"}, "`objective` must be one of ce\\+kd, kd"),
        ({"init_from_teacher": True}, "no `teacher` is named"),
    ):
        with pytest.raises(ValueError, match=message):
            DecoTrainingArguments(**(options | {"output_dir": str(tmp_path)} | changes))


def test_softmax_over_children_survives_extreme_teachers(batch):
    student, teacher = tiny(0, DecoForSIDRetrieval), tiny(1)
    with torch.no_grad():
        for head in teacher.heads:
            head.weight.mul_(1e4)
    loss = distillation_loss(student.score_targets(**batch), teacher.score_targets(**batch))
    loss.backward()
    assert loss.isfinite() and all(p.grad is None or p.grad.isfinite().all() for p in student.parameters())
