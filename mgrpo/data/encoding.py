"""Tokens from rows: template, bos token, tokenizer, length limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from json import loads
from typing import Any, Literal, Protocol

import numpy as np

from mgrpo.data.rows import Contract, Message, row_schemas
from mgrpo.data.templates import override_system, render, with_bos, with_changed_question
from mgrpo.data.tokenizer import token_ids

ASKING_ROLES = ("user", "tool", "system")
"""Roles of a message that a model may answer."""
_USUAL_ROLES = frozenset((*ASKING_ROLES, "assistant", "developer", "function"))
"""Roles that a template may write without a rule for them."""
TOOLS_COLUMN = "the column tools"
REMARKS = ("left_out", "unnamed_roles", "dropped_answer")
"""Columns with the roles of messages that warnings count; "" without any."""


class ToolSchemas(Protocol):
    """The tools of a run."""

    def schemas(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Schemas of the tools that the row may call; raises ValueError where it names one that does not exist."""

    def to_json(self) -> dict[str, Any]:
        """Everything that decides the schemas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides the tokens of a row, besides the tokenizer."""

    template: str | None
    """Jinja; None joins the contents of messages by newlines."""
    template_kwargs: dict[str, Any]
    add_bos: bool
    system_prompt: str | None
    max_tokens: int
    overlong: Literal["filter", "truncate_left", "error"]
    contract: Contract
    tools: ToolSchemas | None = None
    """Tools whose schemas the template receives. None: no tools, or their schemas are not given to it."""
    has_row_tools: bool = True
    """Pass the schemas in a row's column `tools` to the template, where the run has no tools."""
    template_name: str = "auto"
    """`chat_template_name`, for messages."""

    def to_json(self) -> dict[str, Any]:
        """Values for the key of a cache."""
        fields = dataclasses.asdict(self) | {"tools": None if self.tools is None else self.tools.to_json()}
        del fields["template_name"]
        return fields

    def asked(self, record: Mapping[str, object], *, change: Callable[[str], str] | None = None) -> str | list[Message]:
        """The question to the model: text, or the messages that the template is given.

        Args:
            change: makes another text of the question, or of the last message of the user in it.
        """
        prompt = self.contract.prompt(record)
        if isinstance(prompt, str):
            return change(prompt) if change else prompt
        messages = prompt if self.system_prompt is None else override_system(prompt, self.system_prompt)
        return with_changed_question(messages, change) if change else messages

    def text(self, record: Mapping[str, object], tokenizer: Any, *, change: Callable[[str], str] | None = None) -> str:
        """The prompt's text, with all special tokens written out; `change` as in `asked`."""
        return self.rendered(self.asked(record, change=change), tokenizer, tools=self.schemas(record))

    def schemas(self, record: Mapping[str, object]) -> list[dict[str, Any]] | None:
        """Schemas of the tools that the template is given for a row; None: `chat_template_kwargs` may name some."""
        if self.tools is not None:
            return self.tools.schemas(record)
        return (row_schemas(record) or None) if self.has_row_tools else None

    def unnamed_roles(self, messages: Sequence[Message]) -> list[str]:
        """Roles besides the usual ones that do not occur in the template."""
        roles = dict.fromkeys(message["role"] for message in messages if message["role"] not in _USUAL_ROLES)
        template = self.template or ""
        is_named = {role: f"'{role}'" in template or f'"{role}"' in template for role in roles}
        return [role for role in roles if "role" in template and not is_named[role]]

    def rendered(
        self, asked: str | Sequence[Message], tokenizer: Any, *, tools: Sequence[Mapping[str, Any]] | None
    ) -> str:
        """The text of a prompt for the result of `asked`."""
        if not isinstance(asked, str) and self.template is not None:
            return render(
                asked, tokenizer, self.template, add_bos=self.add_bos, kwargs=self.template_kwargs, tools=tools
            )
        text = asked if isinstance(asked, str) else "\n".join(str(message["content"]) for message in asked)
        return with_bos(text, tokenizer) if self.add_bos else text

    def shortened(self, tokens: np.ndarray, tokenizer: Any) -> tuple[np.ndarray, str]:
        """The part kept of a prompt over the limit: nothing, unless prompts are cut."""
        if self.overlong != "truncate_left":
            return tokens[:0], ""
        tokens = tokens[-self.max_tokens :]
        return tokens, tokenizer.decode(tokens.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)


class MessageCheck:
    """Finds the messages that a chat template leaves out of the prompt.

    A short content may stand in the text by chance ("3"), and a long one in another form (as JSON, without its thinking). So
    numbers that occur nowhere else are rendered in place of the contents, once for each sequence of roles, and next to a
    content that is in doubt: it is left out if the number is lost on either side of it.
    """

    def __init__(self, recipe: Recipe, tokenizer: Any) -> None:
        self._recipe, self._tokenizer = recipe, tokenizer
        self._doubtful: dict[object, tuple[set[int], list[str]]] = {}

    def left_out(
        self, messages: Sequence[Message], text: str, *, tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[list[int], list[str]]:
        """The places of the messages whose content is not in the prompt, and the roles of missing calls and schemas."""
        if self._recipe.template is None:
            calls = [f"tool_calls of {message['role']}" for message in messages if message.get("tool_calls")]
            return [], calls + [TOOLS_COLUMN] * bool(tools)
        key = (bool(tools), *((m["role"], bool(m["content"].strip()), *sorted(m.keys())) for m in messages))
        if key not in self._doubtful:
            self._doubtful[key] = self._probe(messages, tools)
        doubtful, other = self._doubtful[key]
        doubtful = doubtful | {
            place for place, message in enumerate(messages) if message["content"].strip() not in text
        }
        for is_behind in (True, False) if doubtful else ():
            doubtful = doubtful - self._found(messages, doubtful, tools, is_behind=is_behind)
        return sorted(doubtful), list(other)

    def _probe(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[set[int], list[str]]:
        """Messages in doubt, independent of their content, and the roles of calls and schemas that are left out."""
        marked = [_marked(message, place) for place, message in enumerate(messages)]
        text = self._rendered(marked, tools)
        if text is None:
            return set(), []
        missing = {
            place for place, message in enumerate(messages) if message["content"].strip() and _mark(place) not in text
        }
        other = [
            f"tool_calls of {message['role']}"
            for place, message in enumerate(messages)
            if message.get("tool_calls") and _mark(place, "1") not in text
        ]
        if tools and self._recipe.tools is None and text == self._rendered(marked, None):
            other.append(TOOLS_COLUMN)
        return missing, other

    def _found(
        self,
        messages: Sequence[Message],
        places: set[int],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        is_behind: bool,
    ) -> set[int]:
        """The places among `places` whose number, before or behind the content, is in the prompt."""
        marked = list(messages)
        for place in places:
            content, mark = messages[place]["content"].strip(), _mark(place)
            marked[place] = {**messages[place], "content": content + mark if is_behind else mark + content}
        text = self._rendered(marked, tools)
        return {place for place in places if text is None or _mark(place) in text}

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str | None:
        """The prompt's text; None where the template refuses the messages, which then cannot be checked."""
        try:
            return self._recipe.rendered(messages, self._tokenizer, tools=tools)
        except ValueError:
            return None


def _mark(place: int, kind: str = "0") -> str:
    """A number for a message that stands in no prompt, and that templates do not change."""
    return f"70918{kind}{place:06d}36427"


def _marked(message: Message, place: int) -> Message:
    """A message with numbers as its content and as the names of its calls."""
    marked = {**message, "content": _mark(place) if message["content"].strip() else message["content"]}
    if calls := message.get("tool_calls"):
        marked["tool_calls"] = [_with_name(call, _mark(place, "1")) for call in calls]
    return marked


def _with_name(call: Mapping[str, Any], name: str) -> dict[str, Any]:
    function = call.get("function")
    return {**call, "function": {**function, "name": name}} if isinstance(function, dict) else {**call, "name": name}


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """Makes prompts from a batch of rows, for `Dataset.map`."""

    recipe: Recipe
    tokenizer: Any
    check: MessageCheck
    threads: Executor
    num_threads: int

    def __call__(self, records: Sequence[str]) -> dict[str, Sequence[Any] | np.ndarray]:
        """The new columns for rows in JSON."""
        texts, problems = ([""] * len(records) for _ in range(2))
        remarks: list[dict[str, str]] = [{}] * len(records)
        for index, record in enumerate(records):
            try:
                texts[index], remarks[index] = self._text(loads(record))
            except ValueError as err:
                problems[index] = str(err)
        tokens = [
            np.array(ids, np.int32)
            for ids in token_ids(self.tokenizer, texts, threads=self.threads, num_threads=self.num_threads)
        ]
        lengths = np.array([len(ids) for ids in tokens])
        for index in np.flatnonzero(lengths == 0):
            problems[index] = problems[index] or "the prompt has no tokens"
        for index in np.flatnonzero(lengths > self.recipe.max_tokens):
            tokens[index], texts[index] = self.recipe.shortened(tokens[index], self.tokenizer)
        columns = {name: [remark.get(name, "") for remark in remarks] for name in REMARKS}
        return {"text": texts, "tokens": tokens, "num_tokens": lengths, "problem": problems, **columns}

    def _text(self, record: Mapping[str, object]) -> tuple[str, dict[str, str]]:
        """The prompt of a row, and `REMARKS` on it; ValueError where it is not the row's question."""
        asked, tools = self.recipe.asked(record), self.recipe.schemas(record)
        text = self.recipe.rendered(asked, self.tokenizer, tools=tools)
        if isinstance(asked, str) or not text:
            return text, {}
        places, roles = self.check.left_out(asked, text, tools=tools)
        questions = [place for place, message in enumerate(asked) if message["role"] != "system"]
        for place in (len(asked) - 1, *questions[-1:]):
            if place in places:
                last = "last message" if place == len(asked) - 1 else "last message before the system's"
                role = asked[place]["role"]
                renamed = (
                    "" if role == "user" else "give it a role that the template writes ('user' for a question), or "
                )
                raise ValueError(
                    f"the chat template ({self.recipe.template_name}) leaves out the {last}, whose role is {role!r}: its text is "
                    f"not in the prompt; {renamed}take another template: chat_template_name"
                )
        if asked[-1]["role"] not in ASKING_ROLES:
            raise ValueError(
                f"the last message of the prompt has the role {asked[-1]['role']!r}, expected user, tool or system: a model that "
                "reads an answer copies it; a single message 'assistant' behind the question is left out "
                f"(chat_template_name={self.recipe.template_name})"
            )
        shown = [message for place, message in enumerate(asked) if place not in places]
        return text, {
            "left_out": ", ".join(dict.fromkeys([*(asked[place]["role"] for place in places), *roles])),
            "unnamed_roles": ", ".join(map(repr, self.recipe.unnamed_roles(shown))),
            "dropped_answer": "assistant" if self.recipe.contract.ends_with_answer(record) else "",
        }
