"""The agent section: a program with a model's address, how it starts, where it runs, and how it is judged."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from mgrpo.config.annotations import ONE_OR_MORE, POSITIVE, Form, Needs, Range, Rule
from mgrpo.processes.user_code import missing_file

REMOTE, VERIFIERS = "remote", "verifiers"
"""Agents that run elsewhere and ask for their tasks; environments of the library of that name."""
WORKER_KEY = "MGRPO_WORKER_KEY"
"""Variable with the key by which remote agents ask for tasks."""
DEFAULT_TIMEOUT_S = 600.0
"""Longest time of an agent where `trajectory_timeout` is none: one that hangs would hold its group for ever."""
JOIN_TOKEN = "RAY_AUTH_TOKEN"
"""The variable with the secret of a run's machines."""
_FUNCTION = re.compile(r"(?:\S+\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ADDRESS = re.compile(r"\S+:[0-9]{1,5}")

WITH_AGENT = Needs("agent", lambda agent: agent is not None)
AT_HOME = Needs("an agent that the run starts", lambda agent_kind: agent_kind not in ("none", "remote"))
WITH_COMMAND = Needs("an agent that is a command", lambda agent_kind: agent_kind == "command")
WITH_IMAGES = Needs(
    "an agent that is a command, not in agent_box=none",
    lambda agent_kind, agent_box: agent_kind == "command" and agent_box != "none",
)
WITH_CONTAINERS = Needs(
    "an agent that is a command, not in agent_box=none or local",
    lambda agent_kind, agent_box: agent_kind == "command" and agent_box not in ("none", "local"),
)
PORT = Range(low=0, high=65535)
WHERE = Form("none, local, docker, podman, or an entry point of mgrpo.boxes", str.isidentifier)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    agent: str | None = None
    """A program that only knows a model's address, in place of tools: a command, such as "python agent.py"; an async function(row,
    endpoint), file.py:function or package.module:function; remote: programs elsewhere that ask for tasks; verifiers: environments of
    verifiers 0.4 and later. tool_configs holds the settings of a function or of verifiers."""
    agent_check: Annotated[str | None, WITH_COMMAND] = None
    """A command that judges what the agent has left behind, in the folder MGRPO_WORK, with the row's ground truth; it starts in a folder of
    its own. Exit status 0 is the reward 1 and any other 0, unless it writes a reward to the file MGRPO_RESULT. none: nothing is checked."""
    agent_sets_reward: Annotated[bool, WITH_AGENT] = True
    """Whether the agent's own word about its reward counts: what it returns, writes to MGRPO_RESULT or sends to /reward. false: only
    agent_check, verifiers and reward functions."""
    agent_box: Annotated[str, WHERE, WITH_COMMAND] = "local"
    """Where a command runs. local: within walls on this machine, without root or a daemon; docker or podman: in a container;
    another name: an entry point of mgrpo.boxes, such as a hosted sandbox; none: as any program of this user."""
    agent_image: Annotated[str | None, WITH_IMAGES] = None
    """The image of its containers, or the folder that is the root of its walls; in containers a row's column image goes before it, but they
    need this one for the check at the start. none: this machine's programs, read-only."""
    agent_network: Annotated[bool, WITH_IMAGES] = False
    """Whether it may reach more of the network than its endpoint."""
    agent_files: Annotated[str | None, WITH_COMMAND] = None
    """Folder that is copied into the working folder of each agent. none: it begins empty."""
    agent_env: Annotated[tuple[str, ...], AT_HOME] = ()
    """Names of variables of the run's environment that it is given as well, such as keys of other services."""
    agent_max_turns: Annotated[int, ONE_OR_MORE, WITH_AGENT] = 1024
    """Turns of the model that one trajectory may have, in all its branches."""
    agent_max_processes: Annotated[int, ONE_OR_MORE, WITH_COMMAND] = 256
    """Processes and threads of one agent."""
    agent_memory_mb: Annotated[int, ONE_OR_MORE, WITH_COMMAND] = 4096
    """Memory of one agent's processes in MiB."""
    agent_disk_mb: Annotated[int, ONE_OR_MORE, WITH_IMAGES] = 1024
    """What one agent may write, in MiB. Behind walls that is memory; a container that has written more ends without a score."""
    agent_cpus: Annotated[float | None, POSITIVE, WITH_CONTAINERS] = None
    """Cores that the processes of one agent may take together. none: any."""
    agent_endpoint_host: Annotated[str, WITH_AGENT] = "127.0.0.1"
    """Address on which the endpoint listens; agents elsewhere need another one than this machine's own, and TLS is up to you."""
    agent_endpoint_port: Annotated[int, PORT, WITH_AGENT] = 0
    """Its port, and the next ones where there are several; 0: any that is free."""
    agent_endpoints: Annotated[int, ONE_OR_MORE, WITH_AGENT] = 1
    """Processes that serve agents, each on one core."""
    agent_endpoint_url: Annotated[str | None, WITH_AGENT] = None
    """Address by which agents reach the endpoint, if that is another one, as of a balancer before several, which sends paths that begin
    with /s/N- to endpoint N, counted from 0. none: each has its own."""
    agent_endpoint_join: Annotated[str | None, WITH_AGENT] = None
    """HOST:PORT of this machine where endpoints of other machines join the run, by mgrpo agent-endpoint; all have RAY_AUTH_TOKEN set to
    the same secret. none: none join."""

    @property
    def agent_kind(self) -> Literal["none", "command", "function", "remote", "verifiers"]:
        """What `agent` names."""
        if self.agent is None:
            return "none"
        if self.agent in (REMOTE, VERIFIERS):
            return "remote" if self.agent == REMOTE else "verifiers"
        return "function" if _FUNCTION.fullmatch(self.agent) else "command"


def _agent(agent: str | None, agent_kind: str, agent_check: str | None) -> Iterator[str]:
    for name, text in (("agent", agent), ("agent_check", agent_check)):
        if text is not None and not text.strip():
            yield f"{name} is empty; give a command, such as {name}='python {name}.py', or leave it out"
            return
    if agent is None:
        return
    if agent_kind == "function":
        module = agent.rpartition(":")[0]
        if module.endswith(".py") and (problem := missing_file(module)):
            yield f"agent: {problem}"
    if agent_kind == "command":
        yield from _command("agent", agent)
    if agent_check is not None:
        yield from _command("agent_check", agent_check)


def _remote(agent_kind: str) -> Iterator[str]:
    key = os.environ.get(WORKER_KEY, "")
    if agent_kind == "remote" and not (key.isascii() and key.isprintable() and key == key.strip()):
        yield f"{WORKER_KEY} is the key of agent workers, which HTTP cannot carry; expected one word of printable ASCII"
    if agent_kind == "remote" and not key:
        yield (
            f"agent=remote gives tasks to whoever has the key {WORKER_KEY}, which the run's environment does not have; export "
            f'{WORKER_KEY}="$(openssl rand -hex 32)" here, and the same where the agents run'
        )


def _command(name: str, text: str) -> Iterator[str]:
    try:
        words = shlex.split(text)
    except ValueError as err:
        yield f"{name}={text!r} cannot be read as a command ({err}); close its quotes"
        return
    if len(words) == 1 and words[0].endswith(".py"):
        yield f"{name}={text} names a file but nothing in it; write {text}:NAME for a function, or 'python {text}' for a command"


def _box(agent_kind: str, agent_box: str, agent_image: str | None) -> Iterator[str]:
    if agent_kind != "command":
        return
    if agent_box in ("docker", "podman"):
        if shutil.which(agent_box) is None:
            other = next((name for name in ("docker", "podman") if shutil.which(name)), "local")
            yield f"agent_box={agent_box} needs the command {agent_box} on PATH; install it, or set agent_box={other}"
        if agent_image is None:
            yield (
                f"agent_box={agent_box} needs agent_image, an image in which a container is started before the run; rows with a column "
                "image have their own nevertheless"
            )
    if agent_box == "local" and agent_image is not None and not os.path.isdir(agent_image):
        yield f"agent_image={agent_image} must be a folder with agent_box=local, the root that its programs see; or choose docker"


def _files(agent_files: str | None) -> Iterator[str]:
    if agent_files is not None and not os.path.isdir(agent_files):
        yield f"agent_files={agent_files} must be a folder"


def _env(agent_env: tuple[str, ...]) -> Iterator[str]:
    for name in agent_env:
        if not _VARIABLE.fullmatch(name):
            yield f"agent_env holds {name!r:.60}, which is not the name of a variable; give names alone, values come from the environment"
        elif name not in os.environ:
            yield f"agent_env names {name}, which the run's environment does not have; export it, or leave it out"


def _url(agent_endpoint_url: str | None) -> Iterator[str]:
    if agent_endpoint_url is not None and not agent_endpoint_url.startswith(("http://", "https://")):
        yield f"agent_endpoint_url={agent_endpoint_url} must be a URL, http://HOST:PORT"


def _join(agent_endpoint_join: str | None) -> Iterator[str]:
    if agent_endpoint_join is None:
        return
    if not _ADDRESS.fullmatch(agent_endpoint_join) or int(agent_endpoint_join.rpartition(":")[2]) > 65535:
        yield f"agent_endpoint_join={agent_endpoint_join} must be HOST:PORT, such as node0:29500"
    if not os.environ.get(JOIN_TOKEN):
        yield (
            f"agent_endpoint_join={agent_endpoint_join} needs {JOIN_TOKEN}, by which endpoints of other machines prove that they "
            "belong to the run; set it to the same secret on all of them"
        )


def _ports(agent_endpoint_port: int, agent_endpoints: int) -> Iterator[str]:
    if agent_endpoint_port and agent_endpoint_port + agent_endpoints > 65536:
        yield (
            f"agent_endpoint_port={agent_endpoint_port} leaves no ports for agent_endpoints={agent_endpoints}, which take one "
            "each; lower it"
        )


def _alone(
    agent: str | None, tools: tuple[str, ...], environment_factory: tuple[str, ...], rollout_func: str | None
) -> Iterator[str]:
    given = {"tools": tools, "environment_factory": environment_factory, "rollout_func": rollout_func}
    others = [name for name, value in given.items() if value]
    if agent is not None and others:
        yield f"agent={agent} drives the model by itself, so {' and '.join(others)} would answer nothing; leave one of them out"


def _whole_trajectories(agent: str | None, turn_credit: str, mask_tool_use: bool) -> Iterator[str]:
    if agent is None:
        return
    if turn_credit == "return":
        yield (
            "turn_credit=return needs turns that follow one another, and an agent may have several at a time; set it to trajectory"
        )
    if not mask_tool_use:
        yield (
            "mask_tool_use=false trains on what others have written, and an agent's branches share it; set it to true, or leave "
            "agent out"
        )


def _limit(agent: str | None, trajectory_timeout: float | None, rollout_timeout: int) -> Iterator[str]:
    if agent is not None and trajectory_timeout is None and rollout_timeout <= DEFAULT_TIMEOUT_S:
        yield (
            f"an agent may take {DEFAULT_TIMEOUT_S:g} s where trajectory_timeout is not given, which must be below "
            f"rollout_timeout={rollout_timeout}, after which the whole run ends; set trajectory_timeout, or raise rollout_timeout"
        )


def _template(agent: str | None, chat_template_name: str) -> Iterator[str]:
    if agent is not None and chat_template_name == "none":
        yield f"agent={agent} talks to the model in chats, but chat_template_name=none; choose a template"


def _masks(agent: str | None, vllm_guided_decoding_regex: str | None) -> Iterator[str]:
    if agent is not None and vllm_guided_decoding_regex is not None:
        yield "vllm_guided_decoding_regex fits whole answers, but an agent has turns of its own; leave one of them out"


RULES: tuple[Rule, ...] = (
    _agent,
    _remote,
    _alone,
    _box,
    _files,
    _env,
    _url,
    _join,
    _ports,
    _whole_trajectories,
    _limit,
    _template,
    _masks,
)


def _open(agent: str | None, agent_endpoint_host: str) -> Iterator[str]:
    if agent is not None and agent_endpoint_host in ("0.0.0.0", "::"):
        yield (
            f"agent_endpoint_host={agent_endpoint_host} serves every network of this machine without encryption; keys keep others "
            "out of sessions, and anyone on the way can read them"
        )


def _unwalled(agent_kind: str, agent_box: str) -> Iterator[str]:
    if agent_kind == "command" and agent_box == "none":
        yield (
            "agent_box=none runs the agent as any program of this user: what the model makes it do reaches your files and the "
            "network; choose local or docker if it runs what the model writes"
        )


WARNINGS: tuple[Rule, ...] = (_open, _unwalled)
