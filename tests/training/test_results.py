"""Result rows of a study."""

import json
from types import SimpleNamespace

from hf_deco.training.arguments import DecoTrainingArguments
from hf_deco.training.report import format_metrics
from hf_deco.training.results import add_rows, changed_arguments, make_rows


def _add(path, ndcg, **changes):
    args = DecoTrainingArguments(interactions="data/toys/log.parquet", results_file=str(path), **changes)
    state = SimpleNamespace(best_metric=0.5, global_step=7, best_global_step=4)
    trainer = SimpleNamespace(state=state, model=SimpleNamespace(num_parameters=lambda: 12))
    metrics = {"deco_ce": {"ndcg@10": ndcg}, "popularity": {"ndcg@10": 0.1}}
    add_rows(path, make_rows(args, metrics, trainer, seconds=3.4, resumed=False))
    return json.loads(path.read_text())


def test_rows_say_what_was_run_and_what_it_gave(tmp_path):
    model, floor = _add(tmp_path / "study/rows.json", 0.3, seed=5)
    assert {name: model[name] for name in ("system", "dataset", "protocol", "seed", "metrics", "wall_s", "steps")} == {
        "system": "deco_ce",
        "dataset": "toys",
        "protocol": "temporal",
        "seed": 5,
        "metrics": {"ndcg@10": 0.3},
        "wall_s": 3,
        "steps": 7,
    }
    assert (model["best_step"], model["validation_ndcg@10"], model["num_parameters"]) == (4, 0.5, 12)
    assert model["config"]["seed"] == 5 and model["command"].startswith("python ")
    assert (floor["system"], floor["seed"], floor["metrics"]) == ("popularity", None, {"ndcg@10": 0.1})
    assert floor["config"]["max_history_length"] == 20 and "learning_rate" not in floor["config"]


def test_the_same_run_replaces_its_row_and_another_adds_one(tmp_path):
    path = tmp_path / "rows.json"
    _add(path, 0.3)
    rows = _add(path, 0.4)
    assert sorted((row["system"], row["metrics"]["ndcg@10"]) for row in rows) == [("deco_ce", 0.4), ("popularity", 0.1)]
    rows = _add(path, 0.6, learning_rate=0.1)
    assert sorted(row["metrics"]["ndcg@10"] for row in rows) == [0.1, 0.4, 0.6]
    rows = _add(path, 0.7, max_history_length=5)  # floors of other histories are other floors
    assert sorted(row["metrics"]["ndcg@10"] for row in rows) == [0.1, 0.1, 0.4, 0.6, 0.7]


def test_where_a_run_writes_does_not_make_it_another_run():
    first, second = (changed_arguments(DecoTrainingArguments(output_dir=folder)) for folder in ("a", "b"))
    assert first == second


def test_metrics_become_a_markdown_table():
    rows = {
        "deco_ce": {"ndcg@10": 0.5, "recall@10": 0.25, "recall@20": 1.0, "repeat/ndcg@10": 0.1, "new/ndcg@10": 0.2},
        "popularity": {"ndcg@10": 0.0, "recall@10": 0.0, "recall@20": 0.125, "repeat/ndcg@10": 0.0, "new/ndcg@10": 0.0},
    }
    assert format_metrics(rows, [10, 20]).splitlines() == [
        "| system | ndcg@10 | recall@10 | recall@20 | repeat/ndcg@10 | new/ndcg@10 |",
        "|---|---|---|---|---|---|",
        "| deco_ce | 0.5000 | 0.2500 | 1.0000 | 0.1000 | 0.2000 |",
        "| popularity | 0.0000 | 0.0000 | 0.1250 | 0.0000 | 0.0000 |",
    ]
    del rows["popularity"]["new/ndcg@10"]
    assert format_metrics(rows, [10, 20]).splitlines()[0] == "| system | ndcg@10 | recall@10 | recall@20 |"
