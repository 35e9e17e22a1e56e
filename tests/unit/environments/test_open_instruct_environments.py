"""Open Instruct's environments, by fakes with the methods and records of its own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from mgrpo.environments.environment import Call
from mgrpo.environments.workers.environment_catalog import Spec, built


@dataclass
class StepResult:
    result: str = ""
    reward: float | None = 0.0
    done: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)


def definition(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": f"{name} it", "parameters": parameters}}


class Door:
    """An environment with tools."""

    config_name = "door"
    response_role = "tool"

    def __init__(self, locks: int = 1, **kwargs: Any):
        self.locks, self.made_with = locks, kwargs
        self.is_ready = False

    async def setup(self):
        self.is_ready = True

    @classmethod
    def get_tool_definitions(cls):
        return [definition("unlock", code={"type": "integer"}), definition("open")]

    async def reset(self, **kwargs):
        assert self.is_ready
        self.code, self.calls = kwargs["code"], []
        return StepResult(result="You see a door."), self.get_tool_definitions()

    async def step(self, call):
        self.calls.append((call.id, call.name, call.args))
        if call.name == "open":
            return StepResult(result="open", reward=1.0, done=True)
        if call.args["code"] < 0:
            raise ValueError("no such code")
        if call.args["code"] != self.code:
            return StepResult(result="wrong", reward=None, metadata={"error": "wrong code"})
        return StepResult(result=f"unlocked {self.locks}", metadata={"runtime": 0.1})

    def get_metrics(self):
        return {"calls": len(self.calls)}


@dataclass
class DoorConfig:
    tool_class: ClassVar[type] = Door
    locks: int = 2
    pool_size: int | None = None


class Echo:
    """A text environment."""

    config_name = "echo"
    response_role = "user"

    def get_metrics(self):
        return {}

    @classmethod
    def get_tool_definitions(cls):
        return []

    async def setup(self):
        pass

    async def reset(self, **kwargs):
        return StepResult(), []

    async def text_step(self, text):
        return StepResult(result=text[::-1], reward=0.5)

    async def step(self, call):
        assert call.name == "mirror"
        return await self.text_step(call.args["text"])


class Weather:
    """A tool: it takes the name that models call it by."""

    config_name = "weather"
    parameters = definition("", city={"type": "string"})["function"]["parameters"]

    def __init__(self, call_name: str, unit: str = "C"):
        self.call_name, self.unit = call_name, unit

    def get_tool_definitions(self):
        function = {"name": self.call_name, "description": "weather", "parameters": self.parameters}
        return [{"type": "function", "function": function}]

    async def reset(self, **kwargs):
        return StepResult(), self.get_tool_definitions()

    def step(self, call):
        return StepResult(
            result=f"3 {self.unit} in {call.args['city']}", metadata={"timeout": call.args["city"] == "Rome"}
        )


class Toolless(Door):
    @classmethod
    def get_tool_definitions(cls):
        return []


def opened(*specs):
    async def opening():
        toolbox = built([Spec(entry=f"{__name__}:{name}", **options) for name, options in specs])
        await toolbox.setup()
        return toolbox

    return asyncio.run(opening())


def played(toolbox, row, *calls):
    async def play():
        opening = await toolbox.reset(row, seed=1)
        answers = await toolbox.step([Call(name=name, arguments=arguments) for name, arguments in calls])
        return opening, [answered.observation for answered in answers]

    return asyncio.run(play())


DOOR = {"env_config": {"env_name": "door", "code": 7, "max_steps": 9}}


def test_an_environment_with_tools_is_played():
    """Its opening is not shown, as in Open Instruct, whose prompts say what the task is."""
    toolbox = opened(("Door", {"settings": {"locks": 4}}))
    assert [tool.name for tool in toolbox.describe().tools] == ["unlock", "open"]
    calls = [("unlock", {"code": "1"}), ("unlock", {"code": -1}), ("unlock", {"code": 7}), ("open", {}), ("open", {})]
    opening, answers = played(toolbox, DOOR, *calls)
    assert opening.text == "" and opening.metrics == {"door/calls": 0.0}
    assert [answer.text for answer in answers] == [
        "wrong",
        '{"error": "ValueError: no such code"}',
        "unlocked 4",
        "open",
        "not called: the episode is over",
    ]
    assert [answer.failed for answer in answers] == [True, True, False, False, False]
    assert [answer.reward for answer in answers] == [0, 0, 0, 1, 0]
    assert [answer.done for answer in answers] == [False, False, False, True, True]
    assert answers[3].metrics == {"door/calls": 4.0}


def test_calls_come_as_open_instruct_makes_them():
    toolbox = opened(("Door", {}))
    played(toolbox, DOOR, ("unlock", {"code": 1}), ("open", {}))
    played(toolbox, DOOR, ("unlock", {"code": "7"}))
    (only,) = toolbox._environments.values()
    assert only.environment._inner.calls == [("1", "unlock", {"code": 7})]


def test_a_configuration_makes_its_class():
    """Its registry holds configurations; pool_size is the pool's."""
    toolbox = opened(("DoorConfig", {"settings": {"locks": 5}}))
    _, answers = played(toolbox, DOOR, ("unlock", {"code": 7}))
    assert answers[0].text == "unlocked 5"
    (only,) = toolbox._environments.values()
    assert only.environment._inner.made_with == {"call_name": "door"}


def test_a_text_environment_takes_turns_as_a_whole():
    toolbox = opened(("Echo", {"call_name": "mirror"}))
    _, answers = played(toolbox, {}, ("act", {"text": "<b>"}))
    assert toolbox.acts and toolbox.describe().tools == ()
    assert (answers[0].text, answers[0].reward) == (">b<", 0.5)


def test_a_tool_takes_its_call_name():
    toolbox = opened(("Weather", {"call_name": "forecast", "settings": {"unit": "F"}}))
    _, answers = played(toolbox, {}, ("forecast", {"city": "Oslo"}), ("forecast", {"city": "Rome"}))
    assert [answer.text for answer in answers] == ["3 F in Oslo", "3 F in Rome"]
    assert [answer.failed for answer in answers] == [False, True]


def test_names_of_environments_are_those_of_open_instruct():
    """Rows name them in env_config."""
    assert opened(("Door", {}), ("Weather", {})).describe().names == {"door", "unlock", "open", "weather"}


def test_an_environment_that_offers_nothing_is_refused():
    with pytest.raises(
        ValueError, match="Toolless cannot be set up: ValueError: its get_tool_definitions returns none"
    ):
        opened(("Toolless", {}))
