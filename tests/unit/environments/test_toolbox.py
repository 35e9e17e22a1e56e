"""Several environments as one: routes, rows, failures."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from mgrpo.environments.environment import Call, Environment, Observation, Tool
from mgrpo.environments.offered.description import Description, checked_tools
from mgrpo.environments.offered.offered_environment import OfferedEnvironment
from mgrpo.environments.offered.toolbox import Toolbox

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


class Adder(Environment):
    """Adds what it is given; made of plain methods."""

    is_repeatable = True
    offered: ClassVar[tuple[str, ...]] = ("add",)

    def __init__(self) -> None:
        self.sum = 0
        self.row: Mapping[str, Any] = {}
        self.threads: set[int] = set()
        self.is_closed = False

    def tools(self):
        return [Tool(name=name, description="", parameters=NUMBER) for name in self.offered]

    def reset(self, row, *, seed):
        self.row, self.sum = row, 0
        return Observation(text=f"from {seed}", metrics={"sum": 0})

    def step(self, calls):
        self.threads.add(threading.get_ident())
        observations = []
        for call in calls:
            self.sum += call.arguments["n"]
            observations.append(Observation(text=f"{call.name} {self.sum}", reward=0.5, metrics={"sum": self.sum}))
        return observations

    def close(self):
        self.is_closed = True


class Pair(Adder):
    offered = ("more", "less")


class Talker(Environment):
    """Takes a turn as a whole; made of coroutines."""

    async def reset(self, row, *, seed):
        await asyncio.sleep(0)
        return Observation(text="hello")

    async def step(self, calls):
        await asyncio.sleep(0)
        return [Observation(text=call.arguments["text"].upper(), done=True) for call in calls]


class Scored(Adder):
    offered = ("score",)

    def reward(self):
        return self.sum


def opened(*members):
    """A toolbox of these environments, set up."""

    async def opening():
        toolbox = Toolbox(members)
        await toolbox.setup()
        return toolbox

    return asyncio.run(opening())


def member(environment, name="", **options):
    name = name or type(environment).__name__.lower()
    return OfferedEnvironment(environment, name=name, entry=f"own:{name}", **options)


def begin(toolbox, row=None, seed=3):
    return asyncio.run(toolbox.reset(row or {}, seed=seed, trajectory="7-1"))


def step(toolbox, *calls):
    calls = [Call(name=name, arguments=arguments) for name, arguments in calls]
    return [answered.observation for answered in asyncio.run(toolbox.step(calls))]


def test_calls_reach_their_environment_and_answers_keep_the_order():
    """A model reads the answer after the call that it stands behind."""
    toolbox = opened(member(Adder()), member(Pair()))
    begin(toolbox)
    answers = step(toolbox, ("more", {"n": 1}), ("add", {"n": 10}), ("more", {"n": "2"}), ("add", {"n": 20}))
    assert [answer.text for answer in answers] == ["more 1", "add 10", "more 3", "add 30"]
    assert [answer.reward for answer in answers] == [0.5] * 4
    assert answers[3].metrics == {"adder/sum": 30.0} and answers[2].metrics == {"pair/sum": 3.0}


def test_calls_that_cannot_be_made_are_answered_and_the_others_are_made():
    """One wrong call of a turn does not cost the right ones."""
    toolbox = opened(member(Adder()), member(Pair()))
    begin(toolbox)
    answers = step(toolbox, ("add", {"n": "x"}), ("add", {"n": 1}), ("fly", {}))
    assert [answer.failed for answer in answers] == [True, False, True]
    assert answers[0].text == 'add: n: expected integer, got "x"; expected: n (integer)'
    assert answers[1].text == "add 1"
    assert answers[2].text == "unknown tool fly; tools: add, less, more"


def test_a_call_name_renames_an_only_tool():
    """Two searches can stand side by side; a game's moves keep their names."""
    toolbox = opened(member(Adder(), "plus", call_name="plus"), member(Pair(), "game", call_name="game"))
    begin(toolbox)
    assert [tool.name for tool in toolbox.describe().tools] == ["plus", "more", "less"] and toolbox.active == {
        "plus",
        "more",
        "less",
    }
    answers = step(toolbox, ("plus", {"n": 1}), ("add", {"n": 1}), ("plus", {"m": 1}))
    assert answers[0].text == "add 1" and answers[0].metrics == {"plus/sum": 1.0}
    assert answers[1].text.startswith("unknown tool add")
    assert answers[2].text.startswith("plus: there is no argument m")


def test_equal_names_are_refused():
    """A call would not say who is meant."""
    with pytest.raises(
        ValueError, match="own:adder and own:adder are both called adder; give them different call names"
    ):
        opened(member(Adder()), member(Adder()))
    with pytest.raises(ValueError, match="own:a and own:b are both called add"):
        opened(member(Adder(), "a"), member(Adder(), "b"))


def test_a_tool_called_act_is_refused_beside_an_environment_without_tools():
    with pytest.raises(ValueError, match="own:act: its tool act has the name of a turn as a whole; rename it"):
        opened(member(Talker()), member(Adder(), "act", call_name="act"))
    opened(member(Adder(), "act", call_name="act"))


def test_a_turn_as_a_whole_goes_to_the_environment_without_tools():
    toolbox = opened(member(Adder()), member(Talker()))
    assert begin(toolbox).text == "from 3\nhello"
    assert toolbox.acts and toolbox.active == {"add"}
    answers = step(toolbox, ("add", {"n": 4}), ("act", {"text": "so <b>"}))
    assert [answer.text for answer in answers] == ["add 4", "SO <B>"] and answers[1].done
    begin(toolbox, {"tools": ["add"]})
    assert not toolbox.acts and step(toolbox, ("act", {"text": "x"}))[0].failed


def test_a_row_allows_tools_by_their_names_or_their_environments():
    toolbox = opened(member(Adder()), member(Pair()))
    for tools, active in [
        (None, {"add", "more", "less"}),
        (["add"], {"add"}),
        (["pair"], {"more", "less"}),
        (["more", "add"], {"more", "add"}),
        ([], set()),
    ]:
        begin(toolbox, {"tools": tools})
        assert toolbox.active == active
    begin(toolbox, {"tools": ["more"]})
    assert step(toolbox, ("less", {"n": 1}))[0].text == "unknown tool less; tools: more"
    begin(toolbox, {"tools": []})
    assert step(toolbox, ("less", {"n": 1}))[0].text == "unknown tool less; there are no tools"


def test_environments_that_a_row_leaves_out_do_not_begin():
    """Resetting what is not used may cost seconds, or fail for want of the row's settings."""
    adder, pair = Adder(), Pair()
    toolbox = opened(member(adder), member(pair))
    assert begin(toolbox, {"tools": ["more"]}).text == "from 3"
    assert pair.row and not adder.row


def test_a_row_sets_what_its_environments_need():
    """env_config reaches the environment that it names, and allows its tools."""
    adder, pair = Adder(), Pair()
    toolbox = opened(member(adder), member(pair))
    row = {
        "prompt": "p",
        "tools": ["add"],
        "env_config": [{"env_name": "pair", "level": 2, "other": None, "max_steps": 4}],
    }
    begin(toolbox, row)
    assert toolbox.active == {"add", "more", "less"}
    assert pair.row == {**row, "env_config": {"level": 2}} and adder.row == {**row, "env_config": {}}


def test_unknown_names_in_a_row_are_refused():
    toolbox = opened(member(Adder()), member(Pair()))
    for row in ({"tools": ["add", "fly"]}, {"env_config": {"env_name": "fly"}}):
        with pytest.raises(
            ValueError, match="the row names fly; the tools and environments are add, adder, less, more, pair"
        ):
            begin(toolbox, row)


def test_only_one_environment_takes_a_turn_as_a_whole():
    """A row says which by its env_config."""
    toolbox = opened(member(Talker(), "a"), member(Talker(), "b"))
    with pytest.raises(ValueError, match="own:a and own:b each take a turn as a whole; name one of them"):
        begin(toolbox)
    assert begin(toolbox, {"env_config": {"env_name": "b"}}).text == "hello"


def test_a_row_chooses_one_of_the_alternatives():
    """As TRL's column `environment` does; alternatives may have equal tools."""
    first, second = Adder(), Adder()
    toolbox = opened(member(first, "a", is_alternative=True), member(second, "b", is_alternative=True), member(Pair()))
    begin(toolbox, {"environment": "b", "x": 1})
    assert step(toolbox, ("add", {"n": 5}))[0].metrics == {"b/sum": 5.0}
    assert second.row == {"x": 1, "env_config": {}} and toolbox.active == {"add", "more", "less"}
    with pytest.raises(ValueError, match="the row's environment is None, expected one of a, b"):
        begin(toolbox)


def test_alternatives_with_different_tools_of_one_name_are_refused():
    class Other(Adder):
        def tools(self):
            return [Tool(name="add", description="another", parameters=NUMBER)]

    with pytest.raises(ValueError, match="own:a and own:b are both called add"):
        opened(member(Adder(), "a", is_alternative=True), member(Other(), "b", is_alternative=True))


def test_the_reward_is_that_of_the_only_one_that_gives_one():
    toolbox = opened(member(Adder()), member(Scored()))
    begin(toolbox)
    step(toolbox, ("score", {"n": 4}), ("add", {"n": 100}))
    assert asyncio.run(toolbox.reward()) == 4.0
    begin(toolbox, {"tools": ["add"]})
    assert asyncio.run(toolbox.reward()) is None


def test_two_that_give_the_reward_are_refused_at_reset():
    class Second(Scored):
        offered = ("second",)

    toolbox = opened(member(Scored()), member(Second()))
    with pytest.raises(
        ValueError, match="own:scored and own:second each decide the reward; name one of them in the row's"
    ):
        begin(toolbox)
    begin(toolbox, {"tools": ["second"]})


def test_plain_methods_do_not_stop_the_loop():
    """One slow tool must not make a thousand trajectories wait."""

    class Slow(Adder):
        def step(self, calls):
            assert may_go_on.wait(5)
            return super().step(calls)

    async def turn():
        answer = asyncio.ensure_future(toolbox.step([Call(name="add", arguments={"n": 1})]))
        await asyncio.sleep(0.01)
        may_go_on.set()
        return await answer

    may_go_on, slow = threading.Event(), Slow()
    toolbox = opened(member(slow))
    begin(toolbox)
    assert asyncio.run(turn())[0].observation.text == "add 1"
    assert threading.get_ident() not in slow.threads


def test_environments_of_a_turn_go_on_together():
    """Each of the two waits until the other has begun."""
    both = threading.Barrier(2)

    class One(Adder):
        def step(self, calls):
            both.wait(5)
            return super().step(calls)

    class Two(One):
        offered = ("more",)

    toolbox = opened(member(One()), member(Two()))
    begin(toolbox)
    assert not any(answer.failed for answer in step(toolbox, ("add", {"n": 1}), ("more", {"n": 1})))


@pytest.mark.parametrize(
    "error", [RuntimeError("broke"), SystemExit(1), StopIteration()], ids=lambda error: type(error).__name__
)
def test_an_environment_that_raises_fails_its_own_calls_only(error):
    """The model is told, and the trajectory goes on."""

    class Broken(Adder):
        offered = ("fail",)

        def step(self, calls):
            raise error

    toolbox = opened(member(Adder()), member(Broken()))
    begin(toolbox)
    first, second = step(toolbox, ("fail", {"n": 1}), ("add", {"n": 1}))
    assert first.failed and type(error).__name__ in first.text
    assert second.text == "add 1" and not second.failed


@pytest.mark.parametrize("answer", [[], ["text"], [Observation(text=3)], None], ids=["none", "text", "number", "null"])
def test_an_environment_that_breaks_the_protocol_fails_its_calls(answer):
    class Broken(Adder):
        def step(self, calls):
            return answer

    toolbox = opened(member(Broken()))
    begin(toolbox)
    (observation,) = step(toolbox, ("add", {"n": 1}))
    assert observation.failed and "TypeError" in observation.text


def test_an_environment_that_cannot_be_set_up_is_named():
    class Broken(Adder):
        def setup(self):
            raise OSError("no server")

    with pytest.raises(ValueError, match="own:broken cannot be set up: OSError: no server"):
        opened(member(Adder()), member(Broken()))


def test_what_reset_raises_travels_and_what_it_returns_is_checked():
    """Its caller tries another instance."""

    class Broken(Adder):
        def reset(self, row, *, seed):
            if "raise" in row:
                raise KeyError("level")
            return "hello"

    toolbox = opened(member(Broken()))
    with pytest.raises(KeyError, match="level"):
        begin(toolbox, {"raise": 1})
    with pytest.raises(TypeError, match="own:broken: reset returned 'hello', expected an Observation or None"):
        begin(toolbox)


@pytest.mark.parametrize("begun", [Observation(done=True), Observation(reward=1.0)])
def test_a_beginning_has_neither_a_reward_nor_an_end(begun):
    """There is no turn that either could be counted for."""

    class Eager(Adder):
        def reset(self, row, *, seed):
            return begun

    with pytest.raises(ValueError, match=r"own:eager: reset returned done=.*only a step may reward or end it"):
        begin(opened(member(Eager())))


def test_all_members_are_closed_although_one_fails():
    class Broken(Adder):
        offered = ("fail",)

        def close(self):
            raise OSError("gone")

    adder = Adder()
    toolbox = opened(member(Broken()), member(adder))
    with pytest.raises(OSError, match="gone"):
        asyncio.run(toolbox.close())
    assert adder.is_closed


def test_the_description_survives_json_and_chooses_as_the_toolbox_does():
    """Data check their rows and choose schemas by it, without an environment."""
    toolbox = opened(member(Adder()), member(Talker()), member(Pair(), "game"))
    described = Description.from_json(toolbox.describe().to_json())
    assert described == toolbox.describe()
    assert [tool.name for tool in described.tools] == ["add", "more", "less"]
    assert described.acts and described.not_repeatable == ("talker",) and not described.is_repeatable
    for row in ({}, {"tools": ["game"]}, {"tools": [], "env_config": {"env_name": "talker"}}):
        begin(toolbox, row)
        choice = described.choice(row)
        assert choice.active == toolbox.active and (choice.actor is not None) == toolbox.acts


def test_a_toolbox_repeats_if_all_of_its_members_do():
    assert opened(member(Adder()), member(Pair())).describe().is_repeatable
    assert not opened(member(Adder()), member(Talker())).describe().is_repeatable


def test_environments_know_their_trajectory():
    """To keep the files of one from another."""
    adder = Adder()
    begin(opened(member(adder)))
    assert adder.trajectory == "7-1"


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        (
            [Tool(name="<|im_end|>", description="", parameters={})],
            r"a tool has the name '<\|im_end\|>', expected letters",
        ),
        ([Tool(name="", description="", parameters={})], "a tool has the name ''"),
        ([Tool(name="a" * 129, description="", parameters={})], "a tool has the name 'aaa"),
        ([Tool(name="a\x1b[2J", description="", parameters={})], "a tool has the name"),
        (
            [Tool(name="go", description="", parameters={})] * 2,
            "two tools have the names go and go, which look the same",
        ),
        (
            [Tool(name="go", description="", parameters={}), Tool(name="g\uff4f", description="", parameters={})],
            "two tools have the names go and g\uff4f, which look the same",
        ),
        ([Tool(name="go", description=5, parameters={})], "the tool go has a description or parameters that"),
        (
            [Tool(name="go", description="", parameters={"a": {1, 2}})],
            "the tool go has a description or parameters that",
        ),
        ([Tool(name="go", description="d" * 2**20, parameters={})], "the schemas of 1 tools have 10486.. bytes"),
    ],
)
def test_tools_that_no_prompt_can_describe_are_refused_by_name(tools, message):
    """Servers name and describe them: a name may pretend to be another tool, or to end a turn."""
    with pytest.raises(ValueError, match=message):
        checked_tools(tools)
