"""IFBench: constraints that belong to one prompt each and check its specific answer."""

from __future__ import annotations

import csv
import io
import itertools
import re
import unicodedata

from mgrpo.rewards.constraints.sentences import split_sentences
from mgrpo.rewards.constraints.vocabulary import NORTHERN_CAPITALS
from mgrpo.rewards.constraints.word_constraints import PUNCTUATION_AND_SPACE, bare

_NUM_AFRICAN_COUNTRIES = 52
_DAYS = (0, 31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def multiples_of_seven(response: str, **_: object) -> bool:
    return re.findall(r"\d+", response.replace(",", ", ")) == ["14", "21", "28", "35", "42", "49"]


def four_questions(response: str, **_: object) -> bool:
    """Four questions of five options each, every one longer than the one before."""
    if not response.startswith("Question"):
        return False
    questions = [part for part in re.split(r"Question \d+[.|):;]?\s*", response) if part.strip()]
    if len(questions) != 4:
        return False
    lengths: list[int] = []
    for question in questions:
        lines = [line.strip() for line in question.strip().split("\n")]
        is_option = [re.match(r"[A-Ea-e][.|)]\s*\w", line) is not None for line in lines]
        if sum(is_option) != 5:
            return False
        lengths.append(len(" ".join(lines[: is_option.index(True)]).strip()))
    return all(shorter < longer for shorter, longer in itertools.pairwise(lengths))


def african_countries(response: str, **_: object) -> bool:
    """52 lines or more in reverse alphabetical order, from the first line with Zimbabwe to the end."""
    stripped = (line.strip(PUNCTUATION_AND_SPACE) for line in response.split("\n"))
    lines = [line for line in stripped if line]
    start = next((index for index, line in enumerate(lines) if "Zimbabwe" in line), len(lines))
    names = [_unaccented(line) for line in lines[start:]]
    return len(names) >= _NUM_AFRICAN_COUNTRIES and names == sorted(names, reverse=True)


def bald_eagle_by_word(response: str, **_: object) -> bool:
    """The response's words in reverse are one sentence, with "bald eagle" in it."""
    text = " ".join(reversed(bare(response.lower().strip()).split()))
    return "bald eagle" in text and text in split_sentences(text)


def bald_eagle_by_letter(response: str, **_: object) -> bool:
    return "elgae dlab" in response.lower()


def alphabet_story(response: str, **_: object) -> bool:
    """26 sentences, from A to Z."""
    sentences = split_sentences(response)
    return len(sentences) == 26 and all(
        sentence.lower().startswith(chr(ord("a") + index)) for index, sentence in enumerate(sentences)
    )


def northern_capitals(response: str, **_: object) -> bool:
    parts = [part.strip() for part in _unaccented(response).split(",")]
    return [part for part in parts if part] == list(NORTHERN_CAPITALS)


def city_table(response: str, **_: object) -> bool:
    rows = _rows(response, ",")
    is_headed = rows[:1] == [["ID", "Country", "City", "Year", "Count"]]
    return is_headed and len(rows) == 8 and all(len(row) == 5 for row in rows[1:])


def product_table(response: str, **_: object) -> bool:
    """14 rows of 5 fields; rows after the first that has a quoted field with a special character are not checked."""
    if not _has_header(response, r",[ \t]*", ("ProductID", "Category", "Brand", "Price", "Stock")):
        return False
    rows = _rows(response.replace('"', '"""'), ",")
    if len(rows) != 15:
        return False
    for row in rows[1:]:
        if len(row) != 5:
            return False
        if any(map(_is_quoted_and_special, row)):
            return True
    return False


def student_table(response: str, **_: object) -> bool:
    """A header and 3 rows, with all fields in quotes, including the header's."""
    if not _has_header(response, r"\t *", ("StudentID", "Subject", "Grade", "Semester", "Score")):
        return False
    rows = _rows(response.replace('"', '"""'), "\t")
    fields = [field.strip() for row in rows for field in row]
    return (
        len(rows) == 4
        and all(len(row) == 5 for row in rows)
        and all(field.startswith('"') and field.endswith('"') for field in fields)
    )


def napoleonic_dates(response: str, **_: object) -> bool:
    """YYYY-MM-DD, of Napoleon's lifetime; month and day may be 00."""
    for date in response.split(","):
        match = re.match(r"(\d{4})-(\d{2})-(\d{2})$", date.strip())
        if not match:
            return False
        year, month, day = map(int, match.groups())
        if not 1769 <= year <= 1821 or month > 12 or (month and day > _DAYS[month]):
            return False
    return True


def _rows(text: str, delimiter: str) -> list[list[str]]:
    """The rows of a CSV text; none where it is not CSV."""
    try:
        return list(csv.reader(io.StringIO(text), delimiter=delimiter))
    except csv.Error:
        return []


def _has_header(response: str, delimiter: str, names: tuple[str, ...]) -> bool:
    pattern = delimiter.join(f'({name}|"{name}")' for name in names)
    return re.fullmatch(pattern, response.partition("\n")[0].strip()) is not None


def _is_quoted_and_special(field: str) -> bool:
    """True if a line of text in double quotes begins the field, and a character in it is neither letter nor space."""
    line = field.partition("\n")[0]
    return line.startswith('"') and re.search(r"[^\w\s]", line[1 : max(line.rfind('"'), 1)]) is not None


def _unaccented(text: str) -> str:
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
