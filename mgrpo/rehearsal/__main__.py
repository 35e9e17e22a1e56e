"""The process of rehearsals: reads requests from stdin, a line of JSON each, and answers each with a line of JSON.

Request: `argv` of the run, the model's `hf_config`, the number of `learners`, `rank`, `packs`, and the device's `memory`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import traceback
import warnings
from collections.abc import Iterable
from typing import Any, TextIO

from mgrpo.config import Config
from mgrpo.config.derived import layout_of
from mgrpo.config.fused_kernels import uses_transformer_engine
from mgrpo.models.family import shape_of
from mgrpo.moving import parse
from mgrpo.rehearsal import cuda, kernel_shapes
from mgrpo.rehearsal.eight_bits import package
from mgrpo.rehearsal.recorder import Recorder

STAND_IN = (
    f"layers are a stand-in for those of Transformer Engine {package.VERSION}: it holds, sends and multiplies what their source says "
    "for Hopper, without having been compared with a GPU"
)
_recorders: list[Recorder] = []


def prepare(memory_bytes: int, *, stands_in: bool = False) -> None:
    """Set this process up to rehearse, and for nothing else.

    Args:
        stands_in: for Transformer Engine, see `needs_stand_in`.
    """
    warnings.filterwarnings("ignore")
    cuda.install(memory_bytes=memory_bytes, waits=lambda what: _recorders[-1].wait(what) if _recorders else None)
    kernel_shapes.install()
    if stands_in:
        package.install()
    from mgrpo.parallel import backend

    backend.install()


def needs_stand_in(config: Config) -> bool:
    """True if the run's layers are Transformer Engine's, which is absent here or needs a GPU."""
    settings = config.parallel
    return uses_transformer_engine(settings, has_cuda=True) or settings.fp8 != "none" or settings.tp_comm_overlap


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Result of the rehearsal; of a failed step, `error` and `at`, its place."""
    from mgrpo.rehearsal.rehearsed_step import RehearsalJob, rehearse

    config = parse(request["argv"])
    stands_in = needs_stand_in(config)
    # Triton's kernels take no tensors without values; those that torch computes with instead keep as much.
    parallel = dataclasses.replace(config.parallel, fused_layers=False)
    if stands_in:
        parallel = dataclasses.replace(parallel, transformer_impl="transformer_engine")
    config = dataclasses.replace(config, parallel=parallel)
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
        found = rehearse(job, recorder)
        return found | {"remarks": [*found["remarks"], STAND_IN]} if stands_in else found
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
    """Answer all requests; the first one's memory is the device's. If this machine cannot rehearse, `refused` is the reason."""
    is_prepared = False
    for line in requests:
        request = json.loads(line)
        try:
            if not is_prepared:
                prepare(request["memory"], stands_in=needs_stand_in(parse(request["argv"])))
                is_prepared = True
            reply = answer(request)
        except cuda.RehearsalError as err:
            reply = {"refused": str(err)}
        print(json.dumps(reply), file=found, flush=True)


def main() -> None:
    # Prints of libraries must not mix with the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
