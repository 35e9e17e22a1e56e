"""Pages about runs whose files are damaged: whatever stands in a line, the page is made, shows the rest and says what is missing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mgrpo.telemetry.files import lines_until
from mgrpo.telemetry.report import write_report
from mgrpo.telemetry.report.compare import comparison
from mgrpo.telemetry.report.page import page
from mgrpo.telemetry.report.sample_pages import Gallery
from tests.unit.telemetry.report.runs import played, record, step_line, write_run

CONFIG = {
    "exp_name": "a name",
    "seed": 1,
    "model_name_or_path": "models/a",
    "dataset_mixer_list": ["a", "1.0"],
    "total_episodes": 100,
    "num_unique_prompts_rollout": 1,
    "num_samples_per_prompt_rollout": 5,
    "learning_rate": 1e-5,
}
METRICS = [
    *(step_line(step, **{"objective/integer_reward": step / 9, "frac_reward_zero_std": 1.0}) for step in range(1, 9)),
    {"step": 0, "eval/pass_at_1": 0.25, "eval/pass_at_4": 0.5, "eval/scores": 0.25},
    {"step": 8, "eval/pass_at_1": 0.75, "eval/pass_at_4": 0.75, "eval/scores": 0.75, "eval/histogram": [1, 2]},
]
ENGINES: dict[str, Any] = {
    "step": 1,
    "time/unix": 1e9,
    "engines": [{"engine": 0, "state": "serving", "starts": 1, "last_failure": ""}],
}
SAMPLE = record(0, 1.0, "a good answer") | {
    "prompt_id": "0_1",
    "advantage": 0.5,
    "columns": {"solution": "7"},
    "tokens": ["a good", " answer"],
    "logprobs": [-0.5, None],
    "trajectory": {
        "ended_by": "done",
        "turns": [{"num_tokens": 2, "calls": [{"name": "search", "failed": False, "seconds": 1.0}], "reward": None}],
        "messages": [{"role": "user", "content": "hello"}],
    },
}
PLAYED = SAMPLE | {"trajectory": played()}
FILES: dict[str, list[dict[str, Any]]] = {
    "metrics.jsonl": METRICS,
    "engines.jsonl": [ENGINES, {"step": 2, "time/unix": 1e9, "changed": ENGINES["engines"]}],
    "rollouts/eval_step_0.jsonl": [SAMPLE, SAMPLE | {"prompt_idx": 1}],
    "rollouts/eval_step_8.jsonl": [SAMPLE, SAMPLE | {"prompt_idx": 1}],
    "rollouts/train_samples.jsonl": [SAMPLE, PLAYED],
    "rollouts/r_rollouts_000000.jsonl": [SAMPLE],
}
_deep: Any = "bottom"
for _ in range(300):
    _deep = [_deep, {"<b>": _deep}] if _ < 3 else [_deep]
VALUES = [
    None, True, 0, -1, 5, 0.5, 2**70, 10**400, -(10**400), 1e308, -1e308, 1e-308, float("nan"), float("inf"), "", "text",
    "<script>", "9" * 5000, "\u2028\u202e\x00\ud83d", [], {}, [1], ["text"], [None], [[]], {"a": 1}, {"\ud83d": []}, _deep,
]  # fmt: skip
LINES = [
    b"[" * 100_000, b'{"step": ' * 20_000, b"{" * 5, b"null", b"5", b'"text"', b"[]", b"{}", b"", b"\xff\xfe{}", b'{"step": 1',
    b'{"step": 1, "eval/pass_at_' + b"9" * 5000 + b'": 0.5}', b'{"step": 1, "reward": ' + b"9" * 10_000 + b"}",
    b'{"step": 1, "\\ud83d": 1, "step": {}}', b"\x00" * 100, b'{"engines": [1]}', b'{"step": NaN}', b'{"step": 1e999}',
]  # fmt: skip


def places(value: object, place: tuple = ()) -> Iterator[tuple]:
    """The places of all values inside a record."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*place, key)
            yield from places(inner, (*place, key))


def with_value(record: dict[str, Any], place: tuple, value: object) -> dict[str, Any]:
    """A copy of the record with another value at a place."""
    copy = json.loads(json.dumps(record))
    inner = copy
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return copy


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A complete run."""
    write_run(tmp_path, METRICS, config=json.dumps(CONFIG))
    (tmp_path / "rollouts").mkdir()
    for name, records in FILES.items():
        (tmp_path / name).write_text("".join(json.dumps(found) + "\n" for found in records))
    return tmp_path


def check(folder: Path) -> str:
    """The page, which a browser could read, with the run's own values in it."""
    made = page(folder)
    assert made.encode() and "a good answer" in made and "75.0 %" in made and "step 8" in made
    json.loads(made.partition("id='values'>")[2].partition("</script>")[0])
    assert made.count("<script") == 2 and not set(made) & set("\u2028\u202e\x00\ud83d")
    return made


def test_a_run_without_damage_has_no_sentence_about_it(run):
    """A sentence on every page would be read by no one; a line that is being written is no damage."""
    assert "Damaged" not in check(run)
    for name in FILES:
        with (run / name).open("a") as file:
            file.write('{"step": 9, "rew')
    assert "Damaged" not in check(run)


@pytest.mark.parametrize("name", FILES)
def test_a_page_is_made_whatever_a_line_holds(run, name):
    """One bad line, and the run of a month would have no page and no watch."""
    good = (run / name).read_bytes()
    (run / name).write_bytes(b"".join(line + b"\n" for line in LINES) + good)
    assert f"of {Path(name).name}" in check(run).partition("Damaged")[2][:300]
    sources = FILES[name]
    damaged = [with_value(found, place, value) for found in sources for place in places(found) for value in VALUES]
    (run / name).write_text("".join(json.dumps(found) + "\n" for found in damaged) + good.decode())
    assert "Damaged" in check(run)


def test_a_line_of_metrics_has_a_step(run):
    """It belongs nowhere without one; a reader who counts the lines of a run would find others."""
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": NaN, "reward": 1}\n{"reward": 1}\n{"step": 9, "reward": NaN}\n')
    assert "2 lines of metrics.jsonl." in check(run)


def test_a_label_may_be_nested_deeper_than_can_be_written():
    """Writing needs a deeper stack than reading."""
    label: Any = []
    for _ in range(5000):
        label = [label]
    assert "a good answer" in Gallery().sample(SAMPLE | {"ground_truth": label})


@pytest.mark.parametrize("name", ["rollouts/eval_step_8.jsonl", "engines.jsonl", "metrics.jsonl"])
def test_each_damaged_record_alone_leaves_a_page(run, name):
    """Beside good records a damaged one may be hidden by what is drawn of them."""
    good = (run / name).read_text()
    found = FILES[name][-1]
    for place in places(found):
        for value in (10**400, "text", [1], {"a": 1}, None):
            (run / name).write_text(json.dumps(with_value(found, place, value)) + "\n" + good)
            check(run)


@pytest.mark.parametrize("line", LINES)
def test_a_damaged_state_is_said_and_not_guessed(run, line):
    """status.json is replaced as a whole, so that a damaged one comes from elsewhere."""
    (run / "status.json").write_bytes(line)
    assert "of status.json" in check(run)


def test_damaged_settings_leave_a_page(run):
    """A user edits them."""
    for name in CONFIG:
        for value in (-1, 2**70, "a\x00b", [[1]]):
            (run / "config.yaml").write_text(json.dumps(CONFIG | {name: value}))
            check(run)
    for text in ("[" * 3000, "a: 2024-99-99", "- 1", "? [a]\n: 1", "5: 6\nseed: 1", "a: [1", "\t", "1: 2"):
        (run / "config.yaml").write_text(text)
        check(run)


def test_damaged_runs_are_compared(run, tmp_path_factory):
    """The other run may be well."""
    for name in FILES:
        with (run / name).open("ab") as file:
            file.write(b"".join(line + b"\n" for line in LINES))
    made = comparison([run, run])
    assert "Damaged" in made and "of metrics.jsonl" in made and "a good answer" in made
    assert write_report(run).is_file()


def test_a_run_continues_its_files_without_their_damaged_lines(tmp_path):
    """What was written after a damaged line would be lost, or the run could not continue at all."""
    path = tmp_path / "lines.jsonl"
    lines = [b'{"step": 1}', *LINES, b'{"step": [1]}', b'{"other": 1}', b'{"step": 2}', b'{"step": 3}']
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    kept = lines_until(path, step=2)
    assert kept[0] == '{"step": 1}\n' and kept[-1] == '{"step": 2}\n'
    assert all(json.loads(line)["step"] in (1, 2) for line in kept if "9" * 5000 not in line)
