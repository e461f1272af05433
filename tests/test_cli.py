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
