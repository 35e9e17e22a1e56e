"""Sampling masks: the sets of tokens that vLLM sampled from, derived from the likeliest tokens or returned by vLLM.

vLLM normalises log-probabilities over the tokens left by top-k, top-p and min-p (`processed_logprobs`) and sets all others to -inf.
The finite ones of a position are its set if they are complete, that is if their probabilities add up to 1.

Above `MOST_KEPT` tokens that would be too many, and vLLM returns masks (`return_sampling_mask`), the finite logits of each
position. Only its V2 model runner supports them, which needs a GPU: tests compare the code for masks with the types of vLLM 0.32.0,
and runs with `top_k` 100 have trained on an H200 and an H100.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from mgrpo.config.schema import MOST_KEPT, Config
from mgrpo.models.hf_config import read_hf_config
from mgrpo.types import KeptTokens

TIES = 16
"""Log-probabilities to request beyond top_k: on a CPU vLLM keeps all tokens that are as likely as the last of the top k, and
half-precision logits of different tokens are often equal."""
MISSING = 1e-4
"""Probability that a set may lack: more than rounding errors, and too little to show in a ratio of policies."""


def num_logprobs(config: Config) -> int:
    """Log-probabilities to request from an engine at each position, besides the sampled token's."""
    if not config.rollout.is_cut or config.rollout.needs_masks:
        return 0
    # vLLM accepts no more than the vocabulary has.
    return int(min(config.rollout.top_k + TIES, read_hf_config(config.model_path)["vocab_size"]))


def kept_args(config: Config) -> dict[str, Any]:
    """Arguments of vLLM for an engine that returns the sets."""
    if config.rollout.needs_masks:
        return {"return_sampling_mask": True}
    return {"max_logprobs": num_logprobs(config)} if config.rollout.is_cut else {}


def kept_problems(config: Config, *, on_gpu: bool) -> Iterator[str]:
    """Problems of returning the sets from engines that a run starts."""
    rollout = config.rollout
    if rollout.needs_masks and not on_gpu:
        yield (
            f"top_k={rollout.top_k} must be at most {MOST_KEPT} with engines on a CPU: of more tokens only engines on GPUs say "
            f"which they sample from; use top_k <= {MOST_KEPT}, 0 to sample from all, or engines on GPUs"
        )
    elif rollout.needs_masks and os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
        yield (
            f"VLLM_USE_V2_MODEL_RUNNER=0 chooses the model runner of vLLM without sampling masks, which top_k={rollout.top_k} "
            f"needs; unset it, or use top_k <= {MOST_KEPT}"
        )


def masked_tokens(sampled: Sequence[int], masks: Sequence[Sequence[int]] | None) -> KeptTokens:
    """The set of each position, which includes the sampled token; empty if the mask lacks that token or is missing.

    Args:
        sampled: `[len]`.
        masks: for each position its tokens, in any order, each once; None: vLLM returned none.
    """
    if masks is None or len(masks) != len(sampled):
        return KeptTokens.none(len(sampled))
    sizes = np.fromiter(map(len, masks), np.int64, len(masks))
    ids = np.fromiter(chain.from_iterable(masks), np.int32, sizes.sum())
    position = np.repeat(np.arange(len(masks)), sizes)
    is_whole = np.zeros(len(masks), np.bool_)
    is_whole[position[ids == np.asarray(sampled, np.int32)[position]]] = True
    return KeptTokens.of_sizes(ids[is_whole[position]], sizes * is_whole)


def kept_tokens(sampled: np.ndarray, ids: np.ndarray, logprobs: np.ndarray) -> KeptTokens:
    """The set of each position, which includes the sampled token; empty if incomplete.

    Args:
        sampled: `[len]`.
        ids, logprobs: `[len, num_logprobs]`, of the likeliest tokens, each once; rows are padded with values that are not finite.
    """
    is_kept = np.isfinite(logprobs)
    mass = np.exp(logprobs, where=is_kept, out=np.zeros(logprobs.shape, np.float64)).sum(axis=1)
    is_whole = (np.abs(mass - 1) < MISSING) & (is_kept & (ids == sampled[:, None])).any(axis=1)
    is_kept &= is_whole[:, None]
    return KeptTokens.of_sizes(ids[is_kept].astype(np.int32), is_kept.sum(axis=1))
