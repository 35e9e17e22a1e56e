"""Which invitations an engine refuses: those of a second run, and those to another model."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.sync.vllm_plugin.receiver import Receiver
from mgrpo.sync.vllm_plugin.transfer_engine import check_free, check_model
from tests.e2e.launching import ROOT

MODEL = str(ROOT / "examples/quickstart/model")
TRIAL = {"model": {}}


@pytest.fixture
def store() -> Iterator[socket.socket]:
    """Of another run: it accepts connections as long as its rank 0 lives."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def receiver(store: socket.socket, *, is_open: bool = True) -> SimpleNamespace:
    """Of that run."""
    return SimpleNamespace(place=store.getsockname(), is_open=is_open)


def test_an_engine_serves_one_run_at_a_time(store):
    """Two would overwrite each other's weights, and neither would notice."""
    other = {"host": "127.0.0.1", "port": 1}
    for invitation in (TRIAL, other):
        with pytest.raises(RuntimeError, match=r"takes part in another run, whose rank 0 is at 127\.0\.0\.1:"):
            check_free(receiver(store), invitation)


def test_a_run_may_invite_its_engine_again(store):
    """After a failure it forms the transfer anew."""
    host, port = store.getsockname()
    check_free(receiver(store), {"host": host, "port": port})


def test_a_run_that_has_gone_does_not_count(store):
    """It was killed, or its transfer has failed: somebody else may have the engine."""
    check_free(None, TRIAL)
    check_free(receiver(store, is_open=False), TRIAL)
    gone = receiver(store)
    store.close()
    check_free(gone, TRIAL)


def test_the_model_must_be_the_runs():
    """The plan would find neither its tensors nor their sizes."""
    shape = shape_of(read_hf_config(MODEL))
    config = SimpleNamespace(model=MODEL)
    check_model(config, json.loads(json.dumps(asdict(shape))))
    other = replace(shape, vocab=shape.vocab + 1, num_layers=7)
    with pytest.raises(
        ValueError, match=r"is not the run's: num_layers=3 instead of 7, vocab=64 instead of 65; start"
    ) as failure:
        check_model(config, asdict(other))
    assert MODEL in str(failure.value)


def test_a_model_of_the_hub_is_judged_by_what_transformers_read():
    """Such an engine has no folder of that name."""
    from transformers import AutoConfig

    config = SimpleNamespace(model="someone/model", hf_config=AutoConfig.from_pretrained(MODEL))
    check_model(config, asdict(shape_of(read_hf_config(MODEL))))


def test_a_plan_for_fewer_workers_than_the_engine_has_is_refused():
    """A server may have been started with others than the run was told."""
    last = object.__new__(Receiver)
    last.worker = 2
    with pytest.raises(ValueError, match=r"sends to 2 workers of the engine, which has a worker number 2"):
        last._incoming({"slices": ["", ""]})
