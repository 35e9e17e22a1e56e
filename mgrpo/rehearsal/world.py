"""This process as one rank of a world that does not exist: torch's fake process group, which delivers nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from mgrpo.rehearsal.recorder import Recorder


@contextmanager
def rank_of(rank: int, world_size: int, recorder: Recorder, *, caches_shapes: bool) -> Iterator[None]:
    """Run the body as `rank` of `world_size`, recorded.

    Args:
        caches_shapes: the fake mode keeps results of earlier calls, which is four times as fast. Not with
            Megatron-FSDP, which frees storages by resizing them to 0: a view from the cache would resize them back.
    """
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    replaced: dict[str, Any] = {
        # Asked for gloo as well, which has no fake store.
        "new_group": _with_fake_backend(dist.new_group),
        "all_gather_object": _everyone_says_the_same,
    }
    names = vars(dist)
    before = {name: names[name] for name in replaced}
    storage: Any = torch.UntypedStorage
    resize = storage.resize_

    def resize_and_count(self: Any, size: int) -> Any:
        resized = resize(self, size)
        recorder.memory.resize(self)
        return resized

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    fake.cache_enabled = caches_shapes
    names.update(replaced)
    storage.resize_ = resize_and_count
    try:
        with fake, recorder, torch.autograd.graph.saved_tensors_hooks(recorder.keep, lambda tensor: tensor):
            yield
    finally:
        storage.resize_ = resize
        names.update(before)
        dist.destroy_process_group()


def _with_fake_backend(new_group: Any) -> Any:
    return lambda *args, **kwargs: new_group(*args, **kwargs | {"backend": "fake"})


def _everyone_says_the_same(found: list[Any], own: Any, group: Any = None) -> None:
    found[:] = [own] * len(found)
