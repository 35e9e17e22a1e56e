"""The words and operators of a shell script as they are written, each with its line, and marks for parts that were not computed."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator
from dataclasses import dataclass

from mgrpo.config.errors import ConfigError

UNKNOWN = "\0"
"""Begins, divides and ends a mark: reason and text of a part that was not computed."""
MARK = re.compile(r"\0([^\0]*)\0([^\0]*)\0")
OPERATORS = re.compile(r"&&|\|\||;;&|;;|;&|\|&|;|\||&|\(|\)|\n")
REDIRECTION = re.compile(r"\d*(?:<<<|<<-|<<|<&|<>|<|>>|>&|>\||>)|&>>|&>")
ASSIGNED = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<more>\+?)=")
CONTINUES = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\n)*[ \t]*(?=-|[+~]*\w+(?:\.\w+)+=)")
"""A line that can only go on with the one before: it begins with a flag, or with a setting as Hydra writes it."""


class Placed(str):
    """A word with the line on which it begins."""

    line: int

    def __new__(cls, text: str, line: int) -> Placed:
        made = super().__new__(cls, text)
        made.line = line
        return made


@dataclass(frozen=True, slots=True)
class Token:
    """A word as it is written, with `items` where it begins a list, or an operator."""

    text: str
    line: int
    is_word: bool
    items: tuple[Token, ...] | None = None


def line_of(word: str) -> int:
    """The line of a word of a text; 0 for others."""
    return word.line if isinstance(word, Placed) else 0


def known(word: str) -> str:
    """The word as it was written, without marks of parts that were not computed."""
    return MARK.sub(r"\2", word)


def reasons(word: str) -> str:
    """Reasons why parts of the word were not computed."""
    return "; ".join(dict.fromkeys(why for why, _ in MARK.findall(word)))


def marked(text: str, why: str) -> str:
    """A mark in place of a text."""
    return f"{UNKNOWN}{why}{UNKNOWN}{text.replace(UNKNOWN, '')}{UNKNOWN}"


class Lexer:
    """The words and operators of a text, of which comments, here-documents and the ends of continued lines are left out."""

    def __init__(self, text: str, *, joins_lines: bool = False) -> None:
        self.text, self.joins_lines = text.replace(UNKNOWN, ""), joins_lines
        self.breaks = [i for i, letter in enumerate(self.text) if letter == "\n"]
        self.documents: list[tuple[str, bool]] = []
        """Ends of here-documents whose text follows the line, and True if tabs before them do not count."""

    def tokens(self) -> Iterator[Token]:
        """All of them; a redirection is an operator, and the word behind it a word."""
        at, text = 0, self.text
        while at < len(text):
            if text.startswith("\\\n", at):
                found = CONTINUES.match(text, at + 2)
                at = found.end() if found else at + 2
            elif text[at] in " \t" or (text[at] == "\n" and self._goes_on(at)):
                at += 1
            elif text[at] == "#":
                end = text.find("\n", at)
                at = len(text) if end < 0 else end
            elif found := REDIRECTION.match(text, at):
                if text.startswith("(", found.end()) and found[0] in ("<", ">"):
                    end = self.end_of_word(at)
                    yield Token(text[at:end], self.line_of(at), is_word=True)
                    at = end
                    continue
                yield Token(found[0], self.line_of(at), is_word=False)
                at = found.end()
                if found[0].lstrip("0123456789") in ("<<", "<<-"):
                    begin = at + len(text[at:]) - len(text[at:].lstrip(" \t"))
                    self.documents.append((re.sub(r"[\"'\\]", "", text[begin : self.end_of_word(begin)]), found[0].endswith("-")))  # fmt: skip
            elif text.startswith("((", at):
                end = self.end_of(at, "(", ")")
                yield Token(text[at:end], self.line_of(at), is_word=True)
                at = end
            elif found := OPERATORS.match(text, at):
                yield Token(found[0], self.line_of(at), is_word=False)
                at = self._after_documents(found.end()) if found[0] == "\n" else found.end()
            else:
                token, at = self._word(at)
                yield token

    def _word(self, at: int) -> tuple[Token, int]:
        end = self.end_of_word(at)
        word = self.text[at:end]
        if ASSIGNED.fullmatch(word) and self.text.startswith("(", end):
            close = self.end_of(end, "(", ")")
            before = self.line_of(end) - 1
            inside = Lexer(self.text[end + 1 : close - 1], joins_lines=True).tokens()
            items = tuple(Token(item.text, item.line + before, is_word=True) for item in inside)
            return Token(word, self.line_of(at), is_word=True, items=items), close
        return Token(word, self.line_of(at), is_word=True), max(end, at + 1)

    def line_of(self, at: int) -> int:
        """The number of the line of a place in the text, from 1."""
        return bisect.bisect_left(self.breaks, at) + 1

    def _goes_on(self, at: int) -> bool:
        return not self.documents and (self.joins_lines or CONTINUES.match(self.text, at + 1) is not None)

    def _after_documents(self, at: int) -> int:
        for end, ignores_tabs in self.documents:
            while at < len(self.text):
                stop = self.text.find("\n", at)
                stop = len(self.text) if stop < 0 else stop
                line = self.text[at:stop]
                at = stop + 1
                if (line.lstrip("\t") if ignores_tabs else line) == end:
                    break
        self.documents = []
        return at

    def end_of_word(self, at: int) -> int:
        """The place behind the word that begins at a place."""
        text = self.text
        while at < len(text) and text[at] not in " \t\n;&|<>()":
            at = self.after(at)
        if text[at : at + 2] in ("<(", ">("):
            return self.end_of(at + 1, "(", ")")
        return at

    def after(self, at: int, *, within: bool = False) -> int:
        """The place behind a letter, quotation or substitution; `within` double quotes."""
        text = self.text
        if text[at] == "\\":
            return min(at + 2, len(text))
        if text[at] == "'" and not within:
            return self._found("'", at + 1)
        if text[at] == '"' and not within:
            at += 1
            while at < len(text) and text[at] != '"':
                at = self.after(at, within=True)
            return self._closed(at)
        if text[at] == "`":
            return self._found("`", at + 1)
        for begin, close in (("(", ")"), ("{", "}")):
            if text.startswith(f"${begin}", at):
                return self.end_of(at + 1, begin, close)
        return at + 1

    def end_of(self, at: int, begin: str, close: str) -> int:
        """The place behind the bracket that closes the one at a place."""
        depth = 0
        while at < len(self.text):
            letter = self.text[at]
            if begin == "(" and letter == "#" and self.text[at - 1] in " \t\n(":
                at = self.text.find("\n", at)
                at = len(self.text) if at < 0 else at
                continue
            depth += (letter == begin) - (letter == close)
            at = self.after(at) if letter not in (begin, close) else at + 1
            if not depth:
                return at
        return self._closed(at)

    def _found(self, letter: str, at: int) -> int:
        found = self.text.find(letter, at)
        return self._closed(len(self.text) if found < 0 else found)

    def _closed(self, at: int) -> int:
        if at >= len(self.text):
            raise ConfigError(["the command line cannot be read: No closing quotation; check its quotes"])
        return at + 1
