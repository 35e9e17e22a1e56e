"""The form of a row, and the meaning of its columns. Rows are plain JSON values here: no files, no tokenizer.

A row has `messages` (a list of {"role", "content"}) or else `prompt` (text, or such a list), `dataset` (the name of a
verifier, or a list of names) and `ground_truth` (any JSON value; with a list of names, one each). All other columns
are for reward functions, and for a run's tools. Messages, their tool calls and schemas of tools may be JSON text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PROMPT = "prompt"
VERIFIERS = "dataset"
TOOLS = "tools"

Message = dict[str, Any]
SHAREGPT = {"human": "user", "gpt": "assistant"}
"""Roles of ShareGPT's conversations, which no chat template supports."""
_KEYS = tuple(
    tuple(re.compile(rf"""['"]{key}['"]\s*:""") for key in keys) for keys in (("role", "content"), ("from", "value"))
)
"""The keys of a message, as JSON and Python write them."""
_TEXT_CURE = 'make messages of a text, [{"role": "user", "content": text}], or rename its column to prompt, which is read without a chat template'


class BadRow(ValueError):
    """A row that cannot be used.

    Attributes:
        expected: the missing property; the same words for the same mistake, independent of the value found.
    """

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(f"found {found}, expected {expected}")
        self.expected = expected


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """Names of the columns, and the requirements of a row."""

    messages_key: str = "messages"
    ground_truths_key: str = "ground_truth"
    need_verifiers: bool = True
    """False for runs without verifiers: `dataset` may be any column, and there may be no ground truth."""

    def check(self, record: object) -> tuple[bool, tuple[str, ...]]:
        """True if the row is a conversation, and its verifiers; raises BadRow."""
        if not isinstance(record, dict):
            raise BadRow(
                shown(record), f"an object with {self.messages_key} or prompt, {self.ground_truths_key} and dataset"
            )
        prompt, is_own = self._given(record), self.is_own_prompt(record)
        if isinstance(prompt, list):
            _check_messages(prompt, key=PROMPT if is_own else self.messages_key)
            self.prompt(record)
        elif not is_own:
            raise BadRow(
                f"{self.messages_key} {shown(prompt)}",
                f"a list with at least one message; {_TEXT_CURE}",
            )
        elif isinstance(prompt, str) and prompt:
            _check_text(prompt)
        else:
            keys = ", ".join(map(repr, record)) or "nothing"
            cure = (
                "; name the column that holds messages with sft_messages_key, that of the answers with ground_truths_key "
                f"(reward_model.ground_truth for one inside another); {_TEXT_CURE}"
            )
            expected = f"{self.messages_key} (a list of role and content) or prompt (text)"
            raise BadRow(f"prompt {shown(prompt)} among {keys}", expected if PROMPT in record else expected + cure)
        return isinstance(prompt, list), self.labels(record)[0]

    def prompt(self, record: Mapping[str, object]) -> str | list[Message]:
        """The question to the model: text, or messages without a final answer."""
        prompt = self._given(record)
        if isinstance(prompt, str):
            return prompt
        assert isinstance(prompt, list)
        messages = [_plain_message(message) for message in prompt]
        return messages[:-1] if self.ends_with_answer(record) else messages

    def ends_with_answer(self, record: Mapping[str, object]) -> bool:
        """True if the messages end with one of the assistant's, which is not part of the prompt."""
        prompt = self._given(record)
        return isinstance(prompt, list) and len(prompt) > 1 and prompt[-1]["role"] == "assistant"

    def is_own_prompt(self, record: Mapping[str, object]) -> bool:
        """True if the prompt is in the column `prompt`, as in TRL."""
        return record.get(self.messages_key) is None

    def labels(self, record: Mapping[str, object]) -> tuple[tuple[str, ...], tuple[object, ...]]:
        """Verifiers and their ground truths; in runs without verifiers the ground truth as it is, if there is one."""
        names, truth = record.get(VERIFIERS), _nested(record, self.ground_truths_key)
        missing = "no" if truth is None else "NaN as"
        truth = None if _is_nan(truth) else truth
        if not self.need_verifiers:
            return (), () if truth is None else (truth,)
        if isinstance(names, str) and names:
            verifiers = (names,)
        elif isinstance(names, list) and names and all(isinstance(name, str) and name for name in names):
            verifiers = tuple(names)
        else:
            raise BadRow(
                f"dataset {shown(names)}",
                "the name of a verifier, or a list of names: add the column, the same name in every row for example, or score with "
                "a function of yours: reward_funcs",
            )
        if truth is None:
            raise BadRow(
                f"{missing} {self.ground_truths_key}",
                "what the verifier compares with; name another column with ground_truths_key (column.key for a value inside one)",
            )
        if isinstance(names, str) or (len(verifiers) == 1 and not isinstance(truth, list)):
            return verifiers, (truth,)
        if not isinstance(truth, list) or len(truth) != len(verifiers):
            raise BadRow(
                f"{self.ground_truths_key} {shown(truth)} for {len(verifiers)} verifiers", "a list with one value each"
            )
        if any(each is None or _is_nan(each) for each in truth):
            raise BadRow(f"{self.ground_truths_key} {shown(truth)}", "a value for each verifier: null and NaN are none")
        return verifiers, tuple(truth)

    def columns(self, record: Mapping[str, object]) -> dict[str, object]:
        """All columns except the prompt."""
        return {key: value for key, value in record.items() if key not in (PROMPT, self.messages_key)}

    def to_json(self, record: object) -> tuple[str, list[str]]:
        """The row as JSON text, and the names of the columns that JSON cannot hold, which become null.

        Numpy values become lists and numbers, dates ISO text, decimals text. Raises BadRow for a label or
        a prompt that JSON cannot hold.
        """
        if isinstance(record, Mapping):
            record = dict(record)
        try:
            return json.dumps(record, default=_plain), []
        except (TypeError, ValueError, RecursionError) as err:
            if not isinstance(record, dict):
                raise BadRow(f"{type(record).__name__} ({err})", "a row of JSON values") from err
        lost = []
        for key, value in record.items():
            try:
                json.dumps({key: value}, default=_plain)
            except (TypeError, ValueError, RecursionError) as err:
                if not isinstance(key, str) or key in (PROMPT, VERIFIERS, self.messages_key, self.ground_truths_key):
                    raise BadRow(f"{key} {shown(value)} ({err})", "a JSON value") from err
                lost.append(key)
        return json.dumps({key: None if key in lost else value for key, value in record.items()}, default=_plain), lost

    def _given(self, record: Mapping[str, object]) -> object:
        messages = record.get(self.messages_key)
        given = record.get(PROMPT) if messages is None else messages
        return _read_messages(given) if isinstance(given, str) else given


def _nested(record: Mapping[str, object], key: str) -> object:
    """The column of that name, else the value inside one at a path such as reward_model.ground_truth; None without it."""
    found: object = record
    for part in [key] if key in record else key.split("."):
        found = found.get(part) if isinstance(found := _from_json(found), Mapping) else None
    return found


def row_schemas(record: Mapping[str, object]) -> list[dict[str, Any]]:
    """Schemas of tools in the column `tools`, as a list or as JSON text; none where it holds anything else, such as names.

    Raises:
        ValueError: only some of its entries are schemas.
    """
    given = _from_json(record.get(TOOLS))
    entries = [_from_json(each) for each in (given if isinstance(given, list) else [given])]
    schemas = [without_nulls(each) for each in entries if isinstance(each, dict)]
    if schemas and len(schemas) < len(entries):
        raise ValueError(f"tools: {shown(given)} has schemas and other entries; expected a list of schemas")
    # One object that is not a schema is a column of the user's own.
    return schemas if isinstance(given, list) or any({"function", "parameters"} & one.keys() for one in schemas) else []


def without_nulls(value: Any) -> Any:
    """A value without the keys that are null: tables give every object the keys of all others."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def shown(value: object) -> str:
    """A value in an error message."""
    return repr(value)[:80]


def _check_messages(messages: list, *, key: str) -> None:
    if not messages:
        raise BadRow(f"{key} []", "a list with at least one message")
    for message in messages:
        if not (isinstance(message, dict) and isinstance(message.get("role"), str) and _has_content(message)):
            is_sharegpt = isinstance(message, dict) and {"from", "value"} <= message.keys()
            cure = "; these are ShareGPT's names: rename them and the roles" if is_sharegpt else ""
            raise BadRow(f"message {shown(message)}", f'{{"role": text, "content": text}}{cure}')
        if message["role"] in SHAREGPT:
            raise BadRow(f"role {message['role']!r}", f"the chat template's name for it, {SHAREGPT[message['role']]!r}")
        _check_text(message.get("content") or "")


def _has_content(message: dict) -> bool:
    """True if a message has text, or calls in place of it; raises BadRow for malformed calls."""
    calls = _from_json(message.get("tool_calls"))
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise BadRow(f"tool_calls {shown(calls)}", "a list of calls, or JSON text of one")
    content = message.get("content")
    return isinstance(content, str) or (content is None and bool(calls) and message["role"] == "assistant")


def _plain_message(message: Message) -> Message:
    """A message without nulls, with text as its content and with its calls as a list."""
    found = {"content": "", **without_nulls(message)}
    return found if "tool_calls" not in found else {**found, "tool_calls": _from_json(found["tool_calls"])}


def _read_messages(text: str) -> str | list:
    """Messages that are written as JSON text, as in columns of CSV files and databases; any other text as it is."""
    stripped = text.strip()
    if stripped[:1] not in ("[", "{") or stripped[-1:] not in ("]", "}"):
        return text
    if not any(all(key.search(stripped) for key in keys) for keys in _KEYS):
        return text
    try:
        found = json.loads(stripped)
    except (ValueError, RecursionError) as err:
        raise BadRow(
            f"{shown(text)}, which looks like messages and is not JSON ({err})",
            "a list of messages, or JSON text of one (json.dumps, not str)",
        ) from err
    if not isinstance(found, list):
        raise BadRow(f"an object as JSON text, {shown(text)}", "a list of messages, or JSON text of one")
    return found


def _from_json(value: object) -> Any:
    """A list or an object that is written as JSON text; any other value as it is."""
    if not isinstance(value, str) or value.strip()[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _is_nan(value: object) -> bool:
    """True for NaN, the missing value of numeric tables."""
    return isinstance(value, float) and value != value


def _check_text(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as err:
        raise BadRow(f"half of a character in the prompt, {shown(text[err.start])}", "Unicode text") from err


def _plain(value: object) -> object:
    """Natural form in JSON of a table's value, for json.dumps."""
    import datetime
    import decimal

    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not a JSON value")
