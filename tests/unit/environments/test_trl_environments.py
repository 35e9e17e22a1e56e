"""Classes in TRL's form, as its documentation has them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mgrpo.environments.adaptors.trl_environments import Trl
from mgrpo.environments.environment import Call
from mgrpo.environments.workers.environment_catalog import Spec, built


class Bag:
    """Holds things."""

    size = 3

    def __init__(self):
        self.reward = 0.0
        self.things = ("leftover",)
        self._secret = "s"
        self.file = object()

    def reset(self, **kwargs) -> str | None:
        self.columns = kwargs
        self.things = ()
        return kwargs.get("greeting")

    def put(self, thing: str, seed: int = 0) -> dict[str, Any]:
        """Put something into the bag.

        Args:
            thing: What to put.
            seed: Which kind.
        """
        if len(self.things) >= self.size:
            raise ValueError("The bag is full.")
        self.things += (thing,)
        self.reward += 1
        return {"things": list(self.things), "seed": seed}

    async def count(self) -> int:
        """Count the things."""
        await asyncio.sleep(0)
        return len(self.things)

    def get_reward(self) -> float:
        return self.reward / 2

    @property
    def is_full(self) -> bool:
        return len(self.things) == self.size

    @property
    def broken(self):
        raise RuntimeError

    def _hidden(self):
        """Not a tool."""


class Asynchronous(Bag):
    async def reset(self, prompt, level=0):
        self.level = level
        return f"{prompt} at {level}"

    async def get_reward(self):
        return 7


class WithoutReward:
    def reset(self, **kwargs):
        pass

    def look(self) -> str:
        """Look around."""
        return "a wall"


def opened(environment_class, **options):
    async def opening():
        toolbox = built([Spec(entry=f"trl:{__name__}:{environment_class.__name__}", **options)])
        await toolbox.setup()
        return toolbox

    return asyncio.run(opening())


def begin(toolbox, row):
    return asyncio.run(toolbox.reset(row, seed=1)).text


def step(toolbox, *calls):
    calls = [Call(name=name, arguments=arguments) for name, arguments in calls]
    return [answered.observation for answered in asyncio.run(toolbox.step(calls))]


def test_public_methods_are_the_tools():
    """reset and get_reward are for the trainer; a parameter called seed is the class's own."""
    tools = {tool.name: tool for tool in opened(Bag).describe().tools}
    assert tools.keys() == {"put", "count"}
    assert tools["put"].parameters["properties"].keys() == {"thing", "seed"}


def test_a_trajectory_is_played_and_scored():
    toolbox = opened(Bag)
    assert begin(toolbox, {"prompt": "p", "greeting": "Fill it.", "level": 2}) == "Fill it."
    answers = step(toolbox, ("put", {"thing": "a"}), ("count", {}), ("put", {"thing": "b", "seed": "4"}))
    assert [answer.text for answer in answers] == [
        '{"things": ["a"], "seed": 0}',
        "2",
        '{"things": ["a", "b"], "seed": 4}',
    ]
    step(toolbox, ("put", {"thing": "c"}))
    (refused,) = step(toolbox, ("put", {"thing": "d"}))
    assert refused.failed and refused.text == '{"error": "ValueError: The bag is full."}'
    assert asyncio.run(toolbox.reward()) == 1.5


def test_reward_functions_see_public_attributes_that_json_can_hold():
    """The instance stays in its process; the documentation's reward functions read env.reward."""
    toolbox = opened(Bag)
    begin(toolbox, {"prompt": "p", "greeting": None})
    step(toolbox, ("put", {"thing": "a"}))
    columns = {"prompt": "p", "greeting": None}
    assert toolbox.snapshot() == {"columns": columns, "is_full": False, "reward": 1.0, "size": 3, "things": ["a"]}


def test_reset_gets_the_columns_that_it_takes():
    """As they are with **kwargs; without, those that it names."""
    toolbox = opened(Asynchronous)
    assert begin(toolbox, {"prompt": "Go", "level": 4, "other": 1}) == "Go at 4"
    assert begin(toolbox, {"prompt": "Go", "env_config": {"env_name": "Asynchronous", "level": 6}}) == "Go at 6"
    assert asyncio.run(toolbox.reward()) == 7.0


def test_a_class_without_get_reward_leaves_the_reward_to_others():
    toolbox = opened(WithoutReward)
    assert begin(toolbox, {"prompt": "p"}) == ""
    assert asyncio.run(toolbox.reward()) is None
    assert step(toolbox, ("look", {}))[0].text == "a wall"


def test_a_row_chooses_among_named_environments():
    async def opening():
        toolbox = built(
            [
                Spec(entry=f"trl:{__name__}:Bag", call_name="bag"),
                Spec(entry=f"trl:{__name__}:WithoutReward", call_name="room"),
            ]
        )
        await toolbox.setup()
        return toolbox

    toolbox = asyncio.run(opening())
    begin(toolbox, {"prompt": "p", "environment": "room"})
    assert toolbox.active == {"look"}
    begin(toolbox, {"prompt": "p", "environment": "bag"})
    assert toolbox.active == {"put", "count"}
    assert toolbox.snapshot()["columns"] == {"prompt": "p"}


def test_whether_it_repeats_is_a_setting():
    """Nothing about such a class says so."""
    assert not opened(Bag).describe().is_repeatable
    assert opened(Bag, settings={"is_repeatable": True}).describe().is_repeatable


def test_an_opening_that_is_not_text_is_refused():
    class Pictures(Bag):
        def reset(self, **kwargs):
            return [{"type": "image"}]

    with pytest.raises(TypeError, match=r"Pictures.reset returned \[\{'type': 'image'\}\]; it may return text or None"):
        Trl(Pictures).reset({}, seed=0)


def test_what_is_no_such_class_is_refused():
    class Empty:
        def reset(self):
            pass

    class Nothing:
        def act(self):
            """Act."""

    with pytest.raises(ValueError, match="Nothing has no method reset"):
        Trl(Nothing)
    with pytest.raises(ValueError, match="Empty has no public method besides reset and get_reward"):
        Trl(Empty)
