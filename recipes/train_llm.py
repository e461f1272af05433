"""Train a recommender on a pretrained language model: grounding, then LoRA, then the merge.

    accelerate launch recipes/train_llm.py recipes/configs/llm_qwen2.5_0.5b.yaml
    accelerate launch --config_file fsdp.yaml recipes/train_llm.py recipes/configs/llm_qwen2.5_3b.yaml --seed 1
    ACCELERATE_USE_CPU=1 accelerate launch --multi_gpu --num_processes 2 \\
        recipes/train_llm.py recipes/configs/llm_qwen2.5_0.5b.yaml --backbone path/to/a/small/model

Every option of `hf_deco.training.llm_arguments.LLMTrainingArguments` and of `transformers.TrainingArguments` can stand
in the file or on the command line; `--help` lists them. `--resume_from_checkpoint last` goes on where a run of the same
folder stopped, in either stage. FSDP and DeepSpeed are set up by `accelerate config`; under DeepSpeed the stages are
two launches, `--stage grounding` and `--stage recommendation --start_from <output_dir>/grounded`.
"""

from accelerate import PartialState

from hf_deco.training.llm_arguments import LLMTrainingArguments
from hf_deco.training.llm_run import train_llm
from hf_deco.training.parser import parse_arguments
from hf_deco.training.report import format_metrics


def main() -> None:
    args = parse_arguments(description=__doc__, options=LLMTrainingArguments)
    metrics = train_llm(args)
    if args.process_index == 0:
        if args.stage == "grounding":
            print(", ".join(f"{name} {value:.4f}" for name, value in metrics["grounding"].items()))
        else:
            print(format_metrics(metrics, args.cutoffs))


if __name__ == "__main__":
    main()
    # Threads of a process group that is left to the interpreter can abort it on its way out.
    PartialState().destroy_process_group()
