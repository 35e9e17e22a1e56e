"""What a model is told of a function, against transformers, whose schemas TRL puts into prompts."""

from __future__ import annotations

import functools
import json
from typing import Annotated, Any, Dict, List, Literal, Optional, Tuple, Union  # noqa: UP035  # users write these

import pytest
from transformers.utils import get_json_schema

from mgrpo.environments.offered.functions import tool_of


class Point:
    """Two numbers."""


class Board:
    """A game."""

    def move(self, row: int, col: int) -> str:
        """Put a stone on the board.

        Args:
            row: Where it goes,
                counted from the top.
            col: Where it goes, from the left.

        Returns:
            The board after it.
        """
        return ""

    async def wait(self) -> None:
        """Do nothing."""


def nothing():
    """Do nothing at all."""


def long_description(x: int):
    """Do much.

    This is done in
    several steps: first one, then another.

    Args:
        x: the number
    """


def plain_types(a: int, b: float, c: str, d: bool, e: list, f: dict, g: Any, h: tuple, i: None):
    """Take one of each.

    Args:
        a: an int
        b: a float
        c: a str
        d: a bool
        e: a list
        f: a dict
        g: anything
        h: a tuple
        i: None
    """


def defaults(a: int, b: str = "x", *, c: float = 1.0) -> float:
    """Have defaults.

    Args:
        a: the first
        b: the second
        c: the third
    Returns:
        A number.
    """
    return 0.0


def optional(a: Optional[int], b: int | None = None, c: Union[str, int, None] = None):  # noqa: UP007, UP045
    """Take what may be missing.

    Args:
        a: one
        b: two
        c: three
    """


def unions(a: int | str, b: str | int | float, c: list[int] | str, d: list | tuple, e: list[int] | None = None):
    """Take several types.

    Args:
        a: one
        b: two
        c: three
        d: four
        e: five
    """


def containers(
    a: list[int], b: dict[str, float], c: tuple[int, str], d: list[dict[str, list[bool]]], e: dict[str, Any]
):
    """Take nested values.

    Args:
        a: one
        b: two
        c: three
        d: four
        e: five
    """


def old_containers(a: List[int], b: Dict[str, float], c: Tuple[int, str], d: List, e: Dict):  # noqa: UP006
    """Take nested values as typing has them.

    Args:
        a: one
        b: two
        c: three
        d: four
        e: five
    """


def literals(
    a: Literal["x", "y"], b: Literal[1, 2] = 1, c: Literal["a", 1, True, None] = "a", d: Literal["q"] | None = None
):
    """Take one of some values.

    Args:
        a: one
        b: two
        c: three
        d: four
    """


def choices(drink: str, number: int):
    """Order a drink.

    Args:
        drink: What to drink (choices: ["tea ", "coffee"])
        number: How many (Choices: [1, 2])
    """


def own_class(a: Point):
    """Take an object.

    Args:
        a: a point
    """


def annotated(a: Annotated[int, "of some kind"]):
    """Take an annotated value.

    Args:
        a: one
    """


def long_arguments(a: str, b: str):
    """Explain the arguments.

    Args:
        a: a text that
            goes on in the next line

            and after an empty one
        b: a text with a colon: like this

    Raises:
        ValueError: never
    """


def one_line(a: int) -> int:
    """Add one. Args: are below.

    Args: a: the number
    Returns: the next
    """
    return a + 1


def examples(a: int) -> list[int]:
    """Count.

    Args:
        a: how far

    Returns:
        list: all numbers,
        in their order

    Examples:
        >>> examples(2)
    """
    return []


def raises(a: int) -> dict[str, int]:
    """Count.

    Args:
        a: how far

    Returns:
        A table.

    Raises:
        ValueError: never
    """
    return {}


async def asynchronous(query: str) -> str:
    """Search.

    Args:
        query: What to look for; "quoted" words, ümläuts and 漢字 too.
    """
    return ""


@functools.lru_cache
def cached(a: int) -> int:
    """Remember.

    Args:
        a: the number
    """
    return a


def tabs(a: int):
    """
    Start in the second line.

    Args:
            a: deeply indented
    """


FUNCTIONS = [
    nothing, long_description, plain_types, defaults, optional, unions, containers, old_containers, literals, choices,
    own_class, annotated, long_arguments, examples, raises, asynchronous, cached, tabs, Board().move, Board().wait,
]  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_tool_is_described_as_transformers_describes_it(function):
    """Templates print schemas as JSON: other keys or another order is another prompt than TRL's."""
    assert json.dumps(tool_of(function).schema) == json.dumps(get_json_schema(function))


def test_a_section_begins_at_the_start_of_a_line():
    """A description that speaks of "Args:" is not cut there."""
    tool = tool_of(one_line)
    assert tool.description == "Add one. Args: are below."
    assert tool.parameters["properties"]["a"] == {"type": "integer", "description": "the number"}
    assert tool.returns == {"type": "integer", "description": "the next"}


def test_types_may_stand_in_the_docstring_as_well():
    """As the Google style has them."""

    def area(width: float, name: str):
        """Measure.

        Args:
            width (float): how wide
            name (str, optional): what of
        """

    properties = tool_of(area).parameters["properties"]
    assert [value["description"] for value in properties.values()] == ["how wide", "what of"]


def test_a_return_type_without_json_is_left_out():
    """The model does not need it; transformers refuses such a function."""

    def point() -> set[int]:
        """Find a point."""

    assert tool_of(point).schema["function"].keys() == {"name", "description", "parameters"}


def test_parameters_that_are_filled_in_are_not_shown():
    """The model must not be asked for the trajectory's id; a game's coordinates stay its own."""

    def note(row: int, *, seed: int, trajectory: str, loud: bool = False):
        """Write a note.

        Args:
            row: where
            loud: how
        """

    parameters = tool_of(note).parameters
    assert list(parameters["properties"]) == ["row", "loud"] and parameters["required"] == ["row"]


def test_everything_that_is_missing_is_named_with_its_place():
    """One start finds all of it."""

    def broken(a, b: int, c: int, *rest: int, d: set[int]):
        """
        Args:
            a: one
            c: three
            d: four
        """

    with pytest.raises(ValueError) as raised:
        tool_of(broken)
    line = broken.__code__.co_firstlineno
    assert str(raised.value).startswith(f"{__file__}:{line}: the tool broken: ")
    for part in (
        "no docstring that says",
        "a: there is no type hint",
        "b: the docstring does not describe it",
        "rest: models call by name",
        "d: set[int] has no JSON form",
    ):
        assert part in str(raised.value)
    assert "c:" not in str(raised.value)


def test_hints_that_cannot_be_read_are_named():
    """A name that only a type checker imports."""

    def broken(a: Unknown):  # noqa: F821
        """Do something.

        Args:
            a: one
        """

    with pytest.raises(ValueError, match=r"test_tool_schemas.py:\d+: the tool broken: .*'Unknown' is not defined"):
        tool_of(broken)


@pytest.mark.parametrize("thing", [Point, functools.partial(defaults, 1), Board()], ids=["class", "partial", "object"])
def test_only_functions_are_described(thing):
    """Their docstrings speak of something else."""
    with pytest.raises(ValueError, match="is not a function; write one with def"):
        tool_of(thing)


@pytest.mark.parametrize(
    ("hint", "problem"),
    [
        (Literal[b"x"], "Literal with b'x' has no JSON form"),
        (tuple[int], "use list"),
        (set[int], r"set\[int\] has no JSON form"),
    ],
)
def test_types_without_json_are_refused(hint, problem):
    def broken(a):
        """Do something.

        Args:
            a: one
        """

    broken.__annotations__["a"] = hint
    with pytest.raises(ValueError, match=f"a: .*{problem}"):
        tool_of(broken)
