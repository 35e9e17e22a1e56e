"""The answers that a row's label accepts, as texts: one, or several, any of which is right."""

from __future__ import annotations

import json

from mgrpo.rewards.verifier import shown, single, text_of


def accepted_texts(ground_truth: object) -> list[str]:
    """The label, or each label of a list, as text, without empty ones: an empty answer is never right.

    Raises:
        ValueError: a label is neither text nor a number, or all of them are empty.
    """
    label = single(ground_truth)
    texts = [text_of(accepted) for accepted in label] if isinstance(label, list) else [text_of(label)]
    filled = [text for text in texts if text.strip()]
    if not filled:
        raise ValueError(f"ground_truth={shown(ground_truth)} is empty; give at least one accepted answer")
    return filled


def accepted_texts_of_json(ground_truth: object) -> list[str]:
    """Accepted texts, as `accepted_texts`, of a label that may be JSON text: '["Paris", "City of Paris"]', or '"Paris"'.

    Text that is not JSON is taken as it is; a number or a word of JSON both as it is and as JSON reads it ("1e3" is both 1e3
    and 1000.0).
    """
    label = single(ground_truth)
    if not isinstance(label, str):
        return accepted_texts(label)
    try:
        value = json.loads(label)
    except (ValueError, RecursionError):
        return accepted_texts(label.strip())
    if isinstance(value, dict):
        raise ValueError(f"ground_truth={shown(label)} is a JSON object; write a text or a list of texts")
    if isinstance(value, (list, str)):
        return accepted_texts(value)
    return [label.strip(), str(value)]
