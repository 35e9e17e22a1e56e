"""The reward curve."""

import json

import pytest

from mgrpo.telemetry.curve import draw_reward_curve, read_points, running_mean

matplotlib = pytest.importorskip("matplotlib")


def metrics_file(tmp_path, *, evaluate=True):
    path = tmp_path / "metrics.jsonl"
    records = [{"step": 0, "eval/scores": 0.5}] if evaluate else []
    for step in range(1, 61):
        records.append({"step": step, "reward": None if step == 30 else step / 10 + step % 3})
        if evaluate and step % 20 == 0:
            records.append({"step": step, "eval/scores": step / 10})
    path.write_text("\n".join(json.dumps(record) for record in records) + '\n{"step": 61, "sco')
    return path


def test_points_skip_null_and_a_torn_last_line(tmp_path):
    """The curve is drawn from runs that crashed, too."""
    path = metrics_file(tmp_path)
    assert len(read_points(path, "reward")) == 59
    assert read_points(path, "eval/scores") == [(0, 0.5), (20, 2.0), (40, 4.0), (60, 6.0)]


def test_the_running_mean_looks_back_only():
    """A mean that looks ahead would show learning before it happened."""
    assert running_mean([0.0, 2.0, 4.0, 6.0], 2) == [0.0, 1.0, 3.0, 5.0]
    assert running_mean([3.0], 5) == [3.0]


def test_the_picture_shows_both_lines_and_the_evaluations(tmp_path):
    """An empty frame is a PNG as well."""
    image = pytest.importorskip("matplotlib.image")
    png = draw_reward_curve(metrics_file(tmp_path), tmp_path / "plots" / "curve.png", title="A run")
    pixels = image.imread(png)[..., :3]
    assert pixels.shape[:2] == (600, 1200)
    for name, (red, green, blue) in {"thin": (143, 184, 222), "bold": (31, 90, 153), "dots": (217, 98, 43)}.items():
        close = abs(pixels * 255 - (red, green, blue)).max(axis=-1) < 12
        columns = close.any(axis=0).nonzero()[0]
        assert close.sum() > 200, name
        # From the left of the frame to its right, not the legend alone.
        assert columns.min() < 150 and columns.max() > 1100, name


def test_without_evaluations_the_legend_does_not_promise_them(tmp_path):
    """Runs without held-out prompts have a curve, too."""
    image = pytest.importorskip("matplotlib.image")
    png = draw_reward_curve(metrics_file(tmp_path, evaluate=False), tmp_path / "curve.png")
    close = abs(image.imread(png)[..., :3] * 255 - (217, 98, 43)).max(axis=-1) < 12
    assert not close.any()


def test_a_file_without_rewards_gives_a_note_and_no_picture(tmp_path, caplog):
    """A run that died in its first step must end with its own error, not with one from the curve."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    assert draw_reward_curve(path, tmp_path / "curve.png") is None
    assert "holds no rewards" in caplog.text
    assert not (tmp_path / "curve.png").exists()


def test_without_matplotlib_there_is_a_note(tmp_path, monkeypatch, caplog):
    """Drawing is optional: a finished run must not fail for want of it."""
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    assert draw_reward_curve(metrics_file(tmp_path), tmp_path / "curve.png") is None
    assert "pip install matplotlib" in caplog.text
