"""Which export is the best one, and what leads to it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mgrpo.config import ConfigError
from mgrpo.config.checkpoint import Checkpoint
from mgrpo.run.report.best import BestExport

NAN = float("nan")
ON = Checkpoint(load_best_model_at_end=True)


def export(best: BestExport, step: int, value: float) -> None:
    """An evaluation and an export after this step."""
    best.evaluate(step, {"eval/scores": value, "eval/stop_rate": 1.0})
    (best.folder / f"step_{step}").mkdir(parents=True, exist_ok=True)
    (best.folder / f"step_{step}" / "config.json").write_text(
        json.dumps({"model_type": "llama", "hidden_size": 32 * step})
    )
    best.export(step)


def pointer(folder: Path) -> dict:
    return json.loads((folder / "best.json").read_text())


@pytest.mark.parametrize(
    ("values", "greater", "least"),
    [
        ([0.1, 0.3, 0.2], 2, 1),
        ([0.3, 0.1, 0.1, 0.3], 1, 2),
        ([NAN, 0.0, NAN, -1.0], 2, 4),
        ([0.5, NAN], 1, 1),
        ([NAN, NAN], None, None),
    ],
)
def test_the_best_is_the_first_of_the_greatest_or_of_the_least(tmp_path, values, greater, least) -> None:
    """A NaN that compares false with everything would stay the best for ever, or never be replaced."""
    for metric, expected in (("eval/scores", greater), ("-eval/scores", least)):
        best = BestExport(tmp_path / metric, replace(ON, metric_for_best_model=metric))
        for number, value in enumerate(values, start=1):
            export(best, number, value)
        assert (best.best and best.best.step) == expected
        assert (best.folder / "best.json").exists() == (expected is not None)


def test_the_pointer_loads_as_the_model(tmp_path) -> None:
    """The path that a user gives to transformers or to an engine, before and after another export becomes the best."""
    from transformers import AutoConfig

    best = BestExport(tmp_path, ON)
    for step, value in ((16, 0.5), (32, 0.4), (48, 0.6)):
        export(best, step, value)
        expected = 48 if step == 48 else 16
        assert AutoConfig.from_pretrained(tmp_path / "best").hidden_size == 32 * expected
        assert pointer(tmp_path)["model"] == f"step_{expected}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "best.json", "step_16", "step_32", "step_48"]


def test_a_file_system_without_links_has_the_file(tmp_path, monkeypatch) -> None:
    """A mounted bucket: a run must not end because of what is only convenient."""

    def fail(self, target):
        raise OSError("not supported")

    monkeypatch.setattr(Path, "symlink_to", fail)
    export(BestExport(tmp_path, ON), 3, 0.5)
    assert pointer(tmp_path) == {
        "model": "step_3",
        "step": 3,
        "metric": "eval/scores",
        "value": 0.5,
        "greater_is_better": True,
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.json", "step_3"]


def test_only_what_was_evaluated_at_its_step_is_compared(tmp_path) -> None:
    """The model that is kept when a run cannot save its state was not evaluated; its value would be another step's."""
    best = BestExport(tmp_path, ON)
    best.evaluate(2, {"eval/scores": 0.9})
    best.export(3)
    assert best.best is None
    export(best, 4, 0.1)
    assert best.best and best.best.step == 4


def test_a_resumed_run_knows_the_best_of_its_state(tmp_path) -> None:
    """And forgets what came after the state, which it does again; the state is JSON."""
    best = BestExport(tmp_path, ON)
    export(best, 2, 0.5)
    state = json.loads(json.dumps(best.state_dict()))
    export(best, 4, 0.7)
    resumed = BestExport(tmp_path, ON, resumed=state)
    assert pointer(tmp_path)["step"] == 2 and (tmp_path / "best").readlink() == Path("step_2")
    export(resumed, 4, 0.5)
    assert resumed.state_dict() == state


def test_a_resumed_run_does_not_point_to_an_export_that_was_deleted(tmp_path) -> None:
    """hf/best would lead nowhere, and no later export could take its place unless it were better still."""
    best = BestExport(tmp_path, ON)
    export(best, 2, 0.5)
    shutil.rmtree(tmp_path / "step_2")
    resumed = BestExport(tmp_path, ON, resumed=best.state_dict())
    assert resumed.best is None and not (tmp_path / "best").is_symlink() and not (tmp_path / "best.json").exists()
    export(resumed, 4, 0.3)
    assert pointer(tmp_path)["step"] == 4


@pytest.mark.parametrize(
    "settings",
    [
        replace(ON, metric_for_best_model="eval/stop_rate"),
        replace(ON, metric_for_best_model="-eval/scores"),
        Checkpoint(),
    ],
)
def test_a_run_that_compares_something_else_begins_anew(tmp_path, settings) -> None:
    """Values of two metrics cannot be compared, and a pointer that nothing updates would mislead."""
    best = BestExport(tmp_path, ON)
    export(best, 2, 0.5)
    again = BestExport(tmp_path, settings, resumed=best.state_dict())
    assert again.best is None and not (tmp_path / "best").is_symlink() and not (tmp_path / "best.json").exists()


def test_a_metric_that_the_first_evaluation_lacks_ends_the_run_before_its_first_step(tmp_path) -> None:
    """Otherwise the run would end days later without a best model. Later it may be missing, as a NaN is."""
    best = BestExport(tmp_path, replace(ON, metric_for_best_model="eval/by_source/a/scores"))
    with pytest.raises(
        ConfigError, match=r"metric_for_best_model=eval/by_source/a/scores: .* have eval/by_source/b/scores"
    ):
        best.evaluate(0, {"eval/by_source/b/scores": 1.0, "eval/pass_at_1": 1.0, "time/eval": 2.0})
    best.evaluate(0, {"eval/by_source/a/scores": 0.5})
    export(best, 2, 0.9)
    assert best.best is None


def test_a_copy_that_followed_the_link_is_set_aside(tmp_path) -> None:
    """Object storage has no links: the copied model would stay the best one for ever, or end the run."""
    for resumed in (None, {"step": 7, "metric": "eval/scores", "value": 0.5, "greater_is_better": True}):
        (tmp_path / "step_7").mkdir(exist_ok=True)
        (tmp_path / "best").mkdir()
        (tmp_path / "best" / "config.json").write_text("{}")
        BestExport(tmp_path, ON, resumed)
        assert (tmp_path / "best").exists() == (resumed is not None)
    assert (tmp_path / "best").is_symlink()
    assert [path.name for path in sorted(tmp_path.glob("best_copy_*/config.json"))] == ["config.json"] * 2
