"""The files for clusters in examples/ and docs/ say what the command line understands."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from mgrpo.config import ConfigError
from mgrpo.moving import load_file, parse
from mgrpo.run.nodes.launch_command import parser

ROOT = Path(__file__).parents[4]
SLURM, KUBERNETES = ROOT / "examples/cluster/slurm.sbatch", ROOT / "examples/cluster/kubernetes.yaml"


def commands(text: str) -> Iterator[list[str]]:
    """The words after each `mgrpo launch` of a script, a page or a comment."""
    joined = re.sub(r"\\\n[# ]*", " ", text)
    for line in re.findall(r'mgrpo launch (--[^\n`"]*)', joined):
        yield shlex.split(line.replace("$I", "1"))


def check(words: list[str]) -> tuple[dict, str]:
    """The flags, and the configuration that is named after them."""
    own, training = words[: words.index("--")], words[words.index("--") + 1 :]
    name = training[training.index("--config") + 1]
    assert (ROOT / name).is_file()
    return {flag: value for flag, value in vars(parser().parse_args(own)).items() if value is not None}, name


def pod() -> dict:
    [job] = [part for part in yaml.safe_load_all(KUBERNETES.read_text()) if part["kind"] == "Job"]
    return job["spec"]


def gpus_of_engines(name: str) -> int:
    settings = load_file(ROOT / name).engine
    return settings.vllm_num_engines * settings.num_workers


@pytest.mark.parametrize(
    "path",
    [
        *(ROOT / name for name in ("docs/cluster.md", "README.md")),
        *sorted((ROOT / "examples/configs").glob("*x8.yaml")),
    ],
    ids=lambda path: path.name,
)
def test_commands_have_flags_that_exist(path):
    """A page that is wrong costs a queue of hours."""
    found = [check(words) for words in commands(path.read_text())]
    assert found
    for flags, _ in found:
        assert flags["learner_nodes"] >= 1


def submit(folder: Path, *, code: int = 0, seconds: int = 0, **environment: str) -> tuple[int, list[list[str]]]:
    """The script's exit code, and the words of what it has called: of srun, which ends with `code` after `seconds`, and scontrol."""
    for name, ends in (("srun", code), ("scontrol", 0)):
        stub = folder / name
        stub.write_text(f"#!/bin/bash\nprintf '%s\\n' {name} \"$@\" END >> {folder / 'called'}\nexit {ends}\n")
        stub.chmod(0o755)
    given = {"PATH": f"{folder}:{os.environ['PATH']}", "SECONDS": str(seconds), "SLURM_SUBMIT_DIR": str(ROOT)}
    given |= {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "64", **environment}
    done = subprocess.run(["bash", str(SLURM)], env=given, timeout=60)
    called = (folder / "called").read_text().split("\nEND\n")[:-1]
    (folder / "called").unlink()
    return done.returncode, [words.split("\n") for words in called]


def of_launch(words: list[str]) -> list[str]:
    return words[words.index("launch") + 1 :]


@pytest.mark.parametrize("line", re.findall(r"^#   (.*sbatch .*slurm.sbatch)$", SLURM.read_text(), re.MULTILINE))
def test_the_slurm_script_asks_for_what_its_runs_need(line, tmp_path):
    """Each command of its head, as Slurm would run it."""
    asked = dict(re.findall(r"#SBATCH --([\w-]+)=(\S+)", SLURM.read_text())) | dict(re.findall(r"--(\w+)=(\S+)", line))
    given = dict(word.split("=") for word in line.split(" sbatch ")[0].split() if "=" in word)
    nodes, gpus = int(asked["nodes"]), int(asked["gpus-per-node"])
    done, [srun] = submit(tmp_path, SLURM_JOB_NUM_NODES=str(nodes), **given)
    flags, name = check(of_launch(srun))
    learners = load_file(ROOT / name).parallel.num_learners_per_node
    assert done == 0 and asked["ntasks-per-node"] == "1" and flags["nproc_per_node"] == gpus
    assert learners == (gpus,) * flags["learner_nodes"]
    assert (nodes - flags["learner_nodes"]) * gpus == gpus_of_engines(name)
    _, [srun] = submit(tmp_path, SLURM_JOB_NUM_NODES=str(nodes), LEARNER_NODES="1", **given)
    assert check(of_launch(srun))[0]["learner_nodes"] == 1


@pytest.mark.parametrize(
    ("code", "seconds", "again"),
    [(0, 9000, False), (143, 9000, True), (1, 9000, True), (2, 60, False), (143, 60, False)],
)
def test_a_job_that_ends_before_its_run_goes_on_later(code, seconds, again, tmp_path):
    """A launcher ends with 143 when its state is saved. One that fails soon would fail again: others are then ended with 143 too."""
    done, called = submit(tmp_path, code=code, seconds=seconds, SLURM_JOB_NUM_NODES="16")
    assert done == code
    assert called[1:] == ([["scontrol", "requeue", "7"]] if again else [])
    words = of_launch(called[0])
    assert parse(words[words.index("--") + 1 :], world_size=64).checkpoint.resume == "intact"


def test_the_kubernetes_job_asks_for_what_its_run_needs():
    job = pod()
    [container] = job["template"]["spec"]["containers"]
    assert container["command"][:2] == ["mgrpo", "launch"]
    flags, name = check(container["command"][2:])
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert flags["nodes"] == job["completions"] == job["parallelism"] and flags["nproc_per_node"] == gpus
    assert (flags["nodes"] - flags["learner_nodes"]) * gpus == gpus_of_engines(name)
    names = {part["kind"]: part["metadata"]["name"] for part in yaml.safe_load_all(KUBERNETES.read_text())}
    assert (
        flags["head"] == f"{names['Job']}-0.{names['Service']}"
        and job["template"]["spec"]["subdomain"] == names["Service"]
    )


def test_a_flag_that_does_not_exist_is_found():
    """Otherwise the checks above would pass on every page."""
    with pytest.raises(ConfigError):
        check(["--learners", "2", "--", "--config", "examples/configs/quickstart.yaml"])
