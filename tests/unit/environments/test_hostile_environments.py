"""Environments that do not begin, answer or end as they should: no other trajectory has them, and none gets a score for them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from mgrpo.environments.loop.losses import EnvironmentLost, ResetFailed
from mgrpo.environments.offered.calling import WorkerLimits
from mgrpo.environments.workers import host
from tests.processes import processes_with
from tests.unit.environments.pooled import ROW, asked, call, pool, run, taken, until


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("bad", ["die", "freeze", "hang", "hang in a thread", "raise"])
def test_an_environment_that_does_not_let_go_serves_nobody_else(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_CLOSE_LIMIT_S", 0.2)

    async def go() -> None:
        environments = pool("Ending", pool_size=1)
        await environments.start()
        await (await taken(environments, ROW | {"where": "end", "bad": bad})).release()
        assert (await asked(await taken(environments), "count")).observation.text == "1 1", "a new one"
        await environments.close()

    run(go())


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("bad", ["die", "freeze", "hang", "hang in a thread", "raise", "leave"])
def test_a_reset_is_tried_twice(bad: str, tmp_path: Path) -> None:
    """The first failure may be an accident; the second one is the row's, which has no score then."""
    limits = WorkerLimits(reset_timeout_s=0.3, acquire_timeout_s=20, grace_s=0.1)

    async def go() -> None:
        environments = pool("Hostile", pool_size=1, limits=limits)
        await environments.start()
        row = ROW | {"where": "reset", "bad": bad}
        instance = await taken(environments, row | {"once": str(tmp_path / "once")})
        assert (await asked(instance, "count")).observation.text == "1 1"
        await instance.release()
        with pytest.raises(ResetFailed, match="no environment could begin t, in 2 tries"):
            await taken(environments, row)
        await (await taken(environments)).release()
        await environments.close()

    run(go())


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("bad", ["die", "freeze", "hang", "hang in a thread", "raise"])
def test_an_environment_that_does_not_close_is_ended(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place is free again, and the end of the pool does not wait for it."""
    monkeypatch.setattr(host, "_CLOSE_LIMIT_S", 0.2)
    monkeypatch.setenv("MGRPO_TOOL_MARK", mark := f"pool-{os.getpid()}-{bad}")

    async def go() -> None:
        environments = pool("Hostile", pool_size=1)
        await environments.start()
        row = ROW | {"where": "close", "bad": bad}
        await (await taken(environments, row)).release(broken=True)
        await taken(environments, row)
        began = time.monotonic()
        await environments.close()
        assert time.monotonic() - began < 5
        await until(lambda: not processes_with(mark))

    run(go())


@pytest.mark.parametrize("bad", ["raise", "hang", "die"])
def test_an_environment_without_a_verdict_gives_no_score(bad: str) -> None:
    """A trajectory whose reward is unknown must not be scored by others as if the environment had none."""
    limits = WorkerLimits(reset_timeout_s=0.3, acquire_timeout_s=20)

    async def go() -> None:
        environments = pool("Hostile", pool_size=1, limits=limits)
        await environments.start()
        instance = await taken(environments, ROW | {"where": "reward", "bad": bad})
        with pytest.raises(EnvironmentLost):
            await instance.ending()
        await instance.release()
        assert (await (await taken(environments)).ending()).reward == 0.0
        await environments.close()

    run(go())


def test_odd_answers_of_an_environment_are_failed_calls() -> None:
    """Errors of its author must not stop a run."""

    async def go() -> None:
        environments = pool("Odd", limits=WorkerLimits(output_bytes=100))
        await environments.start()
        instance = await taken(environments)
        for kind in ("few", "text", "none", "stop", "endless", "unreadable error"):
            assert (await asked(instance, "odd", kind=kind)).observation.failed, kind
        assert (await asked(instance, "odd", kind="surrogate")).observation.text == "a?b"
        long = (await asked(instance, "odd", kind="long")).observation
        assert long.text == "ä" * 25 + "\n... 1900 bytes left out ...\n" + "ä" * 25 and not long.failed
        await environments.close()

    run(go())


@pytest.mark.parametrize(
    ("kind", "shown"),
    [("nan", "nan"), ("1e300", "1e\\+300"), ("text as reward", "'1.0'"), ("unreadable", "a Unreadable that cannot")],
)
def test_a_reward_that_float32_does_not_hold_costs_its_trajectory_the_score(kind: str, shown: str) -> None:
    """It would be trained as infinite, or count as 0 if the step were a failed call; other trajectories go on."""

    async def go() -> None:
        environments = pool("Odd")
        await environments.start()
        instance, other = await taken(environments), await taken(environments, name="other")
        with pytest.raises(EnvironmentLost, match=f"Odd: the reward of a step is {shown}.*at most 3.40282e\\+38"):
            await asked(instance, "odd", kind=kind)
        assert (await asked(other, "odd", kind="surrogate")).observation.text == "a?b"
        await environments.close()

    run(go())


def test_a_metric_that_float32_does_not_hold_costs_its_trajectory_the_score() -> None:
    async def go() -> None:
        environments = pool("Odd")
        await environments.start()
        with pytest.raises(EnvironmentLost, match="Odd: the metric looks is inf, expected a number of at most"):
            await asked(await taken(environments), "odd", kind="metric")
        await environments.close()

    run(go())


@pytest.mark.parametrize("error", ["SystemExit", "KeyboardInterrupt", "GeneratorExit"])
def test_an_exception_that_ends_loops_costs_one_trajectory(error: str) -> None:
    """A worker that it ended would take the trajectories of others with it."""

    async def go() -> None:
        environments = pool("Hostile", pool_size=2)
        await environments.start()
        other = await taken(environments, name="other")
        pids = environments.pids
        with pytest.raises(ResetFailed, match=f"{error}: as asked"):
            await taken(environments, ROW | {"where": "reset", "bad": error})
        assert (await asked(other, "count")).observation.text == "1 1"
        assert environments.pids == pids
        await environments.close()

    run(go())


@pytest.mark.parametrize(
    "written",
    [
        "{}",
        '{"answers": [], "is_stuck": 1}',
        '{"answers": 5, "is_stuck": false}',
        '{"answers": [], "is_stuck": false}',
        '{"answers": [{"seconds": 0, "timed_out": false}], "is_stuck": false}',
        '{"answers": [{"observation": {"text": "", "reward": NaN, "done": false, "failed": false, "metrics": {}}, '
        '"seconds": 0, "timed_out": false}], "is_stuck": false}',
        '{"error": {}, "timed_out": false}',
    ],
)
def test_an_answer_of_another_form_ends_the_worker_and_not_the_run(written: str) -> None:
    """Tools live in the worker's process and may change its modules; the learner's takes nothing on trust."""
    code = f"""
import json
plain, form = json.dumps, json.loads({written!r})
json.dumps = lambda value, **how: plain(form | {{'id': value['id']}} if 'answers' in value else value, **how)
"""

    async def go() -> None:
        environments = pool("run")
        await environments.start()
        instance = await taken(environments)
        with pytest.raises(EnvironmentLost, match="does not fit the question"):
            await asked(instance, "run", code=code)
        await instance.release()
        assert (await asked(await taken(environments), "run", code="answer = 7")).observation.text == "7"
        await environments.close()

    run(go())


def test_what_json_does_not_hold_is_a_failed_call_and_no_column() -> None:
    """A model may nest a thousand lists, which would end whoever reads them by its limit of recursion."""
    nested: Any = []
    for _ in range(900):
        nested = [nested]

    async def go() -> None:
        environments = pool("echo", "Counting")
        await environments.start()
        instance = await taken(environments, ROW | {"image": object(), "bytes": b"", "nested": nested})
        turn = [
            call("echo", text=nested),
            call("echo", text="a"),
            call("echo", text={1, 2}),
            call("echo", text=16**5000),
        ]
        assert [answer.observation.failed for answer in await instance.step(turn)] == [True, False, True, True]
        await environments.close()

    run(go())


def test_what_a_tool_prints_is_not_taken_for_an_answer(capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        "print('{\"id\": 0}'); os.write(1, b'noise\\n' * 1000); sys.stdout.flush(); "
        "subprocess.run(['echo', 'from a child']); answer = repr(sys.stdin.read())"
    )

    async def go() -> None:
        environments = pool("run")
        await environments.start()
        assert (await asked(await taken(environments), "run", code=code)).observation.text == "''"
        await environments.close()

    run(go())
    out, err = capfd.readouterr()
    assert out == "" and "from a child" in err and "noise" in err


def test_tools_do_not_see_the_runs_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they read is untrusted, and a token would let it act in the user's name."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("MGRPO_TOOL_KEY", "for tools")

    async def go() -> None:
        environments = pool("run")
        await environments.start()
        code = "answer = (os.environ.get('HF_TOKEN'), os.environ.get('MGRPO_TOOL_KEY'))"
        assert (await asked(await taken(environments), "run", code=code)).observation.text == "(None, 'for tools')"
        await environments.close()

    run(go())
