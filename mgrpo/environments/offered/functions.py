"""Plain functions as tools: their schemas, and their calls.

A tool's schema comes from the function's name, type hints and Google docstring, as `transformers.utils.get_json_schema`
makes it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from mgrpo.environments.environment import Call, Environment, Observation, Tool
from mgrpo.environments.offered.calling import written
from mgrpo.environments.offered.type_hints import Schema, schema_of

FILLED_IN = ("trajectory", "row", "seed")
"""Keyword-only parameters of these names are not shown to the model: the trajectory's id, its row, and the seed that all
trajectories of its prompt share."""

_SECTION = re.compile(r"^\s*(Args|Returns|Raises):\s*", re.MULTILINE)
_ENTRY = re.compile(r"\s*(\w+)(?:\s*\([^()]*\))?:\s*(.*)")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def tool_of(function: Callable[..., Any]) -> Tool:
    """The tool specification of a function or a bound method.

    Raises:
        ValueError: all hints and descriptions that are missing, with the function's file and line.
    """
    if inspect.isclass(function) or not hasattr(function, "__name__"):
        raise ValueError(f"{function!r:.80} is not a function; write one with def, with type hints and a docstring")
    name, where = function.__name__, _place(function)
    description, texts, returned = _docstring(inspect.getdoc(function) or "")
    problems = [] if description else ["it has no docstring that says what it does"]
    try:
        hints = typing.get_type_hints(function)
    # Hints are code of the user, evaluated here.
    except Exception as err:
        raise ValueError(f"{where}: the tool {name}: its type hints cannot be read: {err}") from err
    properties, required = {}, []
    for parameter in _shown_parameters(function):
        try:
            properties[parameter.name] = _property(parameter, hints, texts)
        except ValueError as err:
            problems.append(f"{parameter.name}: {err}")
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    if problems:
        raise ValueError(f"{where}: the tool {name}: {'; '.join(problems)}")
    parameters: Schema = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    return Tool(name=name, description=description, parameters=parameters, returns=_returns(hints, returned))


class FunctionTool(Environment):
    """A function, plain or async, as the only tool of an environment."""

    def __init__(self, function: Callable[..., Any], *, is_repeatable: bool = False) -> None:
        self.tool = tool_of(function)
        self.name = self.tool.name
        self.is_repeatable = is_repeatable
        self._function = function
        self._filled_in: dict[str, Any] = dict.fromkeys(_filled_in(function))

    def tools(self) -> Sequence[Tool]:
        return (self.tool,)

    def reset(self, row: Mapping[str, Any], *, seed: int) -> None:
        values = {"trajectory": self.trajectory, "row": row, "seed": seed}
        self._filled_in = {name: values[name] for name in self._filled_in}

    def step(self, calls: Sequence[Call]) -> Sequence[Observation] | Awaitable[Sequence[Observation]]:
        begun = [self.begun(call) for call in calls]
        return finished(begun)

    def begun(self, call: Call) -> Observation | Awaitable[Any]:
        """The answer of a plain function, or the awaitable of an async one, for `finished`."""
        try:
            result = self._function(**call.arguments, **self._filled_in)
        # A user's function may raise anything; the model receives the error.
        except (Exception, SystemExit) as err:
            return failure(err)
        return result if inspect.isawaitable(result) else _answer(result)


def finished(begun: Sequence[Observation | Awaitable[Any]]) -> Sequence[Observation] | Awaitable[Sequence[Observation]]:
    """The answers of calls that were begun in their order; those of async functions go on together."""
    done = [item for item in begun if isinstance(item, Observation)]
    return done if len(done) == len(begun) else _awaited(begun)


def failure(err: BaseException) -> Observation:
    """The answer to a call that raised."""
    return Observation(text=_json({"error": f"{type(err).__name__}: {written(err)}"}), failed=True)


async def _awaited(begun: Sequence[Observation | Awaitable[Any]]) -> Sequence[Observation]:
    return await asyncio.gather(*(_observed(item) for item in begun))


async def _observed(item: Observation | Awaitable[Any]) -> Observation:
    if isinstance(item, Observation):
        return item
    try:
        return _answer(await item)
    except (Exception, SystemExit) as err:
        return failure(err)


def _answer(result: object) -> Observation:
    """Text stays as it is; everything else is shown as JSON."""
    return Observation(text=result if isinstance(result, str) else _json(result))


def _json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    # Keys that are not text, or a list that holds itself.
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _docstring(text: str) -> tuple[str, dict[str, str], str | None]:
    """The description, the text of each argument, and that of the result."""
    pieces = _SECTION.split(text)
    sections = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    returned = sections.get("Returns")
    return pieces[0].strip(), _entries(sections.get("Args", "")), None if returned is None else returned.strip()


def _entries(section: str) -> dict[str, str]:
    """Lines "name: text", each with the lines that continue it."""
    entries: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in section.splitlines():
        if found := _ENTRY.fullmatch(line):
            lines = entries.setdefault(found[1], [])
            line = found[2]
        if line.strip():
            lines.append(line.strip())
    return {name: " ".join(parts) for name, parts in entries.items()}


def _property(parameter: inspect.Parameter, hints: Mapping[str, Any], texts: Mapping[str, str]) -> Schema:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        raise ValueError("models call by name; replace *, ** and / by parameters with names")
    if parameter.name not in hints:
        raise ValueError(f"there is no type hint; write {parameter.name}: str, or what it is")
    if parameter.name not in texts:
        raise ValueError(f'the docstring does not describe it; add "{parameter.name}: what it is" under "Args:"')
    return _described(schema_of(hints[parameter.name]), texts[parameter.name])


def _described(schema: Schema, text: str) -> Schema:
    """The schema with its description; a text that ends in `(choices: ["a", "b"])` lists the values."""
    if found := _CHOICES.search(text):
        try:
            schema["enum"] = [choice.strip() if isinstance(choice, str) else choice for choice in json.loads(found[1])]
        except (ValueError, TypeError) as err:
            raise ValueError(f'{found[0]} should be "(choices: ", a JSON list and ")"') from err
        text = text[: found.start()].strip()
    return schema | {"description": text}


def _returns(hints: Mapping[str, Any], text: str | None) -> Schema | None:
    """The schema of the return value; None without a hint that has a JSON form, as the model does not need it."""
    if "return" not in hints:
        return None
    try:
        schema = schema_of(hints["return"])
    except ValueError:
        return None
    return schema if text is None else schema | {"description": text}


def _shown_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    hidden = _filled_in(function)
    return [parameter for name, parameter in inspect.signature(function).parameters.items() if name not in hidden]


def _filled_in(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.items()
    return [name for name, parameter in parameters if name in FILLED_IN and parameter.kind is parameter.KEYWORD_ONLY]


def _place(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else function.__module__
