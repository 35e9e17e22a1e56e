"""What judges cost: tokens, and dollars by the prices of known models."""

from __future__ import annotations

import re
from dataclasses import dataclass

DOLLARS_PER_MILLION_TOKENS = {
    "claude-3-7-sonnet-20250219": (3.0, 15.0),
    "claude-sonnet": (3.0, 15.0),
    "deepseek-chat": (0.07, 1.0),
    "deepseek-reasoner": (0.14, 2.0),
    "gpt-3.5-turbo": (1.5, 2.0),
    "gpt-4": (30.0, 60.0),
    "gpt-4-1106-preview": (10.0, 30.0),
    "gpt-4.1": (2.0, 8.0),
    "gpt-4.1-mini": (0.4, 1.6),
    "gpt-4o": (2.5, 10.0),
    "gpt-4o-mini": (0.15, 0.6),
    "minimax-m2.7": (0.3, 1.2),
    "minimax-m2.7-highspeed": (0.6, 2.4),
    "minimax-m3": (0.6, 2.4),
    "o3": (10.0, 40.0),
}
"""Prompt and completion; a model that is not listed costs nothing, as one's own servers do."""

_SUFFIX = re.compile(r"(-standard|-\d{4}-\d{2}-\d{2})+$")


@dataclass(slots=True, kw_only=True)
class Usage:
    """Sums since the start over every reply, those without a verdict too: they are billed like the others."""

    requests: int = 0
    """Sent, with or without a reply."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    dollars: float = 0.0

    def add(self, model: str, reported: object) -> None:
        """Count the `usage` field of a reply; servers that report none add nothing."""
        if not isinstance(reported, dict):
            return
        prompt, completion = (_count(reported.get(name)) for name in ("prompt_tokens", "completion_tokens"))
        self.prompt_tokens += prompt
        self.completion_tokens += completion
        prompt_price, completion_price = prices(model)
        self.dollars += (prompt_price * prompt + completion_price * completion) / 1e6


def prices(model: str) -> tuple[float, float]:
    """Dollars per million tokens of prompt and of completion; Azure's -standard and a release date are left out."""
    name = model.rpartition("/")[2].lower()
    free = (0.0, 0.0)
    return DOLLARS_PER_MILLION_TOKENS.get(name) or DOLLARS_PER_MILLION_TOKENS.get(_SUFFIX.sub("", name), free)


def _count(value: object) -> int:
    return max(value, 0) if isinstance(value, int) and not isinstance(value, bool) else 0
