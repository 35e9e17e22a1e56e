r"""The place where a mathematical text states its answer: in its boxes or tags, else after "answer is", in its last formula, or at its end.

Exactly one place is read. Texts are written by a model, so every search here is linear in their length.
"""

from __future__ import annotations

import re
from itertools import takewhile
from typing import NamedTuple

from mgrpo.rewards.verifiers.answers.denials import is_denied
from mgrpo.rewards.verifiers.answers.statements import compares, is_withdrawn, num_words

_BOX = re.compile(r"\\f?boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_UNBRACED_BOX = re.compile(r"\\f?boxed(?=[ 0-9+.-]|\\[A-Za-z])")
_UNBRACED_CONTENT = re.compile(r"[-+]?[0-9](?:[0-9.,]*[0-9])?|[ \\][^$]*")
_SENTENCE = "Final Answer: The final answer is"
_SENTENCE_END = re.compile(". I hope it is correct.")
_ANCHOR = re.compile(r"(?i)\banswers?\b(?:[^.!?\n:=]{0,60}?(?:\b(?:is|are)\b|[:=])|[*_ ]*\n)(?:\s*:)?[*_\s]*")
_TAG = re.compile(r"</?answer>", re.IGNORECASE)
_HASHES = re.compile(r"####[ \t]*(\S[^\n]*)\s*\Z")
_STOP = re.compile(r"[.!?](?=[\s*\"'”)]|$)|\n|,\s+(?!and\b|or\b)(?=[a-z]{2,}\b)|\sbut\b")
_SENTENCE_STOP = re.compile(r"[.!?]\s|\n")
_FORMULA_SIGN = re.compile(r"\\.|\$\$?|\n", re.DOTALL)
_MONEY = re.compile(r"[0-9][0-9,.]*\s")
_COPULA = re.compile(r".*\b(?:is|are|equals|be)\b:?(?=.*[0-9$\\])", re.DOTALL)
_CLOSING = {"$": "$", "$$": "$$", r"\(": r"\)", r"\[": r"\]"}
_NUMBER = re.compile(r"(?<![^\s$(=*:])[-+]?\$?(?:[0-9][0-9,]*)?\.?[0-9]+(?:/[0-9]+)?\s?%?(?![0-9\\^_(]|[A-Za-z]\b)")
_NOT_STANDING_ALONE = re.compile(r"[-+*/^_(\\]\s*$")
_OPERATOR_FOLLOWS = re.compile(r"\s*[-+*/^=_)]\s*[0-9a-zA-Z(]")
_SPACING = re.compile(r"\$+|\\[()\[\],;:! \\]|\\q?quad|\\text\s*\{|[{}&~*]")
_WORD = re.compile(r"[A-Za-z]+(?:['’][a-z]+)?")
_CLAUSE_END = re.compile(r"[.,;:!?\n$0-9]|\\[()\[\]]")

_STEPS = frozenset(("so", "then", "thus", "hence", "therefore", "but", "gives", "implies", "later", "finally"))
_REMARKS = frozenset(("but", "which", "because", "since"))
_SIGNS_OF_UNITS = (("/", " per "), ("^2", " squared"), ("²", " squared"), ("^3", " cubed"), ("³", " cubed"))
_COPULAS = frozenset(("is", "are", "was", "were", "equals"))
_PHRASES = (
    (re.compile(r"(?i)\b(?:anything|everything|all) but\b"), "not"),
    (re.compile(r"(?i)\b(?:nothing but|none other than|no other than|and nothing else)\b"), ""),
    (re.compile(r"(?i)(?:\bnot|n['’]t|\bneither)\b(?! only| just| merely)[^.!?:;\n]{0,60}?\bbut\b(?! also)"), ""),
)
"""Turns of phrase, each with the plain one in its place: "anything but", "nothing but", "not 4 but"."""
_MAX_BOX_DEPTH = 3
# Words that a label may have and still be an answer.
_MOST_WORDS = 10
_MAX_PARTS = 50
# Characters between two parts of one answer, and words around one that qualify it.
_LONGEST_JOINT = 60
_LONGEST_WINDOW = 60
_NUM_WORDS = 4


class Span(NamedTuple):
    start: int
    end: int
    content: str


def stated_answer(text: str) -> str:
    """The answer that the text states, with the few words around it; "" if it states none, or takes it back."""
    for pattern, plain in _PHRASES:
        text = pattern.sub(plain, text)
    for find in (
        minerva_answer,
        _answer_in_boxes,
        _answer_in_tags,
        _answer_after_hashes,
        _anchored_answer,
        _last_formula,
        _last_number,
    ):
        found = find(text)
        if found is not None:
            return unboxed(found)
    return text.strip().rpartition("\n")[2]


def unboxed(text: str, *, depth: int = 0) -> str:
    """The answer in the text's boxes, else the text."""
    inner = boxed_answer(text, depth=depth) if depth < _MAX_BOX_DEPTH else None
    return text if inner is None else inner


def boxed_answer(text: str, *, depth: int = 0) -> str | None:
    r"""Contents of the last `\boxed{...}` whose braces close, and of those just before it if they form one answer with it:
    `\boxed{1}, \boxed{2} and \boxed{3}` is "1, 2, 3". A later `\boxed 7` ends at the next dollar sign. None without a box.
    """
    spans = boxes(text)
    if not spans:
        return None
    return unboxed(_last_run(text, spans).content, depth=depth + 1)


def _answer_in_boxes(text: str) -> str | None:
    """Contents as of `boxed_answer`; "" where the words around the boxes deny them."""
    spans = boxes(text)
    if not spans:
        return None
    run = _last_run(text, spans)
    return "" if is_denied(text, run.start, run.end) else unboxed(run.content, depth=1)


def tagged(text: str) -> Span | None:
    """The last `<answer>...</answer>`; None without one that is closed."""
    closing: re.Match[str] | None = None
    for tag in reversed(list(_TAG.finditer(text))):
        if tag[0].startswith("</"):
            closing = tag
        elif closing is not None:
            return Span(tag.start(), closing.end(), text[tag.end() : closing.start()])
    return None


def answer_of_label(text: str) -> str:
    """The answer of a label that may be a worked solution: in Minerva's sentence, boxes, tags, after the last ####, or, where
    `is_prose`, after "answer is"; else the text.
    """
    places = [minerva_answer, boxed_answer, _answer_in_tags, _answer_after_last_hashes]
    for find in [*places, _anchored_answer] if is_prose(text) else places:
        if (found := find(text)) is not None:
            return unboxed(found)
    return text


def is_prose(text: str) -> bool:
    """True if a label is an explanation rather than an answer."""
    return num_words(text) > _MOST_WORDS


def _answer_in_tags(text: str) -> str | None:
    span = tagged(text)
    return span and ("" if is_denied(text, span.start, span.end) else span.content)


def _answer_after_hashes(text: str) -> str | None:
    """GSM8K's last line; a heading further up is none."""
    match = _HASHES.search(text)
    return match and match[1]


def _answer_after_last_hashes(text: str) -> str | None:
    _, hashes, rest = text.rpartition("####")
    return rest.strip() if hashes else None


def minerva_answer(text: str) -> str | None:
    """The x of the last "Final Answer: The final answer is x. I hope it is correct."; the end of the text may replace the
    last five words. None without that sentence.
    """
    for line in reversed(f"{text}I hope it is correct.".split("\n")):
        _, sentence, rest = line.rpartition(_SENTENCE)
        if sentence and (end := _SENTENCE_END.search(rest)):
            return rest[: end.start()].strip()
    return None


def last_formula(text: str) -> str | None:
    """The text between the last two dollar signs; None where there are fewer."""
    before, dollar, _ = text.rpartition("$")
    _, opening, formula = before.rpartition("$")
    return formula if dollar and opening else None


def boxes(text: str) -> list[Span]:
    r"""The boxes that are in no other one, and a `\boxed 7` or `\boxed7` after them, which ends with its number or at the next dollar sign."""
    # Braces are paired in one pass over the text, so that a thousand unclosed boxes cost no more than one.
    starts = {match.end(): match.start() for match in _BOX.finditer(text)}
    spans: list[Span] = []
    open_braces: list[int] = []
    for match in _BRACE.finditer(text) if starts else ():
        if match.group() == "{":
            open_braces.append(match.end())
        elif match.group() == "}" and open_braces:
            inside = open_braces.pop()
            if inside not in starts:
                continue
            while spans and spans[-1].start > starts[inside]:
                spans.pop()
            spans.append(Span(starts[inside], match.end(), text[inside : match.start()]))
    last: re.Match[str] | None = None
    for last in _UNBRACED_BOX.finditer(text):  # noqa: B007
        pass
    content = last and _UNBRACED_CONTENT.match(text, last.end())
    if last and content and content[0].strip() and (not spans or spans[-1].end <= last.start()):
        unbraced = content[0].strip()
        spans += [Span(last.start(), len(text), unbraced)] if unbraced[0] != "{" else []
    return spans


def _anchored_answer(text: str) -> str | None:
    anchors = list(_ANCHOR.finditer(text))
    if not anchors:
        return None
    begin = anchors[-1].end()
    rest = text[begin:]
    formulas = _formulas(rest)
    start = formulas[0].end if formulas and not rest[: formulas[0].start].strip() else 0
    stop = _STOP.search(rest, start)
    clause = rest[: stop.start()] if stop else rest
    if copula := _COPULA.match(clause):
        begin, clause = begin + copula.end(), clause[copula.end() :]
    inside = _formulas(clause)
    if not inside:
        return "" if is_denied(text, begin, begin + len(clause)) else clause
    run = _first_run(clause, inside)
    return "" if is_denied(text, begin + run.start, begin + run.end) else _in_its_words(clause, run)


def _last_formula(text: str) -> str | None:
    """The last formula, unless a number stands in a later sentence."""
    spans = _formulas(text)
    if not spans:
        return None
    if spans[-1].content.rstrip().endswith((".", "!", "?")):
        next_sentence = spans[-1].end
    else:
        stop = _SENTENCE_STOP.search(text, spans[-1].end)
        next_sentence = stop.end() if stop else len(text)
    later = _last_number(text[next_sentence:])
    return _in_its_words(text, _last_run(text, spans)) if later is None else later


def _last_number(text: str) -> str | None:
    """The last number of a text in words; None for a text that is an expression."""
    for line in reversed(text.split("\n")):
        if not any(character.isdigit() for character in line):
            continue
        if not any(len(word) > 2 for word in _WORD.findall(line)) or "\\" in line:
            return line
        spans = [Span(*match.span(), match.group()) for match in _NUMBER.finditer(line)]
        if not spans:
            return line
        run = _last_run(line, spans)
        if _NOT_STANDING_ALONE.search(line[: run.start]) or _OPERATOR_FOLLOWS.match(line, run.end):
            return line
        return _in_its_words(line, run)
    return None


def _formulas(text: str) -> list[Span]:
    r"""The formulas in `$...$` on one line, unless it is "$5 and $", and in `$$...$$`, `\(...\)` and `\[...\]`."""
    spans: list[Span] = []
    opening: re.Match[str] | None = None
    for match in _FORMULA_SIGN.finditer(text):
        sign = match.group()
        if opening is not None and opening.group() == "$":
            if sign == "\n":
                opening = None
            elif sign == "$":
                content = text[opening.end() : match.start()]
                if _MONEY.match(content) and (content[-1].isspace() or text[match.end() : match.end() + 1].isdigit()):
                    opening = match
                else:
                    spans.append(Span(opening.start(), match.end(), content))
                    opening = None
        elif opening is not None:
            if sign == _CLOSING[opening.group()]:
                spans.append(Span(opening.start(), match.end(), text[opening.end() : match.start()]))
                opening = None
        elif sign in _CLOSING and not (sign == "$" and text[max(0, match.start() - 1) : match.start()].isdigit()):
            opening = match
    return spans


def _last_run(text: str, spans: list[Span]) -> Span:
    """The last spans that are parts of one answer, as one."""
    first, least = len(spans) - 1, max(0, len(spans) - _MAX_PARTS)
    while first > least and _is_joint(text[spans[first - 1].end : spans[first].start]):
        first -= 1
    return _joined(spans[first:])


def _first_run(text: str, spans: list[Span]) -> Span:
    last = 0
    while last + 1 < min(len(spans), _MAX_PARTS) and _is_joint(text[spans[last].end : spans[last + 1].start]):
        last += 1
    return _joined(spans[: last + 1])


def _joined(spans: list[Span]) -> Span:
    return Span(spans[0].start, spans[-1].end, ", ".join(span.content for span in spans))


def _is_joint(between: str) -> bool:
    """True if the text between two parts makes one answer of them: nothing, a comma, "and", "or", with a few words or a name."""
    if len(between) > _LONGEST_JOINT:
        return False
    between = _SPACING.sub(" ", between)
    words = [word.lower() for word in _WORD.findall(between)]
    if is_withdrawn(words) or not _STEPS.isdisjoint(words) or re.search(r"[.:!?]|\n\s*\n", between):
        return False
    return not between.strip() or "," in between or ";" in between or "and" in words or "or" in words


def _in_its_words(text: str, span: Span) -> str:
    """The span with the words of its clause around it, which may say that it is not the answer; "" where they deny it."""
    if is_denied(text, span.start, span.end):
        return ""
    before = _CLAUSE_END.split(text[max(0, span.start - _LONGEST_WINDOW) : span.start])[-1]
    after = text[span.end : span.end + _LONGEST_WINDOW]
    for sign, word in _SIGNS_OF_UNITS:
        after = after.replace(sign, word)
    after = _CLAUSE_END.split(after)[0]
    leading: list[str] = []
    for word in _WORD.findall(before)[-_NUM_WORDS:]:
        if word.lower() in _STEPS:
            leading = []
        elif word.lower() in _COPULAS:  # a comparison before it is of the subject: "the least value is 5"
            leading = [earlier for earlier in leading if not compares(earlier.lower())]
        else:
            leading.append(word)
    trailing = list(takewhile(lambda word: word.lower() not in _REMARKS, _WORD.findall(after)[:_NUM_WORDS]))
    return rf"{_as_text(leading)} {span.content} {_as_text(trailing)}"


def _as_text(words: list[str]) -> str:
    return rf"\text{{ {' '.join(words)} }}" if words else ""
