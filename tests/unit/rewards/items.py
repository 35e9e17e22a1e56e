"""Answers to score, in one short call."""

from __future__ import annotations

from mgrpo.rewards.verifier import Answer, Item


def item(verifier: str, completion: str, ground_truth: object, prompt: str = "", num_tokens: int | None = None) -> Item:
    return Item(
        verifier, Answer(completion=completion, ground_truth=ground_truth, prompt=prompt, num_tokens=num_tokens)
    )
