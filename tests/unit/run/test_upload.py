"""Uploads by the real client to a server of ours (`tests.hub_server`), over Git LFS and not over Xet."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mgrpo.moving import from_values
from mgrpo.run.report.upload import Uploads, token_problems, token_warning
from tests.hub_server import TOKEN, Hub, hub_server

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "examples/quickstart/model"


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[Hub]:
    """The server, with a token for it in this process's environment, from which uploads have theirs."""
    with hub_server() as server:
        environment = server.environment(tmp_path / "home", HF_TOKEN=TOKEN, PYTHONPATH=str(ROOT))
        for name in set(os.environ) - set(environment):
            monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def export(tmp_path) -> Path:
    """An export as a run leaves it, with a file of the user's beside it."""
    folder = tmp_path / "out/hf/step_4"
    folder.mkdir(parents=True)
    for path in MODEL.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "README.md").write_text("---\ntags:\n- grpo\n---\n# card\n")
    (folder / "reward_curve.svg").write_text("<svg/>")
    (folder / "notes.txt").write_text("password")
    (folder / "adapter").mkdir()
    (folder / "adapter/adapter_config.json").write_text("{}")
    return folder


def uploads(**values: object) -> Uploads:
    return Uploads(from_values({"push_to_hub": True, "exp_name": "sums", **values}), pause_s=0.1)


def test_the_trained_model_arrives_and_nothing_beside_it(hub, export, capsys):
    """What is uploaded is public one day: a user's own files must not be among it."""
    uploads().finish(export, 4)
    repository = hub.repositories["someone/sums__1"]
    sent = {path: content for path, content in repository.branches["main"].items()}
    expected = {path.name for path in MODEL.iterdir()} | {"reward_curve.svg", "adapter/adapter_config.json"}
    assert set(sent) == expected and repository.private
    assert all(content == (export / path).read_bytes() for path, content in sent.items())
    assert f"{export} is at {hub.url}/someone/sums__1/commit/" in capsys.readouterr().err


def test_names_branch_and_visibility_are_those_asked_for(hub, export):
    uploads(hub_model_id="team/model", hub_revision="run-7", hub_private_repo=False).finish(export, 4)
    repository = hub.repositories["team/model"]
    assert not repository.private
    assert repository.branches["main"] == {} and "model.safetensors" in repository.branches["run-7"]


def test_weights_of_an_earlier_upload_do_not_stay(hub, export):
    """A loader that finds an index reads the old weights."""
    old = {"model-00001-of-00002.safetensors": b"x", "model.safetensors.index.json": b"{}", "other.txt": b"mine"}
    hub.add("someone/sums__1", old)
    uploads().finish(export, 4)
    files = hub.repositories["someone/sums__1"].branches["main"]
    assert "other.txt" in files and not set(files) & set(list(old)[:2])


def test_a_failure_of_the_server_is_tried_again(hub, export, monkeypatch, capsys):
    hub.failures = 1
    uploads().finish(export, 4)
    assert "model.safetensors" in hub.repositories["someone/sums__1"].branches["main"]
    assert "warning" not in capsys.readouterr().err


def test_a_refused_upload_is_one_warning_with_the_command_that_repeats_it(hub, export, monkeypatch, capsys):
    """A run must not fail at its end, after days, for a token that has expired."""
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    uploads(hub_model_id="someone/my-model").finish(export, 4)
    warning = capsys.readouterr().err.splitlines()[-1]
    assert warning.startswith(f"mgrpo: warning: {export} is not on the Hub: ")
    assert warning.endswith(f"repeat it with: hf upload someone/my-model {export} --private")
    assert "hf_expired" not in warning


def test_without_a_token_nothing_is_asked_and_one_sentence_says_so(hub, export, monkeypatch, capsys):
    monkeypatch.delenv("HF_TOKEN")
    code = (
        "from mgrpo.moving import from_values\nfrom pathlib import Path\nfrom mgrpo.run.report.upload import Uploads, token_warning\n"
        "config = from_values({'push_to_hub': True})\nprint(token_warning(config))\n"
        "Uploads(config).finish(Path('x'), 4)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("push_to_hub=true, but there is no token") and done.stderr == ""
    assert not hub.requests
    assert token_warning(from_values({})) is None


def test_an_upload_that_cannot_be_is_refused_where_the_user_asks_for_it(monkeypatch):
    """One line at the top is gone after an hour of log, and the run ends well without its upload."""
    asked, not_asked = from_values({"push_to_hub": True}), from_values({})
    monkeypatch.setattr("mgrpo.run.report.upload.has_token", lambda: True)
    assert not list(token_problems(asked))
    monkeypatch.setattr("mgrpo.run.report.upload.has_token", lambda: False)
    (problem,) = token_problems(asked)
    for cure in ("hf auth login", "HF_TOKEN", "leave push_to_hub out", "hf upload"):
        assert cure in problem
    assert not list(token_problems(not_asked))
    by_preset = dataclasses.replace(
        asked, provenance=dataclasses.replace(asked.provenance, sources={"push_to_hub": "preset open_instruct_main"})
    )
    assert not list(token_problems(by_preset)) and token_warning(by_preset)


def test_every_save_goes_on_beside_the_run(hub, export, capsys):
    """Training must not wait for an upload, and the end must not cross one that is still on its way."""
    own = uploads(hub_strategy="every_save")
    own.saved(export, 2)
    assert own.current is not None and own.current.poll() is None
    first = own.current
    own.saved(export, 3)
    assert own.current is first
    uploads(hub_strategy="every_save").finish(export, 4)
    assert first.poll() == 0 and len(hub.asked("commit")) == 2
    files = hub.repositories["someone/sums__1"].branches["main"]
    assert {"README.md", "reward_curve.svg"} <= set(files)
    assert uploads().saved(export, 2) is None and len(hub.asked("commit")) == 2
