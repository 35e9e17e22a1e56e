"""Tokenizes with several processes, in a program of its own: `python -m mgrpo.data.program`.

`datasets` forks. This program has nothing but one thread when it does, unlike rank 0, which runs Ray; and unlike processes of
multiprocessing it does not import the user's script. One question in JSON on stdin; the answer are files. Errors come as text on
stdout.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from threading import Event
from typing import Any

from mgrpo.data.encoding import Cancelled, Encoder, Recipe, encode_rows
from mgrpo.data.tokenizer import load_described
from mgrpo.processes.lifetime import die_with_parent, ending, start_program

_POLL_S = 0.1


def encode_in_program(
    folder: Path,
    recipe: Recipe,
    tokenizer: dict[str, str],
    *,
    fingerprint: str,
    num_proc: int,
    cancelled: Event,
) -> None:
    """`encode_rows` by `num_proc` processes; ends them all and raises `Cancelled` soon after `cancelled` is set.

    Args:
        tokenizer: of `describe`.
    """
    task = {"folder": str(folder), "recipe": recipe.to_json(), "tokenizer": tokenizer}
    task |= {"fingerprint": fingerprint, "num_proc": num_proc}
    process = start_program(
        "mgrpo.data.program",
        environment=os.environ,
        settings={"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(task).encode())
            process.stdin.close()
        # Its exit code and not the end of its output: if it is killed, its processes keep the pipe open.
        while process.poll() is None:
            if cancelled.wait(_POLL_S):
                raise Cancelled
    finally:
        if process.returncode != 0:
            _kill_session(process)
        said = process.stdout.read().decode(errors="replace")
        process.stdout.close()
    if process.returncode:
        raise RuntimeError(
            f"the program that tokenizes {ending(process.returncode)}; if the machine ran out of memory, set "
            f"dataset_num_proc to a smaller number\n{said}"
        )


def main() -> None:
    # The processes of `datasets` do not end with this one, but they are of its session.
    signal.signal(signal.SIGUSR1, lambda *_: os.killpg(0, signal.SIGKILL))
    die_with_parent(signal.SIGUSR1)
    task: dict[str, Any] = json.load(sys.stdin)
    try:
        import datasets
        from tqdm import tqdm

        # Every bar, shown or not, starts a thread, and this program forks.
        tqdm.monitor_interval = 0
        if not sys.stderr.isatty():
            datasets.disable_progress_bars()
        encoder = Encoder(recipe=Recipe.from_json(task["recipe"]), tokenizer=load_described(task["tokenizer"]))
        encode_rows(Path(task["folder"]), encoder, fingerprint=task["fingerprint"], num_proc=task["num_proc"])
    except Exception:
        # No longer than a pipe holds: it is read when this program has ended.
        print(traceback.format_exc()[-20_000:])
        sys.exit(1)


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    main()
