"""Texts compared word by word: `flan`, `string_matcher`, `string_f1`, `puzzle`, `re_search_f1`, `re_search`.

Texts are compared in SQuAD's normal form (Rajpurkar et al., 2016): lower case, without ASCII punctuation, without the
words a, an and the, one space between words.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable
from typing import ClassVar

from mgrpo.rewards.verifier import Answer, Verifier, has_open_thought, without_thinking
from mgrpo.rewards.verifiers.labels import accepted_texts, accepted_texts_of_json

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SIGNIFICANT = re.compile(
    r"[-+](?=[\d.])(?<!\w.)|(?<=\d)[-+*/^.:](?=[\d.])|(?<!\w)\.(?=\d)|(?<=\d)[%!]|[$](?=[\d.])|(?<=\w)[+#]|[<>=~|^*\\]"
)
"""A sign, a point or an operator."""
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_FINISH = re.compile(r"<finish>", re.IGNORECASE)
_FINISH_END = re.compile(r"</finish>", re.IGNORECASE)


class _InNormalForm(Verifier):
    """Compares in SQuAD's normal form."""

    @staticmethod
    def accepted(ground_truth: object) -> list[str]:
        """The texts of a label, any of which is right."""
        return accepted_texts(ground_truth)

    @classmethod
    def check_label(cls, ground_truth: object) -> str:
        if not any(_SIGNIFICANT.search(label) for label in cls.accepted(ground_truth)):
            return ""
        return "lose a sign, a point or an operator in SQuAD's normal form, where -5 is 5, 3.14 is 314 and C++ is C"


class Flan(_InNormalForm):
    """1.0 if the text after the last "The answer is: " (else the whole text) is the label."""

    name: ClassVar[str] = "flan"

    def score(self, answer: Answer) -> float:
        labels = self.accepted(answer.ground_truth)
        if has_open_thought(answer.completion):
            return 0.0
        return _exact_match(answer.completion.rpartition("The answer is: ")[2], labels)


class StringMatcher(_InNormalForm):
    """1.0 if the text after the last `<answer>`, up to its `</answer>`, is the label; 0.0 without either tag."""

    name: ClassVar[str] = "string_matcher"

    def score(self, answer: Answer) -> float:
        labels = self.accepted(answer.ground_truth)
        _, start, rest = answer.completion.rpartition("<answer>")
        text, end, _ = rest.partition("</answer>")
        is_stated = start and end and not has_open_thought(answer.completion)
        return _exact_match(text, labels) if is_stated else 0.0


class StringF1(_InNormalForm):
    """F1 of the answer's words against the label's, the best of several labels; thinking does not count."""

    name: ClassVar[str] = "string_f1"

    def score(self, answer: Answer) -> float:
        return _best_f1(without_thinking(answer.completion), self.accepted(answer.ground_truth))


class Puzzle(_InNormalForm):
    """1.0 if the whole answer after thinking is the label."""

    name: ClassVar[str] = "puzzle"

    def score(self, answer: Answer) -> float:
        return _exact_match(without_thinking(answer.completion), self.accepted(answer.ground_truth))


class _OfSearches(_InNormalForm):
    """Labels of the data sets of ReSearch and Search-R1, which may be JSON text."""

    @staticmethod
    def accepted(ground_truth: object) -> list[str]:
        return accepted_texts_of_json(ground_truth)


class ReSearchF1(_OfSearches):
    """F1 of the text after the last `<finish>`, up to `</finish>`; 0.1 for the tags alone (ReSearch, Chen et al., 2025)."""

    name: ClassVar[str] = "re_search_f1"

    def score(self, answer: Answer) -> float:
        labels = self.accepted(answer.ground_truth)
        if "<finish>" not in answer.completion and "</finish>" not in answer.completion:
            return 0.0
        text = answer.completion.rpartition("<finish>")[2].partition("</finish>")[0]
        if not text or has_open_thought(answer.completion):
            return 0.0
        return _best_f1(text, labels) or 0.1


class ReSearch(_OfSearches):
    """1.0 if the text between the first `<finish>` and the next `</finish>`, in any case, is a label (Search-R1)."""

    name: ClassVar[str] = "re_search"

    def score(self, answer: Answer) -> float:
        labels = self.accepted(answer.ground_truth)
        start = _FINISH.search(answer.completion)
        end = start and _FINISH_END.search(answer.completion, start.end())
        text = answer.completion[start.end() : end.start()].strip() if start and end else ""
        return _exact_match(text, labels) if text and not has_open_thought(answer.completion) else 0.0


def normal_form(text: str) -> str:
    """SQuAD's normal form of a text."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _exact_match(text: str, labels: Iterable[str]) -> float:
    normal = normal_form(text)
    return float(any(normal == normal_form(label) and (normal or _rest(text) == _rest(label)) for label in labels))


def _rest(text: str) -> str:
    """The text to compare where the normal form leaves nothing: the choice "A" is "(a)", but it is not "" or "the"."""
    text = text.lower()
    return " ".join(text.translate(_PUNCTUATION).split()) or "".join(text.split())


def _best_f1(text: str, labels: Iterable[str]) -> float:
    words = Counter(normal_form(text).split())
    return max(_f1(words, Counter(normal_form(label).split())) for label in labels)


def _f1(words: Counter[str], expected: Counter[str]) -> float:
    num_common = (words & expected).total()
    if num_common == 0:
        return 0.0
    precision, recall = num_common / words.total(), num_common / expected.total()
    return 2 * precision * recall / (precision + recall)
