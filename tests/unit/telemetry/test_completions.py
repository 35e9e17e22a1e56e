"""Completions of a step on the terminal and in trackers."""

from __future__ import annotations

import io

import pytest

from mgrpo.telemetry.completions import completions_table, printed, some_of
from mgrpo.telemetry.progress import Progress
from mgrpo.telemetry.trackers.sinks import Table
from mgrpo.telemetry.untrusted import printable
from tests import builders

HOSTILE = "\x1b]0;owned\x07\x1b[2J[bold red]x[/] \u202eabc\u2028 \x9b31m\x08"


def group(prompt: str, rewards: tuple[float, ...], **parts: float):
    answers = [builders.completion(2, text=f"{prompt} answer {number}") for number in range(len(rewards))]
    return builders.scored_group(
        rewards, completions=answers, parts=[{**parts, "correct": 1.0}] * len(rewards), of=builders.prompt(text=prompt)
    )


def test_a_table_has_every_completion_with_its_own_advantage() -> None:
    """Groups that a filter left out have none; a part that only some groups have is empty in others."""
    table = completions_table([group("a", (1.0, 0.0), math=1.0)], [group("b", (float("nan"),), code=0.5)], [0.7, -0.7])
    assert table.columns == ("prompt", "completion", "math", "code", "reward", "advantage")
    assert table.rows == (
        ("a", "a answer 0", 1.0, None, 1.0, 0.7),
        ("a", "a answer 1", 1.0, None, 0.0, -0.7),
        ("b", "b answer 0", None, 0.5, None, None),
    )


def test_one_completion_of_each_prompt_keeps_its_own_advantage() -> None:
    table = completions_table([group("a", (1.0, 0.0)), group("b", (0.0, 1.0))], [], [1, 2, 3, 4], unique_prompts=True)
    assert [(row[0], row[-1]) for row in table.rows] == [("a", 1.0), ("b", 3.0)]


@pytest.mark.parametrize(
    ("count", "kept"), [(None, [0, 1, 2, 3, 4]), (2, [0, 2]), (9, [0, 1, 2, 3, 4]), (5, [0, 1, 2, 3, 4])]
)
def test_some_rows_are_spread_over_the_step(count, kept) -> None:
    table = Table(name="t", columns=("n",), rows=tuple((float(n),) for n in range(5)))
    assert [row[0] for row in some_of(table, count).rows] == kept


@pytest.mark.parametrize("width", [40, 160])
def test_what_a_model_wrote_does_not_reach_the_terminal(width, monkeypatch) -> None:
    """It could clear the screen, change the title, hide what follows; and a log of it could do so days later."""
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setenv("COLUMNS", str(width))
    table = completions_table([group(HOSTILE, (1.0,), **{"\x1b[31m": 1.0})], [], [0.5])
    Progress(4).show(lambda columns: printed(table, title="step 1", width=columns))
    text = out.getvalue()
    assert not any(character in text for character in "\x1b\x07\x9b\x08\u202e\u2028")
    flat = "".join(text.split())
    assert "[bold" in flat and "\\x1b[2J" in flat and "step1" in flat and "0.5" in flat
    assert max(map(len, text.splitlines())) <= 160 if width == 160 else "completion: " in text


def test_letters_of_all_languages_are_printed_as_they_are() -> None:
    assert printable("naïve 中文\u00a0🙂\n\tx") == "naïve 中文\u00a0🙂\n\tx"
    assert printable("a\rb\ud83d") == "a\\rb\\ud83d"
