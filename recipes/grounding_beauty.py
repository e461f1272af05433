"""Grounding on real texts, and what it is worth: a tiny language model on Amazon Beauty 2014, from random weights.

    OMP_NUM_THREADS=1 python recipes/grounding_beauty.py

The data lie as for `configs/beauty_deco_ce.yaml`. A byte-level BPE tokenizer is trained on the item texts, and a
Qwen2-shaped model of 2 layers x 128 made with random weights, one for each seed. Each is grounded in 95 % of the
catalog (`stage: grounding`, the backbone in full, since it knows nothing yet) and validated on 500 texts that it saw
and 500 of the others. Then models learn to recommend under one short budget, from the grounded checkpoint and from the
language model itself, the backbone once trained in full and once with LoRA. A study can be stopped at any time: the
same command goes on where it was. Rows go to `recipes/results/grounding_beauty.json`, a table to
`grounding_beauty.md`, the curves of grounding to `grounding_beauty.png`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from datetime import date
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from hf_deco.data.items import read_items
from hf_deco.training.llm_arguments import LLMTrainingArguments
from hf_deco.training.llm_run import GROUNDING_FILE, train_llm
from hf_deco.training.preparation import prepare_embeddings, prepare_log, prepare_sids
from hf_deco.training.results import add_rows, changed_arguments, read_rows

RESULTS = Path(__file__).parent / "results"
STUDY = "grounding_beauty"
SHAPE = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
VOCABULARY = 4096
END = "<|endoftext|>"  # as Qwen2 calls it
SHARED = {
    "protocol": "leave_one_out",
    "codebook_sizes": [256, 256, 256, 256],
    "decoder_width": 128,
    "num_beams": 50,
    "cutoffs": [10, 50],
    "bf16": True,
    "disable_tqdm": True,
    "resume_from_checkpoint": "last",
}
GROUNDING = {
    "stage": "grounding",
    "grounding_backbone": "full",
    "grounding_epochs": 5,
    "grounding_learning_rate": 2e-3,
    "grounding_batch_size": 64,
    "grounding_text_length": 40,
    "grounding_holdout": 0.05,
    "grounding_examples": 500,
}
RECOMMENDATION = {
    "stage": "recommendation",
    "dropout": 0.2,
    "decoder_dropout": 0.1,
    "learning_rate": 2e-3,
    "num_train_epochs": 3,
    "per_device_train_batch_size": 256,
    "per_device_eval_batch_size": 128,
    "validation_examples": 1000,
}


def make_language_model(folder: Path, texts: list[str], seed: int) -> str:
    """Write a tokenizer trained on texts and a Qwen2-shaped model with random weights; return where."""
    if not (folder / "model.safetensors").exists():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)
        torch.manual_seed(seed)
        heads = SHAPE["num_attention_heads"]
        config = Qwen2Config(vocab_size=VOCABULARY, num_key_value_heads=heads, tie_word_embeddings=True, **SHAPE)
        Qwen2ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def data_options(data: Path) -> dict:
    """Where the log and its items lie."""
    files = {"interactions": "interactions.parquet", "items": "items.parquet", "embeddings": "item_embeddings.npy"}
    return {name: str(data / file) for name, file in files.items()}


def run_study(data: Path, output: Path, results: Path, seeds: list[int]) -> None:
    """Every run of every seed that is not finished yet."""
    options = data_options(data) | SHARED
    texts = read_items(options["items"]).texts.tolist()
    if not (output / "sids").exists():
        args = LLMTrainingArguments(**options, output_dir=str(output), seed=0)
        items, _, split = prepare_log(args)
        prepare_sids(args, items, split, prepare_embeddings(args, items))
    options["sids"] = str(output / "sids")
    for seed in seeds:
        options |= {"backbone": make_language_model(output / f"language_model-seed{seed}", texts, seed), "seed": seed}
        folder = output / f"grounding-seed{seed}"
        args = LLMTrainingArguments(**options, **GROUNDING, output_dir=str(folder))
        started, begun, done = time.time(), folder.exists(), (folder / "grounded").exists()
        train_llm(args)
        known = [row["seed"] for row in read_rows(results / f"{STUDY}.json") if row["system"] == "grounding"]
        if not done or seed not in known:
            add_rows(results / f"{STUDY}.json", [grounding_row(args, folder, time.time() - started, begun)])
        for way, suffix in (("full", ""), ("lora", "_lora")):
            for name, start in (("grounded", str(folder / "grounded")), ("ungrounded", None)):
                run = {"system": f"deco_ce/{name}{suffix}", "train_backbone": way, "start_from": start}
                run |= {"output_dir": str(output / f"deco_ce_{name}{suffix}-seed{seed}")}
                rows = {"results_file": str(results / f"{STUDY}.json")}
                train_llm(LLMTrainingArguments(**options, **RECOMMENDATION, **run, **rows))


def grounding_row(args: LLMTrainingArguments, folder: Path, seconds: float, resumed: bool) -> dict:
    """The row of a grounded model: its figures, and those of every epoch."""
    record = json.loads((folder / "grounded" / GROUNDING_FILE).read_text(encoding="utf-8"))
    epochs: dict[float, dict] = {}
    for entry in record["log"]:
        found = {name.removeprefix("eval_"): value for name, value in entry.items() if _is_figure(name)}
        if found:
            epochs.setdefault(round(entry["epoch"], 2), {}).update(found)
    return {
        "system": "grounding",
        "dataset": Path(args.interactions).resolve().parent.name,
        "protocol": args.protocol,
        "seed": args.seed,
        "metrics": record["metrics"],
        "epochs": [{"epoch": epoch} | figures for epoch, figures in epochs.items()],
        "config": changed_arguments(args),
        "command": shlex.join(["python", *sys.argv]),
        "date": date.today().isoformat(),
        "wall_s": round(seconds),
        "resumed": resumed,
    }


def _is_figure(name: str) -> bool:
    return name.startswith("eval_") and name.endswith(("sid_loss", "text_loss", "recall@10"))


def summarise(rows: list[dict]) -> str:
    """Two tables: grounding before and after, on texts seen and held out; recommendation from both starts."""
    lines = ["| grounding | seed | text to SID, nats | SID to text, nats a token | recall@10 of SID from text |"]
    lines.append("|---" * 5 + "|")
    for row in (row for row in rows if row["system"] == "grounding"):
        for part, meaning in (("seen", "texts seen"), ("heldout", "texts held out")):
            cells = [meaning, str(row["seed"])]
            for name in ("sid_loss", "text_loss", "recall@10"):
                cells.append(f"{row['epochs'][0][f'{part}_{name}']:.4f} -> {row['metrics'][f'{part}_{name}']:.4f}")
            lines.append("| " + " | ".join(cells) + " |")
    names = [f"ndcg@{SHARED['cutoffs'][0]}", *(f"recall@{k}" for k in SHARED["cutoffs"])]
    lines += ["", "| " + " | ".join(["recommendation", "seed", *names]) + " |", "|---" * 5 + "|"]
    for row in (row for row in rows if row["system"] != "grounding"):
        figures = (f"{row['metrics'][name]:.4f}" for name in names)
        seed = "" if row["seed"] is None else str(row["seed"])
        lines.append("| " + " | ".join([row["system"], seed, *figures]) + " |")
    return "\n".join(lines)


def plot(rows: list[dict], num_items: int, path: Path) -> None:
    """Both losses and recall over the epochs of grounding, of texts seen and held out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    titles = {"sid_loss": "text to SID (nats per item)", "text_loss": "SID to text (nats per token)"}
    titles["recall@10"] = "SID from text, recall@10"
    for axis, (name, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        for index, row in enumerate(rows):
            for part, style in (("seen", "-"), ("heldout", "--")):
                points = [(entry["epoch"], entry[f"{part}_{name}"]) for entry in row["epochs"]]
                label = f"{'seen' if part == 'seen' else 'held out'}, seed {row['seed']}"
                axis.plot(*zip(*points, strict=True), style, color=f"C{index}", label=label)
        axis.set(xlabel="epoch", title=title)
        axis.grid(alpha=0.3)
    axis.axhline(10 / num_items, color="grey", linewidth=1, linestyle=":", label="chance")
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=110, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/amazon14_beauty"), help="folder of log and items")
    parser.add_argument("--output", type=Path, default=Path("runs") / STUDY, help="folder of the runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments = parser.parse_args()
    run_study(arguments.data, arguments.output, arguments.results, arguments.seeds)
    rows = read_rows(arguments.results / f"{STUDY}.json")
    (arguments.results / f"{STUDY}.md").write_text(summarise(rows) + "\n", encoding="utf-8")
    print(summarise(rows))
    grounded = sorted((row for row in rows if row["system"] == "grounding"), key=lambda row: row["seed"])
    plot(grounded, len(read_items(data_options(arguments.data)["items"])), arguments.results / f"{STUDY}.png")


if __name__ == "__main__":
    main()
