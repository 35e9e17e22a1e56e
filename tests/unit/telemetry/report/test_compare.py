"""Several runs on one page: which is which, what they do differently, and what came of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgrpo.cli import main
from mgrpo.telemetry.report.compare import comparison, labels_of
from tests.unit.telemetry.report.runs import HOSTILE, record, step_line, write_lines, write_run
from tests.unit.telemetry.report.test_page import Page


@pytest.fixture
def runs(tmp_path):
    """Two runs of different settings and lengths, with the same held-out prompts."""
    folders = []
    for index, (name, rate, steps) in enumerate((("a", 0.1, 10), ("b<i>", 0.2, 20))):
        lines = [
            {"step": 0, "eval/pass_at_1": 0.25, "eval/scores": 0.25},
            *(step_line(step, reward=rate * step) for step in range(1, steps + 1)),
            {"step": steps, "eval/pass_at_1": rate * 4, "eval/scores": rate * 4},
        ]
        config = f"exp_name: {name}\noutput_dir: {name}\nlearning_rate: {rate}\nseed: 1\nnew: {HOSTILE[0]}\n"
        folders.append(write_run(tmp_path / name, lines, config=config if index else config.replace("new", "old")))
        records = [record(n, float(n == index), f"{name} says {n}") | {"prompt": f"prompt {n}"} for n in range(4)]
        write_lines(tmp_path / name / "rollouts" / f"eval_step_{steps}.jsonl", records)
    return folders


def test_curves_of_runs_share_a_chart_and_an_axis(runs):
    """Side by side with axes of their own, a slower run looks like the same run."""
    page = Page(comparison(runs))
    assert page.open == []
    values = page.values()
    assert (values["first"], values["last"]) == (0, 20)
    first = values["charts"]["c1"]
    assert [series["name"] for series in first["series"]] == ["a", "b<i>"]
    assert [len(series["values"]) for series in first["series"]] == [10, 20]
    assert [series["dots"][-1] for series in first["series"]] == [[10, 0.4], [20, 0.8]]
    buttons = [a["data-name"] for tag, a in page.tags if tag == "button"]
    assert buttons == ["a", "b<i>"]


def test_only_settings_that_differ_are_listed(runs):
    """Of 300 settings, those that explain the curves; what only one run has is among them."""
    page = Page(comparison(runs))
    text = page.text[page.text.index("Settings that differ", 200) : page.text.index("Learning")]
    assert "learning_rate0.10.2" in text and f"new{'not set'}{HOSTILE[0]}" in text and "old" in text
    assert "seed" not in text and "output_dir" not in text and "exp_name" not in text


def test_answers_of_the_runs_to_the_same_prompt_stand_side_by_side(runs, tmp_path):
    """Prompts of other data under the same number are not the same prompt."""
    page = Page(comparison(runs))
    assert "Better in the last run" in page.text and "Worse in the last run" in page.text
    at = page.text.index("prompt 1")
    assert page.text.index("a says 1", at) < page.text.index("b<i> says 1", at) < at + 400
    other = write_run(tmp_path / "c", [step_line(1)])
    write_lines(other / "rollouts" / "eval_step_1.jsonl", [record(0, text="something else")])
    assert "Held-out prompts" not in Page(comparison([*runs, other])).text


def test_runs_are_called_what_distinguishes_their_folders():
    """Two folders of the same name in different places, and one folder twice."""
    assert labels_of([Path("/x/a/run"), Path("/x/b/run")]) == ["a/run", "b/run"]
    assert labels_of([Path("/x/a"), Path("/x/b")]) == ["a", "b"]
    assert labels_of([Path("/x/a"), Path("/x/a")]) == ["a (1)", "a (2)"]
    assert labels_of([Path("/x/a"), Path("/x/a/b")]) == ["a", "b"]


def test_the_report_command_compares(runs, tmp_path, monkeypatch, capsys):
    """In the folder of the caller: a run's own folder would hide it."""
    monkeypatch.chdir(tmp_path)
    assert main(["report", *map(str, runs)]) == 0
    assert capsys.readouterr().out == "comparison.html\n" and (tmp_path / "comparison.html").is_file()
    assert main(["report", *map(str, runs), "--out", "x/both.html"]) == 0
    assert (tmp_path / "x" / "both.html").is_file()
    assert main(["report", str(runs[0]), str(tmp_path / "none")]) == 2
    assert "holds no metrics.jsonl" in capsys.readouterr().err
    assert main(["report", *["a"] * 21]) == 2
    assert "21 runs were given" in capsys.readouterr().err
