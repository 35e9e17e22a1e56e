"""Python interface to the compiled ops in csrc/: argument checks, autograd, and the reference that runs without them.

Imports torch, and nothing from the rest of the project. Life of an op: csrc/README.md.
"""

from mgrpo.ops.compiled import build_info
from mgrpo.ops.kept_tokens import KeptSets
from mgrpo.ops.likeliest import linear_likeliest, token_likeliest
from mgrpo.ops.linear import linear_logits, linear_logprobs
from mgrpo.ops.logprobs import token_logprobs
from mgrpo.ops.packed_loss import policy_loss, segment_mean, segment_sums
from mgrpo.ops.reference_loss import per_token
from mgrpo.ops.settings import COLUMNS, LossSettings, SurrogateFunction

__all__ = [
    "COLUMNS",
    "KeptSets",
    "LossSettings",
    "SurrogateFunction",
    "build_info",
    "linear_likeliest",
    "linear_logits",
    "linear_logprobs",
    "per_token",
    "policy_loss",
    "segment_mean",
    "segment_sums",
    "token_likeliest",
    "token_logprobs",
]
