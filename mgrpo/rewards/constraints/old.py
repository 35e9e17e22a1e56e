"""The 25 functions that labels of `ifeval_old` name, with their own names, arguments and rules.

Open Instruct's, except that marks without anything between them (`[]`, `**`, `<<>>`) do not count.
"""

from __future__ import annotations

import re

from mgrpo.rewards.constraints.label_arguments import Character, Checker, Filled, Quantifier, Text, Texts, Whole
from mgrpo.rewards.constraints.languages import checked_language, language_of
from mgrpo.rewards.constraints.text_formats import count_placeholders, is_json, quoted, title

_SENTENCE_END = re.compile(r"(?<!\w\.\w.)(?<![A-Z][a-z]\.)(?<=[.?!])\s")
_ASTERISKS = re.compile(r"\*+")
_PARAGRAPH_DIVIDER = "* * *"
_RESPONSE_DIVIDER = "******"


def verify_keywords(response: str, *, keyword_list: Texts) -> bool:
    return all(keyword.lower() in response.lower() for keyword in keyword_list)


def verify_keyword_frequency(response: str, *, word: Text, N: Whole) -> bool:
    return re.findall(r"\b\w+\b", response.lower()).count(word.lower()) == N


def validate_forbidden_words(response: str, *, forbidden_words: Texts) -> bool:
    return not any(word.lower() in response.lower() for word in forbidden_words)


def verify_letter_frequency(response: str, *, letter: Character, N: Whole) -> bool:
    return response.count(letter) == N


def validate_response_language(response: str, *, language: Text) -> bool:
    return checked_language(language) == language_of(response)


def verify_paragraph_count(response: str, *, N: Whole) -> bool:
    lines = (line.strip() for line in response.splitlines())
    paragraphs = "\n".join(lines).split(_PARAGRAPH_DIVIDER)
    return len(paragraphs) == N and all(paragraph.strip() for paragraph in paragraphs)


def validate_word_constraint(response: str, *, N: Whole, quantifier: Quantifier) -> bool:
    return _is_quantity(len(response.split()), N, quantifier, tolerance=_tenth(N))


def verify_sentence_constraint(response: str, *, N: Whole, quantifier: Quantifier) -> bool:
    return _is_quantity(len(_SENTENCE_END.split(response)), N, quantifier, tolerance=1)


def validate_frequency_capital_words(response: str, *, N: Whole, quantifier: Quantifier) -> bool:
    return _is_quantity(len(re.findall(r"\b[A-Z]+\b", response)), N, quantifier, tolerance=_tenth(N))


def validate_paragraphs(response: str, *, N: Whole, first_word: Text, i: Whole) -> bool:
    paragraphs = response.split("\n\n")
    if len(paragraphs) != N:
        return False
    if not -N < i <= N:
        raise ValueError(f"validate_paragraphs: i={i} is not a paragraph of N={N}")
    return paragraphs[i - 1].strip().startswith(first_word)


def verify_postscript(response: str, *, postscript_marker: Text) -> bool:
    _, marker, text = response.partition(postscript_marker) if postscript_marker else ("", "", response)
    return postscript_marker in response and len((marker + text).strip()) > len(postscript_marker)


def validate_placeholders(response: str, *, N: Whole) -> bool:
    return count_placeholders(response) >= N


def verify_bullet_points(response: str, *, N: Whole) -> bool:
    lines = (line.strip() for line in response.split("\n"))
    return sum(1 for line in lines if line.startswith(("*", "-")) and line.strip("*- ")) == N


def validate_title(response: str) -> bool:
    return title(response)


def validate_choice(response: str, *, options: Texts) -> bool:
    """One of the options, as separate words; an option counts once where a longer one holds it."""
    longest_first = sorted(filter(None, options), key=len, reverse=True)
    if not longest_first:
        return False
    one = "|".join(map(re.escape, longest_first))
    return len(set(re.findall(rf"(?<!\w)(?:{one})(?!\w)", response))) == 1


def validate_highlighted_sections(response: str, *, N: Whole) -> bool:
    """Runs of asterisks are paired line by line; a pair without text between them does not count."""
    return sum(1 for line in response.split("\n") for part in _ASTERISKS.split(line)[1:-1:2] if part.strip()) >= N


def validate_sections(response: str, *, N: Whole, section_splitter: Filled) -> bool:
    sections = response.removeprefix(section_splitter).split(section_splitter)
    return len(sections) == N and all(section.strip() for section in sections)


def validate_json_format(response: str) -> bool:
    return is_json(response)


def validate_repeat_prompt(response: str, *, original_prompt: Filled) -> bool:
    return response.startswith(original_prompt)


def validate_two_responses(response: str) -> bool:
    parts = [part.strip() for part in response.split(_RESPONSE_DIVIDER)]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def validate_uppercase(response: str) -> bool:
    return response == response.upper()


def validate_lowercase(response: str) -> bool:
    return response == response.lower()


def validate_end(response: str, *, end_phrase: Text) -> bool:
    return response.endswith(end_phrase)


def validate_quotation(response: str) -> bool:
    return quoted(response)


def validate_no_commas(response: str) -> bool:
    return "," not in response


OLD_FUNCTIONS: dict[str, Checker] = {
    function.__name__: function
    for function in (
        verify_keywords,
        verify_keyword_frequency,
        validate_forbidden_words,
        verify_letter_frequency,
        validate_response_language,
        verify_paragraph_count,
        validate_word_constraint,
        verify_sentence_constraint,
        validate_paragraphs,
        verify_postscript,
        validate_placeholders,
        verify_bullet_points,
        validate_title,
        validate_choice,
        validate_highlighted_sections,
        validate_sections,
        validate_json_format,
        validate_repeat_prompt,
        validate_two_responses,
        validate_uppercase,
        validate_lowercase,
        validate_frequency_capital_words,
        validate_end,
        validate_quotation,
        validate_no_commas,
    )
}


def _tenth(N: int) -> int:
    return max(round(N * 0.1), 1)


def _is_quantity(found: int, wanted: int, quantifier: Quantifier, *, tolerance: int) -> bool:
    if quantifier == "at least":
        return found >= wanted
    if quantifier == "at most":
        return found <= wanted
    return abs(found - wanted) <= tolerance
