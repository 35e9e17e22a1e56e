"""Environments of the library `verifiers` (`load_environment(id, **args)`) as programs: they drive the model, and their rubric
gives the reward.

The library is imported in the worker, whose interpreter may be another than the trainer's.
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import Mapping
from typing import Any

from mgrpo.environments.offered.program import Message, Model, NoRoom, Program

_OWN_COLUMNS = ("answer", "info")
"""A row with one of these is a task by itself."""


class Verifiers(Program):
    """One environment, the same for all trajectories of a worker."""

    def __init__(self, id: str, *, args: Mapping[str, Any] | None = None, is_repeatable: bool = False) -> None:
        """
        Args:
            id: the name that `load_environment` takes.
            args: the further arguments of `load_environment`.
        """
        super().__init__(self._play, is_repeatable=is_repeatable)
        self.name = id
        self._args = json.dumps(dict(args or {}), sort_keys=True)

    async def setup(self) -> None:
        # The library handles signals, which only the main thread can.
        _loaded(self.name, self._args)

    async def _play(self, row: Mapping[str, Any], model: Model) -> float:
        environment = _loaded(self.name, self._args)
        client = _client_class()(model)
        task = await asyncio.to_thread(_task, environment, row)
        output = await environment.run_rollout(task, client, "policy", {})
        if client.failure or output["error"] is not None:
            raise RuntimeError(client.failure or f"the environment {self.name} failed: {output['error']}")
        found = output.get("metrics") or {}
        model.metrics.update({name: value for name, value in found.items() if isinstance(value, (int, float))})
        return output["reward"]


@functools.cache
def _loaded(id: str, args: str) -> Any:
    """The environment, once in a process.

    Raises:
        ValueError: the library is missing, or has no such environments.
    """
    try:
        import verifiers
    except ModuleNotFoundError as err:
        raise ValueError(
            f"{err.name} is not installed for the interpreter of the environments; pip install 'verifiers<0.4', or name an "
            "interpreter that has it as env_python"
        ) from err
    if not hasattr(verifiers, "load_environment") or not hasattr(verifiers, "Client"):
        version = getattr(verifiers, "__version__", "")
        raise ValueError(
            f"verifiers {version} has no load_environment(id, **args) with clients of one's own; pip install "
            "'verifiers>=0.1.10,<0.4'"
        )
    return verifiers.load_environment(id, **json.loads(args))


@functools.cache
def _examples(environment: Any) -> dict[int, int]:
    """The places in the environment's own data, by `example_id`."""
    return {number: place for place, number in enumerate(environment.get_dataset()["example_id"])}


def _task(environment: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    """The task for the environment: the row, or one of its own by the row's `example_id`."""
    number = row.get("example_id")
    if number is not None and not any(row.get(name) is not None for name in _OWN_COLUMNS):
        place = _examples(environment).get(number)
        if place is None:
            raise ValueError(f"the row's example_id={number!r} is not in the environment's own data")
        return dict(environment.get_dataset()[place])
    prompt = row["prompt"]
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return {"example_id": 0, **row, "prompt": asked}


@functools.cache
def _client_class() -> Any:
    """The library's own abstract client, filled in."""
    import verifiers as vf
    from verifiers.types import Response, ResponseMessage, ToolCall

    class ModelClient(vf.Client):
        """A client that asks `model.chat`."""

        def __init__(self, model: Model) -> None:
            super().__init__(model)
            self.failure = ""

        def setup_client(self, config: Any) -> Any:
            raise AssertionError("it has a model")

        async def to_native_tool(self, tool: Any) -> dict[str, Any]:
            function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
            return {"type": "function", "function": function}

        async def to_native_prompt(self, messages: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
            return [_plain(message) for message in messages], {}

        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **kwargs: Any
        ) -> Message:
            limit = sampling_args.get("max_completion_tokens") or sampling_args.get("max_tokens")
            try:
                return await self.client.chat(prompt, tools, max_tokens=limit)
            except NoRoom as err:
                raise vf.OverlongPromptError(str(err)) from err
            # The library only keeps that something failed.
            except Exception as err:
                self.failure = self.failure or f"{type(err).__name__}: {err}"
                raise

        async def raise_from_native_response(self, response: Message) -> None:
            pass

        async def from_native_response(self, response: Message) -> Any:
            calls = [
                ToolCall(
                    id=call["id"],
                    name=call["function"]["name"],
                    arguments=json.dumps(call["function"]["arguments"], ensure_ascii=False),
                )
                for call in response.tool_calls
            ]
            was_cut = response.finish_reason == "length"
            message = ResponseMessage(
                content=response.content,
                tool_calls=calls or None,
                finish_reason="length" if was_cut else "tool_calls" if calls else "stop",
                is_truncated=was_cut,
            )
            return Response(id="", created=int(time.time()), model="policy", message=message)

        async def close(self) -> None:
            pass

    return ModelClient


def _plain(message: Any) -> dict[str, Any]:
    """A message of the library as chat templates take it."""
    values = message if isinstance(message, dict) else message.model_dump(exclude_none=True)
    if not values.get("tool_calls"):
        return values
    calls = [
        {
            "type": "function",
            "id": call["id"],
            "function": {"name": call["name"], "arguments": json.loads(call["arguments"])},
        }
        for call in values["tool_calls"]
    ]
    return {**values, "tool_calls": calls}
