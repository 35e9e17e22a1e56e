"""Metrics on disk."""

import json
import shutil

import numpy as np
import pytest

from mgrpo.telemetry.metrics.writer import MetricsWriter
from mgrpo.telemetry.trackers.sinks import Table
from mgrpo.telemetry.trackers.tensorboard import EventFile


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_step_is_one_object_that_opens_with_the_step(tmp_path):
    """Readers follow the file while the run goes on: a line must be whole when write returns."""
    with MetricsWriter(tmp_path / "new" / "run") as writer:
        writer.write(1, {"scores": 0.5, "policy_version": 3, "step": 99})
        first = writer.path.read_text()
        writer.write(2, {"scores": np.float32(0.25), "episode": np.int64(128)})
    assert first == '{"step": 1, "scores": 0.5, "policy_version": 3}\n'
    assert lines_of(writer.path)[1] == {"step": 2, "scores": 0.25, "episode": 128}
    assert '"episode": 128}' in writer.path.read_text()


def test_numbers_that_json_lacks_become_null(tmp_path):
    """A NaN loss would make a line that jq, pandas and browsers refuse, just when it is needed."""
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": 1.0})
    assert "NaN" not in writer.path.read_text()
    assert lines_of(writer.path) == [{"step": 1, "a": None, "b": None, "c": None, "d": 1.0}]


def test_a_second_run_does_not_mix_with_the_first(tmp_path, caplog):
    """Two runs in one file draw a curve that no run had."""
    for run in range(3):
        with MetricsWriter(tmp_path) as writer:
            writer.sinks.append(EventFile(tmp_path / "tensorboard"))
            writer.write(1, {"run": run})
    assert lines_of(tmp_path / "metrics.jsonl") == [{"step": 1, "run": 2}]
    assert lines_of(tmp_path / "metrics.jsonl.1") == [{"step": 1, "run": 0}]
    assert lines_of(tmp_path / "metrics.jsonl.2") == [{"step": 1, "run": 1}]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    assert len(list((tmp_path / "tensorboard.1").iterdir())) == 1
    assert f"files of an earlier run in {tmp_path} were renamed to metrics.jsonl.2, tensorboard.2" in caplog.text


def test_tensorboard_reads_the_same_numbers(tmp_path):
    """An event file in a wrong format shows an empty page and no error."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with MetricsWriter(tmp_path) as writer:
        writer.sinks.append(EventFile(tmp_path / "tensorboard"))
        for step in range(1, 6):
            writer.write(step, {"scores": step / 4, "loss/policy_avg": -1.5, "odd": float("nan") if step == 3 else 1.0})
        # Read before close: TensorBoard watches runs that are still going.
        events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("scores")] == [(s, s / 4) for s in range(1, 6)]
    assert [event.step for event in events.Scalars("odd")] == [1, 2, 4, 5]
    assert set(events.Tags()["scalars"]) == {"scores", "loss/policy_avg", "odd"}


def test_closing_twice_is_harmless(tmp_path):
    """The error path and the context manager both close."""
    writer = MetricsWriter(tmp_path)
    writer.sinks.append(EventFile(tmp_path / "tensorboard"))
    writer.close()
    writer.close()


def test_a_run_that_goes_on_drops_what_came_after_its_checkpoint(tmp_path):
    """Steps done again, an evaluation of the checkpoint's own step that came later, and half a line stood there twice."""
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"eval/scores": 0.1})
        writer.write(1, {"scores": 0.2})
        saved = writer.num_lines
        writer.write(1, {"eval/scores": 0.3})
        writer.write(2, {"scores": 0.4})
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 3, "sco')
    for _ in range(2):
        with MetricsWriter(tmp_path, resumed_after=1, num_lines=saved) as writer:
            assert writer.num_lines == saved
            writer.write(1, {"eval/scores": 0.5})
    assert lines_of(path) == [
        {"step": 0, "eval/scores": 0.1},
        {"step": 1, "scores": 0.2},
        {"step": 1, "eval/scores": 0.5},
    ]


def test_a_run_that_goes_on_in_an_empty_folder_begins_its_own_lines(tmp_path):
    """Checkpoints may lie elsewhere than the metrics, and outlive them."""
    with MetricsWriter(tmp_path, resumed_after=4, num_lines=5) as writer:
        writer.write(5, {"scores": 0.5})
        assert writer.num_lines == 1
    with MetricsWriter(tmp_path, resumed_after=5, num_lines=1) as writer:
        writer.write(6, {"scores": 0.6})
    assert [line["step"] for line in lines_of(tmp_path / "metrics.jsonl")] == [5, 6]


def test_a_line_cut_short_before_the_checkpoints_last_one_is_dropped(tmp_path):
    """After a power cut metrics.jsonl may be shorter than it was when the checkpoint was written."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    with MetricsWriter(tmp_path, resumed_after=3, num_lines=3) as writer:
        writer.write(4, {})
    assert [line["step"] for line in lines_of(tmp_path / "metrics.jsonl")] == [1, 4]


def test_samples_and_settings_are_shown_as_they_are(tmp_path):
    """Beside the curves; TensorBoard reads Markdown, in which a sampled "# 1" would be a heading."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with MetricsWriter(tmp_path) as writer:
        writer.sinks.append(EventFile(tmp_path / "tensorboard", settings="seed: 1\n"))
        writer.table(3, Table(name="samples", columns=("completion", "reward"), rows=(("# 1\n<b> \ud83d", 0.5),)))
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,), (settings,) = events.Tensors("samples/0"), events.Tensors("config")
    assert event.step == 3
    assert event.tensor_proto.string_val == [b"    completion: # 1\n    <b> ?\n    reward: 0.5\n"]
    assert settings.tensor_proto.string_val == [b"    seed: 1\n"]
    assert events.SummaryMetadata("samples/0").plugin_data.plugin_name == "text"


def test_a_file_that_was_deleted_or_replaced_begins_anew(tmp_path):
    """Lines went into a file that no longer had a name, to the end of the run."""
    folder = tmp_path / "run"
    with MetricsWriter(folder) as writer:
        writer.write(1, {"loss": 1.0})
        assert not writer.reopen_if_gone()
        shutil.rmtree(folder)
        assert writer.reopen_if_gone() and not writer.reopen_if_gone()
        writer.write(2, {"loss": 2.0})
        assert writer.num_lines == 1
        writer.path.rename(tmp_path / "away")
        writer.path.write_text("")
        assert writer.reopen_if_gone()
        writer.write(3, {"loss": 3.0})
        assert [json.loads(line)["step"] for line in writer.path.read_text().splitlines()] == [3]
    assert [json.loads(line)["step"] for line in (tmp_path / "away").read_text().splitlines()] == [2]
