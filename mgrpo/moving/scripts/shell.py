"""A launch script as its shell would read it, as far as the text alone decides: the words of its commands, each with its line.

Read are quotes, comments, continued lines, lists, variables that the text or the environment sets, their defaults, sums of whole
numbers, the date, and several commands with operators and redirections between them. Nothing is run. Everything else that could give a
word another value (substituted commands, patterns, files that are sourced, assignments that depend on a condition, a loop or a call)
leaves a mark in the word: `reasons` has the line and the construct.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Mapping, Sequence

from mgrpo.moving.scripts.shell_lexer import ASSIGNED, REDIRECTION, Lexer, Token
from mgrpo.moving.scripts.shell_values import Values

ELEMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)\[[^]]*\]\+?=")
NAME = re.compile(r"[A-Za-z_]\w*")
OPENING = {"if": "if", "while": "while", "until": "until", "for": "for", "select": "select", "case": "case", "{": "{"}
BETWEEN = ("then", "else", "elif", "do", "!", "time")
CLOSING = {"fi": ("if",), "done": ("while", "until", "for", "select"), "esac": ("case",), "}": ("{",)}
DECLARING = ("export", "readonly", "local", "declare", "typeset")
SETTING = ("read", "mapfile", "readarray", "unset", "getopts", "let", "printf")
"""Commands whose arguments may be names that they set."""


class Shell:
    """Follows the commands of a script, and keeps the values that they set."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.values = Values(environment)
        self.is_certain = True
        """True if the next command runs independently of those before it."""

    def commands(self, text: str, *, joins_lines: bool = False) -> Iterator[list[str]]:
        """The words of each command, in order, as far as the script is read; those of assignments alone are left out."""
        blocks: list[str] = []
        command: list[Token] = []
        self.is_certain, is_redirected, function = True, False, ""
        for token in (*Lexer(text, joins_lines=joins_lines).tokens(), Token("\n", 0, is_word=False)):
            if token.is_word:
                if is_redirected:
                    is_redirected = False
                else:
                    command.append(token)
            elif REDIRECTION.fullmatch(token.text):
                is_redirected = True
            elif token.text == "(" and command and not blocks_pattern(blocks):
                function, command = f"the function {command[-1].text} (line {token.line})", []
                blocks.append("(")
            elif token.text == "(":
                blocks.append("(")
            elif token.text == ")" and (blocks[-1:] == ["("] or blocks_pattern(blocks)):
                if blocks[-1] == "(":
                    yield from self._command(command, blocks, function, ends_in=")")
                    blocks.pop()
                command = []
            else:
                done = yield from self._command(command, blocks, function, ends_in=token.text)
                if not any(block.startswith("{") for block in blocks) and command:
                    function = ""
                command = []
                if done:
                    return

    def _command(
        self, command: Sequence[Token], blocks: list[str], function: str, *, ends_in: str
    ) -> Generator[list[str], None, bool]:
        """The words of one command, if it has some; returns True if the script ends with it."""
        tokens = self._without_grammar(list(command), blocks, function)
        is_whole = self.is_certain and ends_in not in ("|", "|&", "&")
        outer = next((block for block in blocks if block != "("), blocks[0] if blocks else "")
        in_function = any(block.startswith("{") and len(block) > 1 for block in blocks)
        done = False
        if tokens:
            where = "a function" if in_function else f"`{outer[:6]}`" if outer else ""
            where = where or ("" if is_whole else "a command that depends on another")
            done = yield from self._simple(tokens, where, in_function=in_function)
        self.is_certain = ends_in not in ("&&", "||", "|", "|&") or (self.is_certain and self._only_assigns(tokens))
        return done

    def _without_grammar(self, tokens: list[Token], blocks: list[str], function: str) -> list[Token]:
        """The words behind those of the grammar, which begin and end blocks."""
        while tokens:
            head = tokens[0].text
            if head in CLOSING:
                if blocks and blocks[-1].startswith(CLOSING[head]):
                    blocks.pop()
                tokens.pop(0)
            elif head in OPENING:
                blocks.append(f"{head}{function if head == '{' else ''}")
                line = tokens.pop(0).line
                if head in ("for", "select") and tokens:
                    for name in NAME.findall(tokens[0].text):
                        self.values.doubt(name, f"line {line}: `{head} {tokens[0].text}` sets it")
                if head in ("for", "select", "case"):
                    return []
            elif head == "function" and len(tokens) > 1:
                blocks.append("{function")
                tokens = tokens[3 if tokens[2:] and tokens[2].text == "{" else 2 :]
            elif head in BETWEEN:
                tokens.pop(0)
            else:
                break
        return tokens

    @staticmethod
    def _only_assigns(tokens: Sequence[Token]) -> bool:
        return bool(tokens) and all(ASSIGNED.match(token.text) for token in tokens)

    def _simple(self, tokens: list[Token], where: str, *, in_function: bool) -> Generator[list[str], None, bool]:
        """One command: apply its assignments, or yield its words."""
        values = self.values
        own = [token for i, token in enumerate(tokens) if not self._only_assigns(tokens[: i + 1])]
        while own and own[0].text in ("command", "builtin"):
            own.pop(0)
        if not own:
            values.assign(tokens, where, in_function)
            return False
        head, line = own[0].text, own[0].line
        texts = [token.text for token in own[1:]]
        if head in DECLARING:
            options = "".join(text[1:] for text in texts if text.startswith("-"))
            if "n" in options:
                values.doubt_all(f"line {line}: `{head} -n` may set it", in_function)
            unread = "" if set(options) <= set("xrga") else f"`{head} -{options}`"
            values.assign([token for token in own[1:] if token.text[0] != "-"], where or unread, in_function)
        elif head.startswith("((") or head == "let":
            for name in NAME.findall(" ".join([head, *texts])):
                values.doubt(name, f"line {line}: {head} may set it", in_function)
        elif head in SETTING and (head != "printf" or "-v" in texts):
            for name in (text.partition("=")[0] for text in texts):
                if NAME.fullmatch(name):
                    values.doubt(name, f"line {line}: `{head}` sets it", in_function)
        elif head in ("source", ".", "eval"):
            values.doubt_all(f"line {line}: `{' '.join([head, *texts[:1]])}` may set it", in_function)
        elif head in ("cd", "pushd", "popd"):
            for name in ("PWD", "OLDPWD"):
                values.doubt(name, f"line {line}: `{head}` changes it", in_function)
        elif head == "shift" or (head == "set" and sets_arguments(texts)):
            values.arguments = f"line {line}: `{head}` changes the script's arguments"
        elif head == "exit" and not where:
            return True
        else:
            if ELEMENT.match(head):
                values.doubt(head.partition("[")[0], f"line {line}: {head} sets a part of it", in_function)
            for name in re.findall(r"\$\{(\w+):?=", " ".join([head, *texts])):
                values.doubt(name, f"line {line}: ${{{name}:=...}} may set it", in_function)
            values.in_function = in_function
            yield [word for token in tokens for word in values.expanded(token)]
        return False


def sets_arguments(words: Sequence[str]) -> bool:
    """True if `set` with these words gives the script other arguments."""
    of_option = False
    for word in words:
        if word == "--" or not (of_option or word.startswith(("-", "+"))):
            return True
        of_option = word.startswith(("-", "+")) and word.endswith("o")
    return False


def blocks_pattern(blocks: Sequence[str]) -> bool:
    """True if a bracket belongs to a pattern of `case`."""
    return bool(blocks) and blocks[-1] == "case"
