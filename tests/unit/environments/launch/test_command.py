"""Commands as agents, with real processes: how they are judged, and every way in which they can fail."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

from mgrpo.environments.launch.command import CommandAgent
from mgrpo.environments.launch.results import Unjudged
from mgrpo.environments.offered.agent import MOST_OUTPUT_CHARS, Endpoint, Outcome
from mgrpo.environments.workers.environment_catalog import Spec
from mgrpo.environments.workers.pool import describe

ENDPOINT = Endpoint(base_url="http://127.0.0.1:9/s/0-1", api_key="the-api-key", reward_key="the-reward-key")
JUDGE = "python -I judge.py"
LIMIT_S = 120.0
FORKS_AWAY = 'trap "" TERM; setsid sh -c "sleep 1000000; true" "$0" & echo away'
"""In a shell whose first argument is the mark: a process that nothing of the shell's end reaches."""


@pytest.fixture(params=["none", "local"])
def box(request: pytest.FixtureRequest) -> str:
    return request.param


def played(
    name: str,
    row: dict[str, Any] | None = None,
    *,
    truth: dict[str, Any] | None = None,
    limit_s: float = LIMIT_S,
    **settings: Any,
) -> Outcome:
    """How `agents.py NAME` has ended; afterwards its box has left nothing."""

    async def play() -> Outcome:
        agent = CommandAgent(**{"command": f"python agents.py {name}", "box": "none", **settings})
        await agent.setup()
        try:
            await agent.reset(row or {}, seed=0)
            return await agent.run(ENDPOINT, truth=truth or {}, limit_s=limit_s)
        finally:
            await agent.close()

    return asyncio.run(play())


def processes_with(mark: str) -> list[str]:
    """Numbers of the processes with this word on their command line, in whatever session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
    return found


def test_a_result_file_is_the_reward(box: str) -> None:
    found = played("rewards", {"worth": 0.5}, box=box)
    assert (found.ended, found.status, found.reward, found.metrics) == ("ended", 0, 0.5, {"steps": 3.0})


def test_an_agent_that_says_nothing_leaves_the_reward_to_others(box: str) -> None:
    found = played("quiet", box=box)
    assert (found.ended, found.status, found.reward, found.metrics) == ("ended", 0, None, {})


def test_a_crash_is_no_reward_but_its_word_is_one(box: str) -> None:
    """Status 3 must not become the reward 0: what failed may be the machine."""
    found = played("crashes", box=box)
    assert (found.ended, found.status, found.reward) == ("crashed", 3, None)
    assert found.output == "before the crash\n"
    assert played("rewards_and_crashes", {"worth": 1}, box=box).reward == 1.0


def test_a_command_that_does_not_exist_has_crashed(box: str) -> None:
    found = played("", command="no-such-program --now", box=box)
    assert (found.ended, found.status, found.reward) == ("crashed", 127, None)
    assert "no-such-program" in found.output


def test_an_agent_that_hangs_is_late_and_has_no_reward(box: str) -> None:
    """Although it has written one."""
    hangs = """sh -c 'echo "{\\"reward\\": 1}" > $MGRPO_RESULT; echo it hangs; sleep 1000000'"""
    found = played("", command=hangs, limit_s=5.0, box=box)
    assert (found.ended, found.reward) == ("late", None)
    assert found.output == "it hangs\n"


@pytest.mark.parametrize("then", ["true", "sleep 1000000"])
def test_what_has_left_the_session_is_ended(box: str, then: str) -> None:
    mark = f"mgrpo-mark-{os.getpid()}-{box}-{then[:4]}"
    found = played("", command=f"sh -c '{FORKS_AWAY}; {then}' {mark}", limit_s=5.0, box=box)
    assert found.ended == ("ended" if then == "true" else "late")
    assert found.output == "away\n"
    assert processes_with(mark) == []


@pytest.mark.parametrize(
    "raw",
    [
        '{"reward": NaN}',
        '{"reward": Infinity}',
        '{"reward": true}',
        '{"reward": "1"}',
        '{"reward": 1e999}',
        '{"reward": 1e300}',
        '{"reward": 1, "metrics": {"a": -1.7e308}}',
        '{"reward": ' + "9" * 400 + "}",
        '{"reward": ' + "9" * 5000 + "}",
        "[1]",
        "1",
        "",
        "{",
        "[" * 60_000,
        '{"reward": 1, "metrics": {"a b": 1}}',
        '{"reward": 1, "metrics": {"a": null}}',
        '{"reward": 1, "metrics": [1]}',
        '{"reward": 1, "metrics": {' + ", ".join(f'"m{number}": 1' for number in range(65)) + "}}",
        " " * 70_000,
    ],
)
def test_a_hostile_result_is_a_crash_without_a_reward(raw: str) -> None:
    found = played("says_raw", {"raw": raw})
    assert (found.ended, found.status, found.reward, found.metrics) == ("crashed", 0, None, {})
    assert "result" in found.output and len(found.output) < 1000


@pytest.mark.parametrize("name", ["links", "makes_a_pipe", "says_no_text"])
def test_a_result_that_is_no_file_is_no_reward(box: str, name: str) -> None:
    found = played(name, box=box)
    assert found.ended == "crashed" and found.reward is None
    assert "root" not in found.output


def test_output_is_cut_to_its_last_part(box: str) -> None:
    found = played("shouts", box=box)
    assert len(found.output) <= MOST_OUTPUT_CHARS and found.output.endswith("the end\n")


def test_the_environment_holds_what_was_named_and_no_more(box: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets of the run would otherwise be read by what the model makes its agent do."""
    for name in ("HF_TOKEN", "MGRPO_TOOL_KEY", "WANDB_API_KEY", "OTHER_SERVICE"):
        monkeypatch.setenv(name, f"value-of-{name}")
    found = played("tells_all", {"prompt": "1 + 1"}, truth={"ground_truth": "2"}, env=["OTHER_SERVICE"], box=box)
    told, row = found.output.splitlines()
    assert "HF_TOKEN" not in told and "MGRPO_TOOL" not in told and "WANDB" not in told
    assert "OTHER_SERVICE" in told and "OPENAI_BASE_URL" in told and "/s/0-1/v1" in told and "MGRPO_REWARD_KEY" in told
    assert "prompt" in row and "ground_truth" not in row
    for secret in ("value-of-OTHER_SERVICE", "the-api-key", "the-reward-key"):
        assert secret not in found.output, "outputs are kept in traces"


def test_a_judged_agent_has_no_key_for_its_reward() -> None:
    for settings in ({"sets_reward": False}, {"check": "true"}):
        found = played("tells_all", **settings)
        assert "MGRPO_REWARD_KEY" not in found.output


def test_an_agent_may_be_kept_from_setting_its_reward() -> None:
    assert played("rewards", {"worth": 1}, sets_reward=False).reward is None


def test_a_missing_variable_is_said_at_the_start() -> None:
    with pytest.raises(ValueError, match="agent_env names NO_SUCH_VARIABLE"):
        CommandAgent(command="true", box="none", env=["NO_SUCH_VARIABLE"])


@pytest.mark.parametrize(("wrote", "reward"), [("right", 1.0), ("wrong", 0.0)])
def test_a_check_sees_the_truth_and_the_files_left_but_no_word_of_the_agent(
    box: str, wrote: str, reward: float
) -> None:
    """The agent has put a judge of its own in place of the real one, and has written itself a reward."""
    found = played("works", {"write": wrote}, truth={"ground_truth": "right"}, check=JUDGE, box=box)
    assert (found.ended, found.reward, found.output) == ("ended", reward, "")


def test_a_check_may_write_its_own_reward() -> None:
    found = played("works", {"write": "", "judge": "word"}, check=JUDGE)
    assert (found.ended, found.reward, found.metrics) == ("ended", 0.25, {"share": 0.5})


@pytest.mark.parametrize("judge", ["broken", "killed"])
def test_a_check_that_cannot_judge_is_no_score(judge: str) -> None:
    with pytest.raises(Unjudged, match="agent_check ended with the status"):
        played("works", {"write": "", "judge": judge}, check=JUDGE)


def test_a_check_that_cannot_start_is_no_score() -> None:
    with pytest.raises(Unjudged, match="status 127"):
        played("quiet", check="no-such-program")


def test_no_check_after_a_crash() -> None:
    found = played("crashes", check="true")
    assert (found.ended, found.reward) == ("crashed", None)


def test_an_agent_that_leaves_no_room_for_its_check_has_crashed() -> None:
    found = played("fills_its_room", {"judge": "word"}, check=JUDGE, box="local", disk_mb=8)
    assert (found.ended, found.reward) == ("crashed", None)
    assert "agent_check" in found.output


@pytest.mark.parametrize("python", ["python -I", "python", "python -B"])
@pytest.mark.parametrize(
    "command",
    ["{} judge.py", "sh -c '{} judge.py'", "{} -c 'import json, runpy; runpy.run_path(\"judge.py\")' judge.py"],
)
def test_a_check_imports_nothing_that_the_agent_left(box: str, python: str, command: str) -> None:
    """A json.py that ends its process with status 0 was paid for, as the check started in the agent's folder, which was its home."""
    if box == "none" and python != "python -I":
        # There the folders of this machine's user are the agent's to write as well.
        pytest.skip("no walls")
    check = command.format(python)
    words = {"truth": {"ground_truth": "right"}, "check": check, "box": box, "files": "."}
    assert played("plants", {"write": "wrong"}, **words).reward == 0.0
    assert played("plants", {"write": "right"}, **words).reward == 1.0


def test_a_check_starts_in_a_folder_of_its_own(box: str) -> None:
    """With another home; the agent's folder is a variable."""
    check = """sh -c 'pwd > "$MGRPO_WORK/seen"; ls -A >> "$MGRPO_WORK/seen"; echo $HOME $MGRPO_TASK >> "$MGRPO_WORK/seen"; cat "$MGRPO_WORK/seen"; exit 127' judge.py"""
    with pytest.raises(Unjudged) as ended:
        played("works", {"write": "x"}, check=check, box=box)
    place, *names, own = str(ended.value).partition("no reward: ")[2].split("\n")[:4]
    assert names == [".mgrpo", "judge.py"] and "mgrpo-check-" in place
    assert own == f"{place}/.mgrpo {place}/.mgrpo/task.json"


@pytest.mark.parametrize(
    ("check", "is_open", "is_blind"),
    [
        ("python judge.py", True, False),
        ("python -I judge.py", False, False),
        ("/usr/bin/python3.11 -BI judge.py", False, False),
        ("env A=b python3 -B judge.py", True, False),
        ("sh -c 'cd x && exec python3 judge.py'", True, True),
        ("sh -c 'python -I judge.py' judge.py", False, False),
        ("timeout 60 python -m pytest -I tests", True, True),
        ("grep -q right answer.txt", False, True),
        ("""sh -c 'grep -q right "$MGRPO_WORK/answer.txt"'""", False, False),
        ("/opt/judge --strict", False, False),
    ],
)
def test_a_start_says_what_a_check_lets_an_agent_do(check: str, is_open: bool, is_blind: bool) -> None:
    """Before the model finds it."""
    remarks = CommandAgent(command="true", box="none", check=check).remarks
    assert [("without -I" in one, "MGRPO_WORK" in one) for one in remarks] == [(True, False)] * is_open + [
        (False, True)
    ] * is_blind


def test_a_start_prints_its_remarks_once(capfd: pytest.CaptureFixture[str]) -> None:
    settings = {"command": "true", "box": "none", "check": "python judge.py"}
    describe([Spec(entry="agent:command", settings=settings)])
    assert capfd.readouterr().err.count("python without -I") == 1


@pytest.mark.parametrize("image", ["/", "https://example.org/cat.png", "--help", "", 7])
def test_no_row_opens_the_walls_of_a_local_box(image: object) -> None:
    """Rows are not trusted, and the folder would be the root of what the model's shell sees. A picture's address costs nothing."""
    found = played("", {"image": image}, command="sh -c 'ls /home /var /etc/shadow'", box="local")
    missing = [f"cannot access '{name}'" for name in ("/home", "/var", "/etc/shadow")]
    assert found.status == 2 and all(each in found.output for each in missing), found.output


def test_files_are_copied_and_each_trajectory_begins_afresh(tmp_path: Path, box: str) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "data.txt").write_text("some")
    (tmp_path / "run.sh").write_text("#!/bin/sh\ncat deep/data.txt; echo more >> deep/data.txt; ls -A\n")
    (tmp_path / "run.sh").chmod(0o755)

    async def twice() -> list[str]:
        agent = CommandAgent(command="./run.sh", files=str(tmp_path), box=box)
        outputs = []
        for seed in range(2):
            await agent.reset({}, seed=seed)
            outputs.append((await agent.run(ENDPOINT, truth={}, limit_s=LIMIT_S)).output)
            await agent.end()
        return outputs

    outputs = asyncio.run(twice())
    assert outputs[0] == outputs[1] == "some.mgrpo\ndeep\nrun.sh\n"


def test_a_full_disk_is_the_agent_s_crash() -> None:
    found = played("fills", box="local")
    assert (found.ended, found.reward) == ("crashed", None)
    assert "No space left" in found.output


def test_an_agent_that_is_cancelled_leaves_nothing(box: str) -> None:
    mark = f"mgrpo-mark-{os.getpid()}-{box}-cancelled"

    async def cancelled() -> None:
        agent = CommandAgent(command=f"sh -c '{FORKS_AWAY}; sleep 1000000' {mark}", box=box)
        await agent.reset({}, seed=0)
        playing = asyncio.create_task(agent.run(ENDPOINT, truth={}, limit_s=LIMIT_S))
        while len(processes_with(mark)) < 2:
            assert not playing.done(), playing.result()
            await asyncio.sleep(0.05)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        await agent.close()

    asyncio.run(cancelled())
    assert processes_with(mark) == []
