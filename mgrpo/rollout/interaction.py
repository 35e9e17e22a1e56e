"""Groups of several turns between the dispatcher and the environments: one event loop in a thread of its own.

The dispatcher sends whole groups and receives requests of one turn each. `environments.loop.episodes` does the work between turns.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from mgrpo.config import ConfigError
from mgrpo.environments.loop.episodes import EpisodeBounds, Episodes, Language, Task
from mgrpo.environments.loop.gathering import Ask, Gathering
from mgrpo.environments.loop.trajectory import Sampled
from mgrpo.rollout.requests import NextTurn, Request, seed_of
from mgrpo.types import Prompt, RolloutGroup

if TYPE_CHECKING:
    from mgrpo.environments.workers.pool import EnvironmentPool

CLOSE_S = 10.0


class Turns(Protocol):
    """Calls to the dispatcher about its groups. All except `post` are made in its own thread."""

    def post(self, task: Callable[[], object]) -> None:
        """Run `task` soon, in the dispatcher's thread."""

    def send_turns(self, requests: Sequence[Request], *, together: bool) -> None:
        """Sample these turns."""

    def withdraw_turn(self, request: Request) -> None:
        """Cancel this turn."""

    def end(self, request: Request, group: RolloutGroup) -> None:
        """Complete a group."""

    def give_up(self, request: Request, err: Exception) -> None:
        """Fail a group, and with it the run unless it is a RefusedError."""


class Opened(Protocol):
    """Adds an environment's text to a prompt."""

    def __call__(self, prompt: Prompt, text: str, *, is_training: bool) -> Prompt: ...


class Asked(Protocol):
    """The question of a prompt to the model: text, or messages."""

    def __call__(self, prompt: Prompt, *, is_training: bool) -> object: ...


class Interaction:
    """All groups of several turns. Always `close` it."""

    def __init__(
        self,
        environments: EnvironmentPool,
        language: Language,
        bounds: EpisodeBounds,
        *,
        episodes: Callable[[Gathering, EnvironmentPool, Any, EpisodeBounds], Episodes] = Episodes,
        opened: Opened,
        asked: Asked | None = None,
        hidden_columns: Collection[str] = (),
        in_rounds: bool,
        run_seed: int,
    ) -> None:
        """
        Args:
            episodes: builds the object that runs the trajectories.
            opened: adds an environment's opening to a prompt.
            asked: the value of `prompt` in rows; None: the same as for reward functions.
            hidden_columns: columns of a row that are not sent to environments.
            in_rounds: see `Gathering`.
        """
        self.environments, self.in_rounds, self.run_seed = environments, in_rounds, run_seed
        self.opened, self.asked, self.hidden_columns = opened, asked, frozenset(hidden_columns)
        self.gathering = Gathering(self._send, self._withdraw, in_rounds=in_rounds)
        self.episodes = episodes(self.gathering, environments, language, bounds)
        self.places = itertools.count()
        self.groups: dict[int, Request] = {}
        """Requests under way, by place."""
        self.turns: dict[Ask, Request] = {}
        """Turns that were sent and not answered."""
        self.tasks: set[asyncio.Task[None]] = set()
        self.dispatcher: Turns | None = None
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(self._broken)
        self.thread = threading.Thread(target=self.loop.run_forever, name="environments", daemon=True)

    def start(self, dispatcher: Turns) -> None:
        """Attach to this dispatcher; returns when the environments' processes have started.

        Raises:
            ValueError: an environment cannot be built.
        """
        self.dispatcher = dispatcher
        self.thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self.loop).result()

    def begin(self, requests: Sequence[Request]) -> None:
        """Begin these groups, in this order. From any thread."""
        self.loop.call_soon_threadsafe(self._begin, list(requests))

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the environments since the last call. From any thread."""
        return self.environments.take_metrics()

    def close(self) -> None:
        """Cancel the groups under way, and end the environments' processes."""
        if self.thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._close(), self.loop).result(CLOSE_S)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join(CLOSE_S)

    async def _start(self) -> None:
        await self.episodes.start()
        await self.environments.start()

    async def _close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.environments.close()
        await self.episodes.close()

    def _broken(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End the run after the failure of a callback whose result is not awaited."""
        err = context.get("exception") or RuntimeError(context["message"])
        if self.dispatcher is None or not isinstance(err, Exception):
            loop.default_exception_handler(context)
        else:
            self.dispatcher.post(partial(_raise, err))

    def _begin(self, requests: Sequence[Request]) -> None:
        self.gathering.enter(len(requests))
        for request in requests:
            place = next(self.places)
            self.groups[place] = request
            task = asyncio.create_task(self._run(place, request))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _run(self, place: int, request: Request) -> None:
        assert self.dispatcher is not None
        prompt, sampling = request.prompt, request.sampling
        task = Task(
            prompt=prompt,
            name=f"{'' if request.is_training else 'eval/'}{prompt.id[0]}/{prompt.id[1]}",
            place=place,
            num_samples=sampling.num_samples,
            max_tokens=sampling.max_tokens,
            opened=partial(self.opened, prompt, is_training=request.is_training),
            row=self._row(prompt, is_training=request.is_training),
            seed=seed_of(self.run_seed, "environment", request.stream, *prompt.id),
            truth=self._truth(prompt),
            sampling={name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p")},
        )
        try:
            group = await self.episodes.run(task)
        except ValueError as err:
            # The text of an environment does not fit the settings.
            self.dispatcher.post(partial(self.dispatcher.give_up, request, ConfigError([str(err)])))
        except Exception as err:
            self.dispatcher.post(partial(self.dispatcher.give_up, request, err))
        else:
            self.dispatcher.post(partial(self.dispatcher.end, request, group))
        finally:
            del self.groups[place]

    def _row(self, prompt: Prompt, *, is_training: bool) -> dict[str, Any]:
        shown = {name: value for name, value in prompt.columns.items() if name not in self.hidden_columns}
        asked = self.asked(prompt, is_training=is_training) if self.asked else prompt.source or prompt.text
        return {"prompt": asked, **shown}

    def _truth(self, prompt: Prompt) -> dict[str, Any]:
        return {name: prompt.columns.get(name, list(prompt.ground_truths)) for name in self.hidden_columns}

    def _send(self, asks: Sequence[Ask]) -> None:
        assert self.dispatcher is not None
        requests = [self._request(ask) for ask in asks]
        self.turns.update(zip(asks, requests, strict=True))
        self.dispatcher.post(partial(self.dispatcher.send_turns, requests, together=self.in_rounds))

    def _withdraw(self, ask: Ask) -> None:
        assert self.dispatcher is not None
        if (request := self.turns.pop(ask, None)) is not None:
            self.dispatcher.post(partial(self.dispatcher.withdraw_turn, request))

    def _request(self, ask: Ask) -> Request:
        whole = self.groups[ask.place]
        turn = NextTurn(
            whole=whole,
            sample=ask.sample,
            turn=ask.turn,
            tokens=ask.tokens,
            max_tokens=ask.max_tokens,
            salt=ask.place,
        )
        return Request(
            prompt=ask.prompt,
            sampling=whole.sampling_of(ask.num_samples, ask.stop),
            stream=whole.stream,
            number=whole.number,
            done=lambda group: self._soon(self._answer, ask, group),
            failed=lambda err: self._soon(self._refuse, ask, err),
            turn=turn,
        )

    def _soon(self, do: Callable[..., None], *args: object) -> None:
        self.loop.call_soon_threadsafe(do, *args)

    def _answer(self, ask: Ask, group: RolloutGroup) -> None:
        self.turns.pop(ask, None)
        if ask.answer.done():
            return  # The group was cancelled.
        ask.answer.set_result(
            [
                Sampled(
                    tokens=completion.tokens,
                    logprobs=completion.logprobs,
                    policy_versions=completion.policy_versions,
                    finish_reason=completion.finish_reason,
                    kept=completion.kept,
                    routes=completion.routes[0] if completion.routes else None,
                )
                for completion in group.completions
            ]
        )

    def _refuse(self, ask: Ask, err: Exception) -> None:
        self.turns.pop(ask, None)
        if not ask.answer.done():
            ask.answer.set_exception(err)


def _raise(err: Exception) -> None:
    raise err
