"""The language of programs: the opening of a chat, and one language for each set of tools that chats name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mgrpo.data.templates import with_bos
from mgrpo.data.tokenizer import token_ids
from mgrpo.environments.environment import Tool
from mgrpo.environments.formats import Format
from mgrpo.environments.loop.bridge import Bridges
from mgrpo.environments.loop.language import TemplateLanguage


class ProgramLanguage(TemplateLanguage):
    """Implements `environments.loop.conversation.Chats`."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        format_of: Callable[[Sequence[Tool]], Format],
        bridges_of: Callable[[Sequence[Tool]], Bridges],
        tools: Sequence[Tool] = (),
        add_bos: bool,
        max_observation_tokens: int,
    ) -> None:
        """
        Args:
            format_of, bridges_of: the format and the bridges of a chat in which these tools may be called.
        """
        bridges = bridges_of(tools)
        super().__init__(
            tokenizer,
            format_of(tools),
            bridges,
            max_observation_tokens=max_observation_tokens,
            is_thinking=bridges.opening([{"role": "user", "content": "Q"}]).rstrip().endswith("<think>"),
        )
        self._format_of, self._bridges_of, self._add_bos = format_of, bridges_of, add_bos
        self._known: dict[str, ProgramLanguage] = {}

    def with_tools(self, tools: Sequence[Tool]) -> ProgramLanguage:
        """The same for chats in which these may be called."""
        if not tools:
            return self
        key = json.dumps([tool.schema for tool in tools], sort_keys=True)
        if key not in self._known:
            self._known[key] = ProgramLanguage(
                self.tokenizer,
                format_of=self._format_of,
                bridges_of=self._bridges_of,
                tools=tools,
                add_bos=self._add_bos,
                max_observation_tokens=self.max_observation_tokens,
            )
        return self._known[key]

    def opening(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation, up to the opening of the model's turn; ValueError where the template refuses it."""
        text = self.bridges.opening([dict(message) for message in messages])
        return token_ids(self.tokenizer, [with_bos(text, self.tokenizer) if self._add_bos else text])[0]

    def written(self, ids: Sequence[int]) -> str:
        """Their text, with special tokens; ValueError for ids that the tokenizer does not have."""
        unknown = [number for number in ids if not 0 <= number < len(self.tokenizer)]
        if unknown:
            raise ValueError(f"the id {unknown[0]} is not among the tokenizer's {len(self.tokenizer)}")
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
