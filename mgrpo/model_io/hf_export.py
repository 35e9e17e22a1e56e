"""The trained model as a Hugging Face folder that transformers and vLLM load, adapters merged into its weights.

Tensors travel one by one from the ranks that hold them to rank 0, which writes each before it receives the next: no rank
holds more than one tensor besides its own weights. Adapters are also in a separate folder, which peft and vLLM load.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from mgrpo.checkpoint.space import OutputError, no_room, with_room
from mgrpo.model_io.hf_folder import Header, carry, header_bytes, tensor_dtypes, write_weights
from mgrpo.model_io.peft_folder import write_peft
from mgrpo.models.adapters import adapter_tensors
from mgrpo.models.hf_files.checksums import write_sums
from mgrpo.models.peft import ADAPTER
from mgrpo.models.placement.boxes import Box, Shape
from mgrpo.models.table import hf_tensors
from mgrpo.parallel.gather import gather_json
from mgrpo.policy.lora_policy import MergedSlice
from mgrpo.policy.parameters import gather_boxes
from mgrpo.policy.policy import Policy


def export_hf(
    policy: Policy,
    source: str | Path,
    folder: str | Path,
    *,
    group: dist.ProcessGroup,
    base: str | None = None,
    add: Callable[[Path], object] = lambda folder: None,
    make_way: Callable[[Path], object] = lambda folder: shutil.rmtree(folder, ignore_errors=True),
) -> None:
    """Write the policy's weights to `folder`, with configuration and tokenizer of `source`.

    Every learner rank must call. `group` is a gloo group of all learners. The folder appears complete or not at all.

    Args:
        base: base model to record in an adapter, a name on the Hub for example; None: `source`.
        add: on rank 0, writes more files to the folder in its argument.
        make_way: on rank 0, moves or deletes an existing `folder`, when the export is complete.
    Raises:
        OutputError: on all ranks, when the folder could not be written.
    """
    folder, source = Path(folder), Path(source)
    # Files hold float32 before shorter types.
    dtypes = dict(sorted(tensor_dtypes(policy.shape, policy.dtype).items(), key=lambda each: -each[1].itemsize))
    model = _Gathering(hf_tensors(policy.shape), policy.live_boxes(), policy, dtypes, group)
    adapters = None
    if policy.lora:
        tensors = adapter_tensors(policy.shape, policy.lora)
        adapters = _Gathering(tensors, policy.adapter_boxes(), policy, dict.fromkeys(tensors, torch.float32), group)
    gatherings = [model, adapters] if adapters else [model]

    def add_more(partial: Path) -> None:
        if adapters and policy.lora:
            of = base or str(source.absolute())
            write_peft(partial / ADAPTER, adapters.whole, policy.shape, policy.lora, base=of)
        add(partial)

    problem, cause = None, None
    if dist.get_rank() == 0:
        try:
            headers = {name: (dtype, model.shapes[name]) for name, dtype in dtypes.items()}
            _write(
                folder, source, policy.dtype, headers, model.whole, add_more, make_way, num_bytes=export_bytes(policy)
            )
        except Exception as err:
            problem, cause = f"the model could not be exported to {folder}: {err}", err
        for gathering in gatherings:
            gathering.finish()
    else:
        for gathering in gatherings:
            gathering.send()
    problem = gather_json(problem, group)[0]
    if problem:
        raise OutputError(problem) from cause


def export_bytes(policy: Policy) -> int:
    """Size of the tensors that `export_hf` writes."""
    lora = policy.lora
    adapters = adapter_tensors(policy.shape, lora).values() if lora else ()
    dtypes = tensor_dtypes(policy.shape, policy.dtype)
    return sum(header_bytes((dtypes[name], shape)) for name, shape in hf_tensors(policy.shape).items()) + sum(
        header_bytes((torch.float32, shape)) for shape in adapters
    )


def _write(
    folder: Path,
    source: Path,
    dtype: torch.dtype,
    tensors: Mapping[str, Header],
    values: Callable[[str], list[torch.Tensor]],
    add: Callable[[Path], object],
    make_way: Callable[[Path], object],
    *,
    num_bytes: int,
) -> None:
    if problem := no_room(folder, num_bytes):
        raise OSError(problem)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        carry(source, partial, dtype=dtype)
        sums = write_weights(tensors, values, partial)
        add(partial)
        write_sums(partial, sums)
        make_way(folder)
        os.replace(partial, folder)
    except Exception as err:
        shutil.rmtree(partial, ignore_errors=True)
        raise OSError(with_room(err, folder, num_bytes)) from err


class _Gathering:
    """Tensors that ranks hold in boxes, brought to rank 0 one by one, in the order of `dtypes`. Every rank makes one."""

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        held: Iterable[tuple[Box, torch.Tensor | MergedSlice]],
        policy: Policy,
        dtypes: Mapping[str, torch.dtype],
        group: dist.ProcessGroup,
    ) -> None:
        self.shapes, self.dtypes, self.group = shapes, dtypes, group
        self._held = dict(held)
        own = [(0, box) for box in self._held]
        # For each tensor its boxes, each with the lowest rank that holds it.
        self._owners: dict[str, dict[Box, int]] = {}
        for rank, boxes in enumerate(gather_boxes(own, policy.shape, group)):
            for _, box in boxes:
                self._owners.setdefault(box.name, {}).setdefault(box, rank)
        self._pending = iter(dtypes)
        self._merged: dict[Callable[[], torch.Tensor], torch.Tensor] = {}

    def whole(self, name: str) -> list[torch.Tensor]:
        """Rank 0: the next tensor, in one block."""
        assert next(self._pending) == name
        return [self._gather(name)]

    def finish(self) -> None:
        """Rank 0, after an error: the others send everything."""
        for name in self._pending:
            self._gather(name)

    def send(self) -> None:
        """Send this rank's boxes of each tensor, on all ranks other than 0."""
        for name in self.dtypes:
            for box, owner in self._owners[name].items():
                if owner == dist.get_rank():
                    dist.send(self._values(box).contiguous(), 0, group=self.group)

    def _gather(self, name: str) -> torch.Tensor:
        shape = self.shapes[name]
        whole, everything = torch.empty(shape, dtype=self.dtypes[name]), Box(name, (0,) * len(shape), shape)
        for box, owner in self._owners[name].items():
            if owner == 0:
                part = self._values(box)
            else:
                part = torch.empty(box.shape, dtype=self.dtypes[name])
                dist.recv(part, owner, group=self.group)
            whole[box.within(everything)] = part
        return whole

    def _values(self, box: Box) -> torch.Tensor:
        held = self._held[box]
        if isinstance(held, MergedSlice):
            if held.weight not in self._merged:
                # An expert's matrices are of two weights, which all experts have in common.
                self._merged = dict([*self._merged.items()][-1:]) | {held.weight: held.weight()}
            held = self._merged[held.weight][held.region]
        return held.to("cpu", self.dtypes[box.name])
