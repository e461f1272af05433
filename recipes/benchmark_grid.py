"""The points that `benchmark.py` measures."""

from __future__ import annotations

from dataclasses import dataclass, replace

QWEN_05B = {
    "model_type": "qwen2",
    "vocab_size": 1,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "use_cache": False,
}
BEST = ("deco", "deco/stored", "fused_gr", "flat_gr")


@dataclass(frozen=True)
class Point:
    """One point of the grid."""

    backbone: str = "L"
    num_items: int = 12_101
    num_codebooks: int = 4
    history_length: int = 20
    batch_size: int = 32
    num_beams: int = 100
    num_results: int = 100
    systems: tuple[str, ...] = BEST


def grid(quick: bool) -> list[Point]:
    """The points that are measured."""
    base = Point()
    first = replace(base, systems=(*BEST, "deco/unskipped", "fused_gr/unskipped", "deco/dense_mask"))
    stock = replace(base, batch_size=1, systems=(*BEST, "transformers_generate"))
    top = replace(base, num_results=10)
    wide = replace(base, num_beams=1000, num_results=1000, systems=("deco", "deco/stored"))
    if quick:
        return [first, stock, top, replace(base, batch_size=1), wide]
    points = [first, stock, replace(stock, batch_size=8), top, wide]
    points += [replace(base, batch_size=size) for size in (1, 8, 128)]
    points += [replace(base, num_beams=beams, num_results=beams) for beams in (10, 500)]
    points += [replace(base, num_beams=beams, num_results=10) for beams in (500, 1000)]
    points += [replace(base, history_length=100), replace(base, num_items=207_649)]
    points += [replace(base, num_codebooks=levels, systems=("deco", "fused_gr")) for levels in (2, 3, 6, 8)]
    points += [replace(base, backbone=name) for name in ("S", "M")]
    points += [replace(base, backbone="Qwen2.5-0.5B", systems=("deco", "fused_gr"))]
    return points


def catalogs() -> list[Point]:
    """The points of the study of catalog sizes."""
    return [replace(Point(), num_items=size, systems=("deco",)) for size in (12_101, 207_649, 10_000_000)]


def read_point(values: list[str]) -> Point:
    """The point that the command line asks for."""
    given = dict(value.split("=", 1) for value in values)
    unknown = set(given) - set(vars(Point()))
    if unknown:
        raise SystemExit(f"`--point` knows {', '.join(vars(Point()))}; got {', '.join(sorted(unknown))}.")
    texts = {name: given.pop(name) for name in ("backbone", "systems") if name in given}
    point = replace(Point(), **{name: int(value) for name, value in given.items()})
    if "num_results" not in given:
        point = replace(point, num_results=point.num_beams)
    systems = tuple(texts["systems"].split(",")) if "systems" in texts else point.systems
    return replace(point, backbone=texts.get("backbone", point.backbone), systems=systems)
