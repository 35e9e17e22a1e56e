"""What a run writes about a step and an evaluation; and the twins of the ranks that write nothing."""

from __future__ import annotations

import ast
import dataclasses
import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mgrpo.layout import Layout
from mgrpo.moving import from_values
from mgrpo.parallel import backend
from mgrpo.run.inputs.continuing import Continued
from mgrpo.run.report.listener import RunListener
from mgrpo.run.report.reporter import Reporter
from mgrpo.telemetry.state import told_engines
from tests.unit.run.producing import collect, evaluator, producer
from tests.unit.telemetry.wandb_file import history, offline_runs, run, values

SECONDS = {"wait": 3.0, "train": 2.0, "sync": 1.0}


def report(tmp_path, *, settings: dict[str, Any] | None = None, **arguments) -> Reporter:
    config = from_values(
        {
            "output_dir": str(tmp_path / "out"),
            "save_traces": True,
            "num_unique_prompts_rollout": 4,
            "num_samples_per_prompt_rollout": 2,
            "total_episodes": 80,
            **(settings or {}),
        }
    )
    return Reporter(config, scale=None, **arguments)


def state(out: Path, step: int, saved: dict[str, Any]) -> Continued:
    """A saved state of the run in `out`, in which the reporter's part is `saved`."""
    return Continued(path=str(out / "checkpoints" / f"step_{step}"), step=step, state={"reporter": saved})


def lines(tmp_path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def batch():
    """One step of four prompts, which took 2 seconds to generate and half a second to score."""
    backend.install()  # before the first import of Megatron
    from mgrpo.run.produce.step_batch import make_batch

    own = producer()
    rollouts = dataclasses.replace(collect(own), generate_s=2.0, score_s=0.5)
    return make_batch(
        rollouts, own.groups.config, layout=Layout(world_size=1), hidden=8, reward_weights={}, policy_version=4
    )


def step(reporter: Reporter, number: int, batch, *, trains: bool = True, loss_scale: float | None = None) -> None:
    results = [SimpleNamespace(grad_norm=2.0, is_finite=True, loss_scale=loss_scale)] if trains else []
    learned = SimpleNamespace(results=results, metrics={"loss/policy_avg": 0.25}, learning_rate=1e-3)
    clock = SimpleNamespace(seconds=SECONDS)
    reporter.step(batch, learned, step=number, version=5, sync_bytes=100, clock=clock)


def test_the_times_of_a_step_add_up(tmp_path, batch) -> None:
    """Packing happens while the learners wait; counted nowhere, a slow part of a step would not be seen."""
    reporter = report(tmp_path)
    step(reporter, 1, batch)
    (line,) = lines(tmp_path)
    assert (line["time/generate"], line["time/score"], line["time/sync"], line["time/total"]) == (2.0, 0.5, 1.0, 6.0)
    assert line["time/train"] == 2.5
    assert line["policy_version"] == 5 and line["sync/bytes"] == 100 and line["loss/policy_avg"] == 0.25
    assert line["judge/requests"] == 2.0
    assert "policy/loss_scale" not in line
    step(reporter, 2, batch, loss_scale=2.0**15)
    step(reporter, 3, batch, trains=False)
    assert [line.get("policy/loss_scale") for line in lines(tmp_path)[1:]] == [2.0**15, None]
    assert line["lr"] == 1e-3 and abs(line["time/unix"] - time.time()) < 60


def test_the_first_line_has_the_phases_of_the_start(tmp_path, batch) -> None:
    """They are known when something has been sampled, after the files were opened; later lines would count them again."""
    start: dict[str, float] = {}
    reporter = report(tmp_path, start=start)
    start |= {"import": 8.0, "sample": 2.5}
    step(reporter, 1, batch)
    step(reporter, 2, batch)
    first, second = lines(tmp_path)
    assert (first["time/start/import"], first["time/start/sample"]) == (8.0, 2.5)
    assert not any(name.startswith("time/start") for name in second)


def test_steps_without_training_are_named_on_the_console_and_in_the_report(tmp_path, batch, capsys) -> None:
    """They cost as much as others; the run's own lines must say so, and why, while it runs."""
    reporter = report(tmp_path)
    for number in (1, 2):
        step(reporter, number, batch, trains=False)
    assert "warning" not in capsys.readouterr().out
    step(reporter, 3, batch, trains=False)
    reporter.close()
    assert "warning: 3 steps in a row: nothing was trained (optim/steps is 0)" in capsys.readouterr().out
    page = (tmp_path / "out" / "report.html").read_text()
    assert "step 3" in page and "nothing was trained (optim/steps is 0)" in page
    assert {line["lr"] for line in lines(tmp_path)} == {1e-3}


def two_steps_with_a_resume(tmp_path, batch) -> dict[str, Any]:
    """Step 2 is done twice: by a run whose newest state is that of step 1, and by the run that continues it; the reporter's part of that state."""
    reporter = report(tmp_path)
    step(reporter, 1, batch)
    saved = reporter.state_dict()
    step(reporter, 2, batch)
    reporter.close()
    own = report(tmp_path, continued=state(tmp_path / "out", 1, saved))
    step(own, 2, batch)
    own.close()
    return saved


def test_some_of_what_training_sampled_can_be_read(tmp_path, batch) -> None:
    """Without held-out prompts they are the only texts of the run; a resumed run does not write a step twice."""
    two_steps_with_a_resume(tmp_path, batch)
    path = tmp_path / "out" / "rollouts" / "train_samples.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(record["step"], record["sample_idx"], record["reward"]) for record in records] == [
        (1, 0, 0.0), (1, 1, 1.0), (2, 0, 0.0), (2, 1, 1.0)
    ]  # fmt: skip
    assert [record["advantage"] for record in records[:2]] == [sample.advantage for sample in batch.samples[:2]]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Training samples" in page


def test_a_completion_with_branches_has_one_advantage(tmp_path, batch) -> None:
    """Every completion behind it would be shown with another one's."""
    first, *rest = batch.samples
    divided = dataclasses.replace(batch, samples=[first, dataclasses.replace(first, continues=True), *rest])
    step(report(tmp_path), 1, divided)
    path = next((tmp_path / "out" / "rollouts").glob("*_rollouts_000000.jsonl"))
    found = [json.loads(line)["advantage"] for line in path.read_text().splitlines()]
    assert found == [sample.advantage for sample in batch.samples] and len({*found}) > 1


def test_a_resumed_run_goes_on_in_its_own_files_and_not_in_those_of_another(tmp_path, batch) -> None:
    """Lines of steps that are done again would stand twice; another run's lines would be continued as this one's."""
    saved = two_steps_with_a_resume(tmp_path, batch)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    other = report(tmp_path, continued=state(tmp_path / "elsewhere", 1, saved))
    step(other, 2, batch)
    assert [line["step"] for line in lines(tmp_path)] == [2]


def test_trackers_get_what_the_lines_hold_and_a_resumed_run_keeps_its_id(tmp_path, batch, monkeypatch) -> None:
    """Two runs of wandb for one run here, or curves that differ from metrics.jsonl."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = {"report_to": ("wandb", "tensorboard"), "wandb_project": "sums", "log_completions": True, "seed": 7}
    first = report(tmp_path, settings=settings)
    step(first, 1, batch)
    saved = json.loads(json.dumps(first.state_dict()))
    before = first.evaluation(evaluator().evaluate(0), step=1, policy_version=1)
    first.finish(before=before, after={})
    second = report(tmp_path, settings=settings, continued=state(tmp_path / "out", 1, saved))
    step(second, 2, batch)
    second.finish(before={}, after={})
    paths = offline_runs(tmp_path / "out")
    assert [run(path).run_id for path in paths] == [first.run_id] * 2
    config = values(run(paths[0]).config.update)
    assert (config["seed"], config["total_episodes"], config["report_to"]) == (7, 80, ["wandb", "tensorboard"])
    written = {name: value for line in lines(tmp_path) for name, value in line.items() if line["step"] == 2}
    (recorded,) = history(paths[1])
    numbers = {name for name, value in written.items() if isinstance(value, (int, float)) and name != "step"}
    assert len(numbers) > 50 and {name: recorded[name] for name in numbers} == {name: written[name] for name in numbers}
    assert [row["eval/scores"] for row in history(paths[0])] == [before["eval/scores"]]
    tables = {path.name.split("_")[0] for path in (paths[0].parent / "files" / "media" / "table").rglob("*.json")}
    assert {"samples", "completions"} <= tables
    assert [line.split()[0] for line in second.tracked] == ["curves", "wandb"]


def test_no_tracker_writes_nothing(tmp_path, batch) -> None:
    reporter = report(tmp_path, settings={"report_to": ("none",)})
    step(reporter, 1, batch)
    reporter.close()
    assert not (tmp_path / "out" / "tensorboard").exists() and reporter.tracked == ()
    assert len(lines(tmp_path)) == 1


def test_completions_are_printed_on_request(tmp_path, batch, capsys, monkeypatch) -> None:
    """With the advantage that each was trained with."""
    monkeypatch.setenv("COLUMNS", "140")
    reporter = report(tmp_path, settings={"log_completions": True, "num_completions_to_print": 2})
    step(reporter, 1, batch)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")][1:]
    assert len(rows) == 2
    advantages = [f"{batch.samples[number].advantage:.3g}" for number in (0, len(batch.samples) // 2)]
    assert [row.split("|")[-2].strip() for row in rows] == advantages


def test_an_evaluation_is_written_with_its_samples(tmp_path) -> None:
    """The version that was evaluated, and every completion."""
    reporter = report(tmp_path)
    metrics = reporter.evaluation(evaluator().evaluate(0), step=3, policy_version=3)
    (line,) = lines(tmp_path)
    assert (line["step"], line["policy_version"], line["eval/scores"]) == (3, 3, metrics["eval/scores"])
    assert line["eval/custom/calls"] == 1.0
    samples = (tmp_path / "out" / "rollouts" / "eval_step_3.jsonl").read_text().splitlines()
    assert len(samples) == 3
    assert np.isfinite(metrics["eval/scores"])


def test_a_listener_hears_what_was_written_and_may_end_the_run(tmp_path, batch) -> None:
    """In the order of the run; without one nothing changes."""

    class Ears(RunListener):
        def __init__(self) -> None:
            self.heard: list[tuple] = []

        def begin(self, config, *, done):
            self.heard.append(("begin", done))

        def step(self, step, metrics, rollouts):
            (line,) = lines(tmp_path)
            self.heard.append(("step", step, metrics["reward"] == line["reward"], len(rollouts.groups)))
            self.wants_end = True

        def evaluation(self, step, metrics, evaluation):
            self.heard.append(("evaluation", step, metrics["eval/scores"], len(evaluation.groups)))

        def exported(self, step, folder, best):
            self.heard.append(("exported", step, folder.name, best))

    ears = Ears()
    reporter = report(tmp_path, listener=ears)
    reporter.begin(0)
    assert not reporter.wants_end
    step(reporter, 1, batch)
    assert reporter.wants_end and not report(tmp_path).wants_end
    reporter.evaluation(evaluator().evaluate(0), step=1, policy_version=1)
    reporter.exported(1)
    assert ears.heard == [
        ("begin", 0), ("step", 1, True, 4), ("evaluation", 1, 1.0, 3), ("exported", 1, "step_1", None)
    ]  # fmt: skip


def test_the_best_export_is_said_and_belongs_to_the_state_of_the_run(tmp_path, capsys) -> None:
    """A resumed run compares with what it did before; the state of another run is of exports that lie elsewhere."""
    own = from_values({"output_dir": str(tmp_path), "load_best_model_at_end": True, "total_episodes": 640})
    reporter = Reporter(own, scale=None)
    reporter.evaluation(evaluator().evaluate(0), step=0, policy_version=0)
    reporter.exported(0)
    reporter.finish(before={}, after={})
    assert "best export: step 0, eval/scores 1\n" in capsys.readouterr().out
    saved = json.loads(json.dumps(reporter.state_dict()))
    (tmp_path / "hf" / "step_0").mkdir(parents=True)
    for root, expected in ((tmp_path, 0), (tmp_path / "elsewhere", None)):
        resumed = Reporter(own, scale=None, continued=state(root, 0, saved))
        assert resumed.best_step == expected
    resumed.finish(before={}, after={})
    assert "no export is the best one: eval/scores was never a number" in capsys.readouterr().out


def test_a_full_disk_is_remembered_with_its_path_and_ends_nothing(tmp_path, batch) -> None:
    """A line of metrics that cannot be written ended the run, and with it the steps since the last saved state."""
    reporter = report(tmp_path)
    step(reporter, 1, batch)
    whole, reporter.writer._lines = reporter.writer._lines, Path("/dev/full").open("w")  # noqa: SIM115
    reporter.writer.path = Path("/dev/full")
    whole.close()
    step(reporter, 2, batch)
    message = f"{tmp_path}/out cannot be written to: No space left on device, "
    assert reporter.failure.startswith(message) and reporter.failure.endswith(" are free there")
    assert reporter.state_dict()["num_lines"] == 1
    reporter.close()
    assert [line["step"] for line in lines(tmp_path)] == [1]


def test_a_failed_report_does_not_end_the_run(tmp_path, monkeypatch, caplog) -> None:
    """A page is worth less than the training it describes."""

    def fail(folder):
        raise OSError("disk full")

    monkeypatch.setattr("mgrpo.run.report.reporter.write_report", fail)
    report(tmp_path).write_report()
    assert "no report: OSError: disk full" in caplog.text


def test_a_run_says_how_it_ended(tmp_path) -> None:
    """From outside, a run that has failed, was stopped or is done looks the same: nothing is written any more."""
    status = tmp_path / "out" / "status.json"

    def said() -> dict:
        return json.loads(status.read_text())

    reporter = report(tmp_path)
    assert said() == {"state": "running", "cause": ""}
    reporter.close("RuntimeError: engine 1 <b>")
    assert said() == {"state": "failed", "cause": "RuntimeError: engine 1 <b>"}
    assert "engine 1 &lt;b&gt;" in (tmp_path / "out" / "report.html").read_text()
    reporter, seen = report(tmp_path), []
    slow = SimpleNamespace(finish=lambda: None, close=lambda wait_s: seen.append(said()["state"]))
    reporter.writer.sinks.append(slow)
    reporter.close()
    assert said()["state"] == "stopped" and seen == ["stopped"]
    reporter = report(tmp_path)
    reporter.finish(before={}, after={})
    reporter.close()
    assert said()["state"] == "finished"
    reporter = report(tmp_path)
    reporter.evaluation(evaluator().evaluate(0), step=3, policy_version=None)  # of `mgrpo eval`
    reporter.close()
    assert said()["state"] == "finished"


def test_rubrics_are_written_to_the_folder_of_their_own(tmp_path, batch) -> None:
    """A line a group; a resumed run repeats its steps, not their lines."""
    settings = {"cache_evolving_rubric_data_dir": str(tmp_path / "rubrics")}
    rollouts = dataclasses.replace(batch.rollouts, rubrics=[{"question": "a"}, {"question": "b"}])
    batch = dataclasses.replace(batch, rollouts=rollouts)
    reporter = report(tmp_path, settings=settings)
    step(reporter, 1, batch)
    saved = reporter.state_dict()
    step(reporter, 2, batch)
    reporter.close()
    own = report(tmp_path, settings=settings, continued=state(tmp_path / "out", 1, saved))
    step(own, 2, batch)
    own.close()
    written = [json.loads(line) for line in (tmp_path / "rubrics" / "evolving_rubrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["question"]) for line in written] == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]


def test_states_of_engines_are_written_when_they_change(tmp_path, batch) -> None:
    """A run of 10,000 steps with two healthy engines writes one line; a resumed run repeats its steps, not their lines."""
    engines = [{"engine": 0, "state": "serving", "starts": 1, "last_failure": ""}]
    reporter = report(tmp_path, engines=lambda: [dict(engine) for engine in engines])
    for number in (1, 2, 3):
        if number == 3:
            engines[0] |= {"state": "starting", "starts": 2, "last_failure": "no answer"}
        step(reporter, number, batch)
        if number == 2:
            saved = reporter.state_dict()
    path = tmp_path / "out" / "engines.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], *line) for line in found] == [
        (1, "step", "time/unix", "engines"),
        (3, "step", "time/unix", "changed"),
    ]
    assert [told_engines(line)[0]["state"] for line in found] == ["serving", "starting"]
    reporter.close()
    own = report(tmp_path, continued=state(tmp_path / "out", 2, saved), engines=lambda: [dict(engines[0])])
    assert len(path.read_text().splitlines()) == 1
    step(own, 3, batch)
    own.close()
    resumed = json.loads(path.read_text().splitlines()[1])
    assert resumed["engines"] == engines, "a run that continues another does not tell all states"
    report(tmp_path).close()
    assert not path.exists() and path.with_name("engines.jsonl.1").exists()


@pytest.mark.parametrize("role", ["Source", "Reporter"])
def test_the_twins_answer_every_call_of_the_trainer(role) -> None:
    """A call that only rank 0 knows ends the others with an AttributeError, after the engines have started."""
    room = Path(__file__).parents[3] / "mgrpo" / "run"
    classes = {
        node.name: {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
        | {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)}
        | {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
        for node in ast.walk(ast.parse(next(room.rglob(f"{role.lower()}.py")).read_text()))
        if isinstance(node, ast.ClassDef)
    }
    called = {
        node.attr
        for name in ("trainer.py", "assembly.py", "launch.py")
        for node in ast.walk(ast.parse(next(room.rglob(name)).read_text()))
        if isinstance(node, ast.Attribute)
        and role.lower() in (getattr(node.value, "attr", ""), getattr(node.value, "id", ""))
    }
    assert len(called) >= 4
    assert called <= classes[role] and called <= classes[f"Silent{role}"]


def test_the_export_of_an_earlier_run_is_renamed_and_the_runs_own_is_replaced(tmp_path) -> None:
    """Whoever tries settings in one folder would lose the model of the run before."""
    folder = tmp_path / "out" / "hf" / "step_4"

    def export(reporter: Reporter, weights: str) -> None:
        reporter.make_way(folder)
        folder.mkdir(parents=True)
        (folder / "weights").write_text(weights)

    export(report(tmp_path), "first")
    second = report(tmp_path)
    export(second, "second")
    export(second, "second, again")
    saved = second.state_dict()
    second.close()
    export(report(tmp_path, continued=state(tmp_path / "out", 2, saved)), "second, continued")
    found = {path.parent.name: path.read_text() for path in folder.parent.glob("*/weights")}
    assert found == {"step_4": "second, continued", "step_4.1": "first"}


def test_a_folder_that_is_deleted_during_a_run_is_named_at_once(tmp_path, batch, capsys):
    """A run went on to a good end without a word, and its metrics and samples were nowhere."""
    reporter = report(tmp_path)
    step(reporter, 1, batch)
    shutil.rmtree(tmp_path / "out")
    step(reporter, 2, batch)
    printed = capsys.readouterr()
    assert "metrics.jsonl was deleted or replaced during the run" in printed.out + printed.err
    step(reporter, 3, batch)
    printed = capsys.readouterr()
    assert "deleted" not in printed.out + printed.err
    assert [line["step"] for line in lines(tmp_path)] == [2, 3] and not reporter.failure
    assert (tmp_path / "out" / "config.yaml").read_text().startswith("#")
