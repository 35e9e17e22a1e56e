"""What `mgrpo serve-agent` offers, and when a trajectory ends."""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
from pathlib import Path

from mgrpo.config.validate import problems
from mgrpo.environments.offered.agent import Endpoint
from mgrpo.environments.offered.waiting import wait
from mgrpo.moving import parse
from mgrpo.run.commands.serve_agent import PATIENCE_S, play, served, words_of

ROOT = Path(__file__).parents[3]
OFFER = {"base_url": "http://127.0.0.1:1/s/0-ab", "api_key": "a-'key", "reward_key": None, "task": "/tmp/a task.json"}


def test_a_shell_understands_what_is_printed():
    """The user copies it as it is."""
    script = words_of(OFFER).split("Start your agent")[0] + "env"
    printed = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, env={}).stdout
    found = dict(line.split("=", 1) for line in printed.splitlines())
    assert found["OPENAI_BASE_URL"] == "http://127.0.0.1:1/s/0-ab/v1" and found["OPENAI_API_KEY"] == "a-'key"
    assert found["ANTHROPIC_BASE_URL"] == OFFER["base_url"] and found["ANTHROPIC_API_KEY"] == "a-'key"
    assert found["MGRPO_TASK"] == OFFER["task"] and "MGRPO_REWARD_KEY" not in found
    assert "MGRPO_REWARD_KEY=r" in words_of(OFFER | {"reward_key": "r"})


def test_trajectories_are_offered_one_after_the_other_and_end_by_the_user(tmp_path):
    """An agent that is started by hand has the time that it needs, and only its own trajectory ends."""
    said, asked, enter = [], threading.Semaphore(0), threading.Semaphore(0)

    def ask():
        asked.release()
        enter.acquire()
        return "\n"

    threading.Thread(target=play, args=(tmp_path, ask, said.append), daemon=True).start()

    async def check():
        endpoints = [Endpoint(base_url=f"http://127.0.0.1:1/s/{number}-ab", api_key="k") for number in range(2)]
        waits = [asyncio.create_task(wait({"prompt": each.base_url}, each, folder=str(tmp_path))) for each in endpoints]
        for num_ended in range(2):
            assert await asyncio.to_thread(asked.acquire, True, 20)
            await asyncio.sleep(0.3)
            assert sum(task.done() for task in waits) == num_ended and len(said) == num_ended + 1
            task = next(line for line in said[-1].splitlines() if "MGRPO_TASK" in line).partition("=")[2]
            assert json.loads(Path(task).read_text())["prompt"] in said[-1]
            enter.release()
            async with asyncio.timeout(20):
                while sum(task.done() for task in waits) == num_ended:
                    await asyncio.sleep(0.02)
        await asyncio.gather(*waits)

    asyncio.run(check())


def test_any_configuration_can_be_served(tmp_path, monkeypatch):
    """Also one with tools, whose place the agent takes, or with another agent."""
    monkeypatch.chdir(ROOT)
    agent = ["--agent", "python agent.py", "--agent_check", "python check.py", "--agent_max_turns", "9"]
    for name, more in (("calculator", []), ("quickstart", agent)):
        words = ["--config", f"examples/configs/{name}.yaml", "--output_dir", str(tmp_path), *more]
        config = served(parse(words, prog="mgrpo serve-agent", defer=True), str(tmp_path))
        assert not problems(config, world_size=1)
        assert config.agent.agent_check is None and config.tools.trajectory_timeout == PATIENCE_S
        assert config.agent.agent_max_turns == (9 if more else 1024)
