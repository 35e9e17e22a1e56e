"""A format of tool calls: how one family of models writes them into a turn, and what is left of the turn without them.

What a model writes is untrusted: reading it never raises, and nothing of it is evaluated. What stands in a thought is no
call. A call that was begun and cannot be read is told to the model and counted; it is never taken for the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from mgrpo.environments.environment import Call

_THOUGHT_BEGINS = re.compile(r"<think>|\[THINK\]")
_THOUGHT_ENDS = re.compile(r"</think>|\[/THINK\]")
_TURN_ENDS = (
    *("<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>"),
    *("<|user|>", "<|observation|>", "<|return|>", "</s>", "<eos>", "<end_of_turn>", "<｜end▁of▁sentence｜>"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """What a turn says."""

    content: str
    """Without calls, thoughts and end markers."""
    calls: tuple[Call, ...] = ()
    unreadable: tuple[str, ...] = ()
    """For each call that was begun and cannot be read, what to tell the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of a turn that is not content, `text[start:end]`: calls and the markup around them."""

    start: int
    end: int
    calls: tuple[Call, ...] = ()
    faults: tuple[str, ...] = ()
    """Why a call cannot be read, one for each such call."""


Reader = Callable[[str, int], Block | None]
"""The next block that begins at or after a position of a text, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """Reads the turns of one family of models. Made by `named`."""

    name: str
    read: Reader
    example: str
    """A call, as the model should write it."""
    stop_strings: tuple[str, ...] = ()
    """A turn ends with the first of them, which is part of it."""
    stop_tokens: tuple[str, ...] = ()
    """Texts of tokens that end a turn besides the model's end token, as far as its tokenizer has them."""
    calls_in_thoughts: bool = False
    """A call in a thought counts: the turn ends there, and the thought goes on after the answer."""
    answer_tag: str = ""
    """Answers stand between tags of this name, in the turn that asked; without one the chat template writes them."""

    def answer(self, texts: list[str] | tuple[str, ...]) -> str | None:
        """The text that follows a turn to answer its calls; None: it is up to the chat template."""
        if not self.answer_tag:
            return None
        return "\n".join(f"<{self.answer_tag}>\n{text}\n</{self.answer_tag}>\n" for text in texts)

    def parse(self, text: str, *, is_thinking: bool = False) -> Parsed:
        """Read a turn.

        Args:
            text: with special tokens written out.
            is_thinking: the prompt ends inside a thought, which this turn goes on with.
        """
        text = _without_end(text)
        at = 0 if self.calls_in_thoughts else self._end_of_first_thought(text, is_thinking)
        content: list[str] = []
        calls: list[Call] = []
        faults: list[str] = []
        block, thought = self.read(text, at), self._thought(text, at)
        while block or thought:
            if block and not (thought and thought.start() < block.start):
                content.append(text[at : block.start])
                calls += block.calls
                faults += block.faults
                at = block.end
            elif thought:
                content.append(text[at : thought.start()])
                at = _end_of_thought(text, thought.end())
            if block and block.start < at:
                block = self.read(text, at)
            if thought and thought.start() < at:
                thought = self._thought(text, at)
        content.append(text[at:])
        if self.calls_in_thoughts:
            content = [_without_thoughts("".join(content), is_thinking)]
        unreadable = tuple(f"The tool call cannot be read: {fault}. Write it as {self.example}" for fault in faults)
        said = "\n".join(part.strip() for part in content if part.strip())
        return Parsed(content=said, calls=tuple(calls), unreadable=unreadable)

    def _thought(self, text: str, at: int) -> re.Match[str] | None:
        return None if self.calls_in_thoughts else _THOUGHT_BEGINS.search(text, at)

    def _end_of_first_thought(self, text: str, is_thinking: bool) -> int:
        """Where a thought ends that began before the text."""
        ends = _THOUGHT_ENDS.search(text)
        if is_thinking:
            return ends.end() if ends else len(text)
        if ends is None or _THOUGHT_BEGINS.search(text, 0, ends.start()):
            return 0
        # The argument of a call may hold the marker.
        block = self.read(text, 0)
        is_argument = block and block.calls and block.start < ends.start() < block.end
        return 0 if is_argument else ends.end()


def _without_end(text: str) -> str:
    text = text.rstrip()
    while marker := next((marker for marker in _TURN_ENDS if text.endswith(marker)), ""):
        text = text.removesuffix(marker).rstrip()
    return text


def _end_of_thought(text: str, at: int) -> int:
    ends = _THOUGHT_ENDS.search(text, at)
    return ends.end() if ends else len(text)


def _without_thoughts(text: str, is_thinking: bool) -> str:
    ends = _THOUGHT_ENDS.search(text)
    begins = _THOUGHT_BEGINS.search(text)
    if is_thinking or (ends and not (begins and begins.start() < ends.start())):
        text = text[ends.end() :] if ends else ""
    kept, at = [], 0
    while thought := _THOUGHT_BEGINS.search(text, at):
        kept.append(text[at : thought.start()])
        at = _end_of_thought(text, thought.end())
    return "".join([*kept, text[at:]])
