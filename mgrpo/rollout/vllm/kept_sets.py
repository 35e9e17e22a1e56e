"""The sets of tokens that vLLM sampled from, read off the log-probabilities of the likeliest tokens, or off its sampling masks.

vLLM normalises log-probabilities over the tokens that its cuts have left (`processed_logprobs`) and gives all others -inf. The finite
ones of a position are its set if they are complete, that is if their probabilities add up to 1.

Above `MOST_KEPT` tokens they would be too many, and vLLM is asked for masks (`return_sampling_mask`), the finite logits of each
position. Only its V2 model runner has them, which needs a GPU: tests compare the code for masks with the types of vLLM 0.32.0,
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
"""Log-probabilities that are asked for beyond top_k: on a CPU vLLM keeps all tokens that are as likely as the last of the top k,
and half-precision logits of different tokens are often equal."""
MISSING = 1e-4
"""Probability that a set may lack: more than rounding errors, and too little to show in a ratio of policies."""


def num_logprobs(config: Config) -> int:
    """Log-probabilities that an engine is asked for at each position, beside the sampled token's."""
    if not config.rollout.is_cut or config.rollout.needs_masks:
        return 0
    # vLLM cannot look for more than there are.
    return int(min(config.rollout.top_k + TIES, read_hf_config(config.model_path)["vocab_size"]))


def kept_args(config: Config) -> dict[str, Any]:
    """Arguments of vLLM with which an engine returns the sets."""
    if config.rollout.needs_masks:
        return {"return_sampling_mask": True}
    return {"max_logprobs": num_logprobs(config)} if config.rollout.is_cut else {}


def kept_problems(config: Config, *, on_gpu: bool) -> Iterator[str]:
    """Sentences about why engines that a run starts cannot return the sets."""
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
    """The set of each position, with the sampled token in it; empty where the masks do not say it.

    Args:
        sampled: `[len]`.
        masks: for each position the tokens that were left, in any order, each once; None: vLLM returned none.
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
    """The set of each position, with the sampled token in it; empty where it is not whole.

    Args:
        sampled: `[len]`.
        ids, logprobs: `[len, num_logprobs]`, of the likeliest tokens, each once; rows are filled up with values that are not finite.
    """
    is_kept = np.isfinite(logprobs)
    mass = np.exp(logprobs, where=is_kept, out=np.zeros(logprobs.shape, np.float64)).sum(axis=1)
    is_whole = (np.abs(mass - 1) < MISSING) & (is_kept & (ids == sampled[:, None])).any(axis=1)
    is_kept &= is_whole[:, None]
    return KeptTokens.of_sizes(ids[is_kept].astype(np.int32), is_kept.sum(axis=1))
