"""The sets of tokens that vLLM sampled from, read off the log-probabilities of the likeliest tokens.

vLLM normalises them over what its cuts have left (`processed_logprobs`), all else has -inf: those of a position that are finite
are its set, if they are all of them, that is if their probabilities add up to 1.
"""

from __future__ import annotations

import numpy as np

from mgrpo.config.schema import Config
from mgrpo.models.family import read_hf_config
from mgrpo.types import KeptTokens

TIES = 16
"""Log-probabilities that are asked for beyond top_k: on a CPU vLLM keeps all tokens that are as likely as the last of the top k,
and half-precision logits of different tokens are often equal."""
MISSING = 1e-4
"""Probability that a set may lack: more than rounding, and less than anything that a ratio of policies would show."""


def num_logprobs(config: Config) -> int:
    """Of each position, what an engine is asked for beside the sampled token's."""
    if not config.rollout.is_cut:
        return 0
    # vLLM cannot look for more than there are.
    return int(min(config.rollout.top_k + TIES, read_hf_config(config.model.path)["vocab_size"]))


def kept_tokens(sampled: np.ndarray, ids: np.ndarray, logprobs: np.ndarray) -> KeptTokens:
    """The set of each position, with the sampled token in it; empty where it is not whole.

    Args:
        sampled: `[len]`.
        ids, logprobs: `[len, num_logprobs]`, of the likeliest tokens, each once; what is not finite fills up.
    """
    is_kept = np.isfinite(logprobs)
    mass = np.exp(logprobs, where=is_kept, out=np.zeros(logprobs.shape, np.float64)).sum(axis=1)
    is_whole = (mass > 1 - MISSING) & (is_kept & (ids == sampled[:, None])).any(axis=1)
    is_kept &= is_whole[:, None]
    return KeptTokens.of_sizes(ids[is_kept].astype(np.int32), is_kept.sum(axis=1))
