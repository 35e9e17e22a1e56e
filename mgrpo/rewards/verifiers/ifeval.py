"""Constraints on the form of an answer: `ifeval`, `ifeval_old`."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from typing import ClassVar

from mgrpo.rewards.constraints.constraint_table import checker_of
from mgrpo.rewards.constraints.label_arguments import bound
from mgrpo.rewards.constraints.languages import language_of
from mgrpo.rewards.constraints.old import OLD_FUNCTIONS
from mgrpo.rewards.constraints.scoring import bound_instructions, kept
from mgrpo.rewards.constraints.word_constraints import treebank_tokens
from mgrpo.rewards.verifier import Answer, Verifier, shown, without_thinking


class IFEval(Verifier):
    """Share of the label's constraints that the answer keeps.

    The label is `[{"instruction_id": [...], "kwargs": [...]}]` as text or as JSON, with the names of IFEval, Open
    Instruct and IFBench. `"mode": "loose"` in it selects IFEval's loose scoring.
    """

    name: ClassVar[str] = "ifeval"

    @classmethod
    def check_label(cls, ground_truth: object) -> str:
        _constraints(ground_truth)
        return ""

    def score(self, answer: Answer) -> float:
        checks, is_loose = _constraints(answer.ground_truth)
        passed = kept(checks, without_thinking(answer.completion), loose=is_loose)
        return sum(passed) / max(len(passed), 1)

    def warm_up(self) -> None:
        treebank_tokens("Warm up.")
        _load_language_profiles()


class IFEvalOld(Verifier):
    """1.0 if the answer passes the one function that the label names: `{"func_name": ..., arguments}`.

    An answer without a letter or digit passes none.
    """

    name: ClassVar[str] = "ifeval_old"

    @classmethod
    def check_label(cls, ground_truth: object) -> str:
        _old_constraint(ground_truth)
        return ""

    def score(self, answer: Answer) -> float:
        check = _old_constraint(answer.ground_truth)
        (passed,) = kept([check], without_thinking(answer.completion), loose=False)
        return float(passed)

    def warm_up(self) -> None:
        _load_language_profiles()


def _constraints(ground_truth: object) -> tuple[list[Callable[[str], bool]], bool]:
    """The label's constraints, and True if its scoring is loose."""
    label = _record(ground_truth)
    names = label.get("instruction_id", label.get("instruction_id_list"))
    checks = bound_instructions(names, label.get("kwargs"))
    mode = label.get("mode", "strict")
    if mode not in ("strict", "loose"):
        raise ValueError(f"mode={shown(mode)} in the label is neither strict nor loose")
    return checks, mode == "loose"


def _old_constraint(ground_truth: object) -> Callable[[str], bool]:
    label = _record(ground_truth)
    name = label.get("func_name")
    arguments = {key: value for key, value in label.items() if key != "func_name" and value is not None}
    return bound(str(name), checker_of(name, OLD_FUNCTIONS), arguments)


def _record(ground_truth: object) -> Mapping[str, object]:
    """The label's mapping, which may be text, and may be the first element of lists around it."""
    value = ground_truth
    for _ in range(8):
        if isinstance(value, Mapping):
            return value
        if isinstance(value, str):
            value = _literal(value)
        elif isinstance(value, (list, tuple)) and value:
            value = value[0]
        else:
            break
    raise ValueError(f"ground_truth={shown(ground_truth)} holds no mapping; write the constraint as JSON")


def _literal(text: str) -> object:
    """The value of JSON text or of a Python literal, the form of these labels in Open Instruct's data sets."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as err:
        raise ValueError(f"ground_truth={shown(text)} is neither JSON nor a Python literal") from err


def _load_language_profiles() -> None:
    try:
        language_of("Warm up.")
    except ValueError:
        # Without langdetect all constraints except those on the language work; their error names the missing package.
        return
