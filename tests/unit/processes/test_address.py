"""Addresses of this machine, asked of its own routes."""

from __future__ import annotations

import pytest

from mgrpo.processes import address


@pytest.mark.parametrize("towards", ["127.0.0.1", "127.0.1.1", "localhost"])
def test_the_way_to_this_machine_is_loopback(towards):
    """And an address of it: something can listen there."""
    assert address.own_address(towards) == address.LOOPBACK
    assert address.interface_of(address.LOOPBACK) == "lo"


def test_an_address_of_another_machine_has_no_interface_here():
    """gloo would refuse the name."""
    assert address.interface_of("192.0.2.1") is None


@pytest.mark.parametrize(
    ("interface", "expected"),
    [
        ("ens5", {"GLOO_SOCKET_IFNAME": "ens5", "NCCL_SOCKET_IFNAME": "=ens5"}),
        ("lo", {"GLOO_SOCKET_IFNAME": "lo"}),
        (None, {}),
    ],
)
def test_nccl_is_told_the_interface_of_an_address_but_never_loopback(monkeypatch, interface, expected):
    """NCCL would wait on the first bridge that it finds, and finds no way to another GPU over loopback."""
    monkeypatch.setattr(address, "interface_of", lambda address: interface)
    assert address.own_interfaces("10.0.0.1") == expected


def test_a_machine_without_a_way_says_where_to():
    """The system's own words name neither end."""
    with pytest.raises(OSError, match="has no way to no-such-machine"):
        address.own_address("no-such-machine")
