"""Forms of a worker's answers, which are untrusted: tools run in its process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mgrpo.environments.environment import fits_float32
from mgrpo.processes.json_lines import Message

Claim = Callable[[Any], bool]


def has_form(question: Message, answer: Message) -> bool:
    """True for a valid answer to this request."""
    ask = question["ask"]
    if ask not in _FORMS:
        return True
    if "error" in answer:
        return _has({"error": _is_text, "timed_out": _is_bool}, answer)
    form = _RETURNED if ask == "resume" and "returned" in answer else _FORMS[ask]
    return _has(form, answer) and (ask != "step" or len(answer["answers"]) == len(question["calls"]))


def _has(form: Mapping[str, Claim], value: Any) -> bool:
    """True for an object with these fields, in which `is_stuck` is a bool or missing."""
    if not isinstance(value, dict) or not _is_bool(value.get("is_stuck", False)):
        return False
    return all(name in value and claim(value[name]) for name, claim in form.items())


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and fits_float32(value)


def _is_reward(value: Any) -> bool:
    return value is None or _is_number(value)


def _are_metrics(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_answers(value: Any) -> bool:
    return isinstance(value, list) and all(_has(_ANSWERED, each) for each in value)


_OBSERVATION: dict[str, Claim] = {
    "text": _is_text,
    "reward": _is_number,
    "done": _is_bool,
    "failed": _is_bool,
    "metrics": _are_metrics,
}
_ANSWERED: dict[str, Claim] = {
    "observation": lambda value: _has(_OBSERVATION, value) and len(value) == len(_OBSERVATION),
    "seconds": _is_number,
    "timed_out": _is_bool,
}
_RETURNED: dict[str, Claim] = {"returned": _is_reward, "metrics": _are_metrics, "shown": _is_object}
_FORMS: dict[str, dict[str, Claim]] = {
    "load": {"description": _is_object},
    "reset": {
        "opening": _is_text,
        "metrics": _are_metrics,
        "active": _are_names,
        "acts": _is_bool,
        "tells": _is_bool,
        "ends": _is_bool,
    },
    "step": {"answers": _are_answers},
    "resume": {"wish": _is_object},
    "run": {"ended": _is_text, "output": _is_text, "reward": _is_reward, "metrics": _are_metrics},
    "ending": {"reward": _is_reward, "snapshot": _is_object},
    "end": {},
    "close": {},
    "stuck": {"stuck": lambda value: isinstance(value, list)},
}
"""Forms by the kind of the request."""
