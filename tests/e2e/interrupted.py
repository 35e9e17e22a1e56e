"""Runs that die and are started again, and whether the end shows it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from tests.e2e.launching import Run, survivors
from tests.e2e.nodes import Nodes

LIMIT_S = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A configuration that runs are started with, in a folder each."""

    flags: Sequence[str]
    config: str = "quickstart"

    def launch(self, folder: Path, flags: Sequence[str] = (), *, fault: str = "", step: int = 0) -> Run:
        """The run, with a fault in one step."""
        program = ("tests/e2e/faulty.py", fault, str(step)) if fault else ("examples/train_grpo.py",)
        return Run(folder, [*self.flags, *flags], program=program, config=self.config)

    def finish(self, folder: Path, flags: Sequence[str] = (), *, fault: str = "", step: int = 0) -> Run:
        """A run to its end, which the fault does not prevent."""
        run = self.launch(folder, flags, fault=fault, step=step)
        try:
            assert run.wait(LIMIT_S) == 0, run.text()[-3000:]
        finally:
            run.end()
        return run

    def fail(self, folder: Path, flags: Sequence[str] = (), *, fault: str = "", step: int = 0) -> Run:
        """A run that does not come to its end, and leaves no process."""
        run = self.launch(folder, flags, fault=fault, step=step)
        try:
            status, family = run.end_of_all(LIMIT_S)
            assert status != 0, run.text()[-3000:]
        finally:
            run.end()
        assert survivors(family, 40) == []
        return run


def origins(run: Run | Nodes) -> list[int]:
    """The steps from which the runs in this folder went on, in turn."""
    return [int(step) for step in re.findall(r"continues from \S*, (\d+) of", run.text())]


def metrics(run: Run | Nodes) -> list[dict]:
    """Every line, clock readings apart."""
    lines = (run.output_dir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines]


def export(run: Run | Nodes) -> Path:
    """The folder of the trained model."""
    return run.output_dir / "hf" / f"step_{metrics(run)[-1]['step']}"


def weights(run: Run | Nodes) -> dict[str, bytes]:
    """The exported model's tensors, bit for bit."""
    with safe_open(export(run) / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name).numpy().tobytes() for name in file.keys()}  # noqa: SIM118


def assert_equal(run: Run | Nodes, reference: Run | Nodes) -> None:
    """Nothing tells the two runs apart but their clocks."""
    ours, theirs = metrics(run), metrics(reference)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for own, their in zip(ours, theirs, strict=True):
        assert own == their, {key: (own.get(key), value) for key, value in their.items() if own.get(key) != value}
    assert weights(run) == weights(reference)
