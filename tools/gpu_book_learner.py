"""Trains by transformers what the mode bf16 of tools/gpu_check_training.py trains: same model, samples and loss.

    python tools/gpu_book_learner.py --folder FOLDER [--device cpu|cuda] [--size large|small|tiny] [--liger] [--compile] [--steps 4]

As TRL does it: padded micro-batches, logits of the completions alone, TRL's log-probabilities where it is installed, and weights
and AdamW's states in bfloat16. --liger takes Liger's RMSNorm, SwiGLU and rotary embedding, --compile compiles the model. The last
line is JSON: losses, tokens per second of the fastest step after the first and the peak of memory, or {"skipped": reason}.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from gpu_check_models import SIZES, WORK, size_for, write_model
from gpu_check_training import made_up_samples, synchronize
from torch import Tensor

from mgrpo.config import Config
from mgrpo.types import TrainSample

MICRO_BATCH = 4
"""Samples of one forward pass."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples with prompts padded on the left and completions on the right, all `[samples, tokens]` or `[samples]`."""

    ids: Tensor
    attention_mask: Tensor
    completions: Tensor
    """Ids of the completions, `[samples, completion tokens]`."""
    mask: Tensor
    """1 where a completion has a token."""
    old_logprobs: Tensor
    advantages: Tensor


def micro_batches(samples: Sequence[TrainSample], device: torch.device) -> list[MicroBatch]:
    """The batch in micro-batches, all of one shape, so that a compiled model is compiled once."""
    prompts, responses = (
        max(len(tokens) for tokens in column)
        for column in ([s.prompt_tokens for s in samples], [s.tokens for s in samples])
    )
    batches = []
    for start in range(0, len(samples), MICRO_BATCH):
        some = samples[start : start + MICRO_BATCH]
        ids = torch.zeros(len(some), prompts + responses, dtype=torch.long)
        attention_mask, old_logprobs = torch.zeros_like(ids), torch.zeros(len(some), responses)
        for row, sample in enumerate(some):
            a, b = prompts - len(sample.prompt_tokens), prompts + len(sample.tokens)
            ids[row, a:prompts] = torch.from_numpy(sample.prompt_tokens)
            ids[row, prompts:b] = torch.from_numpy(sample.tokens)
            attention_mask[row, a:b] = 1
            assert sample.rollout_logprobs is not None
            old_logprobs[row, : len(sample.tokens)] = torch.from_numpy(sample.rollout_logprobs)
        batch = MicroBatch(
            ids=ids,
            attention_mask=attention_mask,
            completions=ids[:, prompts:],
            mask=attention_mask[:, prompts:],
            old_logprobs=old_logprobs,
            advantages=torch.tensor([sample.advantage for sample in some]),
        )
        batches.append(MicroBatch(*(getattr(batch, name).to(device) for name in batch.__slots__)))
    return batches


def token_logprobs() -> tuple[Callable[[Tensor, Tensor], Tensor], str]:
    """TRL's function of logits and ids, or the same in torch, and its name."""
    try:
        from trl.trainer.utils import selective_log_softmax
    except ImportError:

        def selective_log_softmax(logits: Tensor, index: Tensor) -> Tensor:
            rows = zip(logits, index, strict=True)
            return torch.stack([row.log_softmax(-1).gather(-1, ids[:, None])[:, 0] for row, ids in rows])

        return selective_log_softmax, "torch"
    return selective_log_softmax, f"trl {version('trl')}"


def loss_of(logprobs: Tensor, batch: MicroBatch, *, denominator: int, clip: tuple[float, float]) -> Tensor:
    """The clipped surrogate of GRPO, summed over the tokens of the micro-batch and divided by those of the whole batch."""
    ratio = torch.exp(logprobs - batch.old_logprobs)
    advantages = batch.advantages[:, None]
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip[0], 1 + clip[1]) * advantages)
    return -(surrogate * batch.mask).sum() / denominator


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Figures of the training."""
    from transformers import AutoModelForCausalLM

    device = torch.device(args.device)
    size = args.size or size_for(device)
    folder, work, vocab = args.folder / "dense", WORK[size], SIZES[size]["dense"]["vocab_size"]
    if not folder.exists():
        write_model(folder, "dense", size, device)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").to(device)
    model.train()
    if args.compile:
        model.forward = torch.compile(model.forward, dynamic=False)
    config = Config()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.optimizer.learning_rate, weight_decay=0.0, fused=device.type == "cuda"
    )
    samples = made_up_samples(work, vocab)
    batches = micro_batches(samples, device)
    denominator = sum(len(sample.tokens) for sample in samples)
    logprobs_of, logprobs_by = token_logprobs()
    losses, seconds = [], []
    for _ in range(args.steps):
        synchronize(device)
        start = time.perf_counter()
        total = torch.zeros((), device=device)
        for batch in batches:
            kept = batch.completions.shape[1] + 1
            output = model(input_ids=batch.ids, attention_mask=batch.attention_mask, logits_to_keep=kept)
            logprobs = logprobs_of(output.logits[:, :-1], batch.completions).float()
            loss = loss_of(
                logprobs, batch, denominator=denominator, clip=(config.loss.clip_lower, config.loss.clip_higher)
            )
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    # The last token of a sequence predicts nothing.
    tokens = sum(len(sample.prompt_tokens) + len(sample.tokens) - 1 for sample in samples)
    return {
        "logprobs": logprobs_by,
        "losses": losses,
        "tokens": tokens,
        "first_step_s": seconds[0],
        "seconds": min(seconds[1:]),
        "tokens_per_s": tokens / min(seconds[1:]),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
    }


def obstacle(args: argparse.Namespace) -> str:
    """The reason why this machine cannot train so; "" if it can."""
    if args.device == "cpu" and (args.liger or args.compile):
        return "Liger's kernels and the compiled model need a GPU"
    if args.liger:
        try:
            from liger_kernel.transformers import apply_liger_kernel_to_qwen2
        except ImportError as error:
            return f"Liger cannot be imported: {error}"
        # The loss is computed from logits.
        apply_liger_kernel_to_qwen2(fused_linear_cross_entropy=False)
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the models are, or are written")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--size", choices=list(SIZES), help="of the model; default: what the device trains in seconds")
    parser.add_argument("--liger", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    if reason := obstacle(args):
        print(json.dumps({"skipped": reason}))
        sys.exit()
    print(json.dumps(train(args)))


if __name__ == "__main__":
    main()
