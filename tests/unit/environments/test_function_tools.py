"""Functions as tools: what their calls give the model."""

from __future__ import annotations

import asyncio
import inspect
import json

import pytest

from mgrpo.environments.environment import Call
from mgrpo.environments.offered.functions import FunctionTool


def answers(function, *arguments, **at_reset):
    """The observations of one turn's calls."""
    tool = FunctionTool(function)
    tool.trajectory = at_reset.get("trajectory", "")
    tool.reset(at_reset.get("row", {}), seed=at_reset.get("seed", 0))
    given = tool.step([Call(name=function.__name__, arguments=each) for each in arguments])
    return list(asyncio.run(awaited(given)) if inspect.isawaitable(given) else given)


async def awaited(value):
    return await value


def returning(value):
    def tool():
        """Give something."""
        return value

    return tool


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain \n text", "plain \n text"),
        ({"a": ["ü", None]}, '{"a": ["ü", null]}'),
        ([1, (2, True)], "[1, [2, true]]"),
        (3.5, "3.5"),
        (None, "null"),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        ({1, }, '"{1}"'),
    ],
)  # fmt: skip
def test_text_is_shown_as_it_is_and_everything_else_as_json(value, text):
    (answer,) = answers(returning(value), {})
    assert answer.text == text and not answer.failed


def test_an_exception_is_a_failed_call_that_says_why():
    """TRL tells the model so; a run goes on."""

    def broken(a: int):
        """Break.

        Args:
            a: how
        """
        if a:
            raise KeyError("x")
        raise SystemExit("no")

    first, second = answers(broken, {"a": 1}, {"a": 0})
    assert first.failed and json.loads(first.text) == {"error": "KeyError: 'x'"}
    assert second.failed and json.loads(second.text) == {"error": "SystemExit: no"}


def test_async_functions_of_a_turn_run_together_and_answer_in_order():
    """Two searches cost the time of one."""
    begun = []

    async def search(query: str) -> str:
        """Search.

        Args:
            query: what for
        """
        begun.append(query)
        if query == "first":
            while len(begun) < 3:
                await asyncio.sleep(0)
        if query == "third":
            raise ValueError("nothing found")
        return f"about {query}"

    first, second, third = answers(search, {"query": "first"}, {"query": "second"}, {"query": "third"})
    assert (first.text, second.text) == ("about first", "about second")
    assert third.failed and json.loads(third.text) == {"error": "ValueError: nothing found"}


def test_reserved_parameters_are_filled_in_at_reset():
    """A tool that keeps files needs to know for which trajectory (trl #4866)."""

    def tool(text: str, *, trajectory: str, row: dict, seed: int) -> dict:
        """Show what it knows.

        Args:
            text: anything
        """
        return {"text": text, "trajectory": trajectory, "row": row, "seed": seed}

    (answer,) = answers(tool, {"text": "t"}, trajectory="4-2", row={"a": 1}, seed=9)
    assert json.loads(answer.text) == {"text": "t", "trajectory": "4-2", "row": {"a": 1}, "seed": 9}


def test_a_call_cannot_set_what_is_filled_in():
    """A model that writes another trajectory's id must not reach its files."""

    def tool(*, trajectory: str) -> str:
        """Show the trajectory."""
        return trajectory

    (answer,) = answers(tool, {"trajectory": "other"}, trajectory="own")
    assert answer.failed and "own" not in answer.text
