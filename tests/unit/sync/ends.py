"""Senders and receivers of a small model, made from the rule table alone."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

from mgrpo.config.derived import infer_layout_of, layout_of
from mgrpo.layout import InferLayout, Layout
from mgrpo.models.family import shape_of
from mgrpo.models.placement.box_table import HeldBoxes
from mgrpo.models.placement.boxes import Box
from mgrpo.models.placement.mlp_rows import is_frozen
from mgrpo.models.shape import ModelShape
from mgrpo.models.table import engine_boxes, hf_tensors, local_parameters, training_boxes
from mgrpo.moving import load_file
from mgrpo.planner.plan_command import shipped_config
from mgrpo.sync import shared
from mgrpo.sync.channel import Sender
from mgrpo.sync.group import connect_store
from mgrpo.sync.vllm_plugin.receiver import Receiver
from tests.unit.models.test_table import MODELS

HOST = "127.0.0.1"
CONFIGS = Path(__file__).parents[3] / "examples" / "configs"
SHIPPED = {"7b_8gpu": 8, "32b_16x8": 128, "30b_a3b_4x8": 16}
"""Pairs of a training rank and a worker that exchange weights."""


def shipped(name: str) -> tuple[ModelShape, Layout, InferLayout]:
    """Model and layouts of a shipped configuration."""
    config = load_file(CONFIGS / f"{name}.yaml", world_size=1)
    model = shape_of(shipped_config(config.model.model_name_or_path))
    return model, layout_of(config, sum(config.parallel.num_learners_per_node)), infer_layout_of(config.engine)


def sharded_holdings(model: ModelShape, layout: Layout) -> list[list[Box]]:
    """What ZeRO-2 and 3 leave to each rank: an even run of every parameter's elements."""
    found = []
    for rank in range(layout.world_size):
        place = layout.coordinate(rank)
        shard, shards = (place.data * layout.context + place.context) % layout.num_shards, layout.num_shards
        boxes = []
        for parameter in local_parameters(model, layout, rank).values():
            size = torch.Size(parameter.shape).numel()
            boxes += [piece.box for piece in parameter.run(shard * size // shards, (shard + 1) * size // shards)]
        found.append(boxes)
    return found


def whole(model: ModelShape, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Every HF tensor with random values."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(own_dtype(name, dtype))
        for name, shape in hf_tensors(model).items()
    }


def own_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The type of a tensor of a model in `dtype`."""
    return torch.float32 if is_frozen(name) else dtype


def view(tensors: dict[str, torch.Tensor], box: Box) -> torch.Tensor:
    """The slice `box` of the whole tensors."""
    return tensors[box.name][tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))]


def make_senders(model: ModelShape, train: Layout, infer: InferLayout, tensors: Any, **settings: Any) -> list[Sender]:
    """One for every training rank; its live weights are slices of `tensors`. Each has a connection to the store of its own."""
    boxes = settings.pop("holdings", None) or training_boxes(model, train)
    holdings = HeldBoxes.of(boxes)
    return [
        Sender(
            [(box, view(tensors, box)) for box in own],
            holdings=holdings,
            model=model,
            train_layout=train,
            infer_layout=infer,
            rank=rank,
            store=connect_store(HOST, settings["port"], settings["timeout_s"]),
            host=HOST,
            **settings,
        )
        for rank, own in enumerate(boxes)
    ]


def make_receiver(
    model: ModelShape, infer: InferLayout, worker: int, dtype: torch.dtype, sender: Sender, device: str = "cpu"
) -> tuple[Any, Receiver]:
    """A worker, counted through all engines, with weights of its own; returns these as well."""
    engine, number = divmod(worker, infer.workers)
    live = [
        (box, torch.full(box.shape, 9.0, dtype=own_dtype(box.name, dtype), device=device))
        for box in engine_boxes(model, infer)[number]
    ]
    return live, Receiver(live, worker=number, invitation=sender.invitation(engine))


def sent_bytes(sender: Sender) -> int:
    """By one sync."""
    messages = (each for own in sender.channels.values() for round_ in own.rounds for each in round_.values())
    return sum(message.size for message in messages) * sender.dtype.itemsize


def die_after_messages(role: str, port: int, number: int) -> None:
    """The training rank 0 of one, or the only worker, that a `kill -9` ends after so many messages. A process of its own."""
    model, train, infer = small()
    sender = make_senders(model, train, infer, whole(model, torch.float32, seed=0), **settings(port))[0]
    tell = shared.SharedMemoryLink._tell

    def tell_and_die(link: shared.SharedMemoryLink) -> None:
        tell(link)
        if link.count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    shared.SharedMemoryLink._tell = tell_and_die  # type: ignore[method-assign]
    if role == "learner":
        sender.join({0: 0})
        sender.send(1, [0])
    else:
        make_receiver(model, infer, 0, torch.float32, sender)[1].receive(1)


def small() -> tuple[ModelShape, Layout, InferLayout]:
    """A model, one training rank and one worker."""
    return shape_of(MODELS["qwen3"]), Layout(world_size=1), InferLayout()


def settings(port: int, **more: Any) -> dict[str, Any]:
    """Of senders."""
    return {"dtype": torch.float32, "port": port, "bucket_bytes": 1 << 12, "timeout_s": 60, **more}


def receive_from_learner(port: int, versions: int, device: str) -> None:
    """The only worker, which shares the device with training rank 0. A process of its own."""
    model, train, infer = small()
    sender = make_senders(model, train, infer, whole(model, torch.bfloat16, seed=0), **settings(port, share_gpus=True))[
        0
    ]
    _, receiver = make_receiver(model, infer, 0, torch.bfloat16, sender, device)
    for version in range(versions):
        receiver.receive(version)
        receiver.report_digests(version)
    receiver.report_digests(versions)
    receiver.store.get("done")
    receiver.close()
