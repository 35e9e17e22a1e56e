"""A user program that drives the model: `async def rollout(row, model, **settings) -> float | None`.

It runs in a worker process, between requests of the learner: each carries the model's turn, and is answered with the program's
next sampling request or with its result. Standard library only.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from mgrpo.environments.environment import Environment
from mgrpo.environments.offered.calling import number, outcome
from mgrpo.environments.offered.functions import tool_of
from mgrpo.environments.offered.row_columns import is_plain, sendable

Wish = dict[str, Any]
"""A program's sampling request, or the answer to one, as JSON."""
Rollout = Callable[..., Awaitable[float | None]]


class Refused(ValueError):
    """A request that cannot be met; the text is the reason. The trajectory is unchanged."""


class NoRoom(RuntimeError):
    """No room for a further token. A program that does not catch it ends there, without setting a reward."""


class Message(dict[str, Any]):
    """A turn of the model, as a message of a chat; append it to the messages of the next chat as it is."""

    def __init__(self, values: Mapping[str, Any], *, finish_reason: str, unreadable: Sequence[str]) -> None:
        super().__init__(values)
        self.finish_reason = finish_reason
        """"stop", or "length" if the turn was cut."""
        self.unreadable = tuple(unreadable)
        """For each call that was begun and cannot be read, an error text for the model."""

    @property
    def content(self) -> str:
        """The text without calls."""
        return self["content"]

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """`{"id", "type": "function", "function": {"name", "arguments"}}`, the arguments as an object."""
        return self.get("tool_calls", [])


class Model:
    """The model of one trajectory."""

    def __init__(self, *, trajectory: str, seed: int) -> None:
        self.trajectory = trajectory
        """The trajectory's id."""
        self.seed = seed
        """Seed, the same for all samples of a prompt."""
        self.ids: list[int] = []
        """All tokens: at first the row's prompt, then everything up to the model's last token."""
        self.is_sampled: list[bool] = []
        """Per token, True if the model sampled it."""
        self.logprobs: list[float] = []
        """Log-probability per token; 0 for those that were not sampled."""
        self.metrics: dict[str, float] = {}
        """Metrics, reported as env/{name}/{metric}."""
        self.shown: dict[str, Any] = {}
        """Values for reward functions, as attributes of their `environments`; those that JSON cannot hold are left out."""
        self.last: Message | None = None
        """The last turn of the model."""
        self.is_over = False
        self._wishes: asyncio.Queue[tuple[Wish, asyncio.Future[Wish]]] = asyncio.Queue()
        self._asking: asyncio.Future[Wish] | None = None

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        *,
        max_tokens: int | None = None,
    ) -> Message:
        """The model's answer to a conversation.

        Args:
            messages: the whole conversation. After the first chat: the messages before, the model's as it was returned, and the
                answer to it, which is a message of the user or one of the role "tool" for each call.
            tools: schemas, or functions with type hints and a docstring; the same in all chats.
            max_tokens: most tokens of this turn.
        Raises:
            Refused: this cannot be sampled.
            NoRoom: the trajectory is full.
        """
        schemas = [dict(tool) if isinstance(tool, Mapping) else tool_of(tool).schema for tool in tools or ()]
        if not messages or not all(isinstance(message, Mapping) and "role" in message for message in messages):
            raise Refused(
                f"messages={messages!r:.200} must be a list of objects with a role and a content, at least one"
            )
        plain = [dict(message) for message in messages]
        if not is_plain(plain) or not is_plain(schemas):
            raise Refused("messages and tools must be what JSON holds: text, numbers, lists and objects")
        return (await self._ask({"messages": plain, "tools": schemas}, max_tokens))["said"]

    async def sample(self, ids: Sequence[int], *, max_tokens: int | None = None) -> list[int]:
        """The ids that the model adds to these, which begin with `self.ids` once something was sampled.

        Raises:
            Refused: this cannot be sampled.
            NoRoom: the trajectory is full.
        """
        whole = [int(number) for number in ids]
        return (await self._ask({"ids": whole}, max_tokens))["sampled"]

    async def _ask(self, wish: Wish, max_tokens: int | None) -> Wish:
        if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
            raise Refused(f"max_tokens={max_tokens!r:.80} must be a whole number, at least 1")
        if self.is_over:
            raise RuntimeError("the trajectory is over; a program must wait for all that it asks of the model")
        answered: asyncio.Future[Wish] = asyncio.get_running_loop().create_future()
        self._wishes.put_nowait(({**wish, "max_tokens": max_tokens}, answered))
        answer = await answered
        if "no_room" in answer:
            raise NoRoom(answer["no_room"])
        if "refused" in answer:
            raise Refused(answer["refused"])
        return answer

    def _add(self, keep: int, before: Sequence[int], sampled: Sequence[int], logprobs: Sequence[float]) -> None:
        self.ids[keep:] = [*before, *sampled]
        self.is_sampled[keep:] = [False] * len(before) + [True] * len(sampled)
        self.logprobs[keep:] = [0.0] * len(before) + list(logprobs)

    def begin(self, ids: Sequence[int]) -> None:
        """Take the row's prompt."""
        self._add(0, ids, (), ())

    async def wish(self) -> Wish:
        """The next sampling request."""
        while True:
            wish, self._asking = await self._wishes.get()
            if not self._asking.done():
                return wish

    def answer(self, answer: Wish) -> None:
        """Answer the last sampling request, also if the program no longer awaits it."""
        assert self._asking is not None
        if "sampled" in answer:
            self._add(answer["keep"], answer["before"], answer["sampled"], answer["logprobs"])
            self.last = answer["said"] = Message(
                answer["message"], finish_reason=answer["finish_reason"], unreadable=answer["unreadable"]
            )
        if not self._asking.done():
            self._asking.set_result(answer)


class Program(Environment):
    """The function with its settings; one trajectory at a time."""

    def __init__(self, rollout: Rollout, *, is_repeatable: bool = False, **settings: Any) -> None:
        if not inspect.iscoroutinefunction(rollout):
            raise ValueError(
                "it must be an async function: `async def rollout(row, model, **settings)`, which awaits model.chat(messages)"
            )
        try:
            inspect.signature(rollout).bind({}, None, **settings)
        except TypeError as err:
            raise ValueError(f"it is called as rollout(row, model, **settings), and {err}") from err
        self.name = rollout.__name__
        self.is_repeatable = is_repeatable
        self._rollout, self._settings = rollout, settings
        self._file = inspect.getfile(rollout)
        self._row: Mapping[str, Any] = {}
        self._model: Model | None = None
        self._task: asyncio.Task[Any] | None = None

    async def reset(self, row: Mapping[str, Any], *, seed: int) -> None:
        await self.close()
        self._row, self._model = row, Model(trajectory=self.trajectory, seed=seed)

    async def resume(self, answer: Wish) -> Wish:
        """Run the program until its next sampling request or its end.

        Args:
            answer: the answer to its last request; at first the row's prompt, {"begin": ids}.
        Returns:
            {"wish": ...}, or {"returned": reward, "metrics": ..., "shown": ...}.
        """
        model = self._model
        assert model is not None
        if self._task is None:
            model.begin(answer["begin"])
            self._task = asyncio.create_task(outcome(self._rollout, self._row, model, **self._settings))
        else:
            model.answer(answer)
        wish = asyncio.create_task(model.wish())
        try:
            await asyncio.wait({self._task, wish}, return_when=asyncio.FIRST_COMPLETED)
            if not self._task.done():
                return {"wish": wish.result()}
        except asyncio.CancelledError:
            await self.close()
            raise
        finally:
            wish.cancel()
        model.is_over = True
        result, err = self._task.result()
        if isinstance(err, NoRoom):
            result, err = None, None
        if err is not None:
            raise ValueError(f"{self.name}: {type(err).__name__}: {err} ({self._place(err)})") from err
        reward = None if result is None else number(result, f"{self.name}: the reward that it returned")
        metrics = {
            f"{self.name}/{name}": number(value, f"{self.name}: the metric {name}")
            for name, value in model.metrics.items()
        }
        return {"returned": reward, "metrics": metrics, "shown": sendable(model.shown)}

    async def close(self) -> None:
        """Cancel the program; waits until it has ended, however long that takes."""
        task, self._task = self._task, None
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait({task})

    def _place(self, err: BaseException) -> str:
        """The line that raised: the program's own, if that is known."""
        frames = traceback.extract_tb(err.__traceback__)
        own = [frame for frame in frames if frame.filename == self._file]
        frame = (own or frames)[-1]
        return f"{frame.filename}:{frame.lineno}"
