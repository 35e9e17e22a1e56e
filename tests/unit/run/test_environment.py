"""What a rank learns from its launcher, and sets before torch is imported."""

from __future__ import annotations

import pytest

from mgrpo.config import from_values
from mgrpo.run import environment


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """Without a launcher; what a test sets ends with it."""
    monkeypatch.setattr(environment.os, "environ", {})
    return environment.os.environ


@pytest.mark.parametrize(
    ("tensor", "zero_stage", "expected"), [(2, 1, "1"), (2, 0, "1"), (1, 1, None), (2, 2, None), (4, 3, None)]
)
def test_one_queue_of_the_gpu_is_for_tensor_parallelism_only(own_environment, tensor, zero_stage, expected):
    """With one queue ZeRO-3 gathers the next layer after this one instead of during it."""
    environment.prepare_environment(from_values({"tensor_model_parallel_size": tensor, "zero_stage": zero_stage}))
    assert own_environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == expected


@pytest.mark.parametrize("given", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", None])
def test_the_users_allocator_stays(own_environment, given):
    """torch reads one of the two names; setting the other would undo what the user has chosen."""
    if given:
        own_environment[given] = "max_split_size_mb:128"
    environment.prepare_environment(from_values({}))
    found = {name: value for name, value in own_environment.items() if name.endswith("ALLOC_CONF")}
    assert found == ({given: "max_split_size_mb:128"} if given else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ({}, "127.0.0.1"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"}, "127.0.0.1"),
        # Nodes of 2 and 4 learners: 6 // 4 is one machine.
        ({"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"}, "10.0.0.1"),
    ],
)
def test_ranks_meet_on_loopback_only_if_all_of_them_are_on_this_machine(own_environment, place, expected):
    """A node that took itself for the only one would wait on its own loopback interface."""
    own_environment.update(place)
    assert environment.store_host() == expected


@pytest.mark.parametrize(
    ("given", "ray_address", "expected"),
    [
        ({}, None, "lo"),
        ({"MASTER_ADDR": "127.0.0.1"}, None, "lo"),
        ({"MASTER_ADDR": "10.0.0.1"}, None, None),
        ({"MASTER_ADDR": "127.0.0.1"}, "10.0.0.1:6379", None),
        ({"GLOO_SOCKET_IFNAME": "eth1"}, "10.0.0.1:6379", "eth1"),
    ],
)
def test_learners_use_loopback_only_where_the_engines_are_on_their_machine(
    own_environment, given, ray_address, expected
):
    """An engine on another node cannot reach the loopback interface of this one."""
    own_environment.update(given)
    environment.prepare_environment(from_values({"ray_address": ray_address}))
    assert own_environment.get("GLOO_SOCKET_IFNAME") == expected
