"""An engine that has not met the one above it."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from mgrpo.sync.channel import unserved_key
from mgrpo.sync.vllm_plugin.receiver import Receiver


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_that_has_not_met_the_one_above_says_so_in_time(fails):
    """Gloo tries for longer than an engine has to answer: rank 0 would take this one for lost, which is well."""
    told: dict[str, str] = {}
    source: Future[object] = Future()
    if fails:
        source.set_exception(RuntimeError("it is not there"))
    receiver = object.__new__(Receiver)
    vars(receiver).update(
        live=SimpleNamespace(device=torch.device("cpu")),
        store=SimpleNamespace(set=told.__setitem__),
        **{"engine": 5, "generation": 2, "worker": 0, "upstream": (1, 3), "timeout_s": 0.4, "relays": {}},
        is_open=True,
        _source=source,
    )
    assert receiver.receive(7) is False and not receiver.is_open
    assert [*told] == [unserved_key(5, 2, 7)]
    # One that is late is of no use any more.
    closed: list[bool] = []
    if not fails:
        source.set_result(SimpleNamespace(close=lambda: closed.append(True)))
        assert closed == [True]
