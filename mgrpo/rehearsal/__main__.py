"""The process of rehearsals: reads requests from stdin, a line of JSON each, and answers each with a line of JSON.

Request: `argv` of the run, the model's `hf_config`, the number of `learners`, `rank`, `packs`, and the device's `memory`.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Iterable
from typing import Any, TextIO

from mgrpo.config.derived import layout_of
from mgrpo.models.family import shape_of
from mgrpo.moving import parse
from mgrpo.rehearsal import cuda, kernel_shapes
from mgrpo.rehearsal.recorder import Recorder

_recorders: list[Recorder] = []


def prepare(memory_bytes: int) -> None:
    """Make this process one that rehearses, with nothing else."""
    warnings.filterwarnings("ignore")
    cuda.install(memory_bytes=memory_bytes, waits=lambda what: _recorders[-1].wait(what) if _recorders else None)
    kernel_shapes.install()
    from mgrpo.parallel import backend

    backend.install()


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The findings of the rehearsal, or under `error` why the step failed and under `at` where."""
    from mgrpo.rehearsal.rehearsed_step import RehearsalJob, rehearse

    config = parse(request["argv"])
    job = RehearsalJob(
        config=config,
        shape=shape_of(request["hf_config"]),
        teachers=[*map(shape_of, request.get("teachers", ()))],
        layout=layout_of(config, request["learners"]),
        rank=request["rank"],
        packs=request["packs"],
    )
    recorder = Recorder()
    _recorders.append(recorder)
    try:
        return rehearse(job, recorder)
    except Exception as err:
        return {"rank": job.rank, "error": f"{type(err).__name__}: {err}", "phase": recorder.phase, "at": _where(err)}
    finally:
        _recorders.pop()


def _where(err: BaseException) -> list[str]:
    """The operation, if it has a name, and the frames of Megatron and mgrpo, innermost first."""
    frames = [
        f"{frame.filename.rpartition('site-packages/')[2]}:{frame.lineno} {frame.name}"
        for frame in traceback.extract_tb(err.__traceback__)
        if ("/megatron/" in frame.filename or "/mgrpo/" in frame.filename) and "/rehearsal/" not in frame.filename
    ]
    return [*getattr(err, "__notes__", []), *reversed(frames)]


def serve(requests: Iterable[str], found: TextIO) -> None:
    """Answer all requests; the first one's memory is the device's. Where none can be answered, `refused` says why."""
    is_prepared = False
    for line in requests:
        request = json.loads(line)
        try:
            if not is_prepared:
                prepare(request["memory"])
                is_prepared = True
            reply = answer(request)
        except cuda.RehearsalError as err:
            reply = {"refused": str(err)}
        print(json.dumps(reply), file=found, flush=True)


def main() -> None:
    # What libraries print must not come between the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
