"""Where a run goes on, and what a checkpoint remembers of its data."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from ..data.splits import Split
from ..items.sid_table import SIDTable
from ..models.checkpoint_sid import ADAPTER_WEIGHTS
from .arguments import DecoTrainingArguments
from .results import changed_arguments, write_json

DATA_FILE = "training_data.json"
RUN_FILE = "run.json"  # written last: the mark of a finished run
BASE_FILE = "adapter_base.json"  # beside an adapter: what it was trained on
_STATE, _WEIGHTS = "trainer_state.json", "model.safetensors"
# What else makes a checkpoint whole: of a model or an adapter; under FSDP, sharded or not; under DeepSpeed.
_FORMS = (
    ("optimizer.pt", _WEIGHTS),
    ("optimizer.pt", ADAPTER_WEIGHTS),
    ("optimizer_0", "pytorch_model_fsdp_0"),
    ("optimizer.bin", "pytorch_model_fsdp.bin"),
    ("latest",),
)
_SAMPLE = 4096  # entries of a tensor that its fingerprint reads
_DATA_OPTIONS = ("protocol", "drop_duplicates", "collapse_repeats", "k_core")


def find_checkpoint(args: DecoTrainingArguments) -> str | None:
    """The checkpoint that a run goes on from, None for a fresh start.

    Raises:
        ValueError: If `output_dir` holds an earlier run that is not to be gone on with, or the named checkpoint is
            none.
    """
    folder, wanted = Path(args.output_dir), args.resume_from_checkpoint
    whole = [path for path in folder.glob("checkpoint-*") if _is_whole(path)]
    if wanted is None:
        if any(folder.glob("checkpoint-*")) or (folder / "model").exists():
            raise ValueError(
                f"`output_dir` {str(folder)!r} holds an earlier run: set `resume_from_checkpoint` to last to go on "
                "with it, or name another folder."
            )
        return None
    if wanted == "last":  # the newest whole one: a run may have been stopped while it wrote
        return str(max(whole, key=lambda path: int(path.name.split("-")[1]))) if whole else None
    if not _is_whole(Path(wanted)):
        raise ValueError(f"`resume_from_checkpoint` {wanted!r} is no checkpoint of a run; 'last' finds the newest.")
    return wanted


def _is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint holds all that a run goes on from."""
    forms = (all((checkpoint / name).exists() for name in names) for names in _FORMS)
    return (checkpoint / _STATE).exists() and any(forms)


def finished_run(args: DecoTrainingArguments) -> dict | None:
    """What a finished run in `output_dir` left, where it is to be gone on with: its `metrics` and result `rows`.

    Raises:
        ValueError: If it was run with other options.
    """
    path = Path(args.output_dir) / RUN_FILE
    if args.resume_from_checkpoint != "last" or not path.exists():
        return None
    run, options = json.loads(path.read_text(encoding="utf-8")), changed_arguments(args)
    was = changed_arguments(type(args)()) | run["options"]  # an option that came later had its default
    for name in sorted(options.keys() | was.keys()):
        if options.get(name) != was.get(name):
            raise ValueError(
                f"`output_dir` {args.output_dir!r} holds a finished run with another `{name}` ({was.get(name)!r}, not "
                f"{options.get(name)!r}): name another folder."
            )
    return run


def check_same_catalog(checkpoint: str, sids: SIDTable, catalog: np.ndarray) -> None:
    """Raise a `ValueError` where a checkpoint was trained on other SIDs than these."""
    codes, folder = sids.codes[catalog], Path(checkpoint)
    if (folder / BASE_FILE).exists():  # an adapter's
        trained = json.loads((folder / BASE_FILE).read_text(encoding="utf-8"))["catalog_sha256"]
        same = trained == fingerprint({"catalog_codes": torch.as_tensor(codes)})
    elif (folder / _WEIGHTS).exists():
        with safe_open(folder / _WEIGHTS, "pt") as weights:
            name = next(name for name in weights.keys() if name.endswith("catalog_codes"))
            same = np.array_equal(weights.get_tensor(name).numpy(), codes)
    else:  # split over files of its own kind
        return
    if not same:
        raise ValueError(
            f"`resume_from_checkpoint` {checkpoint!r} was trained on other SIDs or another catalog than the options "
            f"give: "
            "go on with the options it was started with."
        )


def fingerprint(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 over names, shapes and evenly spaced entries of tensors.

    Floating-point entries are read in bfloat16, so that weights have one fingerprint in float32 and in bfloat16.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        entries = tensor.detach().flatten()[:: max(1, tensor.numel() // _SAMPLE)].cpu()
        if entries.is_floating_point():
            entries = entries.to(torch.bfloat16).view(torch.int16)
        digest.update(f"{name} {tuple(tensor.shape)} ".encode())
        digest.update(entries.contiguous().numpy().tobytes())
    return digest.hexdigest()


def save_data_options(folder: Path, args: DecoTrainingArguments, split: Split) -> None:
    """Write beside a model what it is called, and how its log was filtered and split."""
    options = {name: getattr(args, name) for name in ("system", *_DATA_OPTIONS)}
    write_json(folder / DATA_FILE, options | {"borders": None if split.borders is None else list(split.borders)})


def check_data_options(checkpoint: str | Path, args: DecoTrainingArguments, split: Split) -> str:
    """Make sure that a checkpoint is tested under the split that it was trained under.

    Returns:
        What the checkpoint's system is called; `args.system` where it keeps no record.

    Raises:
        ValueError: If its training data could hold the test targets.
    """
    path = Path(checkpoint) / DATA_FILE
    if not path.is_file():
        return args.system
    trained = json.loads(path.read_text(encoding="utf-8"))
    for name in _DATA_OPTIONS:
        if getattr(args, name) != trained[name]:
            raise ValueError(
                f"`{name}` is {getattr(args, name)!r}, but {str(checkpoint)!r} was trained with {trained[name]!r}: its "
                "training data could hold the test targets. Set it to that."
            )
    if split.borders is not None and split.borders[1] < trained["borders"][0]:
        raise ValueError(
            f"`interactions` puts the test from time {split.borders[1]} on, but {str(checkpoint)!r} was trained on all "
            f"up to {trained['borders'][0]}: give the log that it was trained with, or a later one."
        )
    return trained["system"]
