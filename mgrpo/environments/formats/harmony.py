"""The channels of gpt-oss: analysis is thought, final is content, and a message to a function is a call."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mgrpo.environments.environment import Call, Tool
from mgrpo.environments.formats.format import Block, Reader
from mgrpo.environments.formats.tagged import first_parameter
from mgrpo.environments.formats.values import Fault, arguments_of, decoded

_MARK = re.compile(r"<\|(?:start|channel|end|return|call)\|>")
_END = re.compile(r"<\|(?:end|return|call|start)\|>")
_TO = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_MESSAGE = "<|message|>"


def harmony(tools: Sequence[Tool]) -> Reader:
    """`<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>`."""
    parameters = {tool.name: first_parameter(tool) for tool in tools}

    def read(text: str, at: int) -> Block | None:
        mark = _MARK.search(text, at)
        if mark is None:
            return None
        if mark[0] not in ("<|start|>", "<|channel|>"):
            return Block(start=mark.start(), end=mark.end())
        message = text.find(_MESSAGE, mark.end())
        if message < 0:
            return Block(start=mark.start(), end=len(text), faults=("<|message|> is missing",))
        header = text[mark.start() : message]
        body = message + len(_MESSAGE)
        to, channel = _TO.search(header), _CHANNEL.search(header)
        if to is None and channel and channel[1] in ("final", "commentary"):
            return Block(start=mark.start(), end=body)
        end = _END.search(text, body)
        stop = end.start() if end else len(text)
        if to is None:
            return Block(start=mark.start(), end=stop)
        return _call(text, mark.start(), body, stop, to[1], header)

    def _call(text: str, start: int, body: int, stop: int, name: str, header: str) -> Block:
        try:
            value, end = decoded(text, body)
            if text[end:stop].strip():
                raise Fault("text stands after the object", at=end)
            call = Call(name=name, arguments=arguments_of(value))
        except Fault as fault:
            # The built-in tools take plain text.
            if name not in parameters or "json" in header:
                return Block(start=start, end=stop, faults=(str(fault),))
            call = Call(name=name, arguments={parameters[name]: text[body:stop]})
        return Block(start=start, end=stop, calls=(call,))

    return read
