"""The command `mgrpo plan --rehearse`: what it prints, and what it refuses before any process starts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mgrpo.planner.plan_command import plan_command
from mgrpo.rehearsal import cuda
from tests.unit.rehearsal.layouts import SMALL, Case


@pytest.fixture
def argv(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SMALL))
    return [*Case(learners=2).argv, "--hf_config", str(file)]


def test_the_rehearsed_step_is_printed_beside_the_plan(argv, tmp_path, capsys):
    """The command runs the rank in a process of its own and says what it held, sent and waited for."""
    found = tmp_path / "found.json"
    assert plan_command([*argv, "--rehearse", "--rank", "1", "--json", str(found)]) == 0
    printed = capsys.readouterr().out
    for words in ("rank 1, stage 0: the step runs", "rehearsed", "planned", "optimizer", "matrix products"):
        assert words in printed
    (rank,) = json.loads(found.read_text())
    by_name = {line["name"]: line for line in rank["compared"]}
    # Of a model this small the rounding of each tensor to 512 bytes shows.
    assert by_name["gradients"]["rehearsed"] == pytest.approx(by_name["gradients"]["planned"], rel=0.01)
    assert by_name["matrix products"]["rehearsed"] == pytest.approx(by_name["matrix products"]["planned"], rel=0.01)


def test_layers_in_8_bits_are_rehearsed_by_a_stand_in_that_is_named(argv, tmp_path, capsys):
    """Who reads the figures must know that no GPU and not Transformer Engine made them."""
    file, found = tmp_path / "wide.json", tmp_path / "found.json"
    file.write_text(json.dumps(SMALL | {"head_dim": 32, "num_key_value_heads": 4, "intermediate_size": 128}))
    options = ["--fp8", "hybrid", "--rehearse", "--rank", "0", "--hf_config", str(file), "--json", str(found)]
    assert plan_command([*argv, *options]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for words in (
        "a stand-in for those of Transformer Engine",
        "without having been compared with a GPU",
        "of these in 8 bits",
    ):
        assert words in printed
    (rank,) = json.loads(found.read_text())
    products = next(line for line in rank["compared"] if line["name"] == "of these in 8 bits")
    assert products["rehearsed"] == products["planned"] > 0


def test_a_step_that_fails_names_the_place(argv, capsys):
    """A user's own loss is part of the step: a tensor on the wrong device is found, and the exit status says so."""
    loss = ["--policy_loss", "tests.unit.rehearsal.losses:on_the_host"]
    assert plan_command([*argv, "--rehearse", "--rank", "0", *loss]) == 1
    printed = capsys.readouterr().out
    for words in ("rank 0: the step fails", "aten.mul.Tensor", "mgrpo/algo/losses/own.py"):
        assert words in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rehearse", "--rank", "2"], "rank=2 is not a learner: there are 2, from 0 to 1"),
        (["--rank", "0"], "add --rehearse"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused_in_a_sentence(argv, capsys, flags: list[Any], message: str):
    """A rank that the layout does not have would rehearse something that never runs."""
    assert plan_command([*argv, *flags]) == 2
    assert message in capsys.readouterr().err


def test_one_rank_or_all_roles(argv, capsys):
    """Both at once ask for two different things."""
    with pytest.raises(SystemExit) as ended:
        plan_command([*argv, "--rehearse", "--rank", "0", "--all-roles"])
    assert ended.value.code == 2 and "not allowed with" in capsys.readouterr().err


def test_another_torch_is_refused(monkeypatch):
    """The stand-in writes into C++ objects: in another release these could be anything."""
    monkeypatch.setattr(cuda, "TORCH", "1.13")
    with pytest.raises(cuda.RehearsalError, match=r"install that release"):
        cuda.install(memory_bytes=1 << 30, waits=lambda what: None)
