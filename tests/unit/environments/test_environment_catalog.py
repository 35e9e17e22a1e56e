"""Tools and environments by what users call them."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from mgrpo.environments.environment import Call
from mgrpo.environments.workers.environment_catalog import NAMES, Spec, built
from tests.shipped import GAMES

SOURCE = '''
from mgrpo.environments.environment import Environment, Observation, Tool

open(__file__ + ".runs", "a").write("x")

def double(n: int) -> int:
    """Double a number.

    Args:
        n: the number
    """
    return 2 * n

def undescribed(n: int):
    return n

def halve(n: int) -> float:
    """Halve a number.

    Args:
        n: the number
    """
    return n / 2

class Wall(Environment):
    name = "wall"

    def __init__(self, height: int = 1):
        if height < 0:
            raise RuntimeError("too low")
        self.height = height

    def tools(self):
        return [Tool(name="climb", description="Climb.", parameters={"type": "object", "properties": {}})]

    def step(self, calls):
        return [Observation(text=str(self.height)) for _ in calls]

class Holder:
    Wall = Wall

class Plain:
    def reset(self, **kwargs): ...

NUMBER = 3
'''


@pytest.fixture
def own(tmp_path: Path) -> str:
    """The path of a file with tools and environments of a user."""
    path = tmp_path / "own.py"
    path.write_text(SOURCE)
    return str(path)


def answer(spec, name, arguments):
    async def ask():
        toolbox = built([spec])
        await toolbox.setup()
        await toolbox.reset({}, seed=0)
        return (await toolbox.step([Call(name=name, arguments=arguments)]))[0].observation.text

    return asyncio.run(ask())


def test_functions_and_environments_of_a_file_are_found(own):
    """The file runs once, however much of it is used, and its folder does not reach sys.path."""
    assert answer(Spec(entry=f"{own}:double"), "double", {"n": "4"}) == "8"
    assert answer(Spec(entry=f"{own}:double", call_name="twice"), "twice", {"n": 5}) == "10"
    assert answer(Spec(entry=f"{own}:Wall", settings={"height": 3}), "climb", {}) == "3"
    assert answer(Spec(entry=f"{own}:Holder.Wall"), "climb", {}) == "1"
    assert Path(own + ".runs").read_text() == "x"
    assert str(Path(own).parent) not in sys.path


def test_modules_are_found(own, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(own).parent))
    assert answer(Spec(entry="own:double"), "double", {"n": 4}) == "8"


def test_everything_that_cannot_be_built_is_named_at_once(own, tmp_path):
    """A start that fails once for each mistake costs as many starts."""
    (tmp_path / "broken.py").write_text("1 / 0")
    entries = {
        "counter": "there is no tool counter; the repository has it as examples/game/games.py:Counter; give one of python,",
        "calculater": "there is no tool calculater; did you mean calculate? give one of python, search",
        "nowhere:f": "nowhere:f cannot be imported: there is no module nowhere; put its folder on PYTHONPATH",
        f"{tmp_path}/none.py:f": f"there is no file {tmp_path}/none.py",
        f"{tmp_path}/broken.py:f": "broken.py:f cannot be imported: ZeroDivisionError: division by zero",
        f"{own}:doble": "doble does not exist; there is double",
        f"{own}:undescribed": "own.py:14: the tool undescribed: it has no docstring",
        f"{own}:NUMBER": "it is neither a function, nor a subclass of mgrpo.environments.environment.Environment",
        f"{own}:Plain": f"write trl:{own}:Plain for a class in TRL's form",
        f"trl:{own}:double": f"; {own}:double cannot be made: TypeError: double() missing 1 required",
        "search": "search cannot be made without settings in tool_configs: search: got index=''",
    }
    with pytest.raises(ValueError) as raised:
        built([Spec(entry=entry) for entry in [*entries, "calculate"]])
    for problem in entries.values():
        assert problem in str(raised.value)


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        (
            "Wall",
            {"hight": 2},
            "own.py:Wall cannot be made with the settings hight: TypeError: .*unexpected keyword",
        ),
        ("Wall", {"height": -1}, "with the settings height: RuntimeError: too low"),
        (
            "double",
            {"n": 2, "headers": {"Authorization": "hush"}},
            "own.py:double cannot be made with the settings n, headers: TypeError: .*unexpected keyword",
        ),
    ],
)
def test_settings_that_do_not_fit_are_named_without_their_values(own, name, settings, problem):
    """Headers and variables of a server hold keys, and an error ends in logs."""
    with pytest.raises(ValueError, match=problem) as failure:
        built([Spec(entry=f"{own}:{name}", settings=settings)])
    assert "hush" not in str(failure.value)


def test_functions_have_their_own_names(own):
    """Several stand side by side; rows and metrics call each by its name."""
    toolbox = built([Spec(entry=f"{own}:double"), Spec(entry=f"{own}:halve"), Spec(entry="calculate")])
    assert [offer.name for offer in toolbox.describe().offers] == ["double", "halve", "calculate"]


def test_names_are_taken_from_the_user_first(own):
    """Rows and metrics call an environment so."""
    specs = [Spec(entry=f"{own}:Wall"), Spec(entry=f"{own}:Wall", call_name="fence"), Spec(entry=f"{GAMES}:Counter")]
    assert [offer.name for offer in built(specs).describe().offers] == ["wall", "fence", "counter"]


def test_a_second_name_of_a_tool_is_what_models_call_it(own, monkeypatch):
    """Open Instruct's users write either name, and prompts that speak of it."""
    monkeypatch.setitem(NAMES, "code", f"{own}:Wall")
    assert answer(Spec(entry="code"), "code", {}) == "1"
    assert answer(Spec(entry="code", call_name="run"), "run", {}) == "1"


def test_a_spec_survives_json():
    """It is sent to worker processes."""
    spec = Spec(entry="search", call_name="c", settings={"index": "wiki.db"})
    assert Spec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


@pytest.mark.parametrize("name", NAMES)
def test_every_name_leads_somewhere(name):
    home, _, attribute = NAMES[name].partition(":")
    assert home.startswith("mgrpo.environments.") and attribute
    if importlib.util.find_spec(home) is None:
        pytest.skip(f"{home} is not there yet")
    assert hasattr(importlib.import_module(home), attribute)


def test_nothing_but_the_standard_library_is_imported():
    """Every worker process would pay for it, and tools could reach it."""
    code = "import sys; before = set(sys.modules); import mgrpo.environments.workers.environment_catalog, mgrpo.environments.tools.calculate; "
    code += "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(loaded) <= {*sys.stdlib_module_names, "mgrpo"}
