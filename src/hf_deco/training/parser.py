"""Options from a YAML file, overridden on the command line."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from transformers import HfArgumentParser

from ..data.tables import read_mapping
from .arguments import DecoTrainingArguments, own_options

# Of the parent class's hundred options, those that a first reader wants; and ours that are there for the parent's sake.
_SHOWN = (
    "seed",
    "bf16",
    "max_steps",
    "eval_steps",
    "save_steps",
    "gradient_accumulation_steps",
    "resume_from_checkpoint",
)
_HIDDEN = {
    "restore_callback_states_from_checkpoint",
    "remove_unused_columns",
    "greater_is_better",
    "metric_for_best_model",
    "load_best_model_at_end",
}


def make_parser(
    positionals: tuple[str, ...] = (), options: type[DecoTrainingArguments] = DecoTrainingArguments, **kwargs
) -> HfArgumentParser:
    """A parser with the named positional arguments, an optional YAML file behind them, and one flag for each option."""
    parser = HfArgumentParser(options, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)
    for name in positionals:
        parser.add_argument(name)
    parser.add_argument("config", nargs="?", help="YAML file with options; flags override it")
    shown = {*own_options(options), *_SHOWN, "config", "help", *positionals} - _HIDDEN
    for action in parser._actions:
        if action.dest not in shown or any(flag.startswith("--no_") for flag in action.option_strings):
            action.help = argparse.SUPPRESS
    parser.usage = " ".join([parser.prog, *positionals, "[config.yaml] [--option value ...]"])
    parser.epilog = "All other options of transformers.TrainingArguments are taken as well."
    return parser


def parse_arguments(
    argv: list[str] | None = None, parser: HfArgumentParser | None = None, **kwargs
) -> DecoTrainingArguments:
    """Read options.

    Args:
        argv (`list[str]`, *optional*): Command line without the program's name; the process's own by default.
        parser ([`HfArgumentParser`], *optional*): Parser from [`make_parser`]; made from `kwargs` by default.

    Raises:
        ValueError: If the file is not a mapping, or holds an unknown option (named).
        SystemExit: For a bad command line, as `argparse` does.
    """
    parser = make_parser(**kwargs) if parser is None else parser
    path = parser.parse_args(argv).config
    if path is not None:
        parser.set_defaults(**read_options(path, parser.dataclass_types[0]))
    args, *rest = parser.parse_args_into_dataclasses(argv)
    return args


def read_options(path: str | Path, kind: type[DecoTrainingArguments] = DecoTrainingArguments) -> dict:
    """Options of a YAML file, checked by name."""
    options = read_mapping(path, "config")
    unknown = sorted(set(options) - {item.name for item in fields(kind)})
    if unknown:
        raise ValueError(f"`config` {str(path)!r} holds unknown options: {', '.join(unknown)}.")
    return options
