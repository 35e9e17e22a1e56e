"""What tools/bench_loop.py makes of the runs that it has measured."""

from __future__ import annotations

import pytest

from tools.bench_loop import Run, Watch, ratios, summary, time_to_goal


def make_run(step_s: list[float], cpu_s: float = 1.0) -> Run:
    return Run(
        trainer="t",
        step_s=step_s,
        phases={"train": step_s},
        cpu_s_per_step=cpu_s,
        others_cores=0.0,
        load_before=0.0,
        rewards=[0.5, 0.8, 0.8, 0.8, 0.8, 0.8],
        ends=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    )


def test_the_median_is_over_the_steps_of_all_rounds():
    """A round in which others kept the machine busy must not count as much as its mean would."""
    figures = summary([make_run([1.0, 2.0, 3.0]), make_run([2.0, 90.0])])
    assert figures["step_s_median"] == 2.0
    assert figures["step_s_min"] == 1.0


def test_a_ratio_above_one_means_that_the_second_is_faster():
    summaries = {"sync": summary([make_run([1.0])]), "trl": summary([make_run([3.0], cpu_s=2.0)])}
    assert ratios(summaries) == {"sync over trl": {"step_s_median": 3.0, "step_s_min": 3.0, "cpu_s_per_step": 2.0}}


def test_the_goal_is_reached_by_the_mean_of_five_steps():
    assert time_to_goal(make_run([1.0])) == 6.0


def test_what_others_used_is_the_machine_less_the_family():
    watch = Watch.__new__(Watch)
    watch.samples = [(0.0, 0.0, 10.0), (1.0, 1.0, 12.0), (2.0, 2.5, 15.0)]
    assert watch.between(-1.0, 1.5) == (pytest.approx(2.5), pytest.approx(2.5))
