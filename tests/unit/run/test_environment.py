"""What a rank learns from its launcher, and sets before torch is imported."""

from __future__ import annotations

import pytest

from mgrpo.moving import from_values
from mgrpo.processes import address
from mgrpo.run.ranks import process


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """Without a launcher; what a test sets ends with it."""
    monkeypatch.setattr(process.os, "environ", {})
    return process.os.environ


@pytest.mark.parametrize(
    ("tensor", "zero_stage", "expected"), [(2, 1, "1"), (2, 0, "1"), (1, 1, None), (2, 2, None), (4, 3, None)]
)
def test_one_queue_of_the_gpu_is_for_tensor_parallelism_only(own_environment, tensor, zero_stage, expected):
    """With one queue ZeRO-3 gathers the next layer after this one instead of during it."""
    process.prepare_environment(from_values({"tensor_model_parallel_size": tensor, "zero_stage": zero_stage}))
    assert own_environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == expected


@pytest.mark.parametrize("given", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", None])
def test_the_users_allocator_stays(own_environment, given):
    """torch reads one of the two names; setting the other would undo what the user has chosen."""
    if given:
        own_environment[given] = "max_split_size_mb:128"
    process.prepare_environment(from_values({}))
    found = {name: value for name, value in own_environment.items() if name.endswith("ALLOC_CONF")}
    assert found == ({given: "max_split_size_mb:128"} if given else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


class Ranks(dict[str, bytes]):
    """A store."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    get = dict.__getitem__


@pytest.fixture
def network(monkeypatch) -> dict[str, str]:
    """This machine's address on the way to others, and a name of its own address."""
    ways: dict[str, str] = {}
    monkeypatch.setattr(process, "own_address", ways.__getitem__)
    monkeypatch.setattr(address, "interface_of", {"10.0.0.1": "eth0", "10.0.0.2": "eth1"}.get)
    return ways


@pytest.mark.parametrize("place", [{}, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"}])
def test_ranks_of_one_machine_meet_on_loopback(own_environment, network, place):
    """On another interface the whole network could connect."""
    own_environment.update(place)
    assert process.meeting_host(Ranks()) == "127.0.0.1" and not {*address.INTERFACES} & own_environment.keys()


@pytest.mark.parametrize("given", [None, "ib0"])
@pytest.mark.parametrize("first", ["0", "3"])
def test_ranks_of_several_machines_meet_where_each_reaches_the_other(own_environment, network, first, given):
    """Debian's hosts file calls a machine itself 127.0.1.1: rank 0, and gloo, would wait there for the others in vain.

    Nodes of 4 and 2 learners: 6 // 4 is one machine.
    """
    store = Ranks()
    places = [
        ({"RANK": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, {"node0": "10.0.0.2"}, "10.0.0.2", "eth1"),
        (
            {"RANK": first, "LOCAL_RANK": first, "LOCAL_WORLD_SIZE": "4"},
            {"node0": "127.0.0.1", "10.0.0.2": "10.0.0.1"},
            "10.0.0.1",
            "eth0",
        ),
    ]
    for place, ways, expected, interface in places:
        own_environment.clear()
        own_environment.update(place, WORLD_SIZE="6", MASTER_ADDR="node0")
        if given:
            own_environment |= dict.fromkeys(address.INTERFACES, given)
        network.clear()
        network.update(ways)
        assert process.meeting_host(store) == expected
        assert own_environment["GLOO_SOCKET_IFNAME"] == (given or interface)
        # NCCL takes every interface that begins with a name without this sign.
        assert own_environment["NCCL_SOCKET_IFNAME"] == (given or f"={interface}")


@pytest.mark.parametrize(
    ("given", "engines", "expected"),
    [
        ({}, {}, "lo"),
        ({"MASTER_ADDR": "127.0.0.1"}, {}, "lo"),
        ({"MASTER_ADDR": "10.0.0.1"}, {}, None),
        ({"MASTER_ADDR": "127.0.0.1"}, {"ray_address": "10.0.0.1:6379"}, None),
        ({"GLOO_SOCKET_IFNAME": "eth1"}, {"ray_address": "10.0.0.1:6379"}, "eth1"),
        ({}, {"vllm_mode": "server", "vllm_server_base_url": ["http://127.0.0.1:1", "http://localhost:2"]}, "lo"),
        ({}, {"vllm_mode": "server", "vllm_server_base_url": ["http://127.0.0.1:1", "http://10.0.0.1:2"]}, None),
    ],
)
def test_learners_use_loopback_only_where_the_engines_are_on_their_machine(own_environment, given, engines, expected):
    """An engine on another node cannot reach the loopback interface of this one."""
    own_environment.update(given)
    process.prepare_environment(from_values(engines))
    assert own_environment.get("GLOO_SOCKET_IFNAME") == expected
