"""Profiles of training steps."""

from __future__ import annotations

import contextlib
import gzip
import json
from pathlib import Path

import pytest
import torch
from torch.autograd.profiler import record_function

from mgrpo.moving import parse
from mgrpo.parallel import backend
from mgrpo.run.train.profile import Profiler


@pytest.fixture
def make(tmp_path: Path):
    """Returns a profiler of steps 2 and 4, and what it says."""
    said: list[str] = []
    config = parse(["--output_dir", str(tmp_path), "--profile_steps", "2", "4"])
    return lambda rank=0: (Profiler(config, rank=rank, say=said.append), said)


@record_function("mgrpo: a part")
def work() -> torch.Tensor:
    return torch.ones(64, 64) @ torch.ones(64, 64)


def test_chosen_steps_of_rank_0_leave_a_trace_with_the_names_of_their_parts(make, tmp_path):
    """The trace is JSON that Perfetto reads; a table of the operations lies beside it, and one line says where."""
    for rank in (0, 1):
        profiler, said = make(rank)
        for step in (1, 2, 3):
            with profiler.step(step):
                work()
    names = {"step_2_rank_0.trace.json.gz", "step_2_rank_0.txt"}
    assert {path.name for path in (tmp_path / "profile").iterdir()} == names
    trace = json.loads(gzip.decompress((tmp_path / "profile/step_2_rank_0.trace.json.gz").read_bytes()))
    assert {"mgrpo: a part", "aten::mm"} <= {event.get("name") for event in trace["traceEvents"]}
    assert "aten::mm" in (tmp_path / "profile/step_2_rank_0.txt").read_text()
    assert len(said) == 1 and said[0] == f"profile of step 2: {tmp_path}/profile/step_2_rank_0.trace.json.gz"


def test_a_profile_that_cannot_be_written_does_not_end_the_run(make, tmp_path):
    """It is said, and that is all."""
    (tmp_path / "profile").write_text("a file where the folder should be")
    profiler, said = make()
    with profiler.step(2):
        work()
    assert len(said) == 1 and said[0].startswith("no profile of step 2: ")


def test_the_error_of_a_step_is_not_hidden(make, tmp_path):
    """A step that fails is not written either."""
    profiler, said = make()
    with pytest.raises(ZeroDivisionError), profiler.step(2):
        _ = 1 / 0
    assert not said and not (tmp_path / "profile").exists()


def test_under_nsys_the_same_steps_are_its_ranges(make, tmp_path, monkeypatch):
    """torch's profiler stays off; the range also ends when the step fails."""
    calls: list[str] = []
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    monkeypatch.setattr(backend, "emit_nvtx", contextlib.nullcontext)
    profiler, _ = make()
    for step in (1, 2):
        with profiler.step(step):
            calls.append(f"step {step}")
    with pytest.raises(ZeroDivisionError), profiler.step(4):
        _ = 1 / 0
    recorded = ["start", "step 2", "synchronize", "stop", "start", "synchronize", "stop"]
    assert calls == ["step 1", *recorded] and not (tmp_path / "profile").exists()
