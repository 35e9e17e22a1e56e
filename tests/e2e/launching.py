"""Start the real program under torchrun, find its processes, and see that none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
TENSOR_PARALLEL = "--tensor_model_parallel_size"


class Run:
    """`torchrun examples/train_grpo.py` in a session of its own, output in a file.

    Args:
        flags: the ranks share every matrix by twos unless these say otherwise.
        program: another one than the example, and words before its flags; none: `mgrpo train --nproc-per-node`.
        config: the name of an example's configuration.
        variables: further environment variables.
    """

    def __init__(
        self,
        folder: Path,
        flags: Sequence[str],
        *,
        ranks: int = 2,
        program: Sequence[str] | None = ("examples/train_grpo.py",),
        config: str = "quickstart",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.log = folder / "log.txt"
        self.output_dir = folder / "out"
        launcher = (
            ["mgrpo.cli", "train"] if program is None else ["torch.distributed.run", "--master-addr", "127.0.0.1"]
        )
        layout = [] if TENSOR_PARALLEL in flags else [TENSOR_PARALLEL, "2"]
        command = [
            sys.executable, "-m", *launcher, "--nproc-per-node", str(ranks), *(program or ()),
            "--config", f"examples/configs/{config}.yaml", "--output_dir", str(self.output_dir), *layout, *flags,
        ]  # fmt: skip
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=self.log.open("a"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment | (variables or {}),
        )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, timeout_s: float) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.text()[-3000:]}") from None

    def wait_for(self, words: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while words not in self.text():
            assert self.process.poll() is None, f"ended early:\n{self.text()[-3000:]}"
            assert time.monotonic() < deadline, f"no {words!r} within {timeout_s} s:\n{self.text()[-3000:]}"
            time.sleep(0.1)

    def end_of_all(self, timeout_s: float) -> tuple[int, list[psutil.Process]]:
        """The exit status, and every process that the run ever had."""
        family: set[psutil.Process] = set()
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running after {timeout_s} s:\n{self.text()[-3000:]}"
            try:
                family.update(self.family())
            except psutil.NoSuchProcess:
                break
            time.sleep(0.5)
        return self.wait(10), list(family)

    def family(self) -> list[psutil.Process]:
        """torchrun and everything it started, and the reaper, which has a session of its own."""
        top = psutil.Process(self.process.pid)
        return [top, *top.children(recursive=True)]

    def find(self, kind: str) -> psutil.Process:
        """The process named "torchrun", "rank 0", "rank 1", "engine actor", "raylet", "gcs" or "verifier"."""
        family = self.family()
        if kind == "torchrun":
            return family[0]
        if kind.startswith("rank"):
            learners = [p for p in family if p.ppid() == self.process.pid]
            return next(p for p in learners if p.environ().get("RANK") == kind.split()[1])
        words = {
            "engine actor": "ray::EngineActor",
            "raylet": "/raylet",
            "gcs": "gcs_server",
            "verifier": "mgrpo.rewards.verifier_worker",
        }[kind]
        return next(
            p for p in family if words in " ".join(p.cmdline()[:3]) or words in p.name() or words in p.cmdline()
        )

    def end(self) -> None:
        """Whatever happened, leave nothing for the next test."""
        if self.process.poll() is None:
            for process in self.family():
                process.send_signal(signal.SIGKILL)


def survivors(processes: Sequence[psutil.Process], timeout_s: float) -> list[str]:
    """Command lines of those that still run after `timeout_s`."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return [" ".join(p.cmdline())[:120] for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
