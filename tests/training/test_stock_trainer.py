"""transformers' own `Trainer` with its callbacks and trackers, which know nothing of these models."""

import pytest
import torch
from transformers import AutoModel, Trainer, TrainerCallback, TrainingArguments


class Heard(TrainerCallback):
    def __init__(self):
        self.steps, self.logged = 0, set()

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logged |= set(logs)


@pytest.mark.parametrize("kind", ["deco", "backbone"])
def test_it_trains_evaluates_tracks_and_ends_with_the_best_weights(
    make_model, make_sequences, tmp_path, monkeypatch, kind
):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tracked"))
    model, heard = make_model(kind=kind, copy_pointer=True).train(), Heard()
    names = ("item_codes", "attention_mask", "labels")
    examples = [
        dict(zip(names, row, strict=True)) for row in zip(*make_sequences(model, [3, 5, 2, 4, 5, 1]), strict=True)
    ]
    args = TrainingArguments(
        str(tmp_path / "run"), max_steps=6, logging_steps=1, learning_rate=0.01, per_device_train_batch_size=3,
        eval_strategy="steps", eval_steps=2, save_steps=2, load_best_model_at_end=True, report_to=["tensorboard"],
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=examples, eval_dataset=examples, callbacks=[heard])
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert heard.steps == 6 and {"loss", "eval_loss", "learning_rate"} <= heard.logged
    assert after < before and after == pytest.approx(min(losses), rel=1e-5)
    assert any((tmp_path / "tracked").iterdir())
    trainer.save_model(str(tmp_path / "model"))
    for name, tensor in AutoModel.from_pretrained(tmp_path / "model").state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
