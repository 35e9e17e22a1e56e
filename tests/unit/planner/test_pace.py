"""Lengths of answers, and the time from step to step of asynchronous runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mgrpo.moving import from_values
from mgrpo.planner.engines.answer_lengths import AnswerLengths, recorded_lengths
from mgrpo.planner.engines.step_pace import pace

SETTING = {
    "engines": 16, "slots": 64, "groups": 64, "samples": 8, "mean": 4000.0, "sigma": 0.9, "longest": 32768, "train_s": 60.0, "sync_s": 5.0,
}  # fmt: skip
SIMULATED = {
    "1 / 1, drained": 344.1, "1 / 1": 212.3, "2 / 2": 155.2, "4 / 4": 103.2, "8 / 8": 76.2, "1 / 2": 149.2, "2 / 4": 97.4, "4 / 8": 69.0,
}  # fmt: skip
"""Seconds a step under async_steps / max_staleness, mean of 40, that the producer, the dispatcher and the rules of a run took on a
simulated clock."""


def test_lengths_have_their_mean_and_end_at_the_cut() -> None:
    """A mean of half the cut with a spread of 0.9: a tenth or more are cut, and a large batch has one of them."""
    lengths = AnswerLengths(mean=4096, longest=8192, spread=0.9)
    own = lengths.of(1000)
    assert own.mean() == pytest.approx(4096, rel=0.01) and own.max() <= 8192
    assert np.all(np.diff(own) >= 0)
    assert 0.1 < (own > 8100).mean() < 0.3
    assert lengths.longest_of(1000) == 8192 and lengths.longest_of(1) < 4096
    drawn = np.minimum(np.random.default_rng(1).lognormal(np.log(lengths.quantile(0.5)), 0.9, 200_000), 8192)
    assert drawn.mean() == pytest.approx(4096, rel=0.01)
    assert lengths.squares() == pytest.approx(np.square(drawn).mean(), rel=0.02)
    alike = AnswerLengths(mean=4096, longest=8192)
    assert set(alike.of(10)) == {4096} and alike.longest_of(10) == 4096


def test_recorded_lengths_are_read_from_what_a_run_writes(tmp_path: Path) -> None:
    """Completions by save_traces: a line each, with num_tokens."""
    (tmp_path / "rollouts").mkdir()
    lines = [{"num_tokens": number, "completion": "x"} for number in (30, 10, 20, 0)]
    (tmp_path / "rollouts" / "step_1.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = recorded_lengths(tmp_path)
    assert found[0] == 10 and found[-1] == 30 and np.mean(found) == pytest.approx(20)
    with pytest.raises(ValueError, match="save_traces"):
        recorded_lengths(tmp_path / "empty")


class Simulated:
    """The engines of the simulation: 10 ms a token and 0.12 ms for each sample that is decoded beside it."""

    def __init__(self, setting: dict[str, float]) -> None:
        self.lengths = AnswerLengths(mean=setting["mean"], longest=int(setting["longest"]), spread=setting["sigma"])
        self.sequences = setting["groups"] * setting["samples"] / setting["engines"]
        self.longest, self.most = self.lengths.longest_of(512), setting["slots"]

    def stream_s(self, running: np.ndarray) -> np.ndarray:
        """Seconds of a batch."""
        return self.sequences * self.lengths.mean / running * (10e-3 + 0.12e-3 * running)

    def again_s(self, running: np.ndarray) -> np.ndarray:
        """Prefill counts as nothing."""
        return 0 * running


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("1 / 1, drained", {"async_steps": 1, "inflight_updates": False}),
        ("1 / 1", {"async_steps": 1}),
        ("2 / 2", {"async_steps": 2}),
        ("4 / 4", {"async_steps": 4}),
        ("8 / 8", {"async_steps": 8}),
        ("1 / 2", {"async_steps": 1, "max_staleness": 2}),
        ("2 / 4", {"async_steps": 2, "max_staleness": 4}),
        ("4 / 8", {"async_steps": 4, "max_staleness": 8}),
    ],
)
def test_the_pace_is_that_of_the_products_own_producer(case: str, settings: dict[str, object]) -> None:
    """The simulation runs the producer, the dispatcher and the rules of a run: 401 s in turn, 65 to 344 s ahead.

    It counts 40 steps from the first, in which nothing is ahead yet, so that the steps of a long run are faster.
    """
    config = from_values({"inflight_updates": True, "num_samples_per_prompt_rollout": 8, **settings})
    planned = pace(config, Simulated(SETTING), learn_s=SETTING["train_s"], sync_s=SETTING["sync_s"])
    assert planned.seconds == pytest.approx(SIMULATED[case], rel=0.15)
    assert planned.bound == ("learners" if settings["async_steps"] * 2 >= 8 and planned.seconds < 66 else "tail")


def test_groups_that_make_room_when_they_end_wait_for_their_longest_answer_alone() -> None:
    """One batch of groups at once: each place is free again after the longest of 32 answers, whatever the learners do."""
    config = from_values({"inflight_updates": True, "async_steps": 1, "num_samples_per_prompt_rollout": 32})
    engines = Simulated(SETTING)
    own = pace(config, engines, learn_s=1.0, sync_s=0.0, batches_under_way=1)
    group = engines.lengths.longest_of(32)
    assert own.seconds == pytest.approx(group * (10e-3 + 0.12e-3 * own.running), rel=0.03)
    assert own.running == pytest.approx(engines.sequences * engines.lengths.mean / group, rel=0.05)
    assert pace(config, engines, learn_s=1.0, sync_s=0.0, batches_under_way=2).seconds < own.seconds
