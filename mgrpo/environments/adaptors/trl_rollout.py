"""Functions in the form of TRL's `rollout_func(prompts, trainer)`, called with one prompt at a time, in a thread.

Its result is checked against the sampled tokens: it must be one sequence that only grew, or tokens would be trained in another
context than they were sampled in.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mgrpo.environments.offered.program import Model, Program

_OWN = ("prompt_ids", "completion_ids", "logprobs", "env_mask")
_REMEDY = "write `async def rollout(row, model)` instead, where model.chat keeps the tokens by itself"
_TOLERANCE = 1e-3


def is_trl_rollout(found: Any) -> bool:
    """True if a function takes prompts and a trainer."""
    return inspect.isfunction(found) and list(inspect.signature(found).parameters)[:2] == ["prompts", "trainer"]


class TrlRollout(Program):
    """Such a function as a program. Other values that it returns are given to reward functions."""

    def __init__(self, function: Callable[..., Any], *, is_repeatable: bool = False) -> None:
        if inspect.iscoroutinefunction(function):
            raise ValueError(f"a rollout_func(prompts, trainer) is a plain function, and this is async; {_REMEDY}")
        super().__init__(self._play, is_repeatable=is_repeatable)
        self.name = function.__name__
        self._function, self._file = function, inspect.getfile(function)

    async def _play(self, row: Mapping[str, Any], model: Model) -> None:
        trainer = TrlTrainer(model, row["prompt"], asyncio.get_running_loop())
        returned = await asyncio.to_thread(self._function, [row["prompt"]], trainer)
        model.shown = _checked(returned, model)


class TrlTrainer:
    """A shim for TRL's trainer."""

    def __init__(self, model: Model, prompt: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._model, self._prompt, self._loop = model, prompt, loop

    def generate_rollout_completions(
        self,
        prompts: Sequence[Any],
        *,
        generation_overrides: Mapping[str, Any] | None = None,
        as_chat: bool | None = None,
    ) -> list[dict[str, Any]]:
        """The ids and log-probabilities of an answer to each prompt, here to one, as TRL's function of this name gives them."""
        limits = dict(generation_overrides or {})
        limit = limits.pop("max_tokens", None)
        if limits:
            raise ValueError(
                f"generation_overrides holds {', '.join(limits)}; only max_tokens may differ from the run's"
            )
        (prompt,) = prompts
        answer = asyncio.run_coroutine_threadsafe(self._answer(prompt, limit), self._loop)
        return [answer.result()]

    async def _answer(self, prompt: Any, limit: int | None) -> dict[str, Any]:
        model = self._model
        if isinstance(prompt, str):
            if prompt != self._prompt or any(model.is_sampled):
                raise ValueError(f"a prompt of text must be that of the row; {_REMEDY}")
            await model.sample(model.ids, max_tokens=limit)
        else:
            await model.chat(prompt, max_tokens=limit)
        start = len(model.ids) - [*model.is_sampled[::-1], False].index(False)
        assert model.last is not None
        return {
            "prompt_ids": model.ids[:start],
            "completion_ids": model.ids[start:],
            "logprobs": model.logprobs[start:],
            "text": model.last.content,
        }

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the trainer of a rollout_func has generate_rollout_completions(prompts), and no {name} here; {_REMEDY}"
        )


def generate_rollout_completions(trainer: TrlTrainer, prompts: Sequence[Any], **settings: Any) -> list[dict[str, Any]]:
    """A replacement of TRL's function of this name."""
    return trainer.generate_rollout_completions(prompts, **settings)


def _checked(returned: Any, model: Model) -> dict[str, Any]:
    """The returned values that are not TRL's own, for the one prompt.

    Raises:
        ValueError: the tokens are not those that were sampled, in one sequence.
    """
    if not isinstance(returned, Mapping) or any(name not in returned for name in _OWN[:3]):
        raise ValueError(f"it returned {returned!r:.100}, expected a dict with {', '.join(_OWN[:3])}")
    for name, values in returned.items():
        if not isinstance(values, Sequence) or len(values) != 1:
            raise ValueError(f"its {name} is {values!r:.100}, expected a list with one entry, for one prompt")
    start = model.is_sampled.index(True) if True in model.is_sampled else len(model.ids)
    mask = [int(sampled) for sampled in model.is_sampled[start:]]
    _refuse_others("prompt_ids", returned["prompt_ids"][0], model.ids[:start])
    _refuse_others("completion_ids", returned["completion_ids"][0], model.ids[start:])
    if 0 in mask or "env_mask" in returned:
        _refuse_others("env_mask", returned.get("env_mask", [()])[0], mask)
    given, known = list(returned["logprobs"][0]), model.logprobs[start:]
    is_known = len(given) == len(known) and all(
        not sampled or abs(one - other) < _TOLERANCE for sampled, one, other in zip(mask, given, known, strict=True)
    )
    if not is_known:
        raise ValueError("its logprobs are not those of the tokens that were sampled; return them as they were given")
    return {name: values[0] for name, values in returned.items() if name not in _OWN}


def _refuse_others(name: str, given: Sequence[int], known: Sequence[int]) -> None:
    if list(map(int, given)) != list(known):
        raise ValueError(
            f"its {name} has {len(given)} entries that are not the {len(known)} of what was sampled: the prompt, then turns and, "
            f"with env_mask 0, what stands between them; {_REMEDY}"
        )
