"""docs/environments.md: its tables are complete, and its code does what the page says."""

from __future__ import annotations

import asyncio
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from mgrpo.config.tools import Tools
from mgrpo.environments.environment import Call
from mgrpo.environments.formats import named
from mgrpo.environments.formats.families import ALIASES, FAMILIES
from mgrpo.environments.loop.trajectory import EndedBy
from mgrpo.environments.tools.python import Python
from mgrpo.environments.workers.environment_catalog import NAMES, TRL, Spec, built

PAGE = (Path(__file__).parents[3] / "docs" / "environments.md").read_text(encoding="utf-8")
FILES = {name: code for code, name in re.findall(r"```python\n(# (\w+\.py)\n.*?)```", PAGE, re.DOTALL)}


def rows(heading):
    """The first two cells of each row of the first table below a heading, as sets of the names in them."""
    below = PAGE[PAGE.index(f"\n## {heading}\n") :]
    table = re.search(r"(?:^\|.*\n)+", below, re.MULTILINE)
    cells = [line.split("|")[1:3] for line in table[0].splitlines()[2:]]
    return [tuple(set(re.findall(r"`([^`]+)`", cell)) for cell in pair) for pair in cells]


def test_every_tool_is_in_the_table_with_its_other_names():
    """A setting of the command line points here for the names."""
    found = rows("Which tools")
    assert set().union(*(own | other for own, other in found)) == NAMES.keys()
    for own, other in found:
        assert len({NAMES[name] for name in own | other}) == 1, "other names are those of another tool"


def test_every_format_is_in_the_table_with_its_other_names():
    """A user looks here for the `tool_parser_type` of a model."""
    found = {own.pop(): other for own, other in rows("How calls are written")}
    assert found.pop("vllm:NAME") == set()
    assert found == {family: {name for name, own in ALIASES.items() if own == family} for family in FAMILIES}


def test_every_end_and_every_setting_is_explained():
    """A new limit would end completions for a reason that is nowhere explained."""
    ends = PAGE[PAGE.index("| `ended_by` |") : PAGE.index("## Rounds")]
    assert set(re.findall(r"^\| `(\w+)` \|", ends, re.MULTILINE)) - {"ended_by"} == set(get_args(EndedBy))
    words = set(re.findall(r"\w+", PAGE))
    assert {field.name for field in fields(Tools)} <= words


def test_limits_have_their_defaults():
    section = PAGE[PAGE.index("\n## Limits\n") :]
    defaults = dict(re.findall(r"^\| `(\w+)` \| (\d+)(?: s)? \|", section, re.MULTILINE))
    own = Tools()
    assert {name: float(value) for name, value in defaults.items() if hasattr(own, name)} == {
        name: getattr(own, name) for name in ("max_tool_calls", "tool_timeout")
    }


def test_settings_of_python_are_those_of_its_class():
    section = PAGE[PAGE.index("\n### python\n") : PAGE.index("\n### search\n")]
    names = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|([^|]*)\|", section, re.MULTILINE))))
    assert names == set(Python.__init__.__kwdefaults__)


@pytest.fixture
def file_of(tmp_path):
    """Where the page's file of a name is."""

    def written(name):
        path = tmp_path / name
        path.write_text(FILES[name], encoding="utf-8")
        return path

    return written


def played(spec, row, *turns):
    """The toolbox, the opening and the observations of turns of one call each, (name, arguments)."""

    async def play():
        toolbox = built([spec])
        await toolbox.setup()
        opening = await toolbox.reset(row, seed=1)
        answers = [
            (await toolbox.step([Call(name=name, arguments=arguments)]))[0].observation for name, arguments in turns
        ]
        return toolbox, opening, answers, await toolbox.reward()

    return asyncio.run(play())


def test_the_function_of_the_page_is_a_tool(file_of):
    """The first thing that a reader copies."""
    calls = ({"city": "Oslo", "day": "2"}, {"city": "Rome"}, {"day": 1})
    spec = Spec(entry=f"{file_of('my_tools.py')}:temperature", settings={"is_repeatable": True})
    toolbox, _, answers, _ = played(spec, {}, *(("temperature", arguments) for arguments in calls))
    (tool,) = toolbox.describe().tools
    assert (tool.name, tool.description) == ("temperature", "Forecast the temperature of a city.")
    assert tool.parameters["required"] == ["city"] and toolbox.describe().is_repeatable
    assert [answer.failed for answer in answers] == [False, True, True]
    assert answers[0].text == "6 degrees" and "no forecast for Rome; there are Oslo, Lagos" in answers[1].text


def test_the_environment_of_the_page_is_played_as_it_says(file_of):
    """The second one."""
    spec = Spec(entry=f"{file_of('rooms.py')}:Rooms", settings={"num_rooms": 20})
    row = {"env_config": {"env_name": "rooms", "key": 3}}
    looks = [("look", {"room": room}) for room in (9, 1, 21, 3)]
    toolbox, opening, answers, reward = played(spec, row, *looks)
    assert opening.text == "\nThere are 20 rooms. Find the key." and toolbox.describe().is_repeatable
    texts = ["Not here. Go down.", "Not here. Go up.", "There is no room 21.", "Here it is."]
    assert [answer.text for answer in answers] == texts
    assert [answer.failed for answer in answers] == [False, False, True, False]
    assert [answer.reward for answer in answers] == [0, 0, 0, 1] and reward is None
    assert [answer.done for answer in answers] == [False, False, False, True]
    assert answers[-1].metrics == {"rooms/looks": 4}
    keys = {played(spec, {}, ("look", {"room": 10}))[2][0].text for _ in range(2)}
    assert len(keys) == 1, "the seed decides where the key is"


def test_the_class_in_trl_form_is_played_as_it_says(file_of):
    """A user of TRL brings such a class."""
    spec = Spec(entry=f"{TRL}{file_of('trl_rooms.py')}:Rooms")
    toolbox, opening, answers, reward = played(
        spec, {"key": 3, "level": 1}, *[("look", {"room": room}) for room in (1, 3)]
    )
    assert [tool.name for tool in toolbox.describe().tools] == ["look"] and opening.text == "Find the key."
    assert [answer.text for answer in answers] == ["Not here.", "Here it is."] and reward == 1.0
    assert toolbox.snapshot()["found"] is True


def test_the_formats_that_answer_by_themselves_are_those_of_the_page():
    """They are recommended for models without a chat template."""
    own = {name for name in FAMILIES if named(name, []).answer(["x"]) is not None}
    assert own == {"legacy", "dr_tulu"}
    assert "In the formats `legacy` and `dr_tulu` the closing tag is a stop string" in PAGE
