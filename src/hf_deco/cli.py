"""`hf-deco`: from a log to recommendations on the command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from huggingface_hub.errors import HfHubHTTPError, StrictDataclassError

_Formatter = argparse.RawDescriptionHelpFormatter
_CATEGORIES = "categories"
# A refused connection is an error of the Hub's HTTP client, whichever that is, and none of the Hub's own.
_HTTPError = HfHubHTTPError.__bases__[0]

DESCRIPTION = """\
Generative recommendation: items get semantic IDs, a model reads a user's history once and spells the next items.

  hf-deco demo                                     train on a real grocery log and look at the result
  hf-deco build-sids --items items.parquet         semantic IDs of your items, with a report of their quality
  hf-deco train config.yaml                        train on your log and test beside untrained floors
  hf-deco evaluate runs/deco/model config.yaml     test a checkpoint again
  hf-deco recommend --model runs/deco/model --items ID ID ID
  hf-deco push runs/deco/model org/name            publish a checkpoint on the Hub
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
  hf-deco build-sids --items items.csv --method basis-rq --width 96 --output-dir sids --tokenizer-dir tokenizer

Items that would share an ID are taken in order of popularity, so give the log where you have one.
Methods other than rq-kmeans are trained by gradient; the same command goes on with a training that was stopped.
"""

RECOMMEND = """\
Recommend items after a history, oldest item first.

  hf-deco recommend --model runs/demo/model --items 1029743 995242
"""

PUSH = """\
Push a checkpoint to the Hub: model, processor, code, index, adapter and card (README.md) in one commit.

  hf-deco push runs/mine/model org/name
  hf-deco push runs/mine/model org/name --private --revision experiment

Log in first, by `hf auth login` or the variable HF_TOKEN. Pickles and a trainer's state stay behind.
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
    except (ValueError, OSError, ImportError, StrictDataclassError, _HTTPError) as error:
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
    from .items.quantizer_training import INITS, QuantizerTraining
    from .items.tokenizer import METHODS

    training = QuantizerTraining()
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
    add("--method", default="rq-kmeans", choices=METHODS, help="how codes are learned (default: rq-kmeans)")
    add("--width", type=int, help="project the embeddings onto this many principal directions first")
    add("--collisions", default="resolve", choices=("resolve", "keep"), help="keep: items may share an ID")
    add("--category-column", default=_CATEGORIES, help="column for the report's purity (default: %(default)s)")
    add("--num-steps", type=int, default=training.num_steps, help="steps of a gradient method (default: %(default)s)")
    add("--batch-size", type=int, default=training.batch_size, help="items a step (default: %(default)s)")
    add("--learning-rate", type=float, default=training.learning_rate, help="of the first step (default: %(default)s)")
    add("--init", default=training.init, choices=INITS, help="where codebooks start (default: %(default)s)")
    add("--tokenizer-dir", help="folder for the tokenizer itself, which encodes new items")
    add("--seed", type=int, default=0, help="seed of the training (default: 0)")
    return parser


def _build_sids(argv: list[str]) -> None:
    args = _sid_parser().parse_args(argv)

    from .data.interactions import read_interactions
    from .data.items import read_items
    from .dataset_card import write_sid_card
    from .items.embedding import embed_texts
    from .items.quality import format_report
    from .items.sid_table import SIDTable
    from .training.preparation import SPLITS, check_capacity, read_embeddings

    tokenizer = _make_tokenizer(args)
    items = read_items(
        args.items, item_column=args.item_column, text_columns=args.text_columns, title_column=args.title_column
    )
    if args.collisions == "resolve":
        check_capacity(args.codebook_sizes, len(items))
    categories = _read_categories(args)
    popularity = None
    if args.interactions is not None:
        columns = {"user_column": args.user_column, "timestamp_column": args.timestamp_column}
        columns |= {"item_column": args.item_column, "unknown_items": args.unknown_items}
        popularity = SPLITS[args.protocol](read_interactions(args.interactions, items=items, **columns)).item_counts
    if args.embeddings is None:
        embeddings = embed_texts(items.texts, args.embedding_model)
    else:
        embeddings = read_embeddings(args.embeddings, len(items))
    checkpoint = Path(f"{Path(args.output_dir)}.training.safetensors")
    tokenizer.fit(embeddings, checkpoint)
    options = {"popularity": popularity, "titles": items.titles, "categories": categories}
    table = SIDTable.from_tokenizer(tokenizer, items.item_ids, embeddings, **options, collisions=args.collisions)
    if args.tokenizer_dir is not None:
        tokenizer.save(args.tokenizer_dir)
    table.save(args.output_dir)
    embedded_by = args.embedding_model if args.embeddings is None else None
    write_sid_card(args.output_dir, method=args.method, embedding_model=embedded_by)
    checkpoint.unlink(missing_ok=True)
    print(format_report(table.report))
    print(f"SID table: {args.output_dir}   tokenizer version: {table.tokenizer_version}")


def _make_tokenizer(args: argparse.Namespace):
    from .items.quantizer_training import QuantizerTraining
    from .items.tokenizer import ItemTokenizer

    training = QuantizerTraining(
        num_steps=args.num_steps, batch_size=args.batch_size, learning_rate=args.learning_rate, init=args.init
    )
    options = {"width": args.width, "training": training, "seed": args.seed}
    return ItemTokenizer(args.codebook_sizes, args.method, **options, verbose=args.method != "rq-kmeans")


def _read_categories(args: argparse.Namespace) -> list[str] | None:
    """The column of categories; that of the default name may be absent."""
    from .data.tables import read_columns

    name = args.category_column
    required = {} if name == _CATEGORIES else {name: "category_column"}
    table = read_columns(args.items, required, optional=(name,), as_text=(name,))
    return table[name].fillna("").astype(str).tolist() if name in table.columns else None


def _recommend(argv: list[str]) -> None:
    parser = argparse.ArgumentParser("hf-deco recommend", description=RECOMMEND, formatter_class=_Formatter)
    parser.add_argument("--model", required=True, help="checkpoint folder or Hub repository")
    parser.add_argument("--items", nargs="*", default=[], metavar="ID", help="the history; none for a new user")
    parser.add_argument("--top-k", type=int, default=10, help="items to return (default: 10)")
    parser.add_argument("--num-beams", type=int, default=100, help="beam width (default: 100)")
    args = parser.parse_args(argv)

    from transformers import pipeline

    from .serving.listing import format_items

    retrieve = pipeline("sid-retrieval", model=args.model)
    print(format_items(retrieve(args.items, top_k=args.top_k, num_beams=args.num_beams)))


def _push(argv: list[str]) -> None:
    parser = argparse.ArgumentParser("hf-deco push", description=PUSH, formatter_class=_Formatter)
    parser.add_argument("folder", help="checkpoint folder")
    parser.add_argument("repository", help="repository of the Hub, organisation/name; created where there is none")
    parser.add_argument("--revision", help="branch (default: the main one)")
    parser.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    parser.add_argument("--message", default="Upload checkpoint", help="of the commit (default: %(default)s)")
    args = parser.parse_args(argv)

    from .hub import push_checkpoint

    options = {"revision": args.revision, "private": args.private, "commit_message": args.message}
    commit = push_checkpoint(args.folder, args.repository, **options)
    print(f"{commit.repo_url} at {commit.oid}")


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
    "push": _push,
}

if __name__ == "__main__":
    sys.exit(main())
