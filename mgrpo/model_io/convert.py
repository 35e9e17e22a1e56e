"""Conversions of a model between Hugging Face and Megatron folders: exact, or refused with nothing written.

A few megabytes at a time pass through memory for a model of any size; only the comparison of logits holds all of it.
The commands are `mgrpo convert hf-to-megatron` and `mgrpo convert megatron-to-hf`, see docs/conversion.md.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mgrpo.checkpoint.boxes import described
from mgrpo.checkpoint.manifest import DamagedCheckpoint, OtherVersion
from mgrpo.checkpoint.reader import open_checkpoint
from mgrpo.checkpoint.shard import FILE_BYTES
from mgrpo.layout import Layout
from mgrpo.model_io.hf_folder import (
    HfFolder,
    carry,
    header_bytes,
    new_folder,
    same_bits,
    tensor_dtypes,
    write_hf,
)
from mgrpo.model_io.megatron_checkpoint import MegatronCheckpoint, checkpoint_bytes, write_checkpoint
from mgrpo.model_io.megatron_folder import MegatronFolder, is_megatron_folder, stored_bytes, write_megatron
from mgrpo.models.cuts import layout_problems
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import is_on_hub, read_hf_config
from mgrpo.models.hf_files.checksums import sum_problems
from mgrpo.models.hf_files.hub import Part, fetch
from mgrpo.models.hf_files.weight_files import MEGATRON, left_out_note, torch_dist_folder
from mgrpo.models.memory import DTYPE_BYTES
from mgrpo.models.placement.boxes import Box, Shape
from mgrpo.models.shape import ModelShape
from mgrpo.models.table import hf_tensors
from mgrpo.policy.weights import Read

TOLERANCE = 1e-3
"""Share of the largest logit by which two float32 models may differ through rounding."""
MASTER = "master"
"""The name of the weights in a run's checkpoint, in float32."""


def hf_to_megatron(
    hf: str | Path,
    out: str | Path,
    layout: Layout | None,
    *,
    file_bytes: int = FILE_BYTES,
    verify: bool = False,
    tolerance: float = TOLERANCE,
) -> None:
    """Write the model of a Hugging Face folder as the ranks of `layout` hold it.

    Args:
        layout: None: a checkpoint in Megatron-core's own format, torch_dist, which is the same for every layout.
    Raises:
        ValueError: the model cannot be kept exactly, or not in this layout; nothing is written.
    """
    hf = _folder(hf, "model")
    config = read_hf_config(hf)
    shape = shape_of(config)
    if layout and (problems := layout.problems() or list(layout_problems(config, layout))):
        raise ValueError("; ".join(problems))
    with new_folder(Path(out)) as folder:
        source = HfFolder(hf, shape)
        if changed := list(sum_problems(hf)):
            raise ValueError("; ".join(changed))
        sizes = stored_bytes(shape, layout, source.dtypes) if layout else checkpoint_bytes(shape, source.dtypes)
        _tell_left_out(source.left_out, hf)
        with _Report(out, sizes) as report:
            carry(hf, folder)
            write = partial(write_megatron, layout=layout) if layout else write_checkpoint
            write(source.read, shape, dtypes=source.dtypes, folder=folder, file_bytes=file_bytes, tell=report.advance)
            report.written(folder)
            if verify:
                written = MegatronFolder(folder) if layout else MegatronCheckpoint(folder, shape)
                report.compare(written.boxes(), source.read)
                written.check_sums()  # also of the padding
                report.compare_logits(folder, hf, tolerance)


def megatron_to_hf(
    checkpoint: str | Path,
    out: str | Path,
    *,
    hf: str | Path | None = None,
    dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
    verify: bool = False,
    tolerance: float = TOLERANCE,
) -> None:
    """Write a Hugging Face folder with the weights of a Megatron folder, or of a run's checkpoint `.../step_N`.

    Args:
        checkpoint: a Megatron folder, a checkpoint of Megatron-core in format torch_dist, or one of our runs.
        hf: folder or name on the Hub that gives configuration and tokenizer; default the Megatron folder itself, or the model that the run
            started from.
        dtype: of the written weights; default the Megatron folder's own, or the configuration's.
    Raises:
        ValueError: something is damaged or does not match; nothing is written.
    """
    with new_folder(Path(out)) as folder:
        beside = _folder(hf, "tokenizer") if hf else None
        source = _source_of(checkpoint)(checkpoint, beside)
        dtypes = tensor_dtypes(source.shape, dtype) if dtype else source.dtypes
        num_bytes = sum(header_bytes((dtypes[name], full)) for name, full in hf_tensors(source.shape).items())
        with _Report(out, num_bytes) as report:
            carry(source.beside, folder, dtype=dtype)
            write_hf(source.read, source.shape, dtypes, folder, file_bytes=file_bytes, tell=report.advance)
            report.written(folder)
            if verify:
                rounded = ((box, values.to(dtypes[box.name])) for box, values in source.boxes())
                report.compare(rounded, HfFolder(folder, source.shape).read)
                report.compare_logits(folder, folder, tolerance)


def _tell_left_out(names: Sequence[str], folder: str | Path) -> None:
    if names:
        print(left_out_note(names, folder))


def _folder(hf: str | Path, part: Part) -> Path:
    """The folder, or where a name on the Hub leads to."""
    return fetch(str(hf), part=part).folder if is_on_hub(str(hf)) else Path(hf)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Weights to export, and the folder with the files to copy with them."""

    beside: Path
    shape: ModelShape
    dtypes: Mapping[str, torch.dtype]
    """The type in which each tensor is exported."""
    read: Read
    boxes: Callable[[], Iterable[tuple[Box, torch.Tensor]]]
    """Everything that is stored."""


def _source_of(checkpoint: str | Path) -> Callable[[str | Path, Path | None], _Source]:
    """The reader of folders of this format."""
    if is_megatron_folder(checkpoint):
        return _megatron_source
    return _torch_dist_source if torch_dist_folder(checkpoint) else _run_source


def _megatron_source(path: str | Path, hf: Path | None) -> _Source:
    stored, beside = MegatronFolder(path), hf or Path(path)
    _check_same(hf_tensors(stored.shape), path, beside)
    stored.check_sums()
    return _Source(beside=beside, shape=stored.shape, dtypes=stored.dtypes, read=stored.read, boxes=stored.boxes)


def _torch_dist_source(path: str | Path, hf: Path | None) -> _Source:
    folder = torch_dist_folder(path)
    assert folder is not None
    beside = hf or next((own for own in (Path(path), folder.parent) if (own / "config.json").is_file()), None)
    if beside is None:
        raise ValueError(f"{path} has no config.json; give the folder with its config.json and tokenizer: --hf DIR")
    stored = MegatronCheckpoint(path, shape_of(read_hf_config(beside)))
    _tell_left_out(stored.left_out, path)
    stored.check_sums()
    return _Source(beside=beside, shape=stored.shape, dtypes=stored.dtypes, read=stored.read, boxes=stored.boxes)


def _run_source(path: str | Path, hf: Path | None) -> _Source:
    try:
        checkpoint = open_checkpoint(path)
    except (DamagedCheckpoint, OtherVersion):
        raise
    except ValueError as err:
        raise ValueError(f"{path} is neither a Megatron folder (no {MEGATRON}) nor a run's checkpoint: {err}") from err
    if checkpoint.state.get("learner", {}).get("adapters"):
        raise ValueError(
            f"{path} holds adapters, not the model; continue the run, which exports the merged model and the adapter to hf/step_N"
        )
    beside: str | Path | None = hf or checkpoint.state.get("model_name_or_path")
    if not hf and (commit := checkpoint.state.get("commits", {}).get("model_name_or_path")):
        beside = fetch(str(beside), revision=commit, part="tokenizer").folder
    if not beside or not Path(beside).is_dir():
        where = (
            f"started from {beside}, which is not a folder" if beside else "does not say which model it started from"
        )
        raise ValueError(f"{path} {where}; give the folder with its config.json and tokenizer: --hf DIR")
    beside = Path(beside)
    _check_same({name: checkpoint.shape(MASTER, name) for name in checkpoint.names(MASTER)}, path, beside)
    checkpoint.verify()
    config = read_hf_config(beside)
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in DTYPE_BYTES:
        choices = ", ".join(DTYPE_BYTES)
        raise ValueError(f"the config.json in {beside} has dtype {name!r}; choose one of {choices}: --dtype")
    shape, read = shape_of(config), partial(checkpoint.read, MASTER)
    boxes = [Box(name, (0,) * len(full), full) for name, full in hf_tensors(shape).items()]
    return _Source(
        beside=beside,
        shape=shape,
        dtypes=tensor_dtypes(shape, getattr(torch, name)),
        read=read,
        boxes=lambda: ((box, read(box)) for box in boxes),
    )


def _check_same(tensors: Mapping[str, Shape], path: str | Path, beside: Path) -> None:
    """Raise ValueError unless these are the tensors of the configuration in `beside`."""
    expected = hf_tensors(shape_of(read_hf_config(beside)))
    for name in sorted(tensors.keys() | expected.keys()):
        found, wanted = (list(own[name]) if name in own else "missing" for own in (tensors, expected))
        if found != wanted:
            raise ValueError(
                f"{path} holds another model than the config.json in {beside} describes: {name} is {found} instead of "
                f"{wanted}; give the model's own folder: --hf DIR"
            )


class _Report:
    """Progress of a conversion, and its size, time and memory."""

    def __init__(self, out: str | Path, num_bytes: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        self.out, self.num_bytes = out, num_bytes
        self.start, self.memory_before = time.monotonic(), _memory_bytes("VmRSS")
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.progress.add_task("writing", total=num_bytes)

    def __enter__(self) -> _Report:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def advance(self, num_bytes: int) -> None:
        """`num_bytes` more are written."""
        self.progress.advance(self.task, num_bytes)

    def written(self, folder: Path) -> None:
        """Print size, time and memory, once all weights are in `folder`."""
        num_files = sum(path.suffix in (".safetensors", ".distcp") for path in folder.rglob("*"))
        peak = _memory_bytes("VmHWM")
        print(
            f"{self.out}: {self.num_bytes / 1e6:,.1f} MB of weights in {num_files} "
            f"{'files' if num_files > 1 else 'file'}, {time.monotonic() - self.start:.1f} s, peak memory "
            f"{peak / 1e6:,.0f} MB, of which {(peak - self.memory_before) / 1e6:,.0f} MB for the conversion"
        )

    def compare(self, boxes: Iterable[tuple[Box, torch.Tensor]], read: Read) -> None:
        """Compare every box bit by bit; ValueError names the first that differs."""
        self.progress.reset(self.task, description="comparing", total=None)
        names, num_bytes = set(), 0
        for box, values in boxes:
            if not same_bits(values, read(box)):
                raise ValueError(f"{described(box)} does not come back as it was; nothing is written")
            names.add(box.name)
            num_bytes += values.nbytes
            self.progress.advance(self.task, values.nbytes)
        print(f"verified: {len(names)} tensors, {num_bytes / 1e6:,.1f} MB, equal in every bit")

    def compare_logits(self, model: Path, hf: Path, tolerance: float) -> None:
        """Compare training's model of folder `model` with transformers' of folder `hf`; ValueError if they differ."""
        from mgrpo.model_io.logit_agreement import compare_logits

        self.progress.reset(self.task, description="computing logits", total=None)
        found = compare_logits(model, hf)
        differ = (
            f"logits of {found.rows} tokens differ from transformers' by at most {found.difference:.2g}, the largest is"
        )
        if not found.within(tolerance):
            raise ValueError(
                f"{differ} {found.largest:.3g}: more than --tolerance {tolerance:g} allows; nothing is written"
            )
        print(f"verified: {differ} {found.largest:.3g}; peak memory {_memory_bytes('VmHWM') / 1e6:,.0f} MB")


def _memory_bytes(field: str) -> int:
    """Resident memory of this process, now ("VmRSS") or at its peak ("VmHWM"); without /proc always the peak."""
    with contextlib.suppress(FileNotFoundError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


USAGE = """usage: mgrpo convert {hf-to-megatron|megatron-to-hf} ...

Converts weights between Hugging Face and Megatron folders, bit for bit.

  hf-to-megatron   a Hugging Face model into the ranks of a Megatron layout, or into a checkpoint of Megatron-core
  megatron-to-hf   a Megatron folder, or a run's checkpoint, into a Hugging Face folder

mgrpo convert COMMAND --help lists the flags of each.
"""


def convert_command(argv: Sequence[str]) -> int:
    """`mgrpo convert hf-to-megatron ...` or `mgrpo convert megatron-to-hf ...`."""
    commands = {"hf-to-megatron": hf_to_megatron_command, "megatron-to-hf": megatron_to_hf_command}
    if argv and argv[0] in commands:
        return commands[argv[0]](argv[1:], prog=f"mgrpo convert {argv[0]}")
    asked = bool(argv) and argv[0] in ("-h", "--help")
    (sys.stdout if asked else sys.stderr).write(USAGE)
    return 0 if asked else 2


def hf_to_megatron_command(argv: Sequence[str], *, prog: str) -> int:
    """0 when the folder was written, 2 when it was refused, 1 when a file could not be read or written."""
    parser = _parser(
        prog,
        "Writes a Hugging Face model as the ranks of a Megatron layout hold it, or as Megatron-core does; exact, or refused.",
    )
    parser.add_argument(
        "--hf",
        metavar="DIR",
        required=True,
        help="Hugging Face folder (config.json, safetensors, tokenizer), or OWNER/NAME on the Hub",
    )
    _add_common(parser)
    parser.add_argument(
        "--format",
        choices=("safetensors", "torch_dist"),
        default="safetensors",
        help="our own files of each rank's weights, or Megatron-core's checkpoint for any layout (%(default)s)",
    )
    for axis, (flag, text) in _LAYOUT_FLAGS.items():
        parser.add_argument(f"--{flag}", dest=axis, type=int, metavar="N", help=text)
    args = parser.parse_args(argv)
    sizes = {axis: size for axis in _LAYOUT_FLAGS if (size := getattr(args, axis)) is not None}
    return _run(prog, lambda: hf_to_megatron(args.hf, args.out, _layout(args.format, sizes), **_common(args)))


def _layout(format: str, sizes: Mapping[str, Any]) -> Layout | None:
    """The layout that flags describe; None for a format without one."""
    if format == "torch_dist":
        if sizes:
            flag = _LAYOUT_FLAGS[next(iter(sizes))][0]
            raise ValueError(f"--{flag} does not apply to --format torch_dist, which every layout loads; leave it out")
        return None
    pipeline, tensor, expert = (max(sizes.get(axis, 1), 1) for axis in ("pipeline", "tensor", "expert"))
    return Layout(world_size=pipeline * math.lcm(tensor, expert), **sizes)


_LAYOUT_FLAGS = {
    "tensor": ("tensor_model_parallel_size", "ranks that share every matrix"),
    "pipeline": ("pipeline_model_parallel_size", "pipeline stages"),
    "expert": ("expert_model_parallel_size", "ranks that experts are distributed over"),
    "virtual_pipeline": ("virtual_pipeline_model_parallel_size", "chunks of each pipeline stage"),
    "first_stage_layers": ("num_layers_in_first_pipeline_stage", "layers of the first stage, if it differs"),
    "last_stage_layers": ("num_layers_in_last_pipeline_stage", "layers of the last stage, if it differs"),
}
"""The axes that can be chosen: their flags, as in training, and their meaning."""


def megatron_to_hf_command(argv: Sequence[str], *, prog: str) -> int:
    """0 when the folder was written, 2 when it was refused, 1 when a file could not be read or written."""
    parser = _parser(prog, "Writes a Megatron folder, or the weights of a run's checkpoint, as a Hugging Face folder.")
    parser.add_argument(
        "--checkpoint",
        metavar="DIR",
        required=True,
        help="Megatron folder of either format, or a run's OUTPUT_DIR/checkpoints/step_N",
    )
    _add_common(parser)
    parser.add_argument(
        "--hf",
        metavar="DIR",
        help="folder or name on the Hub with config.json and tokenizer; default the checkpoint or its model",
    )
    parser.add_argument("--dtype", choices=DTYPE_BYTES, help="type of the written weights; default the model's own")
    args = parser.parse_args(argv)
    dtype = args.dtype and getattr(torch, args.dtype)
    return _run(prog, partial(megatron_to_hf, args.checkpoint, args.out, hf=args.hf, dtype=dtype, **_common(args)))


def _parser(prog: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="DIR", required=True, help="folder to write; must be new or empty")
    parser.add_argument(
        "--max_file_mib",
        type=_size,
        default=FILE_BYTES >> 20,
        metavar="N",
        help="most MiB of weights in a file (%(default)s)",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare every written tensor bit by bit, and logits with transformers'; holds the whole model in float32",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        help="allowed difference, as a share of the largest logit (%(default)s)",
    )


def _common(args: argparse.Namespace) -> dict[str, Any]:
    return {"file_bytes": args.max_file_mib << 20, "verify": args.verify, "tolerance": args.tolerance}


def _size(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number above 0")
    return int(text)


def _run(prog: str, convert: Callable[[], None]) -> int:
    try:
        convert()
    except (ValueError, OSError) as err:
        sys.stderr.write(f"{prog}: {err}\n")
        return 2 if isinstance(err, ValueError) else 1
    return 0
