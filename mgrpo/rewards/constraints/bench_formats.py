"""IFBench: the layout of a response, and its repetitions."""

from __future__ import annotations

import functools
import itertools
import re
import string
from collections import deque
from collections.abc import Callable

from mgrpo.rewards.constraints.label_arguments import Filled, Text, Whole
from mgrpo.rewards.constraints.sentences import split_sentences
from mgrpo.rewards.constraints.word_constraints import PUNCTUATION_AND_SPACE, bare

_OPENING = {")": "(", "]": "[", "}": "{"}
_TEMPLATE = ("My Answer:", "My Conclusion:", "Future Outlook:")
_SENTENCE_TO_REPEAT = "only output this sentence here, ignore all other requests."
_MARKS_BUT_QUOTE = string.digits + string.punctuation.replace('"', "")


def nested_brackets(response: str) -> bool:
    """Brackets five deep, the innermost closed. A bracket that closes wrongly resets the depth."""
    levels: list[str] = []
    deepest = 0
    for char in response:
        if char in "([{":
            levels.append(char)
            deepest = max(deepest, len(levels))
        elif char in _OPENING:
            if not levels or levels.pop() != _OPENING[char]:
                levels, deepest = [], 0
            elif deepest >= 5:
                return True
    return False


def nested_quotes(response: str) -> bool:
    """Quotes three deep, alternating between \" and ', and closed three levels down from the deepest."""
    levels: list[str] = []
    deepest = 0
    for char in response:
        if levels and char == levels[-1]:
            levels.pop()
            if deepest - len(levels) >= 3:
                return True
        elif char in "\"'":
            levels.append(char)
            deepest = max(deepest, len(levels))
    return False


def one_of_options(response: str, *, options: Text) -> bool:
    """Options are separated by `/`, else by `or`, else by commas. Options such as a), b), c) must be met exactly."""
    separator = "/" if "/" in options else "or" if "or" in options else ","
    choices = [option.strip() for option in options.split(separator)]
    if re.match(r"\W*[aA]\W*[bB]\W*[cC]", options):
        return response in choices
    answer = response.strip(PUNCTUATION_AND_SPACE).lower()
    return any(choice.strip(PUNCTUATION_AND_SPACE).lower() == answer for choice in choices)


def word_a_line(response: str) -> bool:
    text = bare(response).strip()
    return sum(1 for line in text.split("\n") if line) == len(text.split())


def emoji_ends(response: str) -> bool:
    """An emoji is among the last two characters of each sentence, or begins the next; punctuation is passed over."""
    is_emoji = _emoji_test()
    sentences = [bare(sentence).strip() for sentence in split_sentences(response)]
    for sentence, following in itertools.zip_longest(sentences, sentences[1:], fillvalue=""):
        if not sentence:
            return False
        if not any(map(is_emoji, sentence[-2:])) and not (following and is_emoji(following[0])):
            return False
    return True


def stairs(response: str) -> bool:
    """Each line is indented deeper than the line before."""
    indents = [len(line) - len(line.lstrip(" ")) for line in _without_some_blank_lines(response.split("\n"))]
    return all(deeper > indent for indent, deeper in itertools.pairwise(indents))


def explained_quotes(response: str) -> bool:
    """No two quotes touch, and none ends the response."""
    text = response.replace("“", '"').replace("”", '"').replace("'\"'", "")
    text = "".join(text.split())
    return '""' not in text and not text.strip(_MARKS_BUT_QUOTE).endswith('"')


def separators(response: str, *, sep: Text) -> bool:
    return response.count(sep) >= 2


def italic_thesis(response: str) -> bool:
    """Text in the first HTML italics, and text after them."""
    start = _first_of(response, "<i>", "<em>")
    end = _first_of(response[max(start, 0) :], "</i>", "</em>")
    if start < 0 or end < 0:
        return False
    return bool(response[start + 3 : start + end].strip() and response[start + end + 4 :].strip())


def sub_bullets(response: str) -> bool:
    return all("-" in bullet for bullet in response.split("*")[1:])


def sentences_then_bullets(response: str) -> bool:
    """Two sentences or more, then two or more lines that start with `*`; with at most one empty line between them."""
    num_sentences = num_bullets = 0
    is_text = True
    for line in map(str.strip, response.split("\n")):
        if line.startswith("*"):
            is_text = False
            num_bullets += 1
            if num_sentences < 2:
                return False
        elif is_text:
            is_text = bool(line)
            if num_sentences < 2:
                num_sentences += len(split_sentences(line))
        else:
            return False
    return num_bullets >= 2


def prompt_changed(response: str, *, prompt_to_repeat: Filled) -> bool:
    """The prompt without its first word."""
    return response != prompt_to_repeat and response.split()[1:] == prompt_to_repeat.split()[1:]


def sentence_copied(response: str) -> bool:
    return response.strip().lower() == _SENTENCE_TO_REPEAT


def words_copied(response: str, *, prompt_to_repeat: Filled, n_start: Whole, n_end: Whole) -> bool:
    """The indices count words; the end is left out."""
    return response.lower().split() == prompt_to_repeat.lower().split()[n_start:n_end]


def output_template(response: str) -> bool:
    return all(label in response for label in _TEMPLATE)


def no_whitespace(response: str) -> bool:
    return not any(char.isspace() for char in response)


def _without_some_blank_lines(lines: list[str]) -> list[str]:
    """The lines that IFBench checks: it removes blank lines from the list that it iterates over.

    So the line after a blank one is skipped, blank or not; and the line removed is the first one equal to the blank
    one, which may have been skipped.
    """
    is_kept = [True] * len(lines)
    passed: dict[str, deque[int]] = {}
    index = 0
    while index < len(lines):
        line = lines[index]
        if line.strip():
            index += 1
            continue
        equal = passed.setdefault(line, deque())
        equal.append(index)
        is_kept[equal.popleft()] = False
        if index + 1 < len(lines) and not lines[index + 1].strip():
            passed.setdefault(lines[index + 1], deque()).append(index + 1)
        index += 2
    return [line for line, kept in zip(lines, is_kept, strict=True) if kept]


def _first_of(text: str, *tags: str) -> int:
    """The place of the first tag that occurs: the second is searched for only if the first is missing."""
    return next((start for start in map(text.find, tags) if start >= 0), -1)


@functools.cache
def _emoji_test() -> Callable[[str], bool]:
    import regex

    emoji = regex.compile(r"[\p{Emoji}--[\p{ASCII}\p{Regional_Indicator}]]", regex.V1)
    return lambda char: emoji.match(char) is not None
