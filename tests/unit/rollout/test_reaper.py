"""The reaper ends what the cluster has started, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from mgrpo.rollout.vllm.ray_processes.reaper import MARK, processes_of

SAYS_IT_RUNS = "import time; print(flush=True); time.sleep(60)"
STARTS_ANOTHER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SAYS_IT_RUNS!r}])"


def test_what_a_cluster_has_started_is_ended_and_a_reader_of_its_logs_is_not(tmp_path):
    """A user may look into the folder, with its name on the command line and a log open."""
    folder = tmp_path / "mgrpo-x"
    folder.mkdir()
    (folder / "log").write_text("")

    def start(program: str, *words: str, log: Any = None, **mark: str) -> subprocess.Popen:
        command = [sys.executable, "-c", program, *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=reading, stderr=log, env=os.environ | mark)
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        return process

    with (folder / "log").open() as reading, (folder / "log").open("a") as writing:
        own = start(STARTS_ANOTHER, **{MARK: str(folder)})
        renamed = start(SAYS_IT_RUNS, log=writing)  # which overwrites the environment: Ray's agents
        reader = start(SAYS_IT_RUNS, str(folder))
        neighbour = start(SAYS_IT_RUNS, **{MARK: f"{folder}2"})
    reaper = subprocess.Popen(
        [sys.executable, "-m", "mgrpo.rollout.vllm.ray_processes.reaper", str(folder)],
        stdin=subprocess.PIPE,
        env=os.environ,
    )
    try:
        found = processes_of(str(folder))
        assert {own.pid, renamed.pid} < set(found) and len(found) == 3
        assert reaper.stdin is not None
        reaper.stdin.close()
        assert reaper.wait(20) == 0
        assert own.wait(5) != 0 and renamed.wait(5) != 0 and processes_of(str(folder)) == []
        assert reader.poll() is None and neighbour.poll() is None
        assert not folder.exists()
    finally:
        for process in (own, renamed, reader, neighbour, reaper):
            process.kill()
