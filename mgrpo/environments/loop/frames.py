"""The text that a chat template writes between two turns of the model, with places for observations.

It is found from conversations with stand-ins, which differ only before the turn: the text after the turn's end must be the
same for all of them, and hold every stand-in. Tokens are the work of `bridge`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Render = Callable[[Sequence[Message], bool], str]
"""The text of messages, with or without the opening of the model's next turn."""
Form = Callable[[str], str]

_ANSWER = "qzanswerzq"
_OBSERVED = re.compile("qz(text|name)([0-9]+)zq")
# Holds what templates may change in a text, and nothing that they may write around it.
_HARD_TEXT = '\n\n\n "{}"\t<\N{LATIN SMALL LETTER E WITH ACUTE}&\'> \n\n\n'


_Ends = tuple[Sequence[str], Sequence[str]]
"""Tokens that end a turn, and those that count where none of these is found."""


class BridgeError(ValueError):
    """A chat template that cannot be used for several turns, and why."""


class _Refusal(BridgeError):
    """The template raised an error."""


def _as_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _without_newlines(text: str) -> str:
    return text.strip("\n")


# From the longest result to the shortest, which is part of the longer ones.
_FORMS: tuple[Form, ...] = (str, _without_newlines, str.lstrip, str.rstrip, str.strip, _as_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSpan:
    """A stretch of a bridge."""

    text: str
    is_own: bool
    """True for the template's text; otherwise it comes from a tool, an environment or the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFrame:
    """The text between two turns."""

    end: str
    """The token that ends a turn."""
    is_header: bool
    """True if the end token is the header of the next message: a last turn is written without it."""
    parts: tuple[str | tuple[str, int], ...]
    """The parts after the end token; ("text", 1) and ("name", 1) are the places of the second text and of its tool's name."""
    forms: tuple[Form, ...]
    """The template's form of each text."""
    before: str
    """The text of a conversation up to its last end token."""

    def filled(self, texts: Sequence[str], names: Sequence[str]) -> list[TextSpan]:
        """The spans after the end token."""
        spans = []
        for part in self.parts:
            if isinstance(part, str):
                spans.append(TextSpan(text=part, is_own=True))
            else:
                what, index = part
                spans.append(
                    TextSpan(text=self.forms[index](texts[index]) if what == "text" else names[index], is_own=False)
                )
        return spans


def find_frame(
    render: Render, roles: Sequence[str], *, tool_roles: Sequence[str], ends: Sequence[str], added: Sequence[str]
) -> TurnFrame:
    """The template's text from the end of a turn to the opening of the next.

    Args:
        roles: of the messages between the two, at least one; before a "tool" the turn calls as many tools as there are.
        tool_roles: roles of the messages that tools may answer with; the first that works is taken.
        ends: tokens that end a turn.
        added: all tokens that the tokenizer finds in a text before it splits the rest.
    Raises:
        BridgeError: why the template cannot be used.
    """
    known_ends = (ends, _plain_end(render, added))
    if "tool" not in roles:
        return _find(render, _user_pasts(), list(map(_observation, roles, range(len(roles)))), known_ends)
    problem: BridgeError | None = None
    for role in tool_roles:
        texts = [_observation(role if one == "tool" else one, index) for index, one in enumerate(roles)]
        # Some templates join the arguments to other text.
        for write in (dict, json.dumps):
            try:
                return _find(render, _tool_pasts(role, roles.count("tool"), write), texts, known_ends)
            except BridgeError as err:
                if problem is None or (isinstance(problem, _Refusal) and not isinstance(err, _Refusal)):
                    problem = err
    assert problem is not None
    raise problem


def _find(render: Render, pasts: Sequence[list[Message]], observed: list[Message], ends: _Ends) -> TurnFrame:
    before, end, text = _split(_rendered(render, [*pasts[0], *observed], opens=True), observed, ends)
    for past in pasts[1:]:
        _, other_end, other = _split(_rendered(render, [*past, *observed], opens=True), observed, ends)
        if (other_end, other) != (end, text):
            wholes = end + text, other_end + other
            start = next((place for place, chars in enumerate(zip(*wholes, strict=False)) if len({*chars}) > 1), 0)
            forms = [whole[max(0, start - 40) : start + 40] for whole in wholes]
            raise BridgeError(
                f"what it writes after a turn of the model depends on what came before: {forms[0]!r} or {forms[1]!r}"
            )
    alone = _rendered(render, pasts[0], opens=False)
    ending = alone[alone.rfind(_ANSWER) + len(_ANSWER) :]
    own: list[Form] = [_form(text, message) for message in observed]
    filled = [re.escape(form(message["content"])) for form, message in zip(own, observed, strict=True)]
    place = re.compile("|".join(filled) + f"|{_OBSERVED.pattern}")
    parts: list[str | tuple[str, int]] = []
    last = 0
    for match in place.finditer(text):
        what = _OBSERVED.search(match[0])
        assert what is not None
        parts += [text[last : match.start()], (what[1], int(what[2]))]
        last = match.end()
    return TurnFrame(
        end=end,
        is_header=not any(one in ending for words in ends for one in words),
        parts=tuple(part for part in (*parts, text[last:]) if part),
        forms=tuple(own),
        before=before,
    )


def _split(text: str, observed: Sequence[Message], ends: _Ends) -> tuple[str, str, str]:
    """The text before the token that ends the model's last turn, that token, and the text after it."""
    role, marks = observed[0]["role"], [_mark(message) for message in observed]
    places = [text.find(mark) for mark in marks]
    if -1 in places:
        number = f" {places.index(-1) + 1} of {len(places)}" if len(places) > 1 else ""
        raise BridgeError(f"it drops messages of the role {role}{number}: the model would never see what it asked for")
    first = min(places)
    start = text.rfind(_ANSWER, 0, first)
    if start == -1:
        raise BridgeError("it drops the turns of the model itself")
    start += len(_ANSWER)
    for words in ends:
        if found := [(place, end) for end in words if (place := text.find(end, start, first)) != -1]:
            place, end = min(found)
            return text[:place], end, text[place + len(end) :]
    raise BridgeError(
        f"it writes no token that ends a turn of the model ({', '.join(map(repr, ends[0])) or 'the model has none'}) "
        f"between the turn and {text[start:first]!r}"
    )


def _form(text: str, observed: Message) -> Form:
    for form in _FORMS:
        if form(observed["content"]) in text:
            return form
    start = text.find(_mark(observed))
    raise BridgeError(
        f"it rewrites what a message of the role {observed['role']} says: {observed['content']!r} "
        f"became {text[max(0, start - 20) : start + 40]!r}"
    )


def _rendered(render: Render, messages: Sequence[Message], *, opens: bool) -> str:
    try:
        return render(messages, opens)
    except ValueError as err:
        raise _Refusal(str(err)) from err


def _plain_end(render: Render, added: Sequence[str]) -> list[str]:
    """The token right after a plain answer; not every model has it among those that end its completions."""
    try:
        text = render([*_user_pasts()[0], _observation("user", 0)], True)
    except ValueError:
        return []
    following = text[text.rfind(_ANSWER) + len(_ANSWER) :] if _ANSWER in text else ""
    return sorted((token for token in added if following.startswith(token)), key=len)[-1:]


def _mark(message: Message) -> str:
    found = _OBSERVED.search(message["content"])
    assert found is not None
    return found[0]


def _observation(role: str, index: int) -> Message:
    content = _HARD_TEXT.format(f"qztext{index}zq")
    if role in ("user", "system"):
        return {"role": role, "content": content}
    return {"role": role, "name": f"qzname{index}zq", "tool_call_id": _call_id(index), "content": content}


def _call_id(index: int) -> str:
    # Mistral's templates ask for nine letters and digits.
    return f"call{index:05d}"


def _user_pasts() -> list[list[Message]]:
    asked = {"role": "user", "content": "Q"}
    last = {"role": "assistant", "content": _ANSWER}
    longer = {"role": "assistant", "content": f"A longer answer.\n\n{_ANSWER}"}
    return [
        [asked, last],
        [{"role": "user", "content": "What else is there to ask?"}, longer],
        [asked, {"role": "assistant", "content": "A"}, asked, last],
    ]


def _tool_pasts(role: str, num_calls: int, write: Callable[[Mapping[str, str]], object]) -> list[list[Message]]:
    """Conversations that end with `num_calls` calls; each has the name of its observation's tool."""

    def calls(names: Sequence[str], answer: str) -> list[dict[str, Any]]:
        return [
            {
                "type": "function",
                "id": _call_id(index),
                "function": {"name": name, "arguments": write({"x": answer})},
            }
            for index, name in enumerate(names)
        ]

    names = [f"qzname{index}zq" for index in range(num_calls)]
    asked = {"role": "user", "content": "Q"}
    # The answer is in the content also, for templates that do not write calls.
    last = {"role": "assistant", "content": _ANSWER, "tool_calls": calls(names, _ANSWER)}
    longer = {"role": "assistant", "content": f"Let me look. {_ANSWER}", "tool_calls": calls(names, f"or {_ANSWER}")}
    earlier = {"role": "assistant", "content": "", "tool_calls": calls(["look"], "first")}
    seen = {"role": role, "name": "look", "tool_call_id": _call_id(0), "content": "found"}
    return [
        [asked, last],
        [{"role": "user", "content": "What else is there to ask?"}, longer],
        [asked, {"role": "assistant", "content": "A"}, asked, longer],
        [asked, earlier, seen, last],
    ]
