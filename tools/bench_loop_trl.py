"""The work of one of mgrpo's examples done by TRL's GRPOTrainer, for comparison in `bench.py loop`.

    .venv-trl/bin/python tools/bench_loop_trl.py [--config examples/configs/quickstart.yaml] [--steps 120] [--seed 1] [--threads 1]

Same model, dtype, prompts, batch, lengths, learning rate schedule, loss and sampling as the configuration, which is read;
generation by transformers, no vLLM. Needs an environment of its own, see requirements/bench_trl.txt. Prints one line of JSON,
everything else goes to stderr: seconds, seconds of generation, CPU seconds and reward of every step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def read_rows(path: str) -> list[dict[str, Any]]:
    """Rows of a file of mgrpo as those of TRL: text or chat messages under "prompt"."""
    rows = (json.loads(line) for line in (ROOT / path).read_text(encoding="utf-8").splitlines())
    names = {"ground_truth": "ground_truth", "verifier": "dataset"}
    return [
        {"prompt": row.get("messages") or row["prompt"], **{own: row[name] for own, name in names.items()}}
        for row in rows
    ]


def is_right(completion: Any, row: dict[str, Any]) -> float:
    """The verdict of mgrpo's verifiers `integer` (the completion is the number and nothing else) and `gsm8k` (its last number)."""
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    if row["verifier"] == "integer":
        return float(text.strip() == row["ground_truth"])
    numbers = NUMBER.findall(text)
    return float(bool(numbers) and float(numbers[-1].replace(",", "")) == float(row["ground_truth"]))


def sampled_accuracy(model: Any, tokenizer: Any, rows: list[dict[str, Any]], settings: dict[str, Any]) -> float:
    """Share of right completions of plain prompts at temperature 1."""
    import torch

    samples = settings["num_samples_per_prompt_rollout"]
    prompts = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True, padding_side="left")
    was_training = model.training
    with torch.no_grad():
        sequences = model.eval().generate(
            **prompts, do_sample=True, top_k=0, num_return_sequences=samples, max_new_tokens=settings["response_length"]
        )
    model.train(was_training)
    texts = tokenizer.batch_decode(sequences[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    return statistics.fmean(is_right(text, rows[index // samples]) for index, text in enumerate(texts))


def run(args: argparse.Namespace) -> dict[str, object]:
    """Train and return the figures of every step."""
    import torch
    import yaml
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings = yaml.safe_load(args.config.read_text(encoding="utf-8"))
    rewards: list[float] = []

    def reward_func(completions: list[Any], ground_truth: list[str], verifier: list[str], **_: object) -> list[float]:
        rows = ({"ground_truth": truth, "verifier": name} for truth, name in zip(ground_truth, verifier, strict=True))
        scores = [is_right(completion, row) for completion, row in zip(completions, rows, strict=True)]
        rewards.append(statistics.fmean(scores))
        return scores

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    model = AutoModelForCausalLM.from_pretrained(
        ROOT / settings["model_name_or_path"], dtype=getattr(torch, settings["model_dtype"])
    )
    tokenizer = AutoTokenizer.from_pretrained(ROOT / settings["model_name_or_path"])
    held_out = read_rows(settings["dataset_mixer_eval_list"][0])
    is_plain = isinstance(held_out[0]["prompt"], str)
    accuracy_before = sampled_accuracy(model, tokenizer, held_out, settings) if is_plain else None
    figures = train(
        settings,
        model=model,
        tokenizer=tokenizer,
        reward_func=reward_func,
        num_steps=args.steps,
        per_device_train_batch_size=settings["num_unique_prompts_rollout"] * settings["num_samples_per_prompt_rollout"],
        bf16=False,
        use_cpu=True,
        seed=args.seed,
        optim="adamw_torch",
    )
    if len(rewards) != args.steps:
        raise RuntimeError(f"{args.steps} steps gave {len(rewards)} rewards; this program expects TRL 1.16.0")
    return figures | {
        "trainer": f"{figures['trainer']}, {args.threads} threads",
        "rewards": rewards,
        "heldout_sampled_before": accuracy_before,
        "heldout_sampled_after": sampled_accuracy(model, tokenizer, held_out, settings) if is_plain else None,
    }


def train(
    settings: dict[str, Any],
    *,
    model: Any,
    tokenizer: Any,
    reward_func: Callable[..., list[float]],
    num_steps: int,
    **own: Any,
) -> dict[str, Any]:
    """Train by GRPOTrainer as a configuration of mgrpo would.

    Returns seconds, seconds of generation and CPU seconds of every step, and the tokens of the shortest completion. `own`: settings
    of GRPOConfig that the configuration does not decide.
    """
    import torch
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl import __version__ as trl_version

    generate_seconds: list[float] = []
    step_marks: list[float] = []
    cpu_marks: list[float] = []
    began_unix: list[float] = []

    class TimedTrainer(GRPOTrainer):
        """Clocks generation. `_generate` is private to TRL: if it is renamed, the list of times stays empty, which is an error below."""

        def _generate(self, prompts: list) -> object:
            start = time.perf_counter()
            result = super()._generate(prompts)
            generate_seconds.append(time.perf_counter() - start)
            return result

    class StepClock(TrainerCallback):
        def on_train_begin(self, *_: object, **__: object) -> None:
            began_unix.append(time.time())
            self.on_step_end()

        def on_step_end(self, *_: object, **__: object) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            step_marks.append(time.perf_counter())
            cpu_marks.append(time.process_time())

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=num_steps,
            num_generations=settings["num_samples_per_prompt_rollout"],
            max_completion_length=settings["response_length"],
            temperature=settings["temperature"],
            learning_rate=settings["learning_rate"],
            lr_scheduler_type=settings["lr_scheduler_type"],
            warmup_steps=settings["warm_up_steps"],
            max_grad_norm=settings["max_grad_norm"],
            weight_decay=0.0,
            loss_type="dapo",
            epsilon=settings["clip_lower"],
            epsilon_high=settings["clip_higher"],
            beta=settings["beta"],
            scale_rewards="group",
            gradient_checkpointing=False,
            save_strategy="no",
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            **own,
        )
        trainer = TimedTrainer(
            model=model,
            args=config,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list(read_rows(settings["dataset_mixer_list"][0])),
            reward_funcs=reward_func,
            callbacks=[StepClock()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()

    step_seconds = [after - before for before, after in itertools.pairwise(step_marks)]
    if not len(generate_seconds) == len(step_seconds) == num_steps:
        raise RuntimeError(
            f"{num_steps} steps gave {len(generate_seconds)} generation times and {len(step_seconds)} step times; this "
            f"program expects TRL 1.16.0, found {trl_version}"
        )
    return {
        "trainer": f"trl {trl_version}",
        "began_unix": began_unix[0],
        "step_s": step_seconds,
        "generate_s": generate_seconds,
        "cpu_s": [after - before for before, after in itertools.pairwise(cpu_marks)],
        "shortest": min(log["completions/min_length"] for log in trainer.state.log_history if "reward" in log),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=ROOT / "examples" / "configs" / "quickstart.yaml")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps, also the schedule's horizon")
    parser.add_argument("--seed", type=int, default=1, help="data order and sampling")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    args = parser.parse_args()
    # Before torch is imported: spinning threads are twenty times slower on a machine that does anything else.
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    os.environ["OMP_WAIT_POLICY"] = "passive"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    stdout, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps(run(args)), file=stdout)


if __name__ == "__main__":
    main()
