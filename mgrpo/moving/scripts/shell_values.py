"""The values that a script's variables and lists have, as far as its text alone decides, and the words that a shell makes of them."""

from __future__ import annotations

import ast
import operator
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence

from mgrpo.moving.scripts.shell_lexer import ASSIGNED, UNKNOWN, Lexer, Placed, Token, line_of, marked, reasons

PIECE = re.compile(r"(?:\0[^\0]*\0[^\0]*\0|\S)+")
"""A part of an unquoted value that a shell makes a word of; no mark is divided."""
PARAMETER = re.compile(r"(?P<name>[A-Za-z_]\w*|[1-9]\d*)(?:(?P<how>:?-)(?P<default>.*))?", re.DOTALL)
LIST_USED = re.compile(r"(?P<name>[A-Za-z_]\w*)\[(?P<all>[@*])\]")
DATE = re.compile(r"date \+(?P<quote>[\"']?)(?P<format>(?:%[YmdHMSyjFTbBaAs]|[^%\"'$`\\])*)(?P=quote)")
SEQUENCE = re.compile(r"seq((?: \d{1,4})?(?: [1-9]\d{0,3})? \d{1,4})")
"""Whole numbers that rise."""
OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
}
"""A shell's, which rounds towards zero."""


class Values:
    """The state of a script: values of its variables and lists, and doubts about those that the text does not decide."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = {"RANDOM": str(random.randrange(1 << 15)), **environment}
        self.variables: dict[str, str] = {}
        self.lists: dict[str, list[str]] = {}
        self.doubts: dict[str, str] = {}
        """Names whose value depends on more than the text, with the reason."""
        self.lasting: dict[str, str] = {}
        """Doubts of names that a function sets, which may be called at any time."""
        self.any_name = ""
        """Reason why every name that the script has not set since may have another value; "": none."""
        self.any_time = ""
        """The same for every name, also one that the script sets later: a function may be called."""
        self.arguments = ""
        """Reason why "$@" is not the script's arguments, which are none."""
        self.splitting = ""
        """Reason why unquoted values are not divided at blanks alone."""
        self.in_function = False
        """True if the command that is read is a function's."""

    def doubt_all(self, why: str, in_function: bool) -> None:
        """Drop the values of all names, until the script sets them again."""
        self.any_name = why
        self.variables.clear()
        self.lists.clear()
        if in_function:
            self.any_time = why

    def doubt(self, name: str, why: str, in_function: bool = False) -> None:
        """Record that the value of a name depends on more than the text; for one that a function sets, from now on."""
        self.doubts[name] = why
        if in_function:
            self.lasting[name] = why

    def assign(self, tokens: Sequence[Token], where: str, in_function: bool) -> None:
        """Follow `name=value` words; `where`: the block or command on which they depend; "" if unconditional."""
        for token in tokens:
            found = ASSIGNED.match(token.text)
            if found is None:
                continue
            name, adds = found["name"], bool(found["more"])
            if name == "IFS":
                self.splitting = f"line {token.line}: IFS is set"
            if where:
                self.doubt(name, f"line {token.line}: {name} is set in {where}", in_function)
                continue
            doubt = self._doubt_of(name) if adds else ""
            if token.items is not None:
                before = self.lists.get(name)
                if adds and before is None:
                    before = [marked(f"${{{name}[@]}}", doubt or f"line {token.line}: {name} is set nowhere before")]
                items = [word for item in token.items for word in self.expanded(item)]
                self.lists[name] = [*(before or [] if adds else []), *items]
                self.variables.pop(name, None)
            else:
                value = self._one(token.text[found.end() :], token.line)
                start = self._value(name, f"${name}", token.line, default="") if adds else ""
                self.variables[name] = start + value
                self.lists.pop(name, None)
            if not doubt:
                self.doubts.pop(name, None)

    def _one(self, raw: str, line: int) -> str:
        """The value of an assignment, which is not divided."""
        home, rest = self._home(raw, line)
        return home + self._text(rest, line, quoted=False)[0]

    def _home(self, raw: str, line: int) -> tuple[str, str]:
        """The user's folder where a word begins with it, and the rest of the word."""
        is_home = raw == "~" or raw.startswith("~/")
        return (self._value("HOME", "~", line), raw[1:]) if is_home else ("", raw)

    def expanded(self, token: Token) -> list[str]:
        """The words that a shell makes of one: several or none where a value is not quoted."""
        raw, line = token.text, token.line
        if token.items is not None:
            return [Placed(marked(raw, f"line {line}: a list in a command"), line)]
        bare = raw[1:-1] if raw[:1] == raw[-1:] == '"' and len(raw) > 1 else raw
        if bare in ("$@", "${@}", "$*", "${*}"):
            why = self.arguments or ("of a function" if self.in_function else "")
            return [Placed(marked(raw, why if ":" in why else f"line {line}: {bare} {why}"), line)] if why else []
        if used := re.fullmatch(r"\$\{" + LIST_USED.pattern + r"\}", bare):
            words = self._list(used["name"], bare, line)
            if bare != raw:
                words = [" ".join(words)] if used["all"] == "*" else words
                return [Placed(word, line_of(word) or line) for word in words]
            return [
                Placed(piece, line_of(word) or line)
                for word in words
                for piece in PIECE.findall(self._unquoted(word, line))
            ]
        if raw[:1] in "<>" and raw[1:2] == "(":
            return [Placed(marked(raw, f"line {line}: {raw} is a command"), line)]
        if re.match(r"~[\w+-]*(?:/|$)", raw) and raw[1:2] not in ("", "/"):
            return [Placed(marked(raw, f"line {line}: {raw} is the folder of a user"), line)]
        home, rest = self._home(raw, line)
        words = self._text(rest, line, quoted=False)[1]
        return [Placed(word, line) for word in ([home + word for word in words[:1]] or [home] * bool(home)) + words[1:]]

    def _text(self, raw: str, line: int, *, quoted: bool) -> tuple[str, list[str]]:
        """A written word as one text, and as the words into which its unquoted values divide it."""
        lexer, at = Lexer(raw), 0
        whole: list[str] = []
        words: list[str] = []
        current: list[str] | None = None
        while at < len(raw):
            end = lexer.after(at, within=quoted)
            piece, divides = raw[at:end], False
            if piece == "\\\n":
                at = end
                continue
            if piece[0] == "\\":
                text = piece if quoted and piece[1:] not in ("$", "`", '"', "\\") else piece[1:]
            elif piece[0] == "'" and not quoted:
                text = piece[1:-1]
            elif piece[0] == '"' and not quoted:
                text = self._text(piece[1:-1], line, quoted=True)[0]
            elif piece[0] == '"':
                text = ""
            elif piece[0] == "$" or piece[0] == "`":
                if piece == "$" and (found := re.compile(r"[A-Za-z_]\w*|[0-9@*#?!$-]").match(raw, at + 1)):
                    end, piece = found.end(), raw[at : found.end()]
                elif piece == "$" and not quoted and raw[at + 1 : at + 2] in ("'", '"'):
                    end = lexer.after(at + 1)
                    piece = marked(raw[at:end], f"line {line}: {raw[at:end]} is a quotation of its own kind")
                text = piece if UNKNOWN in piece else self._substituted(piece, line, quoted=quoted)
                divides = not quoted and UNKNOWN not in text
            else:
                text = piece
                if not quoted and (piece in "*?" or (piece == "{" and self._is_brace(raw, at))):
                    text = marked(piece, f"line {line}: {raw} is a pattern; quote it if it is none")
            at = end
            whole.append(text)
            if divides and text != self._unquoted(text, line):
                text, divides = self._unquoted(text, line), False
            if not divides:
                current = [*(current or []), text]
                continue
            pieces = PIECE.findall(text)
            if text[:1].isspace() and current is not None:
                words.append("".join(current))
                current = None
            for i, part in enumerate(pieces):
                if i:
                    words.append("".join(current or []))
                    current = None
                current = [*(current or []), part]
            if text and text[-1].isspace() and pieces:
                words.append("".join(current or []))
                current = None
        if current is not None:
            words.append("".join(current))
        return "".join(whole), words

    def _unquoted(self, value: str, line: int) -> str:
        """A value that stands without quotes: a shell would look for files in place of a pattern."""
        if UNKNOWN in value:
            return value
        if any(letter in value for letter in "*?"):
            return marked(value, f"line {line}: {value} is a pattern without quotes")
        if self.splitting and len(value.split()) > 1:
            return marked(value, self.splitting)
        return value

    @staticmethod
    def _is_brace(raw: str, at: int) -> bool:
        """True if a shell makes several words of the brace."""
        close = raw.find("}", at)
        return close > 0 and ("," in raw[at:close] or ".." in raw[at:close])

    def _substituted(self, piece: str, line: int, *, quoted: bool) -> str:
        if piece.startswith("$((") and piece.endswith("))"):
            return self._sum(piece, line)
        if piece.startswith(("$(", "`")):
            if found := DATE.fullmatch(piece[2:-1] if piece[0] == "$" else piece[1:-1]):
                return time.strftime(found["format"])
            if found := SEQUENCE.fullmatch(piece[2:-1] if piece[0] == "$" else piece[1:-1]):
                return " ".join(map(str, counted([int(word) for word in found[1].split()])))
            return marked(piece, f"line {line}: {piece} is a command")
        if not piece.startswith("${"):
            return piece if piece == "$" else self._value(piece[1:], piece, line)
        body = piece[2:-1]
        if used := LIST_USED.fullmatch(body):
            words = self._list(used["name"], piece, line)
            if used["all"] == "*" or len(words) == 1:
                return " ".join(words)
            return marked(piece, f"line {line}: {piece} within a word")
        if body in ("@", "*"):
            return self._value(body, piece, line)
        found = PARAMETER.fullmatch(body)
        if found is None:
            return marked(piece, f"line {line}: {piece} is an expansion that is not read")
        if not found["how"]:
            return self._value(found["name"], piece, line)
        text = self._text(found["default"], line, quoted=quoted)[0]
        value = self._value(found["name"], piece, line, default=text)
        return text if value == "" and found["how"] == ":-" else value

    def _doubt_of(self, name: str) -> str:
        is_own = name in self.variables or name in self.lists
        why = self.any_time or self.lasting.get(name) or self.doubts.get(name) or ("" if is_own else self.any_name)
        if name.isdecimal() or name in "@*":
            why = self.arguments or ("the arguments are a function's" if self.in_function else "")
        return why

    def _value(self, name: str, piece: str, line: int, *, default: str | None = None) -> str:
        if name in ("@", "*") and not self._doubt_of(name):
            return ""
        if why := self._doubt_of(name):
            return marked(piece, why)
        if name in self.lists:
            return marked(piece, f"line {line}: {name} is a list")
        found = self.variables.get(name, self.environment.get(name))
        if found is not None:
            return found
        return marked(piece, f"line {line}: {piece} is set nowhere") if default is None else default

    def _list(self, name: str, piece: str, line: int) -> list[str]:
        if why := self._doubt_of(name):
            return [marked(piece, why)]
        if name not in self.lists:
            return [marked(piece, f"line {line}: the list {name} is set nowhere")]
        return self.lists[name]

    def _sum(self, piece: str, line: int) -> str:
        """A sum of whole numbers and variables."""
        inner = self._text(piece[3:-2], line, quoted=True)[0]
        if UNKNOWN in inner:
            return marked(piece, reasons(inner))
        try:
            return str(summed(inner, lambda name: self._value(name, name, line)))
        except UnknownName as err:
            return marked(piece, str(err))
        except (SyntaxError, ValueError, LookupError, ZeroDivisionError, RecursionError):
            return marked(piece, f"line {line}: {piece} is no sum of whole numbers")


class UnknownName(Exception):
    """A name in a sum has no known value; the message has the reason."""


def summed(text: str, value_of: Callable[[str], str]) -> int:
    """The value of a sum as a shell computes it; many kinds of error where it is not one, or not of whole numbers."""
    if not re.fullmatch(r"[\w\s+\-*/%()]*", text) or re.search(r"\d_", text):
        raise ValueError

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(int(number)) if not isinstance(number, bool):
                return number
            case ast.Name(name):
                found = value_of(name)
                if UNKNOWN in found:
                    raise UnknownName(reasons(found))
                if not re.fullmatch(r"-?(?:0|[1-9]\d*)", found):
                    raise ValueError
                return int(found)
            case ast.UnaryOp(ast.USub(), operand):
                return -value(operand)
            case ast.BinOp(left, operation, right):
                return OPERATIONS[type(operation)](value(left), value(right))
        raise ValueError

    number = value(ast.parse(" ".join(text.split()), mode="eval").body)
    if abs(number) >= 1 << 63:
        raise ValueError
    return number


def counted(numbers: Sequence[int]) -> range:
    """The numbers that `seq` prints: up to the last one, from 1 or the first one, by 1 or the middle one."""
    first = numbers[0] if len(numbers) > 1 else 1
    step = numbers[1] if len(numbers) > 2 else 1
    return range(first, numbers[-1] + (1 if step > 0 else -1), step)
