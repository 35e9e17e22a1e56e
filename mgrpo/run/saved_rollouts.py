"""Sampled groups as arrays and JSON, for the state of a run, and back."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from mgrpo.types import Completion, Prompt, RolloutGroup

_ARRAYS = ("tokens", "logprobs", "policy_versions")


def packed(groups: Mapping[int, RolloutGroup]) -> tuple[dict[int, dict[str, Any]], dict[str, np.ndarray]]:
    """For each group a record in JSON of where its completions lie in the arrays, end to end.

    The arrays are those of `Completion` by name, and `texts` uint8, in UTF-8.
    """
    records: dict[int, dict[str, Any]] = {}
    completions = [completion for group in groups.values() for completion in group.completions]
    texts = [completion.text.encode() for completion in completions]
    ends = iter(itertools.accumulate(len(completion.tokens) for completion in completions))
    text_ends = iter(itertools.accumulate(map(len, texts)))
    start = text_start = 0
    for number, group in groups.items():
        size = len(group.completions)
        cuts = [start, *itertools.islice(ends, size)]
        text_cuts = [text_start, *itertools.islice(text_ends, size)]
        reasons = [completion.finish_reason for completion in group.completions]
        records[number] = {"cuts": cuts, "text_cuts": text_cuts, "finish_reasons": reasons}
        start, text_start = cuts[-1], text_cuts[-1]
    arrays = {name: np.concatenate([getattr(c, name) for c in completions]) for name in _ARRAYS if completions}
    return records, arrays | ({"texts": np.array(bytearray(b"".join(texts)))} if completions else {})


def unpacked(prompt: Prompt, record: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> RolloutGroup:
    """A group from its record and the arrays."""
    texts = arrays.get("texts", np.zeros(0, np.uint8))
    cuts, text_cuts = itertools.pairwise(record["cuts"]), itertools.pairwise(record["text_cuts"])
    return RolloutGroup(
        prompt=prompt,
        completions=tuple(
            Completion(
                tokens=arrays["tokens"][a:b],
                logprobs=arrays["logprobs"][a:b],
                policy_versions=arrays["policy_versions"][a:b],
                finish_reason=reason,
                text=texts[c:d].tobytes().decode(),
            )
            for (a, b), (c, d), reason in zip(cuts, text_cuts, record["finish_reasons"], strict=True)
        ),
    )
