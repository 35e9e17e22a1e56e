"""Agreement of the trained model with transformers: logits of random tokens, in float32.

Both models are built whole, one after the other and always on the CPU, so that they differ only by rounding.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mgrpo import packing
from mgrpo.layout import Layout
from mgrpo.model_io.model_reader import model_reader
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.types import TrainSample

NUM_SEQUENCES, NUM_TOKENS = 4, 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The differences between the logits of two models."""

    rows: int
    largest: float
    """Largest absolute logit of transformers."""
    difference: float
    """Largest absolute difference."""

    def within(self, tolerance: float) -> bool:
        """True if the difference is at most that share of the largest logit, or that much where logits are small."""
        return self.difference <= tolerance * max(self.largest, 1.0)


def compare_logits(model: Path, hf: Path) -> Agreement:
    """Logits of the model in folder `model`, as training builds it, and those of transformers from folder `hf`.

    Args:
        model: a Hugging Face folder or a Megatron folder.
    """
    # Megatron's attention on GPUs takes no float32. CUDA reads this when it is first used, after the imports below.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    samples = _random_samples(read_hf_config(hf)["vocab_size"])
    expected = _transformers_logits(hf, samples)
    difference = largest = 0.0
    for ours, theirs in zip(_own_logits(model, samples), expected, strict=True):
        difference = max(difference, float((ours - theirs).abs().nan_to_num(torch.inf).max()))
        largest = max(largest, float(theirs.abs().max()))
    return Agreement(rows=sum(map(len, expected)), largest=largest, difference=difference)


def _random_samples(vocab: int) -> list[TrainSample]:
    """Every token of a row except the first is a response: only responses have logits."""
    rng = np.random.default_rng(0)
    rows = rng.integers(0, vocab, (NUM_SEQUENCES, NUM_TOKENS)).astype(np.int32)
    return [
        TrainSample(
            prompt_tokens=row[:1],
            tokens=row[1:],
            loss_mask=np.ones(len(row) - 1, dtype=bool),
            rollout_logprobs=np.zeros(len(row) - 1, dtype=np.float32),
            advantage=0.0,
            group=number,
        )
        for number, row in enumerate(rows)
    ]


@torch.no_grad()
def _transformers_logits(folder: Path, samples: list[TrainSample]) -> list[torch.Tensor]:
    """Logits of each sample, `[responses, vocab]`."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    settings = dict(read_hf_config(folder))
    # By its class: for Kimi-K2's checkpoints transformers has the architecture, DeepSeek's, and not the model_type.
    (architecture,) = settings["architectures"]
    kind: Any = getattr(transformers, architecture)
    config = kind.config_class.from_dict(settings | {"model_type": kind.config_class.model_type})
    model, loading = kind.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    missing = sorted(loading["missing_keys"]) or sorted(map(str, loading["mismatched_keys"]))
    if missing:
        raise ValueError(f"transformers finds no weights for {missing[0]} in {folder}")
    model.eval()
    rows = [np.concatenate((sample.prompt_tokens, sample.tokens)) for sample in samples]
    return [model(torch.from_numpy(row).long()[None]).logits[0, :-1].clone() for row in rows]


def _own_logits(folder: Path, samples: list[TrainSample]) -> list[torch.Tensor]:
    """Logits of each sample, `[responses, vocab]`, from one pack."""
    from mgrpo.parallel import backend

    backend.install()
    from mgrpo.policy.model import ResponseModel
    from mgrpo.policy.policy import Policy

    ((packs,),) = packing.plan_step(
        samples, pack_length=len(samples) * NUM_TOKENS, dp=1, num_mini_batches=1, multiple_of=1, share_prompts=False
    )
    shape = shape_of(read_hf_config(folder))
    backend.init_process_group(rank=0, world_size=1, timeout_minutes=10)
    try:
        policy = Policy(shape, Layout(world_size=1), dtype=torch.float32, seed=0, temperature=1.0)
        policy.load(model_reader(folder, shape))
        (microbatch,) = policy.microbatches([packing.assemble(samples, documents) for documents in packs])
        (model,) = policy.chunks
        assert isinstance(model, ResponseModel)
        seen: list[torch.Tensor] = []
        model.output_layer.register_forward_hook(lambda layer, args, output: seen.append(model.capped(output[0][:, 0])))
        policy.score([microbatch], "old")
    finally:
        backend.leave_process_groups()
    cuts = microbatch.pack.response_cu_seqlens.tolist()
    by_sample = dict(zip(microbatch.pack.samples.tolist(), itertools.pairwise(cuts), strict=True))
    return [seen[0][slice(*by_sample[number]), : shape.vocab] for number in range(len(samples))]
