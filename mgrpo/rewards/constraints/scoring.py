"""The constraints of a label that a response keeps, strictly or loosely."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mgrpo.rewards.constraints.constraint_table import CONSTRAINTS, checker_of
from mgrpo.rewards.constraints.label_arguments import bound
from mgrpo.rewards.constraints.word_constraints import says_something
from mgrpo.rewards.verifier import shown


def score_instructions(
    instruction_ids: Sequence[str],
    kwargs: Sequence[Mapping[str, object] | None],
    response: str,
    *,
    loose: bool = False,
) -> list[bool]:
    """True for each constraint that the response keeps.

    Args:
        instruction_ids: names of constraints of IFEval, Open Instruct or IFBench.
        kwargs: arguments of each, in the same order; None for no argument.
        loose: also try the response without its first line, its last, both, and all of these without asterisks.
    """
    return kept(bound_instructions(instruction_ids, kwargs), response, loose=loose)


def bound_instructions(instruction_ids: object, kwargs: object) -> list[Callable[[str], bool]]:
    """The constraints of a label with their arguments; ValueError if one is unknown or an argument is not right."""
    if not isinstance(instruction_ids, (list, tuple)) or not isinstance(kwargs, (list, tuple)):
        raise ValueError(
            f"instruction_id={shown(instruction_ids)} and kwargs={shown(kwargs)} must be lists, with one entry per constraint"
        )
    if len(instruction_ids) != len(kwargs):
        raise ValueError(f"{len(instruction_ids)} constraints have {len(kwargs)} kwargs; write one for each")
    checks: list[Callable[[str], bool]] = []
    for name, given in zip(instruction_ids, kwargs, strict=True):
        if given is not None and not isinstance(given, Mapping):
            raise ValueError(f"{name}: kwargs={shown(given)} is not a mapping of arguments")
        arguments = {key: value for key, value in (given or {}).items() if value is not None}
        checks.append(bound(name, checker_of(name, CONSTRAINTS), arguments))
    return checks


def kept(checks: Sequence[Callable[[str], bool]], response: str, *, loose: bool) -> list[bool]:
    """True for each check that the response, or one of its variants, passes; a variant without letter or digit passes none.

    A check that takes too long is not passed: it is the response that makes a label's regular expression slow.
    """
    variants = [variant for variant in (_loose_variants(response) if loose else [response]) if says_something(variant)]
    return [_passes(check, variants) for check in checks]


def _passes(check: Callable[[str], bool], variants: Sequence[str]) -> bool:
    try:
        return any(check(variant) for variant in variants)
    except TimeoutError:
        return False


def _loose_variants(response: str) -> list[str]:
    lines = response.split("\n")
    shortened = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    variants = [response, *shortened]
    return list(dict.fromkeys([*variants, *(variant.replace("*", "") for variant in variants)]))
