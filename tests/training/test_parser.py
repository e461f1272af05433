"""Options from YAML and command line."""

import pytest

from hf_deco.training.parser import make_parser, parse_arguments


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "options.yaml"
    path.write_text("learning_rate: 0.5\ncodebook_sizes: [4, 5]\nprotocol: leave_one_out\nseed: 3\n")
    return str(path)


def test_the_file_sets_options_and_flags_override_it(config):
    args = parse_arguments([config, "--seed", "9", "--codebook_sizes", "6", "7", "8"])
    assert (args.learning_rate, args.protocol, args.seed, args.codebook_sizes) == (0.5, "leave_one_out", 9, [6, 7, 8])


def test_without_a_file_the_defaults_hold():
    args = parse_arguments(["--backbone", "S"])
    assert (args.backbone, args.learning_rate, args.metric_for_best_model) == ("S", 1e-3, "ndcg@10")


def test_dashes_and_underscores_are_the_same():
    assert parse_arguments(["--num-beams", "150"]).num_beams == parse_arguments(["--num_beams", "150"]).num_beams == 150


def test_an_unknown_option_in_the_file_is_named(tmp_path):
    path = tmp_path / "options.yaml"
    path.write_text("learning_rte: 0.5\nseed: 1\n")
    with pytest.raises(ValueError, match="unknown options: learning_rte"):
        parse_arguments([str(path)])


def test_a_file_that_is_no_mapping_is_refused(tmp_path):
    path = tmp_path / "options.yaml"
    path.write_text("- seed\n")
    with pytest.raises(ValueError, match="must hold a mapping, got list"):
        parse_arguments([str(path)])


def test_a_file_that_is_no_yaml_is_named(tmp_path):
    path = tmp_path / "options.yaml"
    path.write_text("seed: [1\n")
    with pytest.raises(ValueError, match="options.yaml' is no YAML"):
        parse_arguments([str(path)])


def test_a_missing_file_is_an_error():
    with pytest.raises(FileNotFoundError, match="nowhere.yaml"):
        parse_arguments(["nowhere.yaml"])


def test_an_unknown_flag_stops_with_usage(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--learning_rte", "1"])
    assert "--learning_rte" in capsys.readouterr().err


def test_help_shows_our_options_and_leaves_out_the_rest():
    text = make_parser(prog="program", description="What it does.").format_help()
    assert "What it does." in text and "--interactions" in text and "--codebook_sizes" in text
    assert "--deepspeed" not in text and "--no_load_best_model_at_end" not in text
