"""The files for clusters in examples/ and docs/ say what the command line understands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from mgrpo.config import ConfigError
from mgrpo.moving import load_file
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
    return settings.vllm_num_engines * settings.vllm_tensor_parallel_size


@pytest.mark.parametrize(
    "path",
    [
        SLURM,
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


def test_the_slurm_script_asks_for_what_its_run_needs():
    [words] = commands(SLURM.read_text())
    flags, name = check(words)
    asked = dict(re.findall(r"#SBATCH --([\w-]+)=(\S+)", SLURM.read_text()))
    nodes, gpus = int(asked["nodes"]), int(asked["gpus-per-node"])
    assert asked["ntasks-per-node"] == "1" and flags["nproc_per_node"] == gpus
    assert (nodes - flags["learner_nodes"]) * gpus == gpus_of_engines(name)


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
