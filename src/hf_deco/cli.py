"""`hf-deco`: from a log to recommendations on the command line."""

from __future__ import annotations

import argparse
import sys

from huggingface_hub.errors import StrictDataclassError

_Formatter = argparse.RawDescriptionHelpFormatter

DESCRIPTION = """\
Generative recommendation: items get semantic IDs, a model reads a user's history once and spells the next items.

  hf-deco demo                                     train on a real grocery log and look at the result
  hf-deco build-sids --items items.parquet         semantic IDs of your items, with a report of their quality
  hf-deco train config.yaml                        train on your log and test beside untrained floors
  hf-deco evaluate runs/deco/model config.yaml     test a checkpoint again
  hf-deco recommend --model runs/deco/model --items ID ID ID
"""

TRAIN = """\
Train Deco, or a full-backbone model, on a log.

Needs a log (columns user_id, item_id, timestamp) and an item table (item_id, text, and title if there is one):

  hf-deco train --interactions log.csv --items items.csv --output_dir runs/mine

Options can stand in a YAML file, flags override it; --resume_from_checkpoint last goes on after a stop:

  hf-deco train config.yaml --seed 1 --resume_from_checkpoint last

The folder ends with model/ (AutoModel and AutoProcessor open it), metrics.json, training.png and sids/.
"""

EVALUATE = """\
Test a checkpoint on the test part of a log, beside the untrained floors.

  hf-deco evaluate runs/mine/model config.yaml
  hf-deco evaluate runs/mine/model --interactions log.csv --items items.csv --protocol temporal --num_beams 200
"""

BUILD_SIDS = """\
Give every item a semantic ID and report how good they are.

  hf-deco build-sids --items items.csv --output-dir sids
  hf-deco build-sids --items items.parquet --interactions log.parquet --codebook-sizes 256 256 256 --output-dir sids

Items that would share an ID are taken in order of popularity, so give the log where you have one.
"""

RECOMMEND = """\
Recommend items after a history, oldest item first.

  hf-deco recommend --model runs/demo/model --items 1029743 995242
"""


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status: 1 for bad input, with its message on standard error."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser("hf-deco", description=DESCRIPTION, formatter_class=_Formatter)
    parser.add_argument("command", choices=list(COMMANDS), metavar="command", help=", ".join(COMMANDS))
    if argv and argv[0] in ("--version", "-V"):
        from . import __version__

        print(f"hf-deco {__version__}")
        return 0
    command = parser.parse_args(argv[:1]).command
    try:
        COMMANDS[command](argv[1:])
    except (ValueError, OSError, ImportError, StrictDataclassError) as error:
        print(f"hf-deco {command}: {error}", file=sys.stderr)
        return 1
    return 0


def _train(argv: list[str]) -> None:
    from .training.parser import parse_arguments
    from .training.report import format_metrics
    from .training.run import train

    args = parse_arguments(argv, prog="hf-deco train", description=TRAIN)
    metrics = train(args)
    if args.process_index == 0:
        print(format_metrics(metrics, args.cutoffs))


def _evaluate(argv: list[str]) -> None:
    from .training.parser import make_parser, parse_arguments
    from .training.report import format_metrics
    from .training.run import evaluate

    parser = make_parser(prog="hf-deco evaluate", description=EVALUATE, positionals=("checkpoint",))
    checkpoint = parser.parse_args(argv).checkpoint
    args = parse_arguments(argv, parser=parser)
    print(format_metrics(evaluate(args, checkpoint), args.cutoffs))


def _sid_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("hf-deco build-sids", description=BUILD_SIDS, formatter_class=_Formatter)
    add = parser.add_argument
    add("--items", required=True, help="item table: CSV, Parquet or JSON Lines")
    add("--output-dir", required=True, help="folder of the SID table")
    add("--interactions", help="log; its training part decides which items are popular")
    add("--protocol", default="temporal", choices=("temporal", "leave_one_out"), help="how the log is split")
    add("--user-column", default="user_id", help="column of the log with user ids (default: user_id)")
    add("--item-column", default="item_id", help="column of both with item ids (default: item_id)")
    add("--timestamp-column", default="timestamp", help="column of the log with times (default: timestamp)")
    add("--unknown-items", default="error", choices=("error", "drop"), help="items of the log that the table lacks")
    add("--text-columns", nargs="+", default=["text"], help="columns that describe an item (default: text)")
    add("--title-column", default="title", help="column with the name to show (default: title)")
    add("--embeddings", help="NumPy file (N, d), one row per row of the item table, instead of texts")
    model = "sentence-transformers/all-MiniLM-L6-v2"
    add("--embedding-model", default=model, help="sentence-transformers model, name or path (default: %(default)s)")
    add("--codebook-sizes", nargs="+", type=int, default=[2048] * 4, help="codes per level (default: 2048, 4 times)")
    add("--seed", type=int, default=0, help="seed of k-means (default: 0)")
    return parser


def _build_sids(argv: list[str]) -> None:
    args = _sid_parser().parse_args(argv)

    from .data.interactions import read_interactions
    from .data.items import read_items
    from .items.embedding import embed_texts
    from .items.quality import format_report
    from .items.sid_table import SIDTable
    from .training.preparation import SPLITS, check_capacity, read_embeddings

    items = read_items(
        args.items, item_column=args.item_column, text_columns=args.text_columns, title_column=args.title_column
    )
    check_capacity(args.codebook_sizes, len(items))
    popularity = None
    if args.interactions is not None:
        columns = {"user_column": args.user_column, "timestamp_column": args.timestamp_column}
        columns |= {"item_column": args.item_column, "unknown_items": args.unknown_items}
        popularity = SPLITS[args.protocol](read_interactions(args.interactions, items=items, **columns)).item_counts
    if args.embeddings is None:
        embeddings = embed_texts(items.texts, args.embedding_model)
    else:
        embeddings = read_embeddings(args.embeddings, len(items))
    table = SIDTable.build(
        items.item_ids, embeddings, args.codebook_sizes, popularity=popularity, titles=items.titles, seed=args.seed
    )
    table.save(args.output_dir)
    print(format_report(table.report))
    print(f"SID table: {args.output_dir}")


def _recommend(argv: list[str]) -> None:
    parser = argparse.ArgumentParser("hf-deco recommend", description=RECOMMEND, formatter_class=_Formatter)
    parser.add_argument("--model", required=True, help="checkpoint folder or Hub repository")
    parser.add_argument("--items", nargs="*", default=[], metavar="ID", help="the history; none for a new user")
    parser.add_argument("--top-k", type=int, default=10, help="items to return (default: 10)")
    parser.add_argument("--num-beams", type=int, default=100, help="beam width (default: 100)")
    args = parser.parse_args(argv)

    from .serving.recommender import Recommender

    recommender = Recommender.from_pretrained(args.model)
    print(recommender.format(recommender.recommend([args.items], top_k=args.top_k, num_beams=args.num_beams)[0]))


def _demo(argv: list[str]) -> None:
    parser = argparse.ArgumentParser("hf-deco demo", description="Train on a real grocery log and look at the result.")
    parser.add_argument("--output-dir", default="runs/demo", help="folder of the run (default: runs/demo)")
    parser.add_argument(
        "--num-products", type=int, default=2000, help="products kept, those bought most (default: 2000)"
    )
    args = parser.parse_args(argv)

    from .demo import run_demo

    run_demo(args.output_dir, args.num_products)


COMMANDS = {
    "demo": _demo,
    "build-sids": _build_sids,
    "train": _train,
    "evaluate": _evaluate,
    "recommend": _recommend,
}

if __name__ == "__main__":
    sys.exit(main())
