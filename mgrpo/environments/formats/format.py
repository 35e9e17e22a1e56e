"""A format of tool calls: one family's way to write them into a turn, and the rest of the turn without them.

A model's text is untrusted: reading it never raises, and nothing in it is evaluated. Text in a thought is not a call. A call
that was begun and cannot be read is reported to the model and counted; it is never taken for the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mgrpo.environments.environment import Call
from mgrpo.environments.formats import thoughts

_MAX_FAULT = 200
_TURN_ENDS = (
    *("<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>"),
    *("<|user|>", "<|observation|>", "<|return|>", "</s>", "<eos>", "<end_of_turn>", "<｜end▁of▁sentence｜>"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A turn, read."""

    content: str
    """The text without calls, thoughts and end markers."""
    calls: tuple[Call, ...] = ()
    unreadable: tuple[str, ...] = ()
    """For each call that was begun and cannot be read, an error text for the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of a turn that is not content, `text[start:end]`: calls and the markup around them."""

    start: int
    end: int
    calls: tuple[Call, ...] = ()
    faults: tuple[str, ...] = ()
    """Reasons why calls cannot be read, one for each such call."""


Reader = Callable[[str, int], Block | None]
"""The next block that begins at or after a position of a text, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """Reader of the turns of one family of models. Made by `named`."""

    name: str
    read: Reader
    example: str
    """A call, as the model should write it."""
    stop_strings: tuple[str, ...] = ()
    """Stop strings; the turn includes the one that ends it."""
    stop_tokens: tuple[str, ...] = ()
    """Texts of tokens that end a turn besides the model's end token, as far as its tokenizer has them."""
    calls_in_thoughts: bool = False
    """True if a call in a thought counts: the turn ends there, and the thought continues after the answer."""
    answer_tag: str = ""
    """Answers are put between tags of this name, in the turn that asked; "": the chat template writes them."""

    @property
    def tags(self) -> tuple[str, str] | None:
        """Text before and after an answer, within the calling turn; None: the chat template writes answers."""
        return (f"<{self.answer_tag}>\n", f"\n</{self.answer_tag}>\n") if self.answer_tag else None

    def answer(self, texts: Sequence[str]) -> str | None:
        """The text that answers the calls of a turn; None as for `tags`."""
        if self.tags is None:
            return None
        before, after = self.tags
        return "\n".join(before + text + after for text in texts)

    def parse(self, text: str, *, is_thinking: bool = False) -> Parsed:
        """Read a turn.

        Args:
            text: with special tokens written out.
            is_thinking: the prompt ends inside a thought, which this turn continues.
        """
        try:
            content, blocks = self._parts(without_end(text), is_thinking)
        # No reader should, but one turn must not end a run.
        except (ValueError, RecursionError):
            return Parsed(content="", unreadable=(self._told("it has a value that is none"),))
        faults = (fault for block in blocks for fault in block.faults)
        return Parsed(
            content="\n".join(part.strip() for part in content if part.strip()),
            calls=tuple(call for block in blocks for call in block.calls),
            unreadable=tuple(self._told(fault) for fault in faults),
        )

    def _parts(self, text: str, is_thinking: bool) -> tuple[list[str], list[Block]]:
        """Content and blocks outside thoughts."""
        if not self.calls_in_thoughts:
            return self._split(text, self._end_of_earlier_thought(text, is_thinking), has_thoughts=True)
        content, blocks = self._split(text, 0, has_thoughts=False)
        return [thoughts.without_thoughts("\n".join(content), is_thinking=is_thinking)], blocks

    def _told(self, fault: str) -> str:
        """The error text for the model, with the fault cut: it may quote a name of any length."""
        return f"The tool call cannot be read: {fault[:_MAX_FAULT]}. Write it as {self.example}"

    def _split(self, text: str, at: int, *, has_thoughts: bool) -> tuple[list[str], list[Block]]:
        """The parts of a text after a position: content, and blocks that are not in a thought."""
        content: list[str] = []
        blocks: list[Block] = []
        block = self.read(text, at)
        thought = thoughts.next_thought(text, at) if has_thoughts else None
        while block or thought:
            if block and not (thought and thought.start() < block.start):
                blocks.append(block)
                start, end = block.start, block.end
            elif thought:
                start, end = thought.start(), thoughts.end_of(text, thought)
            content.append(text[at:start])
            at = end
            if block and (block.start < at or block.end <= at):
                block = self.read(text, at)
            if thought and thought.start() < at:
                thought = thoughts.next_thought(text, at)
        return [*content, text[at:]], blocks

    def _end_of_earlier_thought(self, text: str, is_thinking: bool) -> int:
        if is_thinking:
            return thoughts.end_of_thought(text, 0)
        start, end = thoughts.end_of_earlier_thought(text)
        # The argument of a call may hold the mark.
        block = self.read(text, 0) if end else None
        return 0 if block and block.calls and block.start < start < block.end else end


def without_end(text: str) -> str:
    """The text of a turn without the tokens that end it."""
    text = text.rstrip()
    while marker := next((marker for marker in _TURN_ENDS if text.endswith(marker)), ""):
        text = text.removesuffix(marker).rstrip()
    return text
