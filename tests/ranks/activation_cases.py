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


def held_inputs(dispatcher: str, **arguments: Any) -> dict[str, int]:
    """Bytes of the inputs of all layers and of their mixtures in a training step, and of those that are held when it is over.

    Args:
        dispatcher: alltoall, deepep, or hybridep.
    """
    from contextlib import nullcontext

    import torch
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from mgrpo.policy.policy import Policy
    from tests.ranks import deep_ep_on_gloo

    train_step = Policy.train_step
    inputs: list[tuple[weakref.ref[Any], int]] = []
    found = {}

    def remembering(forward: Any) -> Any:
        def remember(self: Any, hidden_states: Any, *args: Any, **options: Any) -> Any:
            if torch.is_grad_enabled():
                inputs.append((weakref.ref(hidden_states.untyped_storage()), hidden_states.nbytes))
            return forward(self, hidden_states, *args, **options)

        return remember

    def look(self: Any, *args: Any, **options: Any) -> Any:
        result = train_step(self, *args, **options)
        found["inputs"] = sum(nbytes for _, nbytes in inputs)
        found["held"] = sum(nbytes for storage, nbytes in inputs if storage() is not None)
        return result

    arguments["settings"] = {"moe_token_dispatcher_type": dispatcher} | arguments["settings"]
    with (
        nullcontext() if dispatcher == "alltoall" else deep_ep_on_gloo.installed(),
        patch.object(MoELayer, "forward", remembering(MoELayer.forward)),
        patch.object(TransformerLayer, "forward", remembering(TransformerLayer.forward)),
        patch.object(Policy, "train_step", look),
    ):
        cases.gradients(**arguments)
    return found
