"""One trajectory at the endpoint: its turns, its bounds, and its report at the end. No HTTP."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mgrpo.environments.endpoint.messages import BadRequest, ContextFull, Fault
from mgrpo.environments.endpoint.tree import Ask, Node, Tree
from mgrpo.environments.endpoint.wishes import SampledTurn, Wishes
from mgrpo.environments.environment import LARGEST, fits_float32
from mgrpo.environments.loop.program_language import ProgramLanguage

MOST_STOPS, LONGEST_STOP = 16, 256
"""Strings at which a turn may end, and the characters of one."""
NUM_READERS = 2
"""Threads of `LongReader`."""
LONG_BYTES, HUGE_BYTES = 32_000, 512_000
"""Requests of more are read in a thread, those of yet more in another one, so that others need not wait for them."""
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "temperature": (1,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
}
"""Values without an effect, by the setting's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A call's request for a turn, independent of the API."""

    messages: Any
    """Messages as JSON; checked by the tree."""
    tools: Any = ()
    """Tools as chat templates take them; checked by the tree."""
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    """Strings at which the turn ends."""
    reads_calls: bool = True
    """False: calls stay text."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The client's sampling parameters, by OpenAI's names."""
    previous: int | None = None
    """The number of the turn that the messages follow; None: they are the whole conversation."""
    instructions: str | None = None
    """System prompt before all messages; it replaces that of the previous turn."""


class TokenUsage(NamedTuple):
    """Numbers of tokens."""

    context: int
    sampled: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turned:
    """A turn for the client that requested it."""

    node: Node
    token_logprobs: np.ndarray
    """`[sampled]` float32."""
    text_of_token: Callable[[int], str]
    """The text of an id, also of a special one; ValueError if the tokenizer has none."""

    @property
    def message(self) -> Mapping[str, Any]:
        """The turn as a message of a chat."""
        return self.node.message

    @property
    def stop(self) -> str | None:
        """The client's string at which it ended."""
        return self.node.stop

    @property
    def usage(self) -> TokenUsage:
        return TokenUsage(self.node.length, len(self.node.tokens))

    @property
    def logprobs(self) -> list[dict[str, Any]]:
        """The sampled tokens as OpenAI writes them, special ones and those of calls and thoughts included."""
        return [
            {"token": text, "logprob": logprob, "bytes": _bytes_of(text), "top_logprobs": []}
            for text, logprob in zip(map(self._text, self.node.tokens), self.token_logprobs.tolist(), strict=True)
        ]

    def _text(self, number: int) -> str:
        try:
            return self.text_of_token(number)
        except ValueError:
            # Models have more ids than their tokenizers.
            return f"token_id:{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryBounds:
    """Limits and sampling parameters of one trajectory."""

    max_tokens: int
    """Sampled tokens and those between turns, of all branches."""
    max_model_length: int
    """Tokens of a context and the turn after it."""
    per_turn_max_tokens: int | None = None
    deadline_s: float | None = None
    """Seconds from its beginning, which `Sessions` counts."""
    sampling: Mapping[str, float | None] = field(default_factory=dict)
    """Sampling parameters of all its turns; missing ones are neutral."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointLimits:
    """Limits of every session."""

    max_turns: int = 1024
    max_open_calls: int = 64
    max_branches: int = 1024
    body_bytes: int = 10 << 20
    """Most bytes of a body: `held_bytes` with room for tools and fields, as a larger one could not be recorded."""
    body_s: float = 10.0
    retry_s: float = 10.0
    """Seconds that a call without a client waits for a retry; client libraries begin one within 8 s."""
    comment_s: float = 5.0
    """Seconds between signs of life in a stream whose turn is being sampled; clients limit the time between reads."""
    held_bytes: int = 8 << 20
    """Most bytes of messages, as JSON, in a trajectory's record; a recorded turn's repeated history is not counted again."""
    open_body_bytes: int = 1 << 25
    """Bytes of the bodies of a trajectory's calls that are open at once."""
    worker_silence_s: float = 60.0
    """Seconds without a heartbeat after which a worker that sends them loses its task."""


class Counts:
    """Counters of events other than turns."""

    def __init__(self) -> None:
        self.plain = Counter(retries=0, abandoned=0, other_model=0)
        self.refused: Counter[str] = Counter()
        """Refused requests by the code or the status of the error."""
        self.overridden: Counter[str] = Counter()
        """Overridden sampling parameters by name."""


class LongReader:
    """Reader of long requests in threads, each with a separate tokenizer: a tokenizer is locked while it encodes."""

    def __init__(self, languages: Sequence[ProgramLanguage]) -> None:
        """`languages`: one for each thread, for long requests and for huge ones; no other thread uses them."""
        self._threads = [(ThreadPoolExecutor(1, "reader"), language) for language in languages]

    async def read(self, ask: Callable[[ProgramLanguage], Ask], *, is_huge: bool) -> Ask:
        """The result of `ask`, called with the language of a thread in that thread."""
        thread, language = self._threads[is_huge]
        return await asyncio.get_running_loop().run_in_executor(thread, ask, language)


class Session:
    """The turns of one trajectory. Belongs to one event loop.

    A turn may use all tokens that are left although others are being sampled, as the length of these is unknown. One that no
    longer fits when it is done is refused, so that the turns read by clients never exceed the bounds.
    """

    def __init__(
        self,
        name: str,
        language: ProgramLanguage,
        wishes: Wishes,
        *,
        bounds: TrajectoryBounds,
        limits: EndpointLimits,
        reader: LongReader,
        say: Callable[[str, str], None],
    ) -> None:
        """
        Args:
            language: language of chats without tools.
            say: shows the user a text, once for each key.
        """
        self.name, self.bounds, self.limits = name, bounds, limits
        self.counts = Counts()
        self.reward: float | None = None
        self.metrics: dict[str, float] = {}
        self.tree = Tree(language)
        self.ended = asyncio.Event()
        """Set once no further turn may be requested."""
        self.why_over: str | None = None
        """"ended", "late", "lost" if no worker has come, or "gone" if its worker is silent."""
        self.left: Mapping[str, Any] = {}
        """The report about its agent at the end, see `tasks.left_by`."""
        self._language, self._wishes, self._say = language, wishes, say
        self._reader, self._reading = reader, asyncio.Lock()
        self._num_asked = self._num_branches = self._num_used = self._num_held = 0
        self._continued: set[int] = set()
        """Turns after which another one was requested."""
        self._instructed: set[int] = set()
        """Turns whose conversation begins with instructions."""

    def close(self, why: str) -> None:
        """End the session: refuse further turns."""
        self.why_over = self.why_over or why
        self.ended.set()

    async def turn(self, request: TurnRequest, *, num_bytes: int) -> Turned:
        """Sample the turn of a request, and record it. Cancelled, nothing is recorded.

        Args:
            num_bytes: bytes of the request's body.
        Raises:
            Fault: the request is refused, or its turn cannot be sampled.
        """
        self._check_open()
        self._pin(request.settings)
        ask = await self.ask(request, num_bytes=num_bytes)
        if ask.is_first and self.tree.has_begun:
            # Another turn has begun while a thread has read this request.
            ask = await self.ask(request, num_bytes=num_bytes)
        self._check_open()
        limit = self._room(ask, request.max_tokens)
        if self._num_held + ask.num_bytes > self.limits.held_bytes:
            raise over(f"its messages would hold more than {self.limits.held_bytes} bytes")
        number = self._begin(ask)
        # Reserved, as other calls may be sampled at the same time.
        self._num_held += ask.num_bytes
        try:
            answer = await self._wishes.sample(
                self.name,
                number,
                {
                    "parent": None if ask.parent is None else ask.parent.number,
                    "added": ask.added,
                    "rewrites": ask.rewrites,
                    "max_tokens": limit,
                    "stop": list(request.stop),
                },
            )
            return self._take(number, ask, request, answer)
        except BaseException:
            self._num_held -= ask.num_bytes
            raise

    async def ask(self, request: TurnRequest, *, num_bytes: int) -> Ask:
        """The context and the place in the tree of a request's turn; records nothing."""
        messages, room = self._whole(request), self.bounds.max_model_length
        if num_bytes <= LONG_BYTES:
            return self.tree.ask(messages, request.tools, request.previous, room=room)

        def ask(language: ProgramLanguage) -> Ask:
            return self.tree.ask(messages, request.tools, request.previous, room=room, language=language)

        # One at a time, so that no trajectory takes all of a thread's time.
        async with self._reading:
            return await self._reader.read(ask, is_huge=num_bytes > HUGE_BYTES)

    def report(self) -> dict[str, Any]:
        """The report for the learner at the end."""
        nodes = sorted(self.tree.nodes.values(), key=lambda node: node.number)
        counts: dict[str, Any] = dict(self.counts.plain)
        counts["undelivered"] = sum(not node.delivered for node in nodes)
        counts["rendered_again"] = self.tree.num_rendered_again
        begun = [node for node in nodes if node.parent is None or node.rewrites]
        counts["context_repeated"] = sum(node.length for node in begun[1:])
        return {
            "turns": [
                {
                    "number": node.number,
                    "delivered": node.delivered,
                    "message": node.message,
                    "calls": list(node.calls.values()),
                    "num_unreadable": node.num_unreadable,
                }
                for node in nodes
            ],
            "roots": [{"number": node.number, "messages": node.messages} for node in nodes if node.parent is None],
            "added": {str(node.number): node.messages for node in nodes if node.parent is not None},
            "reward": self.reward,
            "metrics": self.metrics,
            "counts": counts | {"refused": dict(self.counts.refused), "overridden": dict(self.counts.overridden)},
            "first_difference": self.tree.first_difference,
        }

    def _whole(self, request: TurnRequest) -> Any:
        """The messages of the whole conversation."""
        messages = request.messages
        if request.previous is not None and isinstance(messages, list):
            if request.previous not in self.tree.nodes:
                raise BadRequest(
                    f"Previous response with id 'resp_{request.previous}' not found.",
                    "previous_response_not_found",
                    "previous_response_id",
                )
            messages = self.tree.history(request.previous)[request.previous in self._instructed :] + messages
        if request.instructions is not None and isinstance(messages, list):
            messages = [{"role": "system", "content": request.instructions}, *messages]
        return messages

    def _check_open(self) -> None:
        if self.why_over == "late":
            raise over("it has taken longer than it may")
        if self.why_over is not None:
            raise over("it has ended")

    def _pin(self, settings: Mapping[str, Any]) -> None:
        """Check a client's sampling parameters; the trajectory's are used instead."""
        for name, value in settings.items():
            finite(value, name)
            own = self.bounds.sampling.get(name)
            neutral = _NEUTRAL.get(name, ())
            if value == own or (value in neutral and (own is None or own in neutral)):
                continue
            used = "none" if own is None else f"{own:g}"
            self.counts.overridden[name] += 1
            self._say(
                f"overridden {name}",
                f"an agent asks for {name}={value:g}; the run's is used instead ({used}), since another one would change the "
                "distribution that is trained",
            )

    def _room(self, ask: Ask, max_tokens: int | None) -> int:
        """Most tokens of the turn."""
        if self._num_asked >= self.limits.max_turns:
            raise over(f"it has had all of its {self.limits.max_turns} turns")
        if self._num_used >= self.bounds.max_tokens:
            raise over(f"it has used its {self.bounds.max_tokens} tokens")
        left = self.bounds.max_tokens - self._num_used - self._own_tokens(ask)
        room = min(left, self.bounds.max_model_length - ask.length)
        if room < 1:
            # Tokens that an agent removes by compaction are no longer counted.
            limit = ask.length + room
            raise ContextFull(
                f"This model's maximum context length is {limit} tokens. However, your messages resulted in {ask.length} "
                "tokens. Please reduce the length of the messages.",
                num_tokens=ask.length,
                limit=limit,
            )
        return min(room, *(each for each in (max_tokens, self.bounds.per_turn_max_tokens, room) if each is not None))

    @staticmethod
    def _own_tokens(ask: Ask) -> int:
        """Tokens between the previous turn and this one."""
        return 0 if ask.parent is None or ask.rewrites else len(ask.added)

    def _begin(self, ask: Ask) -> int:
        """Count a turn and its branch; returns the turn's number."""
        goes_on = ask.parent is not None and not ask.rewrites and ask.parent.number not in self._continued
        if not goes_on and self._num_branches >= self.limits.max_branches:
            raise BadRequest(
                f"This trajectory has {self._num_branches} branches, the most that it may have; repeat the messages of a turn "
                "that nothing follows yet.",
                "too_many_branches",
                "messages",
            )
        if ask.parent is not None:
            self._continued.add(ask.parent.number)
        self.tree.begin(ask)
        self._num_branches += not goes_on
        number = self._num_asked
        self._num_asked += 1
        return number

    def _take(self, number: int, ask: Ask, request: TurnRequest, answer: SampledTurn) -> Turned:
        self._num_used += self._own_tokens(ask) + len(answer.tokens)
        if self._num_used > self.bounds.max_tokens:
            raise over(f"it has used its {self.bounds.max_tokens} tokens, by turns that were sampled meanwhile")
        node = self.tree.add(
            ask,
            number,
            answer.tokens,
            answer.finish_reason,
            reads_calls=request.reads_calls and bool(request.tools),
            stop=request.stop,
        )
        if request.instructions is not None:
            self._instructed.add(number)
        self._num_held += len(json.dumps(node.message))
        logprobs = np.array(answer.logprobs, np.float32)
        return Turned(node=node, token_logprobs=logprobs, text_of_token=self._language.text_of_token)


def over(why: str) -> Fault:
    """The error for a trajectory that may have no further turn."""
    return Fault(400, "invalid_request_error", f"This trajectory is over: {why}.", "trajectory_over")


def finite(value: Any, name: str) -> float:
    """A number from a client.

    Raises:
        BadRequest: it is none, or float32 does not hold it.
    """
    if not isinstance(value, bool) and isinstance(value, int | float) and fits_float32(value):
        return float(value)
    why = f"expected a number of at most {LARGEST:g} (float32)"
    raise BadRequest(f"Invalid value for '{name}': {str(value)[:80]}; {why}.", "invalid_value", name)


def _bytes_of(text: str) -> list[int] | None:
    """The UTF-8 bytes of a token; None: it is part of a character."""
    return None if "\ufffd" in text else list(text.encode())
