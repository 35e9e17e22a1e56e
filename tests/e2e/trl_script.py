"""A script of TRL's that trains twice, and prints what it finds; run by test_trl_script.py.

python trl_script.py FOLDER
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from mgrpo.trl import GRPOConfig, GRPOTrainer

MODEL = "examples/quickstart/model"
ROWS = [{"prompt": f"What is {number} + {number}?"} for number in range(8)]


def arguments(folder: Path, **fields: object) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(folder),
        num_generations=4,
        per_device_train_batch_size=8,
        max_completion_length=8,
        learning_rate=0.01,
        logging_steps=1,
        report_to="none",
        **fields,
    )


def nothing(completions, **kwargs):
    return [None] * len(completions)


def length(completions, log_metric, **kwargs):
    log_metric("calls", 1.0)
    return [float(len(completion)) for completion in completions]


def unrewarded(folder: Path) -> dict:
    """Evaluations of other rows before training, and a run whose function fits no row."""
    trainer = GRPOTrainer(MODEL, nothing, arguments(folder, num_train_epochs=0.5), ROWS)
    sets = trainer.evaluate({"even": ROWS[::2], "odd": ROWS[1:4:2]})
    output = trainer.train()
    return {"sets": sets, "loss": output.training_loss, "steps": output.global_step}


def adapted(folder: Path) -> dict:
    """A PeftModel, ended by a callback."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    class Enough(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32"), LoraConfig(r=4))
    trainer = GRPOTrainer(
        model,
        [length],
        arguments(folder, num_train_epochs=1, beta=0.1),
        ROWS,
        eval_dataset=ROWS[:2],
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        callbacks=[Enough],
    )
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
    output = trainer.train()
    changed = [name for name, weight in before.items() if not torch.equal(trainer.model.get_parameter(name), weight)]
    assert trainer.model is model
    return {
        "changed": changed,
        "adapters": [name for name in before if ".lora_" in name],
        "steps": output.global_step,
        "max_steps": trainer.state.max_steps,
        "log": trainer.state.log_history,
        "evaluation": trainer.evaluate(),
    }


if __name__ == "__main__":
    logging.basicConfig()
    out = Path(sys.argv[1])
    found = {"unrewarded": unrewarded(out / "unrewarded"), "adapted": adapted(out / "adapted")}
    (out / "found.json").write_text(json.dumps(found))
