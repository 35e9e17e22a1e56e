"""The simulation of failures against hand-worked runs, and against the formula that docs/checkpoints.md gives."""

from __future__ import annotations

import pytest

from mgrpo.config.checkpoint import lost_share
from tools.bench_goodput import Policy, Rates, draw, simulate

RATES = Rates(copy_s=1, disk_s=20, send_s=30, storage_s=100)


def run(policy: Policy, failures, *, steps=20, name: str) -> dict:
    return simulate(policy, RATES, step_s=60, steps=steps, failures=failures, name=f"test-{name}")


def test_a_run_without_failures_loses_what_its_saves_take():
    """Four of them, which training waits for, or the copies alone."""
    waits = run(Policy(name="w", every_steps=5, asynchronous=False), [], name="waits")
    assert waits["goodput"] == pytest.approx(1200 / 1600) and waits["goodput by the run"] == pytest.approx(1200 / 1500)
    behind = run(Policy(name="b", every_steps=5), [], name="behind")
    assert behind["goodput"] == pytest.approx(1200 / 1204)
    # The next save waits for the one before: 100 s are written while 60 s train.
    crowded = run(Policy(name="c", every_steps=1), [], steps=3, name="crowded")
    assert crowded["goodput"] == pytest.approx(180 / (60 + 1 + 100 + 1 + 100 + 1))


def test_a_failure_costs_what_is_not_saved_and_the_restart():
    """By hand, with a state after each 5th step of 60 s: the failures are at 701 s and, after the restart, at 1,351 s."""
    policy = Policy(name="p", every_steps=5, restart_s=100)
    found = run(policy, [(701.0, [0])], name="one")
    # 600 s and two copies are over at 602; the second state is complete at 702, one second too late.
    assert found["failures"] == 1 and found["steps done again"] == 6
    assert found["goodput"] == pytest.approx(1200 / (701 + 100 + 15 * 60 + 3))
    assert found["lost at resumes, hours"] == pytest.approx((701 + 100 - 301) / 3600)
    found = run(policy, [(703.0, [0])], name="later")
    assert found["steps done again"] == 1
    assert found["goodput"] == pytest.approx(1200 / (703 + 100 + 600 + 2))


@pytest.mark.parametrize(
    ("lost", "again"),
    [
        ([], 1),
        ([0], 1),
        ([1], 1),
        ([0, 1], 6),
    ],
)
def test_a_state_on_the_nodes_outlives_one_of_them(lost, again):
    """At 690 s, in step 12: the nodes have step 10 since 652 s, storage would have it at 752 s and has step 5."""
    policy = Policy(name="n", every_steps=5, has_near=True, restart_s=100)
    found = run(policy, [(690.0, lost)], name=f"near-{len(lost)}-{sum(lost)}")
    assert found["steps done again"] == again


def test_a_failure_in_the_middle_of_a_copy_leaves_the_state_before():
    """At 631 s the second state is on one disk and not yet on the other."""
    policy = Policy(name="n", every_steps=5, has_near=True, restart_s=100)
    assert run(policy, [(640.0, [0])], name="half")["steps done again"] == 5
    assert run(policy, [(640.0, [])], name="half crash")["steps done again"] == 5


def test_long_runs_lose_what_the_formula_says():
    """To first order; a simulation with a mistake of a factor of two would be found."""
    policy, mtbf = Policy(name="f", every_s=1200, restart_s=300), 20_000.0
    rates = Rates(copy_s=10, disk_s=0, send_s=0, storage_s=0)
    lost = []
    for seed in range(4):
        found = simulate(policy, rates, step_s=60, steps=10_000, failures=draw(seed, mtbf, 1e7), name=f"formula-{seed}")
        lost.append(1 - found["goodput"])
        assert found["goodput by the run"] == pytest.approx(found["goodput"], rel=0.01)
    assert sum(lost) / 4 == pytest.approx(lost_share(1200, save_s=10, restart_s=300, mtbf_s=mtbf), rel=0.15)
