"""What the ranks of `test_activation_offload.py` run."""

from __future__ import annotations

import weakref
from typing import Any
from unittest.mock import patch

from tests.ranks import cases


def gradients(**arguments: Any) -> dict[str, Any]:
    """`cases.gradients`, and bytes of the storages that were sent, and of those gone when the first of them came back."""
    from mgrpo.policy.layers.activation_offload import ActivationOffload

    send, fetch = ActivationOffload._send, ActivationOffload._fetch
    sent: list[tuple[weakref.ref[Any], int]] = []
    found = {"sent": 0, "gone": 0}

    def count_sent(self: Any, layer: Any) -> None:
        send(self, layer)
        for saved in layer.saved.values():
            found["sent"] += saved.on_device.nbytes
            sent.append((weakref.ref(saved.on_device.untyped_storage()), saved.on_device.nbytes))

    def count_gone(self: Any, layer: Any) -> None:
        found["gone"] += sum(nbytes for storage, nbytes in sent if storage() is None)
        sent.clear()
        fetch(self, layer)

    with (
        patch.object(ActivationOffload, "_send", count_sent),
        patch.object(ActivationOffload, "_fetch", count_gone),
    ):
        return cases.gradients(**arguments) | {"offloaded": found}
