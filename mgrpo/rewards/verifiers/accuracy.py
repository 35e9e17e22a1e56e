"""The comparison of TRL's accuracy functions: `trl_accuracy`."""

from __future__ import annotations

import functools
import logging
from typing import ClassVar

from mgrpo.rewards.verifier import Answer, Verifier, shown, text_of


class TRLAccuracy(Verifier):
    """1.0 if math-verify finds the solution's value in the completion, read as LaTeX with `\\boxed` first."""

    name: ClassVar[str] = "trl_accuracy"

    def score(self, answer: Answer) -> float:
        import math_verify

        solution = text_of(answer.ground_truth)
        gold = _parsed_solution(solution)
        if not gold:
            raise ValueError(f"solution={shown(solution)} holds nothing that math-verify can read")
        found = math_verify.parse(
            answer.completion,
            extraction_config=[_latex_only()],
            extraction_mode="first_match",
            parsing_timeout=None,
        )
        return float(math_verify.verify(gold, found, timeout_seconds=None))

    def warm_up(self) -> None:
        # It warns on every process start that its timeouts are off, which is intended here: the worker has one.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self.score(Answer(completion=r"\boxed{0.5}", ground_truth=r"$\frac{1}{2}$"))


@functools.lru_cache(maxsize=1024)
def _parsed_solution(solution: str) -> list:
    """Cached, because a whole group shares the solution."""
    import math_verify

    return math_verify.parse(solution, parsing_timeout=None)


@functools.lru_cache(maxsize=1)
def _latex_only() -> object:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig

    return LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )
