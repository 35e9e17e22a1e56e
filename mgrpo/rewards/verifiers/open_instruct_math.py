"""Mathematical answers as Open Instruct's `math` reads them, several candidates at a time: `math_open_instruct`."""

from __future__ import annotations

from typing import ClassVar

from mgrpo.rewards.verifier import Answer, Verifier, has_open_thought
from mgrpo.rewards.verifiers.answers.expressions import is_same_value, warm_up
from mgrpo.rewards.verifiers.answers.latex_strings import is_same_string, minerva_form
from mgrpo.rewards.verifiers.answers.places import boxes, last_formula, minerva_answer, tagged
from mgrpo.rewards.verifiers.mathematics import judged, labels_of, note_of, with_decimal_points


class MathOpenInstruct(Verifier):
    r"""1.0 if any candidate in the completion is the label, or any of several labels.

    Candidates are the last `\boxed{...}` and Minerva's sentence, else the last `<answer>...</answer>`, else the text between the last two dollar signs, else the
    whole text; the sentence and the whole text both as written and in Minerva's normal form. Two are equal if
    Hendrycks' normal forms are, or by math-verify. One completion may so be right for several labels.
    """

    name: ClassVar[str] = "math_open_instruct"

    @classmethod
    def check_label(cls, ground_truth: object) -> str:
        return note_of(labels_of(ground_truth))

    def score(self, answer: Answer) -> float:
        labels = labels_of(answer.ground_truth)
        if has_open_thought(answer.completion):
            return 0.0
        candidates = _candidates(answer.completion)
        return judged(
            labels,
            lambda label: any(_is_same(candidate, label) for candidate in candidates),
            timeout_s=self.settings.verifier_timeout,
        )

    def warm_up(self) -> None:
        warm_up()


def _candidates(text: str) -> list[str]:
    sentence = minerva_answer(text)
    found = [span.content for span in boxes(text)[-1:]]
    if sentence is not None:
        found += [minerva_form(sentence), sentence]
    if not found and (tags := tagged(text)):
        found = [tags.content]
    if not found:
        formula = last_formula(text)
        found = [minerva_form(text), text] if formula is None else [minerva_form(formula), formula]
    return [_bare(candidate) for candidate in found]


def _is_same(candidate: str, label: str) -> bool:
    candidate, label = with_decimal_points(candidate, _bare(label))
    return is_same_string(candidate, label) or is_same_value(candidate, label)


def _bare(expression: str) -> str:
    """The expression without the dollar signs and white space around it, and without punctuation or space after it."""
    return expression.lstrip("$ \t\r\n").rstrip("\\$.,; \t\r\n")
