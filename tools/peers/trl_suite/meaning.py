"""Which of TRL's tests can say something about mgrpo.trl: those whose source does not need what only TRL's trainer has."""

from __future__ import annotations

import re

REASONS = {
    "tests transformers alone": r"class TestTransformersContinuousBatchingContract",
    "vision-language models, which are not supported": r"class TestGRPOTrainerVLM|SmolVLM",
    "Liger's kernels, which are not used": r"use_liger_kernel=True",
    "the completions are written in place of transformers' generate; here vLLM samples": (
        r"""patch\("transformers[.\w]*\.generate"\)|patch\.object\(trainer\.model, "generate\""""
    ),
    "calls, reads or replaces inner parts of TRL's trainer": (
        r"class TestGetHighEntropyMask|class TestGRPORolloutDispatch|\b(?:GRPOT|t)rainer\._\w+"
        r"|trainer\.training_step|\.get_(?:train|eval)_dataloader|GRPOTrainer\.get_off_policy_mask"
    ),
}
"""Why a test says nothing, and what its source has then."""


def why_not(source: str, *, class_name: str) -> str | None:
    """Why a test cannot say anything here; None where it can.

    Args:
        source: of the test function, with its decorators.
    """
    text = f"class {class_name}\n{source}"
    return next((reason for reason, pattern in REASONS.items() if re.search(pattern, text)), None)
