"""What a configuration names on the Hub, by the real client against a server of ours (`tests.hub_server`), in processes of
their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mgrpo.config import to_yaml
from mgrpo.config.fields import flat
from mgrpo.config.validate import problems
from mgrpo.models.hf_files.hub import HubSnapshot
from mgrpo.moving import from_values, parse
from tests.hub_server import Hub, hub_server
from tests.unit.checkpoint.states import make_values, save

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "examples/quickstart/model"
LOCATED = """
import json, sys
from mgrpo.run.inputs.continuing import look_for_state
from mgrpo.moving import parse
from mgrpo.run.inputs.snapshots import located
for flags in json.loads(sys.argv[1]):
    config = parse(flags, defer=True)
    config = located(config, look_for_state(config)[0])
    snapshots = {name: [s.name, s.commit, s.part, str(s.folder)] for name, s in config.provenance.snapshots.items()}
    print(json.dumps([config.model_path, config.tokenizer_path, snapshots, config.provenance.problems]))
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_server() as server:
        server.add("someone/tiny", MODEL)
        yield server


def run(hub: Hub, home: Path, *command: str, cwd: Path = ROOT, **more: str) -> subprocess.CompletedProcess:
    environment = hub.environment(home, PYTHONPATH=str(ROOT), **more)
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=cwd, capture_output=True, text=True, timeout=120
    )


def located(hub: Hub, home: Path, *configurations: list[str], cwd: Path = ROOT) -> list[list]:
    """Model, tokenizer, snapshots and problems of each configuration, one after the other in one process."""
    done = run(hub, home, "-c", LOCATED, json.dumps(configurations), cwd=cwd)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_name_becomes_the_folder_that_everything_reads(hub, tmp_path):
    ((model, tokenizer, snapshots, found),) = located(hub, tmp_path, ["--model_name_or_path", "someone/tiny"])
    commit = hub.repositories["someone/tiny"].commit("main")
    assert model == tokenizer and model.endswith(commit) and not found
    assert snapshots == {"model_name_or_path": ["someone/tiny", commit, "model", model]}


def test_a_folder_of_the_same_name_comes_first(hub, tmp_path):
    """A run must not change because somebody publishes a model of its folder's name."""
    (tmp_path / "someone/tiny").mkdir(parents=True)
    flags = ["--model_name_or_path", "someone/tiny"]
    ((model, _, snapshots, found),) = located(hub, tmp_path, flags, cwd=tmp_path)
    assert (model, snapshots, found) == ("someone/tiny", {}, []) and not hub.requests


def test_tokenizer_of_another_name_or_revision_is_its_own_download(hub, tmp_path):
    repository = hub.repositories["someone/tiny"]
    repository.branches["v2"] = {**repository.branches["main"], "README.md": b"second"}
    hub.add("someone/words", {"tokenizer.json": b"{}", "model.safetensors": b"x" * 100})
    others = ("--tokenizer_name_or_path", "someone/words"), ("--tokenizer_revision", "v2"), ("--model_revision", "v2")
    found = located(hub, tmp_path, *(["--model_name_or_path", "someone/tiny", *other] for other in others))
    (model, tokenizer, *_), (model_2, tokenizer_2, *_), (model_3, tokenizer_3, *_) = found
    assert model != tokenizer and [path.name for path in Path(tokenizer).iterdir()] == ["tokenizer.json"]
    assert Path(model_2).name == repository.commit("main") and Path(tokenizer_2).name == repository.commit("v2")
    assert model_3 == tokenizer_3 and Path(model_3).name == repository.commit("v2")


def test_a_run_goes_on_with_the_commit_that_it_began_with(hub, tmp_path):
    """A branch that has moved would change the reference model in the middle of a run; another revision is what was asked for."""
    repository = hub.repositories["someone/tiny"]
    began, out = repository.commit("main"), tmp_path / "out"
    words = {"model_name_or_path": "someone/tiny", "output_dir": str(out)}
    state = {"config": flat(from_values(words)), "commits": {"model_name_or_path": began}}
    save(out / "checkpoints", 2, make_values(2), state=state)
    flags = [word for name, value in words.items() for word in (f"--{name}", value)]
    located(hub, tmp_path, flags)
    repository.branches |= {
        "main": {**repository.branches["main"], "README.md": b"moved"},
        "old": repository.branches["main"],
    }
    others = [], ["--resume", "never"], ["--model_revision", "main"]
    names = [Path(model).name for model, *_ in located(hub, tmp_path, *([*flags, *other] for other in others))]
    assert names == [began, repository.commit("main"), repository.commit("main")]
    assert repository.commit("main") != began


def test_every_wrong_name_is_in_the_list_of_problems(hub, tmp_path):
    """One start must tell all that is wrong, in one line each, and end with 2."""
    flags = ["--model_name_or_path", "someone/typo", "--tokenizer_name_or_path", "someone/other", "--beta", "-1"]
    done = run(
        hub,
        tmp_path,
        "-m",
        "mgrpo.cli",
        "train",
        *flags,
        "--dataset_mixer_list",
        "examples/quickstart/train.jsonl",
        "1.0",
    )
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert (
        sum(
            line.startswith("  - model_name_or_path=someone/typo is not a folder, and not on the Hub") for line in lines
        )
        == 1
    )
    assert sum(line.startswith("  - tokenizer_name_or_path=someone/other is not a folder") for line in lines) == 1
    assert any("beta" in line for line in lines)


@pytest.mark.parametrize("path", ["./x", "/x/y", "a/b/c", "../x"])
def test_a_path_is_no_name(hub, tmp_path, path):
    """Whoever mistypes a path must read of a folder, not of the Hub."""
    done = run(hub, tmp_path, "-m", "mgrpo.cli", "train", "--model_name_or_path", path)
    assert done.returncode == 2 and f"model_name_or_path={path} is not a folder; check the path" in done.stderr
    assert not hub.requests


def test_a_plan_needs_the_configuration_alone(hub, tmp_path):
    words = ["--model_name_or_path", "someone/tiny", "--dataset_mixer_list", "x", "1.0"]
    done = run(hub, tmp_path, "-m", "mgrpo.cli", "plan", *words, "--pack_length", "512")
    assert done.returncode == 0 and "someone/tiny" in done.stdout, done.stderr
    assert {line.split("/")[-1] for line in hub.asked("resolve")} == {"config.json"}
    done = run(hub, tmp_path, "-m", "mgrpo.cli", "plan", *words[2:], "--model_name_or_path", "someone/typo")
    assert done.returncode == 2 and "model_name_or_path=someone/typo is not a folder, and not on the Hub" in done.stderr


def test_convert_takes_a_name(hub, tmp_path):
    words = ["convert", "hf-to-megatron", "--hf", "someone/tiny", "--out", str(tmp_path / "out")]
    done = run(hub, tmp_path, "-m", "mgrpo.cli", *words)
    assert done.returncode == 0 and (tmp_path / "out/megatron.json").is_file(), done.stderr
    words[3:] = ["someone/typo", "--out", str(tmp_path / "other")]
    done = run(hub, tmp_path, "-m", "mgrpo.cli", *words)
    assert done.returncode == 2 and "convert hf-to-megatron: someone/typo is not a folder" in done.stderr


def test_the_effective_configuration_keeps_the_name_and_tells_the_commit():
    """A report must say what was trained, and the file must start the same run on another machine."""
    config = from_values({"model_name_or_path": "a/b"})
    folder = Path("/cache/models--a--b/snapshots/abc")
    config.provenance.snapshots["model_name_or_path"] = HubSnapshot(
        name="a/b", commit="abc", part="model", folder=folder
    )
    assert "model_name_or_path: a/b  # argument, commit abc\n" in to_yaml(config)
    assert config.model_path == config.tokenizer_path == str(folder)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            "--model_name_or_path . --model_revision v2",
            "model_revision=v2 is of a name on the Hub, and . is read as a folder",
        ),
        (
            "--model_name_or_path a/b --tokenizer_name_or_path . --tokenizer_revision v2",
            "tokenizer_revision=v2 is of a name",
        ),
        ("--hub_model_id a/b/c", "hub_model_id=a/b/c is not a name that the Hub could have"),
        ("--hub_model_id a--b", "hub_model_id=a--b is not a name"),
        ("--hub_strategy checkpoint", "training states are not uploaded"),
    ],
)
def test_settings_of_the_hub_that_cannot_be_meant(flags, expected):
    found = problems(parse(flags.split(), defer=True), world_size=1, has_dataset=True)
    assert sum(expected in problem for problem in found) == 1, found


@pytest.mark.parametrize(
    "flags", ["--model_name_or_path . --model_revision main", "--hub_model_id some.one/m_1-b.c", "--hub_model_id x"]
)
def test_usual_settings_of_the_hub_are_accepted(flags):
    found = problems(parse(flags.split(), defer=True), world_size=1, has_dataset=True)
    assert not any("hub_" in problem or "revision" in problem for problem in found), found


@pytest.mark.parametrize(
    "words", ["--hub_token hf_secret", "--hub_token hf_secret --hub_token hf_secret2", "--hub_token hf_secret hf_x"]
)
def test_a_token_is_refused_and_not_repeated(words, capsys):
    """Logs and configuration files are read by many."""
    config = parse(words.split(), defer=True)
    told = " ".join((*config.provenance.problems, *config.notes, to_yaml(config), capsys.readouterr().err))
    assert "hf_secret" not in told and "set HF_TOKEN in the environment" in told
