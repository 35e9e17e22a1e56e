"""The quickstart's work done by TRL's GRPOTrainer, for comparison in `bench_loop.py`.

    .venv-trl/bin/python tools/bench_loop_trl.py [--steps 120] [--seed 1] [--threads 1]

Same model, problems, 32 prompts x 8 samples of at most 6 tokens, learning rate schedule, loss and sampling as
examples/configs/quickstart.yaml; generation by transformers, no vLLM. Needs an environment of its own, see
requirements/bench_trl.txt. Prints one line of JSON, everything else goes to stderr; `train_s` is a step without its
generation, so it includes rewards, both passes, the optimizer and logging.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

QUICKSTART = Path(__file__).resolve().parent.parent / "examples" / "quickstart"
PROMPTS_PER_STEP = 32
SAMPLES_PER_PROMPT = 8
MAX_NEW_TOKENS = 6
GOAL_REWARD = 0.8
GOAL_WINDOW = 5


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=QUICKSTART / "model", help="Hugging Face folder")
    parser.add_argument("--train", type=Path, default=QUICKSTART / "train.jsonl", help="rows to train on")
    parser.add_argument("--heldout", type=Path, default=QUICKSTART / "heldout.jsonl", help="rows to measure on")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps, also the schedule's horizon")
    parser.add_argument("--seed", type=int, default=1, help="data order and sampling")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    return parser.parse_args()


def read_rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def is_right(completion: str, ground_truth: str) -> float:
    """The verdict of mgrpo's verifier `integer`: the completion is the number and nothing else."""
    return float(completion.strip() == ground_truth)


def first_to_reach(goal: float, rewards: list[float], ends: list[float]) -> float | None:
    """Seconds until the mean of the last `GOAL_WINDOW` rewards reached the goal; None if it never did."""
    for i in range(GOAL_WINDOW, len(rewards) + 1):
        if statistics.fmean(rewards[i - GOAL_WINDOW : i]) >= goal:
            return ends[i - 1]
    return None


def sampled_accuracy(model: Any, tokenizer: Any, rows: list[dict[str, str]]) -> float:
    """Share of right completions at temperature 1, `SAMPLES_PER_PROMPT` per row."""
    import torch

    prompts = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True, padding_side="left")
    was_training = model.training
    with torch.no_grad():
        sequences = model.eval().generate(
            **prompts, do_sample=True, top_k=0, num_return_sequences=SAMPLES_PER_PROMPT, max_new_tokens=MAX_NEW_TOKENS
        )
    model.train(was_training)
    texts = tokenizer.batch_decode(sequences[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    truths = [row["ground_truth"] for row in rows for _ in range(SAMPLES_PER_PROMPT)]
    return statistics.fmean(is_right(text, truth) for text, truth in zip(texts, truths, strict=True))


def run(args: argparse.Namespace, started: float) -> dict[str, object]:
    """Train and return the figures; `started` is when the program began."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl import __version__ as trl_version

    rewards: list[float] = []
    generate_seconds: list[float] = []
    step_marks: list[float] = []

    def reward_func(completions: list[str], ground_truth: list[str], **_: object) -> list[float]:
        scores = [is_right(text, truth) for text, truth in zip(completions, ground_truth, strict=True)]
        rewards.append(statistics.fmean(scores))
        return scores

    class TimedTrainer(GRPOTrainer):
        """Clocks generation. `_generate` is private to TRL: if it is renamed, the list of times stays empty, which is an error below."""

        def _generate(self, prompts: list) -> object:
            start = time.perf_counter()
            result = super()._generate(prompts)
            generate_seconds.append(time.perf_counter() - start)
            return result

    class StepClock(TrainerCallback):
        def on_train_begin(self, *_: object, **__: object) -> None:
            step_marks.append(time.perf_counter())

        def on_step_end(self, *_: object, **__: object) -> None:
            step_marks.append(time.perf_counter())

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    held_out = read_rows(args.heldout)
    accuracy_before = sampled_accuracy(model, tokenizer, held_out)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=args.steps,
            per_device_train_batch_size=PROMPTS_PER_STEP * SAMPLES_PER_PROMPT,
            num_generations=SAMPLES_PER_PROMPT,
            max_completion_length=MAX_NEW_TOKENS,
            temperature=1.0,
            learning_rate=2e-4,
            lr_scheduler_type="linear",
            warmup_steps=10,
            max_grad_norm=1.0,
            weight_decay=0.0,
            optim="adamw_torch",
            loss_type="dapo",
            epsilon=0.2,
            epsilon_high=0.28,
            beta=0.0,
            scale_rewards="group",
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            seed=args.seed,
            save_strategy="no",
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
        )
        trainer = TimedTrainer(
            model=model,
            args=config,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list(read_rows(args.train)),
            reward_funcs=reward_func,
            callbacks=[StepClock()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()

    ends = [mark - step_marks[0] for mark in step_marks[1:]]
    step_seconds = [end - begin for begin, end in zip([0.0, *ends], ends, strict=False)]
    if not len(rewards) == len(generate_seconds) == len(step_seconds) == args.steps:
        raise RuntimeError(
            f"{args.steps} steps gave {len(rewards)} rewards, {len(generate_seconds)} generation times and "
            f"{len(step_seconds)} step times; this program expects TRL 1.16.0, found {trl_version}"
        )
    rest_seconds = [step - generate for step, generate in zip(step_seconds, generate_seconds, strict=True)]
    return {
        "trainer": f"trl {trl_version}",
        "torch": torch.__version__,
        "threads": args.threads,
        "seed": args.seed,
        "steps": args.steps,
        "step_s_mean": statistics.fmean(step_seconds),
        "step_s_median": statistics.median(step_seconds),
        "generate_s_mean": statistics.fmean(generate_seconds),
        "generate_s_median": statistics.median(generate_seconds),
        "train_s_mean": statistics.fmean(rest_seconds),
        "train_s_median": statistics.median(rest_seconds),
        "loop_s": ends[-1],
        f"time_to_reward_{GOAL_REWARD}_s": first_to_reach(GOAL_REWARD, rewards, ends),
        "heldout_sampled_before": accuracy_before,
        "heldout_sampled_after": sampled_accuracy(model, tokenizer, held_out),
        "wall_s": time.perf_counter() - started,
        "cpu_s": time.process_time(),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "rewards": rewards,
    }


def main() -> None:
    started = time.perf_counter()
    args = parse_args()
    # Before torch is imported: spinning threads are twenty times slower on a machine that does anything else.
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    os.environ["OMP_WAIT_POLICY"] = "passive"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    stdout, sys.stdout = sys.stdout, sys.stderr
    figures = run(args, started)
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}
    rounded["rewards"] = [round(reward, 4) for reward in figures["rewards"]]
    print(json.dumps(rounded), file=stdout)


if __name__ == "__main__":
    main()
