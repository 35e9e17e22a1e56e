"""GRPO as a loop that can be read from top to bottom, copied and changed: a tiny model learns to add on two CPU cores.

    python examples/loop.py

Engines sample, a verifier scores, completions are compared within their group, a learner trains on them, and the engines
receive its weights. `mgrpo.train` does the same on many ranks and machines, with data, states, evaluations and reports
around it; here each of these steps is a line or two. It takes about a minute.
"""

import json
import random
from pathlib import Path

import numpy as np

import mgrpo
from mgrpo import packing
from mgrpo.rewards import verify
from mgrpo.types import Completion, TrainSample

QUICKSTART = Path(__file__).parent / "quickstart"
STEPS, PROMPTS, SAMPLES = 120, 32, 8

CONFIG = mgrpo.GRPOConfig(
    model_name_or_path=str(QUICKSTART / "model"),
    model_dtype="float32",
    output_dir="output/loop",
    # For the schedule of the learning rate; the loop below counts its steps itself.
    total_episodes=STEPS * PROMPTS * SAMPLES,
    num_unique_prompts_rollout=PROMPTS,
    num_samples_per_prompt_rollout=SAMPLES,
    max_prompt_token_length=8,
    response_length=6,
    beta=0.0,
    clip_higher=0.28,
    learning_rate=2e-4,
    warm_up_steps=10,
    pack_length=2048,
    vllm_kv_cache_mb=64,
)


def read(name: str) -> list[dict[str, str]]:
    """Rows with a prompt such as "10+16=", its ground truth and the name of the verifier that compares them."""
    return [json.loads(line) for line in (QUICKSTART / name).read_text().splitlines()]


def score(rows: list[dict[str, str]], groups: list[tuple[Completion, ...]]) -> np.ndarray:
    """The rewards, `[prompts, completions]`: 1 for a right sum, 0 for a wrong one, NaN where the verifier has failed."""
    return np.array(
        [
            [verify(row["dataset"], completion.text, row["ground_truth"]) for completion in group]
            for row, group in zip(rows, groups, strict=True)
        ]
    )


def main() -> None:
    """Train for STEPS steps, then sample the held-out sums."""
    random.seed(0)
    train, held_out = read("train.jsonl"), read("heldout.jsonl")

    # vLLM in a process of its own, which loads the model while this one imports torch and Megatron.
    with mgrpo.start_engines(CONFIG) as engines:
        import torch

        from mgrpo.algo import advantages

        learner = mgrpo.make_learner(CONFIG)
        engines.receive_weights(learner)

        def tokens(rows: list[dict[str, str]]) -> list[np.ndarray]:
            return [np.array(engines.tokenizer.encode(row["prompt"]), np.int32) for row in rows]

        def evaluate(when: str) -> None:
            right = score(held_out, engines.sample(tokens(held_out)))
            print(f"held-out sums: {100 * np.nanmean(right):.1f} % right {when} training")

        evaluate("before")
        for step in range(1, STEPS + 1):
            # Sample, score, and compare each completion with its group.
            rows = random.sample(train, PROMPTS)
            prompts = tokens(rows)
            groups = engines.sample(prompts)
            rewards = score(rows, groups)
            compared = advantages(torch.from_numpy(rewards), normalization="standard")

            # A group whose rewards are all equal teaches nothing, and is left out, as is a completion without a score.
            samples = [
                TrainSample(
                    prompt_tokens=prompts[number],
                    tokens=completion.tokens,
                    loss_mask=completion.loss_mask,
                    rollout_logprobs=completion.logprobs,
                    advantage=advantage,
                    group=number,
                )
                for number, (group, own) in enumerate(zip(groups, compared.tolist(), strict=True))
                for completion, advantage, reward in zip(group, own, rewards[number], strict=True)
                if any(own) and not np.isnan(reward)
            ]

            # Lay them out in packs without padding, take one optimizer step, and give the engines the new weights.
            plan = packing.plan_step(
                samples,
                pack_length=CONFIG.parallel.pack_length,
                dp=1,
                num_mini_batches=1,
                multiple_of=1,
                share_prompts="auto",
            )
            index, (packs,) = packing.to_slices(samples, plan, multiple_of=1, document_multiple_of=1)
            learner.learn(index, packs.filled(), step=step)
            engines.receive_weights(learner)
            if step % 10 == 0:
                trained = f"{len(samples)} of {rewards.size} completions are trained on"
                print(f"step {step}: reward {np.nanmean(rewards):.2f}, {trained}")

        evaluate("after")


if __name__ == "__main__":
    main()
