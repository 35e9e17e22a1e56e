"""What the backend says about this machine."""

from __future__ import annotations

import os

import pytest
import torch

from mgrpo.parallel import backend


@pytest.mark.parametrize(
    ("cuda", "words"),
    [(None, "built for CPUs alone"), ("13.0", "with CUDA 13.0 needs driver 580"), ("12.8", "a driver for it")],
)
def test_gpus_that_torch_does_not_find_have_a_reason(monkeypatch, cuda, words) -> None:
    """ "No GPU" on a machine full of them sends the user to the hardware; it is the driver."""
    monkeypatch.setattr(backend.torch.version, "cuda", cuda)
    assert words in backend.why_no_cuda()


@pytest.mark.skipif(backend.has_cuda(), reason="with CUDA every rank has a device of its own")
def test_ranks_of_a_machine_share_its_memory(monkeypatch) -> None:
    """Four ranks that each count on all of it would choose buffers for which there is no room."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    whole = backend.device_bytes()
    assert whole > 1 << 28
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert backend.device_bytes() == whole // 4


@pytest.fixture
def machine(monkeypatch):
    """A GPU of some compute capability, with FlashAttention 3's package or without; the kernels activated by the choice."""
    activated = []

    def pretend(capability: tuple[int, int], *, package: bool = False, error: Exception | None = None) -> list[str]:
        def activate(name: str) -> None:
            if error is not None:
                raise error
            activated.append(name)

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(backend, "find_spec", lambda name: object() if package else None)
        monkeypatch.setattr(backend, "activate_flash_attention_impl", activate)
        return activated

    backend.flash_attention.cache_clear()
    yield pretend
    backend.flash_attention.cache_clear()


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "expected"),
    [
        ((9, 0), torch.bfloat16, 128, "FA2"),
        ((8, 0), torch.float16, 256, "FA2"),
        ((9, 0), torch.float32, 128, None),
        ((9, 0), torch.bfloat16, 100, None),
        ((9, 0), torch.bfloat16, 264, None),
        ((7, 5), torch.float16, 128, None),
    ],
)
def test_flash_attention_is_used_for_what_its_kernels_take(machine, capability, dtype, head_dim, expected) -> None:
    """Anything else would end in a kernel's error in the first forward pass."""
    machine(capability)
    assert backend.flash_attention(dtype, head_dim) == expected


def test_flash_attention_3_is_activated_once_where_it_is_installed(machine) -> None:
    """Its kernels exist for Hopper only: elsewhere each call of them fails."""
    activated = machine((9, 0), package=True)
    assert [backend.flash_attention(torch.bfloat16, 128) for _ in range(2)] == ["FA3", "FA3"]
    assert activated == ["FA3"]


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_flash_attention_3_is_left_alone_on_other_gpus(machine, capability) -> None:
    """A package that is installed for another machine of the same cluster changes nothing here."""
    activated = machine(capability, package=True)
    assert backend.flash_attention(torch.bfloat16, 128) == "FA2" and activated == []


def test_a_broken_flash_attention_3_is_named_and_passed_over(machine, caplog) -> None:
    """Built for another torch it fails to load; training goes on with what torch itself has."""
    machine((9, 0), package=True, error=ImportError("undefined symbol"))
    assert backend.flash_attention(torch.bfloat16, 128) == "FA2"
    assert "FlashAttention 3 is installed and cannot be used: undefined symbol" in caplog.text


@pytest.mark.parametrize("num_local_ranks", [1, 3, 1000])
def test_an_update_on_the_host_takes_this_ranks_share_of_the_cores(monkeypatch, num_local_ranks) -> None:
    """On one thread it takes as long as the rest of a step; on all cores the ranks of a machine get in each other's way."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_local_ranks))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(6))
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError, match="inside"), backend.host_threads():
        assert torch.get_num_threads() == max(6 // num_local_ranks, 1)
        raise RuntimeError("inside")
    assert torch.get_num_threads() == before
