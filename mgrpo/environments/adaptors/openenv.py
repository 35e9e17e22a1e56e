"""An environment of an OpenEnv server. Each instance has a separate session, over one WebSocket.

The model calls the server's MCP tools; if it has none, one tool `step` with the fields of its action. With `action_field`
a turn as a whole is one action instead. Only the protocol is needed, not OpenEnv's package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mgrpo.environments.adaptors.mcp import text_of
from mgrpo.environments.adaptors.openenv_session import OpenEnvSession, SessionLost
from mgrpo.environments.environment import Call, Environment, Observation, Tool

_STEP = "step"
_SEEDS = 2**31
"""Servers hand seeds to libraries that take no larger ones."""


class OpenEnv(Environment):
    """Settings: the server's address, and the form of its actions and observations as text."""

    name = "openenv"

    def __init__(
        self,
        *,
        url: str,
        action_field: str = "",
        text_field: str = "",
        reset_columns: Sequence[str] = (),
        capacity_timeout: float = 30.0,
    ) -> None:
        """
        Args:
            url: the server's address, such as http://localhost:8000.
            action_field: the action's field for the text of a turn; there are no tools then.
            text_field: the observation's field to show; default: all fields, as JSON.
            reset_columns: columns of a row that the server's reset gets beside the seed.
            capacity_timeout: seconds to wait for a session where the server has given out all of them.
        """
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ValueError(f"openenv: url={url!r}, expected one like http://localhost:8000")
        self._session = OpenEnvSession(url, capacity_timeout_s=capacity_timeout)
        self._action_field, self._text_field, self._reset_columns = action_field, text_field, tuple(reset_columns)
        self._tools: Sequence[Tool] = ()
        self._has_step = False
        self._is_done = self._is_lost = False

    async def setup(self) -> None:
        try:
            await self._session.connect()
            if not self._action_field:
                self._tools = await self._listed()
        except BaseException:
            await self.close()
            raise

    def tools(self) -> Sequence[Tool]:
        return self._tools

    async def reset(self, row: Mapping[str, Any], *, seed: int) -> Observation:
        self._is_done = self._is_lost = False
        columns = {column: row[column] for column in self._reset_columns if column in row}
        request = {**columns, "seed": seed % _SEEDS}
        await self._session.connect()
        try:
            answer = await self._session.ask("reset", request)
        except SessionLost:  # servers close sessions that were idle, which is only seen now
            await self._session.connect()
            answer = await self._session.ask("reset", request)
        if answer.error:
            raise RuntimeError(f"openenv: the server could not reset: {answer.error}")
        return Observation(text=self._shown(answer.observation))

    async def step(self, calls: Sequence[Call]) -> Sequence[Observation]:
        return [await self._answered(call) for call in calls]

    def reward(self) -> float | None:
        """None, as the steps give the reward; ConnectionError if the session was lost."""
        if self._is_lost:
            raise ConnectionError("openenv: the session was lost, and with it the reward")
        return None

    async def close(self) -> None:
        await self._session.close()

    async def _listed(self) -> Sequence[Tool]:
        answer = await self._session.ask("step", {"type": "list_tools"})
        found = answer.observation.get("tools")
        if isinstance(found, list) and found:
            return [
                Tool(
                    name=tool["name"],
                    description=tool.get("description") or "",
                    parameters=tool.get("input_schema") or tool.get("inputSchema") or {"type": "object"},
                )
                for tool in found
            ]
        self._has_step = True
        action = await self._session.action_schema()
        fields = {name: field for name, field in action.get("properties", {}).items() if name != "metadata"}
        return [
            Tool(
                name=_STEP,
                description=action.get("description") or "Takes one step in the environment.",
                parameters={**action, "properties": fields},
            )
        ]

    async def _answered(self, call: Call) -> Observation:
        if self._is_done:
            return Observation(text="The episode is over.", failed=True, done=True)
        try:
            answer = await self._session.ask("step", self._action(call))
        except SessionLost as err:
            self._is_done = self._is_lost = True
            return Observation(text=f"The environment is not available: {err}", failed=True, done=True)
        if answer.error:
            return Observation(text=f"The step failed: {answer.error}", failed=True)
        self._is_done = answer.is_done
        observation = answer.observation
        problem = observation.get("error") if "tool_name" in observation else None
        failed = bool(problem) or _is_failed_result(observation)
        text = f"The call failed: {problem.get('message')}" if problem else self._shown(observation)
        return Observation(text=text, reward=answer.reward, done=answer.is_done, failed=failed)

    def _action(self, call: Call) -> Mapping[str, Any]:
        if self._action_field:
            return {self._action_field: call.arguments.get("text", "")}
        if self._has_step:
            return call.arguments
        return {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}

    def _shown(self, observation: Mapping[str, Any]) -> str:
        if self._text_field:
            value = observation.get(self._text_field)
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if "tool_name" in observation:
            result = observation.get("result")
            if isinstance(result, Mapping) and ("content" in result or "structuredContent" in result):
                return text_of(result)
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        fields = {name: value for name, value in observation.items() if value is not None}
        return json.dumps(fields, ensure_ascii=False) if fields else ""


def _is_failed_result(observation: Mapping[str, Any]) -> bool:
    """True if a tool ran and failed, for which the server does not report a failed step."""
    result = observation.get("result") if "tool_name" in observation else None
    return isinstance(result, Mapping) and bool(result.get("is_error") or result.get("isError"))
