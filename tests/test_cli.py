"""`hf-deco` on a small log."""

import json
import re

import pytest

import hf_deco
from hf_deco.cli import COMMANDS, main


@pytest.fixture(scope="module")
def model(options, tmp_path_factory):
    """A checkpoint that `hf-deco train` wrote."""
    folder = tmp_path_factory.mktemp("cli")
    arguments = [f"--{name}={value}" for name, value in options.items() if not isinstance(value, list)]
    arguments += ["--codebook_sizes", "8", "8", "8", "--cutoffs", "10", "20"]
    assert main(["train", *arguments, "--max_steps", "40", "--output_dir", str(folder / "run")]) == 0
    return folder / "run/model"


def test_recommend_prints_rank_score_id_and_title(model, capsys):
    assert main(["recommend", "--model", str(model), "--items", "i3", "i10", "i17", "--top-k", "5"]) == 0
    lines = capsys.readouterr().out.strip("\n").split("\n")
    parsed = [re.fullmatch(r" +(\d+) +(-\d+\.\d{3})  (i\d+) +Item (i\d+)", line).groups() for line in lines]
    assert [int(rank) for rank, *_ in parsed] == [1, 2, 3, 4, 5]
    scores = [float(score) for _, score, *_ in parsed]
    assert scores == sorted(scores, reverse=True)
    assert all(item == title for *_, item, title in parsed)


def test_recommend_answers_a_user_without_history(model, capsys):
    assert main(["recommend", "--model", str(model), "--top-k", "3"]) == 0
    assert len(capsys.readouterr().out.strip("\n").split("\n")) == 3


def test_recommend_names_an_unknown_item(model, capsys):
    assert main(["recommend", "--model", str(model), "--items", "i3", "nothing"]) == 1
    assert "'nothing'" in capsys.readouterr().err


def test_recommend_names_a_folder_that_is_no_checkpoint(tmp_path, capsys):
    assert main(["recommend", "--model", str(tmp_path), "--items", "i3"]) == 1
    assert str(tmp_path) in capsys.readouterr().err


def test_evaluate_repeats_the_metrics_of_the_run(model, options, tmp_path, capsys):
    arguments = [f"--{name}={value}" for name, value in options.items() if not isinstance(value, list)]
    arguments += ["--cutoffs", "10", "20", "--output_dir", str(tmp_path)]
    assert main(["evaluate", str(model), *arguments]) == 0
    expected = json.loads((model.parent / "metrics.json").read_text())["deco_ce"]
    assert f"| deco_ce | {expected['ndcg@10']:.4f} | {expected['recall@10']:.4f} |" in capsys.readouterr().out


def test_build_sids_writes_a_table_and_its_report(options, tmp_path, capsys):
    arguments = ["--items", options["items"], "--interactions", options["interactions"]]
    arguments += ["--embeddings", options["embeddings"], "--codebook-sizes", "8", "6"]
    arguments += ["--output-dir", str(tmp_path / "sids")]
    assert main(["build-sids", *arguments]) == 0
    assert "collision" in capsys.readouterr().out
    from hf_deco.items.sid_table import SIDTable

    table = SIDTable.load(tmp_path / "sids")
    assert table.codes.shape == (40, 2) and table.codebook_sizes == (8, 6)
    assert len({tuple(row) for row in table.codes.tolist()}) == 40


def test_build_sids_says_when_there_are_too_few_codes(options, tmp_path, capsys):
    arguments = ["--items", options["items"], "--embeddings", options["embeddings"]]
    assert main(["build-sids", *arguments, "--codebook-sizes", "4", "4", "--output-dir", str(tmp_path / "sids")]) == 1
    assert "codebook_sizes" in capsys.readouterr().err
    assert not (tmp_path / "sids").exists()


@pytest.fixture
def build_sids(options, tmp_path):
    """`hf-deco build-sids` with some arguments; returns its status and the folder of the table."""

    def build(*arguments, embeddings=options["embeddings"], folder="sids", sizes=("8", "6")):
        given = ["--items", options["items"], "--embeddings", str(embeddings), "--codebook-sizes", *sizes]
        return main(["build-sids", *given, "--output-dir", str(tmp_path / folder), *arguments]), tmp_path / folder

    return build


@pytest.mark.parametrize("method", ["rq-kmeans", "rq", "rq-ema", "simvq", "basis-rq", "prefix-basis-rq"])
def test_build_sids_by_every_method(build_sids, options, tmp_path, capsys, method):
    import numpy as np

    from hf_deco.items import ItemTokenizer, SIDTable

    arguments = ["--method", method, "--width", "4", "--num-steps", "5", "--collisions", "keep"]
    status, folder = build_sids(*arguments, "--tokenizer-dir", str(tmp_path / "tokenizer"))
    assert status == 0
    table, tokenizer = SIDTable.load(folder), ItemTokenizer.load(tmp_path / "tokenizer")
    np.testing.assert_array_equal(table.codes, tokenizer.encode(np.load(options["embeddings"])))
    assert (tokenizer.method, tokenizer.width, table.codebooks[0].shape) == (method, 4, (8, 4))
    assert table.tokenizer_version == tokenizer.version_id in capsys.readouterr().out
    again = SIDTable.load(build_sids(*arguments, folder="again")[1])
    other = SIDTable.load(build_sids(*arguments, "--seed", "1", folder="other")[1])
    assert again.tokenizer_version == table.tokenizer_version != other.tokenizer_version
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "other", "sids", "tokenizer"]


def test_build_sids_goes_on_after_a_stop(build_sids, tmp_path, monkeypatch):
    from hf_deco.items import SIDTable
    from hf_deco.items.quantizer_training import QuantizerTrainer

    arguments = ["--method", "prefix-basis-rq", "--num-steps", "270"]
    whole = SIDTable.load(build_sids(*arguments, folder="whole")[1])
    original, steps = QuantizerTrainer.step, []

    def interrupted(self, *batch):
        steps.append(len(steps))
        if len(steps) == 265:
            raise KeyboardInterrupt
        return original(self, *batch)

    monkeypatch.setattr(QuantizerTrainer, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build_sids(*arguments)
    assert not (tmp_path / "sids").exists() and (tmp_path / "sids.training.safetensors").exists()
    status, folder = build_sids(*arguments)
    assert status == 0 and len(steps) == 265 + 20  # 250 of 270 were kept
    table = SIDTable.load(folder)
    assert table.codes.tolist() == whole.codes.tolist() and table.tokenizer_version == whole.tokenizer_version
    assert not (tmp_path / "sids.training.safetensors").exists()


def test_build_sids_reports_purity_where_there_are_categories(build_sids, options, tmp_path, capsys):
    import pandas as pd

    items = pd.read_csv(options["items"])
    items["categories"] = ["a", "b", None, "c"] * 10
    items.to_csv(tmp_path / "items.csv", index=False)
    status, _ = build_sids("--items", str(tmp_path / "items.csv"))
    assert status == 0 and "purity" in capsys.readouterr().out
    assert build_sids("--category-column", "colour")[0] == 1
    assert "`colour`" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["rq-kmeans", "basis-rq"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": ("41", "2")}, "`codebook_sizes`"),
        ({"sizes": ("41", "2"), "collisions": "keep"}, "asks for 41 codes at the first level"),
        ({"sizes": ("8", "1", "8")}, "has a level of size 1"),
        ({"row": float("nan")}, "NaN or infinite values in 1 of 40 rows, first in row 3"),
        ({"rows": 1.0, "width": "2"}, "no variance"),
        ({"rows": 1.0}, "no variance|only 1 distinct"),
        ({"width": "7"}, "`width` must be between 1 and the embeddings' 6 columns, got 7"),
    ],
)
def test_build_sids_refuses_bad_input(build_sids, options, tmp_path, capsys, method, change, message):
    import numpy as np

    embeddings = np.load(options["embeddings"])
    embeddings[3] = change.get("row", embeddings[3])
    embeddings[:] = change.get("rows", embeddings)
    np.save(tmp_path / "embeddings.npy", embeddings)
    arguments = ["--method", method, "--collisions", change.get("collisions", "resolve"), "--num-steps", "2"]
    arguments += ["--width", change["width"]] if "width" in change else []
    status, folder = build_sids(
        *arguments, embeddings=tmp_path / "embeddings.npy", sizes=change.get("sizes", ("8", "6"))
    )
    assert status == 1 and re.search(message, capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["embeddings.npy"]


def test_build_sids_names_the_methods_it_knows(build_sids, capsys):
    with pytest.raises(SystemExit):
        build_sids("--method", "vq")
    assert "rq-kmeans" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_with_an_example(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: hf-deco {command}")
    assert command == "demo" or f"hf-deco {command} " in text.split("\n\n", 1)[1]


def test_no_command_or_a_wrong_one_stops_with_usage(capsys):
    for argv in ([], ["fly"]):
        with pytest.raises(SystemExit) as stop:
            main(argv)
        assert stop.value.code == 2
    assert "demo" in capsys.readouterr().err


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hf-deco {hf_deco.__version__}\n"
