"""`mgrpo serve-agent`: the endpoint over a model, without training, for an agent that you start yourself.

Each prompt is a trajectory with an address and a key of its own, which the command prints. When your agent has ended, Enter ends
the trajectory, and its tokens and reward are printed as by `mgrpo rollout`.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mgrpo.config import Config, ConfigError
from mgrpo.config.agent import Agent
from mgrpo.config.annotations import JSONObject
from mgrpo.environments.offered.waiting import DONE, SERVED
from mgrpo.moving import parse
from mgrpo.run.commands.sample import first_prompts, num_of, show

AGENT = "mgrpo.environments.offered.waiting:wait"
PATIENCE_S = 86400.0
"""Longest time of a trajectory without `trajectory_timeout`, in seconds: people debug between two calls."""
_KEPT = (
    "agent_sets_reward",
    "agent_max_turns",
    "agent_endpoint_host",
    "agent_endpoint_port",
    "agent_endpoints",
    "agent_endpoint_url",
    "agent_endpoint_join",
)
"""Settings of the endpoint and its clients; the other agent settings are about starting an agent."""
_POLL_S = 0.1


def serve_agent_command(argv: Sequence[str]) -> int:
    """`mgrpo serve-agent`: serve a few prompts and print the trajectories."""
    from mgrpo.run.commands.evaluate import ready

    try:
        num, argv = num_of(["--num", "1", *argv])
        config = first_prompts(parse(argv, prog="mgrpo serve-agent", defer=True), num)
        with (
            tempfile.TemporaryDirectory(prefix="mgrpo-serve-") as folder,
            ready(served(config, folder), []) as (_, production),
        ):
            with_user = (Path(folder), sys.stdin.readline, _say)
            threading.Thread(target=play, args=with_user, name="serve-agent", daemon=True).start()
            evaluation = production.evaluator.evaluate(done=0)
            show(evaluation, production.tokenizer)
    except ConfigError as err:
        sys.stderr.write(f"mgrpo: {err}\n")
        return 2
    return 0


def served(config: Config, folder: str) -> Config:
    """The configuration with a placeholder agent that waits for an external one."""
    agent = Agent(agent=AGENT, **{name: getattr(config.agent, name) for name in _KEPT})
    tools = dataclasses.replace(
        config.tools,
        tools=(),
        environment_factory=(),
        rollout_func=None,
        tool_configs=(JSONObject(json.dumps({"folder": folder})),),
        trajectory_timeout=config.tools.trajectory_timeout or PATIENCE_S,
    )
    longest = max(config.rollout.rollout_timeout, int(2 * PATIENCE_S))
    return dataclasses.replace(
        config, agent=agent, tools=tools, rollout=dataclasses.replace(config.rollout, rollout_timeout=longest)
    )


def play(folder: Path, ask: Callable[[], str], say: Callable[[str], None]) -> None:
    """Offer each trajectory to the user, one after the other, for as long as the process lives."""
    known: set[Path] = set()
    wait = threading.Event()
    while not wait.wait(_POLL_S):
        for offer in sorted(set(folder.glob(f"*{SERVED}")) - known):
            known.add(offer)
            say(words_of(json.loads(offer.read_text())))
            ask()
            offer.with_suffix(DONE).touch()


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def words_of(offer: Mapping[str, Any]) -> str:
    """Shell commands with the variables for an agent of this trajectory."""
    url, key = offer["base_url"], offer["api_key"]
    variables = {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "MGRPO_TASK": offer["task"],
    }
    if offer["reward_key"]:
        variables["MGRPO_REWARD_KEY"] = offer["reward_key"]
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    return "\n".join(["", *lines, "Start your agent in a shell with these; press Enter here when it has ended.", ""])
