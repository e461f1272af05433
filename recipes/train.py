"""Train a model on a log, from a YAML file of options and any number of overrides.

    python recipes/train.py recipes/configs/beauty_deco_ce.yaml
    python recipes/train.py recipes/configs/beauty_deco_ce.yaml --seed 1 --output_dir runs/beauty_seed1
    ACCELERATE_USE_CPU=1 accelerate launch --multi_gpu --num_processes 2 \\
        recipes/train.py recipes/configs/beauty_deco_ce.yaml

Every option of `hf_deco.training.arguments.DecoTrainingArguments` and of `transformers.TrainingArguments` can stand in
the file or on the command line; `--help` lists them. `--resume_from_checkpoint last` goes on where a run of the same
folder stopped.
"""

from accelerate import PartialState

from hf_deco.training.parser import parse_arguments
from hf_deco.training.report import format_metrics
from hf_deco.training.run import train


def main() -> None:
    args = parse_arguments(description=__doc__)
    metrics = train(args)
    if args.process_index == 0:
        print(format_metrics(metrics, args.cutoffs))


if __name__ == "__main__":
    main()
    # Threads of a process group that is left to the interpreter can abort it on its way out.
    PartialState().destroy_process_group()
