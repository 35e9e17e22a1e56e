"""Constraints on the layout and markup of a response (IFEval and Open Instruct).

Where a regular expression would try again from every bracket or line of a long response, lines are searched instead:
every checker takes time in proportion to the response.
"""

from __future__ import annotations

import json
import re

from mgrpo.rewards.constraints.label_arguments import Count, Relation, Text, Whole, holds
from mgrpo.rewards.constraints.languages import checked_language, language_of
from mgrpo.rewards.constraints.patterns import compiled
from mgrpo.rewards.constraints.sentences import split_sentences
from mgrpo.rewards.constraints.word_constraints import says_something, treebank_tokens

_OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def placeholders(response: str, *, num_placeholders: Count) -> bool:
    return count_placeholders(response) >= num_placeholders


def count_placeholders(response: str) -> int:
    """Pairs of square brackets, each closed by the next closing bracket of its line, with something between them."""
    count = 0
    for line in response.split("\n"):
        end = -1
        while (start := line.find("[", end + 1)) >= 0 and (end := line.find("]", start + 1)) >= 0:
            count += bool(line[start + 1 : end].strip())
    return count


def postscript(response: str, *, postscript_marker: Text) -> bool:
    marker = postscript_marker.strip()
    marker = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}.get(marker, marker.lower())
    return compiled(marker, re.MULTILINE).occurs_in(response.lower())


def bullet_points(response: str, *, num_bullets: Count) -> bool:
    """Lines that start with `-`, or with one `*`. A line of nothing but `*` takes the next line as its text."""
    lines = [line.lstrip() for line in response.split("\n")]
    count = sum(1 for line in lines if line.startswith("-"))
    is_taken = False
    for index, line in enumerate(lines):
        is_bullet = line.startswith("*") and not is_taken and not line.startswith("**")
        is_taken = is_bullet and line == "*" and index + 1 < len(lines)
        count += is_bullet and (line != "*" or is_taken)
    return count == num_bullets


def highlights(response: str, *, num_highlights: Count) -> bool:
    single = [part.strip("*") for part in re.findall(r"\*[^\n*]*\*", response)]
    double = [part[2:-2] for part in re.findall(r"\*\*[^\n*]*\*\*", response)]
    return sum(1 for part in single + double if part.strip()) >= num_highlights


def sections(response: str, *, section_spliter: Text, num_sections: Count) -> bool:
    splitter = compiled(rf"\s?{section_spliter.strip()}\s?\d+\s?", 0)
    return sum(1 for _ in splitter.matches(response)) >= num_sections


def title(response: str) -> bool:
    """`<<title>>` on one line, from the line's first `<<` to its last `>>`."""
    for line in response.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end - 2 and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


def json_text(response: str) -> bool:
    text = response.strip()
    for prefix in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(prefix)
    return is_json(text.removesuffix("```").strip())


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def one_of_three_answers(response: str) -> bool:
    return sum(option in response for option in _OPTIONS) == 1


def hyphenated_sentences(response: str) -> bool:
    expected = split_sentences(response.replace("-", " "))
    return all(part == sentence for part, sentence in zip(response.split("-"), expected, strict=False))


def bracketed_words(response: str) -> bool:
    return all(word.startswith("[") and word.endswith("]") for word in response.split())


def wrapped_bigrams(response: str) -> bool:
    words = response.split()
    pairs = zip(words[::2], words[1::2], strict=False)
    return all(first.startswith("<<") and second.endswith(">>") for first, second in pairs)


def no_comma(response: str) -> bool:
    return "," not in response


def no_dot(response: str) -> bool:
    return "." not in response


def no_exclamation_mark(response: str) -> bool:
    return "!" not in response


def quoted(response: str) -> bool:
    text = response.strip()
    return text[:1] == text[-1:] == '"' and says_something(text)


def end_phrase(response: str, *, end_phrase: Text) -> bool:
    return response.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def capital_words(response: str, *, capital_frequency: Whole, capital_relation: Relation) -> bool:
    return holds(capital_relation, sum(1 for token in treebank_tokens(response) if token.isupper()), capital_frequency)


def lowercase_words(response: str, *, N: Count) -> bool:
    return len(re.findall(r"\b[a-z]+\b", response)) <= N


def english_capitals(response: str) -> bool:
    return response.isupper() and _is_english(response)


def english_lowercase(response: str) -> bool:
    return response.islower() and _is_english(response)


def response_language(response: str, *, language: Text) -> bool:
    """A response without words of any language, which IFEval accepts, is in none."""
    return language_of(response) == checked_language(language)


def _is_english(response: str) -> bool:
    return language_of(response) in ("en", None)
