"""Compare item tokenizers on real embeddings: use of the codes, collisions, error; at rest, under drift, and on a toy.

    OMP_NUM_THREADS=1 python recipes/compare_tokenizers.py recipes/configs/compare_tokenizers.yaml

Items with the same text count once. Embeddings are centred and projected onto `width` principal directions. The paper's
sizes (2048, 512, 128) are scaled to a catalog of N items as (16 a, 4 a, a), a = round((N / (64 load))^(1/3)), so that
`load` of the possible code sequences would be in use if all were different; (4 a, 4 a, 4 a) has the same capacity.
Collisions are kept. Under drift (see `hf_deco.items.EmbeddingDrift`) a tokenizer is fitted at time 0, then takes one
step on every batch of a stream, and is judged on the whole catalog at time 1. The toy is the paper's (Appendix A).

A study can be stopped at any time: the same command goes on where it was. It writes a row per run to
`recipes/results/<study>.json`, tables to `<study>.md`, and pictures to `<study>.png` and `<study>_toy.png`.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from datetime import date
from pathlib import Path

import numpy as np
import torch
import yaml
from tokenizer_report import plot_study, plot_toy, summarise

from hf_deco.data.tables import read_columns
from hf_deco.items import (
    EmbeddingDrift,
    ItemTokenizer,
    Projection,
    QuantizerTraining,
    RQKMeans,
    StreamingTokenizer,
    embed_texts,
    quality_report,
)
from hf_deco.items.quantizer_training import QuantizerTrainer
from hf_deco.models.quantization import ResidualQuantizer
from hf_deco.training.preparation import read_embeddings
from hf_deco.training.results import add_rows, read_rows

RESULTS = Path(__file__).parent / "results"
KEYS = {"study", "output_dir", "seeds", "width", "load", "training", "data", "systems", "variants", "drift", "toy"}
TOY_SYSTEMS = ("rq-kmeans", "rq", "rq-ema", "rq-ema/restart", "simvq", "basis-rq", "basis-rq/12-steps")


def read_study(path: Path) -> dict:
    """A study's YAML file, its keys and systems checked."""
    study = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(study, dict) or set(study) != KEYS:
        raise ValueError(f"{str(path)!r} must hold {', '.join(sorted(KEYS))} and no other keys.")
    for run in (*study["systems"], *study["variants"]):
        if set(run) - {"system", "training", "options"} or "system" not in run:
            raise ValueError(f"a system has the keys `system`, `training` and `options`, got {run}.")
        make_tokenizer(study, run, (4, 2), 0)  # what no run could use is refused here
    return study


def make_tokenizer(study: dict, run: dict, sizes: tuple[int, ...], seed: int) -> ItemTokenizer:
    training = QuantizerTraining(**(study["training"] | run.get("training", {})))
    return ItemTokenizer(sizes, run["system"].split("/")[0], training=training, seed=seed, **run.get("options", {}))


def load_data(study: dict, name: str) -> tuple[np.ndarray, list[str] | None]:
    """Projected embeddings of the items with distinct texts, and their categories."""
    source = study["data"][name]
    items = read_columns(source["items"], {"text": "data"}, optional=("categories",))
    cache = Path(source.get("embeddings", Path(study["output_dir"]) / f"{name}.npy"))
    if not cache.exists() and "embedding_model" in source:
        cache.parent.mkdir(parents=True, exist_ok=True)
        temporary = cache.with_name(f".{name}.npy")
        np.save(temporary, embed_texts(items["text"], source["embedding_model"]))
        temporary.replace(cache)
    kept = ~items["text"].duplicated().to_numpy()
    embeddings = read_embeddings(cache, len(items))[kept]
    projection = Projection.fit(embeddings, study["width"])
    print(f"{name}: {len(embeddings)} items, {projection.explained_variance:.1%} of the variance kept", flush=True)
    categories = items["categories"][kept].fillna("").tolist() if "categories" in items.columns else None
    return projection(embeddings), categories


def scaled_sizes(num_items: int, load: float) -> dict[str, tuple[int, ...]]:
    """Three levels in the paper's ratio and three equal ones, both of about `num_items / load` sequences."""
    unit = max(2, round((num_items / (64 * load)) ** (1 / 3)))
    return {"progressive": (16 * unit, 4 * unit, unit), "uniform": (4 * unit,) * 3}


def measure(tokenizer: ItemTokenizer, points: np.ndarray, categories: list[str] | None) -> dict:
    """Metrics of a tokenizer on projected embeddings."""
    codes = tokenizer.encode(points)
    moved = np.zeros(len(codes), dtype=bool)
    report = quality_report(codes, codes, points, tokenizer.reconstruction, moved, categories)
    metrics = {name: report[name] for name in ("utilization", "collision_rate_after", "largest_bucket_after")}
    metrics |= {"mse": report["reconstruction_mse_after"], "prefix_purity": report.get("prefix_purity")}
    metrics |= {name: [level[name] for level in report["levels"]] for name in ("usage", "perplexity")}
    if tokenizer.method != "rq-kmeans":
        metrics["orthogonality_error"] = tokenizer.quantizer.quantizer.orthogonality_error()
    return metrics


class Study:
    """Runs what is not finished yet, and keeps the rows."""

    def __init__(self, study: dict, results: Path):
        self.study = study
        self.file = results / f"{study['study']}.json"
        self.data: dict[str, tuple] = {}

    def load(self, name: str) -> tuple[np.ndarray, list[str] | None]:
        if name not in self.data:
            self.data[name] = load_data(self.study, name)
        return self.data[name]

    def run(self, key: dict, make_metrics) -> None:
        """Makes a row, unless one with the same key is there."""
        if any(all(row.get(name) == value for name, value in key.items()) for row in read_rows(self.file)):
            return
        start = time.perf_counter()
        metrics = make_metrics()
        row = key | {"metrics": metrics, "command": shlex.join(["python", *sys.argv]), "date": date.today().isoformat()}
        add_rows(self.file, [row | {"wall_s": round(time.perf_counter() - start, 1)}])
        name = " ".join(str(key[part]) for part in ("dataset", "protocol", "system", "seed"))
        print(f"{name} {key['config'].get('sizes', '')}: {metrics['mse']:.4g}", flush=True)

    def run_static(self) -> None:
        study, first = self.study, next(iter(self.study["data"]))
        for name in study["data"]:
            points, categories = self.load(name)
            for shape, sizes in scaled_sizes(len(points), study["load"]).items():
                runs = study["systems"] + (study["variants"] if (name, shape) == (first, "progressive") else [])
                for run, seed in ((run, seed) for run in runs for seed in study["seeds"]):
                    key = self.key(run, name, "static", seed, sizes=shape, codebook_sizes=list(sizes))

                    def make(run=run, seed=seed, sizes=sizes, points=points, categories=categories) -> dict:
                        return measure(make_tokenizer(study, run, sizes, seed).fit(points), points, categories)

                    self.run(key, make)

    def key(self, run: dict, dataset: str, protocol: str, seed: int, **config) -> dict:
        config |= {"width": self.study["width"], "training": self.study["training"] | run.get("training", {})}
        config["options"] = run.get("options", {})
        return {"system": run["system"], "dataset": dataset, "protocol": protocol, "seed": seed, "config": config}

    def run_drift(self) -> None:
        study, name = self.study, next(iter(self.study["data"]))
        points, categories = self.load(name)
        sizes = scaled_sizes(len(points), study["load"])["progressive"]
        restart = {"system": "rq-ema/restart", "options": {"restart_dead_codes": True}}
        runs = [{"system": "rq-kmeans/frozen"}, {"system": "rq-kmeans/refit"}, restart]
        runs += [run for run in study["systems"] if run["system"] != "rq-kmeans"]
        for kind, strength in study["drift"]["strength"].items():
            for run, seed in ((run, seed) for run in runs for seed in study["seeds"]):
                stream = study["drift"] | {"strength": strength}
                key = self.key(run, name, f"drift/{kind}", seed, codebook_sizes=list(sizes), stream=stream)

                def make(run=run, seed=seed, kind=kind, strength=strength) -> dict:
                    drift = EmbeddingDrift(points, kind, strength=strength, seed=seed)
                    return drift_metrics(study, run, sizes, seed, drift, categories)

                self.run(key, make)

    def run_toy(self) -> None:
        toy = self.study["toy"]
        for system, seed in ((system, seed) for system in TOY_SYSTEMS for seed in self.study["seeds"]):
            key = {"system": system, "dataset": "toy", "protocol": "toy", "seed": seed, "config": toy}

            def make(system=system, seed=seed) -> dict:
                metrics, codebook, used = toy_metrics(toy, system, seed)
                path = self.toy_file(system, seed)
                path.parent.mkdir(parents=True, exist_ok=True)
                np.savez(path, codebook=codebook, used=used)
                return metrics

            self.run(key, make)

    def toy_file(self, system: str, seed: int) -> Path:
        """Where the codes of a toy run are kept for its picture."""
        return Path(self.study["output_dir"]) / "toy" / f"{system.replace('/', '_')}-seed{seed}.npz"

    def draw_toy(self, path: Path) -> None:
        """The picture of the first seed's toy; left as it is where codes were made elsewhere."""
        seed = self.study["seeds"][0]
        files = {system: self.toy_file(system, seed) for system in TOY_SYSTEMS}
        if all(file.exists() for file in files.values()):
            panels = {system: dict(np.load(file)) for system, file in files.items()}
            plot_toy(toy_points(self.study["toy"], seed), panels, path)


def drift_metrics(study: dict, run: dict, sizes, seed: int, drift: EmbeddingDrift, categories) -> dict:
    """Metrics at time 1 of a tokenizer that was fitted at time 0, and the share of the first items with another SID."""
    rows = np.flatnonzero(drift.present(0))
    end = drift.at(1)
    tokenizer = make_tokenizer(study, run, sizes, seed).fit(drift.at(0, rows))
    before = tokenizer.encode(drift.at(0, rows))
    if run["system"] == "rq-kmeans/refit":
        # Another seed: k-means that starts from the same items would find the same clusters in turned embeddings.
        tokenizer = make_tokenizer(study, run, sizes, seed + 1000).fit(end)
    elif tokenizer.method != "rq-kmeans":
        rate = study["drift"]["learning_rate"]
        stream = StreamingTokenizer(tokenizer, rows, drift.at(0, rows), learning_rate=rate)
        for batch_rows, batch in drift.batches(study["drift"]["num_batches"], study["drift"]["batch_size"]):
            stream.partial_fit(batch_rows, batch)
        stream.publish()
        tokenizer = stream.tokenizer
    changed = (tokenizer.encode(end[rows]) != before).any(axis=1)
    return measure(tokenizer, end, categories) | {"changed_share": float(changed.mean())}


def toy_points(toy: dict, seed: int) -> np.ndarray:
    """Points `(num_points, width)` around centres drawn from a standard normal."""
    rng = np.random.default_rng((seed, 2))
    centres = rng.standard_normal((toy["num_clusters"], toy["width"]))
    cluster = rng.integers(0, toy["num_clusters"], toy["num_points"])
    noise = toy["noise"] * rng.standard_normal((toy["num_points"], toy["width"]))
    return (centres[cluster] + noise).astype(np.float32)


def toy_metrics(toy: dict, system: str, seed: int) -> tuple[dict, np.ndarray, np.ndarray]:
    """Metrics of one codebook on the toy, the codes `(V, d)`, and which of them are in use.

    Codes start within [-0.1, 0.1] and data keep their scale, as in the paper.
    """
    points = toy_points(toy, seed)
    if system == "rq-kmeans":
        kmeans = RQKMeans((toy["num_clusters"],), seed=seed).fit(points)
        codebook, codes = kmeans.codebooks[0], kmeans.encode(points)[:, 0]
    else:
        method, _, variant = system.partition("/")
        options = {"restart": {"restart_dead_codes": True}, "12-steps": {"newton_schulz_steps": 12}}.get(variant, {})
        quantizer = ResidualQuantizer([toy["num_clusters"]], toy["width"], method, center=False, **options)
        inputs = torch.from_numpy(points)
        quantizer.init_from_data(inputs, "uniform", seed)
        steps = toy["epochs"] * (len(points) // toy["batch_size"])
        training = QuantizerTraining(
            num_steps=steps, batch_size=toy["batch_size"], learning_rate=toy["learning_rate"], init="uniform"
        )
        QuantizerTrainer(quantizer, training, seed).fit(inputs)
        quantizer.cpu().eval()
        codebook, codes = quantizer.codebooks()[0].detach().numpy(), quantizer.encode(inputs)[:, 0].numpy()
    counts = np.bincount(codes, minlength=len(codebook))
    shares = counts[counts > 0] / len(codes)
    metrics = {"utilization": float((counts > 0).mean()), "mse": float(np.square(points - codebook[codes]).mean())}
    metrics["perplexity"] = float(np.exp(-(shares * np.log(shares)).sum()))
    return metrics, codebook, counts > 0


def main(path: Path, results: Path) -> None:
    study = read_study(path)
    runs = Study(study, results)
    runs.run_static()
    runs.run_drift()
    runs.run_toy()
    rows = read_rows(runs.file)
    table = summarise(rows)
    (results / f"{study['study']}.md").write_text(table + "\n", encoding="utf-8")
    plot_study(rows, results / f"{study['study']}.png")
    runs.draw_toy(results / f"{study['study']}_toy.png")
    print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="YAML file of the study")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder of the results (default: recipes/results)"
    )
    arguments = parser.parse_args()
    main(arguments.study, arguments.results)
