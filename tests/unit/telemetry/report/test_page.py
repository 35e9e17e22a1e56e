"""The page about a run: complete, readable without a network or scripts, and safe whatever a model wrote."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mgrpo.cli import main
from mgrpo.telemetry.alerts import help_page
from mgrpo.telemetry.report import write_report
from mgrpo.telemetry.report.run import LOST_S, state_of
from mgrpo.telemetry.report.sample_pages import (
    HEADINGS,
    MAX_BRANCHES,
    MAX_LINE_BYTES,
    MAX_MESSAGES,
    choose_prompts,
    spread,
)
from tests.unit.telemetry.report.runs import HOSTILE, append_lines, played, record, step_line, write_lines, write_run

ROOT = Path(__file__).parents[4]
BEFORE = {"step": 0, "policy_version": 0, "eval/pass_at_1": 0.25, "eval/scores": 0.25}
AFTER = {"step": 10, "eval/pass_at_1": 0.75, "eval/scores": 0.75, "eval/by_source/<i>/pass_at_1": 0.5, "eval/x": None}


class Page(HTMLParser):
    """Tags and attributes, the text outside of style and script, and the values that the script is given."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.content: dict[str, list[str]] = {"style": [], "script": []}
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        inside = self.open[-1] if self.open else ""
        if inside in self.content:
            self.content[inside].append(data)
        else:
            self.text += data

    def values(self):
        return json.loads(self.content["script"][0])


@pytest.fixture
def run(tmp_path):
    """The files of a run, with hostile text wherever text can be."""
    steps = [step_line(step, **{"objective/' onfocus='alert(5)_reward": step / 7}) for step in range(1, 11)]
    lines = [BEFORE, *steps, AFTER]
    write_run(
        tmp_path,
        lines,
        config="exp_name: '<script>alert(0)</script>'\nmodel_name_or_path: models/<b>x\nlearning_rate: 2.0e-05\nseed: 1\n",
    )
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "rew')
    records = [record(number, float(number), text) for number, text in enumerate([*HOSTILE, "a", "b", "c"])]
    write_lines(tmp_path / "rollouts" / "eval_step_9.jsonl", [record(0, -1.0, "an older answer")])
    write_lines(tmp_path / "rollouts" / "eval_step_10.jsonl", records)
    tokens = {"tokens": HOSTILE, "logprobs": [-0.1] * len(HOSTILE)}
    write_lines(
        tmp_path / "rollouts" / "train_samples.jsonl",
        [record(0, text=HOSTILE[1]) | tokens | {"finish_reason": HOSTILE[2]}],
    )
    return tmp_path


def read(folder) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


def test_what_a_model_wrote_is_text_and_nothing_else(run):
    """A model that is rewarded for it would write a script; the reader opens the page with her own rights."""
    page = read(run)
    assert page.open == []
    tags = [tag for tag, _ in page.tags]
    assert not {"img", "iframe", "link", "object", "embed", "form", "base"} & set(tags)
    assert tags.count("script") == 2 and tags.count("style") == 1
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on") or name == "style"]
    for text in (*HOSTILE[:4], HOSTILE[5], "<script>alert(0)</script>", "models/<b>x", "by_source/<i>"):
        assert text in page.text
    assert not any(char in page.text for char in "\x00\x07\x1b\u202e\ufeff\ud83d")
    assert "\\u202egnp.exe \\ud83d \\ufeff" in page.text
    ((pieces, logprobs),) = page.values()["tokens"].values()
    assert pieces[1] == HOSTILE[1] and "\\u202egnp.exe" in pieces[4] and logprobs[0] == -0.1
    assert not re.search("[<>&\u2028\u2029]", page.content["script"][0])


def test_the_page_loads_nothing_and_runs_only_its_own_script(run):
    """It is mailed and opened without a network, and no text in it may send a request or run."""
    page = read(run)
    links = [a[name] for _, a in page.tags for name in ("src", "href", "data", "srcset", "action") if name in a]
    assert all(link.startswith("#") for link in links)
    (policy,) = [a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a]
    style, script = ("".join(parts) for parts in (page.content["style"], page.content["script"][1:]))
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
        "base-uri 'none'; form-action 'none'"
    )
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", script)


def test_the_page_shows_settings_curves_and_evaluations(run):
    """Enough to see what was run and what came of it; the same prompt in both evaluations."""
    page = read(run)
    for text in ("learning_rate", "2e-05", "25.0 %", "75.0 %", "finished", "Rose most", "Lowest reward", "At random"):
        assert text in page.text
    assert "an older answer" in page.text and "after step 9" in page.text and "after step 10" in page.text
    charts = page.values()["charts"]
    assert [series["name"] for series in charts["c1"]["series"]] == ["training", "held-out"]
    assert charts["c1"]["series"][0]["values"] == [step / 20 for step in range(1, 11)]
    assert charts["c1"]["series"][1]["dots"] == [[0, 0.25], [10, 0.75]]
    assert "optim/steps 1, time/total 2" in page.text and len([tag for tag, _ in page.tags if tag == "polyline"]) == 4


def test_a_run_without_evaluations_or_settings_has_a_page(tmp_path):
    """A run that has just begun, or has no held-out data."""
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "reward": None}, {"step": 2, "reward": 0.5}])
    page = read(tmp_path)
    assert "None." in page.text and tmp_path.name in page.text
    write_lines(tmp_path / "metrics.jsonl", [])
    assert tmp_path.name in read(tmp_path).text


def test_long_texts_are_shortened(tmp_path):
    """200,000 characters of one answer would hide the others."""
    write_lines(tmp_path / "metrics.jsonl", [])
    write_lines(tmp_path / "rollouts" / "eval_step_1.jsonl", [record(0, text="A" * 200_000)])
    page = read(tmp_path)
    assert "198000 more characters" in page.text and len(page.text) < 20_000


def test_prompts_are_those_that_changed_the_extremes_and_a_few_of_the_rest():
    """Each prompt once, whatever the reasons to show it; always the same choice."""
    first = {prompt: prompt % 7 - 3.0 for prompt in range(60)}
    last = {prompt: first[prompt] + (prompt % 5 - 2) for prompt in range(60)}
    chosen = choose_prompts(first, last)
    assert {heading: len(found) for heading, found in chosen.items()} == HEADINGS
    together = [prompt for found in chosen.values() for prompt in found]
    assert len(together) == len(set(together))
    assert {last[p] - first[p] for p in chosen["Rose most"]} == {2.0}
    assert {last[p] - first[p] for p in chosen["Fell most"]} == {-2.0}
    rest = set(range(60)) - set(chosen["Rose most"]) - set(chosen["Fell most"])
    assert [last[p] for p in chosen["Lowest reward"]] == sorted(last[p] for p in rest)[: HEADINGS["Lowest reward"]]
    assert choose_prompts(first, last) == chosen
    # The highest and the lowest of equal rewards would be two names for the same.
    alike = choose_prompts(dict.fromkeys(range(20), 0.0), dict.fromkeys(range(20), 0.0))
    assert [len(found) for found in alike.values()] == [0, 0, 0, 0, 4]
    assert not any(choose_prompts({}, {}).values())


def test_evaluations_side_by_side_are_the_first_the_last_and_some_between():
    """Without the first nobody sees what was learned."""
    assert spread([0, 10, 20], 4) == [0, 10, 20]
    assert spread(list(range(0, 100, 10)), 4) == [0, 30, 60, 90]


def test_the_page_of_a_run_without_held_out_data_shows_what_training_sampled(tmp_path):
    """Texts, and the row's own columns, which a reward function was given; no label that is not there."""
    steps = [{"step": s, "reward": 1.0, "optim/steps": s % 2, "time/unix": 1e9 + s, "lr": 1e-5 * s} for s in (1, 2, 3)]
    write_run(tmp_path, steps, config="# mgrpo 9, Python 3\nseed: 1\n")
    shown = [record(0, text=text) | {"step": step, "ground_truth": []} for step, text in ((1, "early"), (3, "late"))]
    shown[1] |= {"columns": {"solution": "<b>7"}, "advantage": -0.5, "scores": {"integer": 0.0, "correct": 0.0}}
    called = [{"calls": [{"name": "search", "failed": True}, {"name": "<i>", "failed": False}]}, {"calls": []}]
    shown[1] |= {"trajectory": {"turns": called, "ended_by": "done"}}
    write_lines(tmp_path / "rollouts" / "train_samples.jsonl", shown)
    page = read(tmp_path)
    assert page.text.index("late") < page.text.index("early")
    assert "solution: <b>7" in page.text and "advantage -0.5" in page.text and "ground truth" not in page.text
    assert "correct 0" not in page.text
    assert "ended by the environment; 2 turns, called search (failed), <i>" in page.text
    assert "from 2001-09-09 01:46:41 to 2001-09-09 01:46:43 UTC" in page.text and "mgrpo 9, Python 3" in page.text
    assert "1 of them had nothing to train on" in page.text and "Learning rate" in page.text


def test_a_tree_is_shown_branch_after_branch(tmp_path):
    """Text that no turn followed would be read as what the model saw, and what it did not say as its own."""
    write_run(tmp_path, [step_line(1)])
    shown = record(0, None) | {"completion": "text of all", "step": 1, "trajectory": played()}
    write_lines(tmp_path / "rollouts" / "train_samples.jsonl", [shown])
    page = read(tmp_path)
    assert "4 turns, called look; agent crashed with status 3 after 2.5 s; retries 2" in page.text
    at = [
        page.text.index(words)
        for words in (
            "branch 1 begins by itself, 4 tokens before it",
            "assistant, not sampled here",
            "an example hello",
            'look({"at": "hello"})',
            "last hello",
            "branch 2 goes on from branch 1 after turn 1, its context written again, 9 tokens before it",
            "fork hello",
            "branch 3 begins by itself",
            "tokens of all branches, one after the other",
            "text of all",
            "printed by the agent",
        )
    ]
    assert at == sorted(at)
    said = [attributes["class"] for _, attributes in page.tags if (attributes.get("class") or "").startswith("said")]
    assert said == ["said"] * 3 + ["said sampled", "said", "said sampled"] + ["said", "said sampled"] * 2
    branches = [a["class"] for tag, a in page.tags if tag == "section" and "branch" in (a.get("class") or "")]
    assert branches == ["branch d0", "branch d1", "branch d0"]


def test_a_large_tree_does_not_fill_the_page(tmp_path):
    """An agent may make a thousand branches; all of them are in the record."""
    write_run(tmp_path, [step_line(1)])
    many = played()
    many["branches"] = [many["branches"][0] | {"messages": many["branches"][0]["messages"] * 100}] * 1000
    shown = record(0, 1.0, "answer") | {"step": 1, "trajectory": many}
    write_lines(tmp_path / "rollouts" / "train_samples.jsonl", [shown])
    page = read(tmp_path)
    assert f"{1000 - MAX_BRANCHES} more branches are in its record" in page.text
    assert f"{600 - MAX_MESSAGES} more messages" in page.text and len(page.text) < 200_000


def test_traces_are_read_from_all_parts_of_large_files(tmp_path):
    """save_traces keeps everything; a page that read it all would be late, one that reads the start shows only the start."""
    write_run(tmp_path, [step_line(step) for step in range(1, 401)])
    records = [
        {
            "step": step,
            "prompt_id": f"0_{step}",
            "reward": 1.0,
            "ground_truth": ["7"],
            "tokens": ["it is", " 7"],
            "logprobs": [-0.5, None],
        }
        for step in range(1, 401)
    ]
    write_lines(tmp_path / "rollouts" / "r_rollouts_000000.jsonl", records[:250])
    write_lines(tmp_path / "rollouts" / "r_rollouts_000001.jsonl", records[250:], after='{"step": 401, "tok')
    append_lines(tmp_path / "rollouts" / "other.jsonl", [{"step": 9999, "completion": "not a trace"}])
    page = read(tmp_path)
    steps = [int(step) for step in re.findall(r"step (\d+) \d+ completion", page.text)]
    assert steps == sorted(steps, reverse=True) and steps[-1] == 1 and max(steps) > 350
    assert max(b - a for a, b in zip(steps[1:], steps, strict=False)) < 40
    assert "it is 7" in page.text and "not a trace" not in page.text
    assert [["it is", " 7"], [-0.5, None]] in page.values()["tokens"].values()
    write_lines(tmp_path / "rollouts" / "r_rollouts_000000.jsonl", [{"completion": "x" * 2 * MAX_LINE_BYTES}, *records])
    assert "it is 7" in read(tmp_path).text


@pytest.mark.parametrize(
    ("status", "age", "state"),
    [
        (None, None, "ended"),
        (None, 1, "running"),
        ("running", 1, "running"),
        ("running", LOST_S + 1, "lost"),
        ("running", -3600, "lost"),
        ("running", None, "lost"),
        ("failed", 1, "failed"),
        ("finished", None, "finished"),
        ("<b>", None, "ended"),
    ],
)
def test_a_run_that_was_killed_is_not_said_to_run(tmp_path, status, age, state):
    """Its last words were that it runs; whoever holds the lock touches it."""
    write_lines(tmp_path / "metrics.jsonl", [step_line(1)])
    if status:
        (tmp_path / "status.json").write_text(
            json.dumps({"state": status, "cause": "a <cause>" * (status == "failed")})
        )
    if age:
        (tmp_path / "run.lock").write_text("")
        os.utime(tmp_path / "run.lock", (time.time() - age,) * 2)
    assert state_of(tmp_path)[0] == state
    page = read(tmp_path)
    follows = next(a["data-follow"] for tag, a in page.tags if tag == "html")
    assert follows == ("reload" if state == "running" else "")
    assert ("a <cause>" in page.text) == (state == "failed")


def test_time_left_follows_the_pace_of_the_last_steps(tmp_path):
    """The first steps, which compile, are slower; an hour of silence is not counted as progress."""
    now = time.time()
    times = [now - 1000 + 60 * step for step in range(1, 11)] + [now - 40 + step for step in range(1, 31)]
    lines = [step_line(step, **{"time/unix": at}) for step, at in enumerate(times, 1)]
    config = "total_episodes: 100\nnum_unique_prompts_rollout: 1\nnum_samples_per_prompt_rollout: 1\n"
    write_run(tmp_path, lines, config=config, state="running")
    page = read(tmp_path)
    assert "step 40 of 100" in page.text and re.search(r"about 0:(4[5-9]|5[0-5]) left", page.text)


def test_a_warning_is_shown_once_with_a_page_that_exists(tmp_path):
    """It comes again every 100 steps; a page that does not exist helps nobody."""
    lines = [step_line(step, frac_reward_zero_std=1.0, reward=0.0) for step in range(1, 251)]
    write_run(tmp_path, lines)
    page = read(tmp_path)
    assert page.text.count("(frac_reward_zero_std is 1)") == 1 and "step 3, 103, 203" in page.text
    for metric in (
        "frac_reward_zero_std",
        "objective/f1_error_rate",
        "tools/aggregate/failure_rate",
        "val/no_score_rate",
    ):
        assert help_page(metric) in page.text or metric != "frac_reward_zero_std"
        assert (ROOT / help_page(metric)).is_file()


def test_every_start_is_shown_by_phase(tmp_path):
    """A restart that takes long shows where, beside the first one; a chart of it would have a point a start."""
    first = {"time/start/import": 8.0, "time/start/sample": 2.5}
    again = {"time/start/import": 9.25, "time/start/restore": 30.0, "time/start/sample": None}
    lines = [step_line(1, **first), step_line(2), step_line(3, **again), step_line(4)]
    html = write_report(write_run(tmp_path, lines)).read_text()
    section = html[html.index("<h2 id='starts'>") :]
    rows = re.findall(r"<tr>(.*?)</tr>", section.partition("</table>")[0])
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]
    assert cells == [
        ["before step", "first sample after", "import", "sample", "restore"],
        ["1", "10.5", "8.0", "2.5", ""],
        ["3", "39.2", "9.2", "", "30.0"],
    ]
    assert "time/start/" not in html
    assert "id='starts'" not in write_report(write_run(tmp_path, [step_line(1)])).read_text()


def test_engines_that_died_are_seen_at_their_step(tmp_path):
    """A slow stretch of a run is explained by the engine that was started again in it."""
    write_run(tmp_path, [step_line(step) for step in range(1, 11)])

    def states(step, second, starts=1, why=""):
        engines = [("serving", 1, ""), (second, starts, why)]
        named = [{"engine": n, "state": s, "starts": k, "last_failure": w} for n, (s, k, w) in enumerate(engines)]
        return {"step": step, "engines": named}

    write_lines(
        tmp_path / "engines.jsonl",
        [states(1, "serving"), states(6, "starting", 2, "no answer <b>"), states(8, "serving", 2, "no answer <b>")],
    )
    page = read(tmp_path)
    bars = [a for tag, a in page.tags if tag == "rect"]
    assert [a["class"] for a in bars] == [
        "engine serving",
        *(f"engine {s}" for s in ("serving", "starting", "serving")),
    ]
    assert [float(a["width"]) for a in bars] == pytest.approx([1000, 500, 200, 300], abs=0.1)
    assert page.text.count("no answer <b>") == 1 and "engine 0 serving, engine 1 serving" in page.text


def test_a_page_of_a_long_run_is_small_and_soon_made(tmp_path):
    """10,000 steps of 80 metrics, and evaluations of 20,000 completions: it is made every minute beside the training."""
    names = [f"custom/m{number}" for number in range(70)]
    lines = [
        step_line(step, **{name: float((step * 7919 + n) % 1009) for n, name in enumerate(names)})
        for step in range(1, 10_001)
    ]
    lines += [{"step": step, "eval/scores": step / 10_000, "eval/pass_at_1": 0.5} for step in range(0, 10_001, 100)]
    write_run(tmp_path, lines)
    records = [record(n, float(n % 5), "lorem ipsum " * 100, prompt=n // 8) for n in range(20_000)]
    write_lines(tmp_path / "rollouts" / "eval_step_0.jsonl", records)
    write_lines(tmp_path / "rollouts" / "eval_step_10000.jsonl", records)
    began = time.process_time()
    path = write_report(tmp_path)
    assert time.process_time() - began < 60
    assert path.stat().st_size < 4e6


def test_the_report_command(run, tmp_path, capsys):
    """From the files alone, in place of the old page; a folder without a run is one sentence."""
    (run / "report.html").write_text("old")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    assert "alert" in (run / "report.html").read_text()
    assert main(["report", str(run), "--out", str(run / "elsewhere.html")]) == 0
    assert (run / "elsewhere.html").is_file()
    capsys.readouterr()
    assert main(["report", str(tmp_path / "rollouts")]) == 2
    assert "holds no metrics.jsonl" in capsys.readouterr().err
    assert main(["report"]) == 2
