"""Gated delta nets (arXiv:2412.06464) of an engine on a CPU, in plain torch, with the states in vLLM's own cache.

Of a sequence a cache keeps the last inputs of the convolution and, for each head, a matrix S `[value dim, key dim]`. A token with
query q, key k, value v, decay d and strength b turns S into `S' = d S + b (v - d S k) k^T` and has the output `S' q`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

OP = "cpu_gdn_attention_core"
CHUNK = 64
"""Tokens of a prompt that are computed at once."""


def register_delta_core() -> None:
    """vLLM's `register_cpu_gdn_attention_ops`, which every such layer calls when it is made.

    Raises:
        ValueError: the engine is to keep states of earlier tokens, for the prefixes of other requests or for drafts.
    """
    from vllm.config import get_current_vllm_config
    from vllm.utils.torch_utils import LayerNameType, direct_register_custom_op

    config = get_current_vllm_config()
    if config.cache_config.enable_prefix_caching or config.speculative_config is not None:
        raise ValueError(
            "on a CPU a model with gated delta nets is served without a cache of prefixes and without speculative decoding, for which "
            "it would have to keep earlier states; start the engine with --no-enable-prefix-caching and without --speculative-config"
        )
    if not hasattr(torch.ops.vllm, OP):
        delta_core.__annotations__["layer_name"] = LayerNameType
        direct_register_custom_op(op_name=OP, op_func=delta_core, mutates_args=["core_attn_out"])


def delta_core(
    mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor, layer_name: Any
) -> None:
    """vLLM's `cpu_gdn_attention_core`: requests that decode one token each, then prompts, each from its state so far.

    Args:
        mixed_qkv: `[tokens, channels]`, queries, keys and values before the convolution.
        b, a: `[tokens, value heads]`.
        core_attn_out: `[tokens, value heads, value dim]`, written.
    """
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    from vllm.utils.torch_utils import _resolve_layer_name

    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:
        return
    batch = context.attn_metadata[layer.prefix]
    inputs, states = layer.kv_cache[0], layer.kv_cache[1]
    if not is_conv_state_dim_first():
        inputs = inputs.transpose(1, 2)
    weight = layer.conv1d.weight
    log_decay = -layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias.float())
    strength = b.float().sigmoid()
    starts, slots = batch.non_spec_query_start_loc.tolist(), batch.non_spec_state_indices_tensor.long()

    def parts(start: int, stop: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values `[tokens, value heads, dim]` of sequences of the same length."""
        new = mixed_qkv[start:stop].unflatten(0, (len(slots), -1)).mT
        read = torch.cat((inputs[slots].to(new.dtype), new), dim=2)
        inputs[slots] = read[..., 1 - weight.shape[2] :].to(inputs.dtype)
        mixed = F.silu(F.conv1d(read, weight, layer.conv1d.bias, groups=len(weight)))
        query, key, value = (part[0].float() for part in layer.rearrange_mixed_qkv(mixed.mT.flatten(0, 1)))
        shared = value.shape[1] // key.shape[1]
        query, key = (_normalised(part).repeat_interleave(shared, dim=1) for part in (query, key))
        return query * query.shape[-1] ** -0.5, key, value

    if count := batch.num_decodes:
        mine = slots[:count]
        out, after = delta_step(*parts(0, count, mine), log_decay[:count], strength[:count], states[mine].float())
        states[mine], core_attn_out[:count] = after.to(states.dtype), out.to(core_attn_out.dtype)
    for number in range(count, count + batch.num_prefills):
        mine, at = slots[number : number + 1], slice(starts[number], starts[number + 1])
        if not batch.has_initial_state[number]:
            inputs[mine], states[mine] = 0, 0
        sequence = parts(at.start, at.stop, mine)
        out, after = delta_chunks(*sequence, log_decay[at], strength[at], states[mine[0]].float())
        states[mine[0]], core_attn_out[at] = after.to(states.dtype), out.to(core_attn_out.dtype)


def delta_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    strength: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each of several sequences.

    Args:
        query, key: `[sequences, heads, key dim]`.
        value: `[sequences, heads, value dim]`.
        log_decay, strength: `[sequences, heads]`.
        state: `[sequences, heads, value dim, key dim]`.

    Returns:
        The outputs, shaped as `value`, and the states afterwards.
    """
    state = state * log_decay.exp()[..., None, None]
    change = (value - (state @ key[..., None])[..., 0]) * strength[..., None]
    state = state + change[..., :, None] * key[..., None, :]
    return (state @ query[..., None])[..., 0], state


def delta_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    strength: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of one sequence, by whole chunks (arXiv:2412.06464, section 3.3): all of them at once but for the state.

    With D[i, j] the decay from token j to token i of a chunk, 0 where j > i, the changes U of the state solve
    `(1 + b K K^T D) U = b (V - decayed K S^T)`, left of the diagonal; they add `decayed U^T K` to S.

    Args:
        query, key: `[tokens, heads, key dim]`.
        value: `[tokens, heads, value dim]`.
        log_decay, strength: `[tokens, heads]`.
        state: `[heads, value dim, key dim]`.

    Returns:
        The outputs, shaped as `value`, and the state afterwards.
    """
    tokens, chunks = len(query), -(-len(query) // CHUNK)

    def chunked(part: torch.Tensor) -> torch.Tensor:
        """`[chunks, heads, CHUNK, ...]`; the last chunk's missing tokens are 0, which changes nothing."""
        padded = part.new_zeros(chunks * CHUNK, *part.shape[1:])
        padded[:tokens] = part
        return padded.unflatten(0, (chunks, CHUNK)).transpose(1, 2)

    query, key, value = chunked(query), chunked(key), chunked(value)
    log_decay, strength = chunked(log_decay), chunked(strength)[..., None]
    since_start = log_decay.cumsum(-1).exp()[..., None]
    # Each sum by itself: a difference of two sums from the start loses digits to earlier strong decays.
    steps = log_decay[..., None].expand(*log_decay.shape, CHUNK).tril(-1).cumsum(-2)
    between = steps.exp().tril()
    strong = key * strength
    system, within = strong @ key.mT * between, query @ key.mT * between
    own, inherited = (
        torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        for right in (value * strength, strong * since_start)
    )
    query, key = query * since_start, key * between[..., -1, :, None]
    whole, outputs = since_start[..., -1:, :], []
    for chunk in range(chunks):
        change = own[chunk] - inherited[chunk] @ state.mT
        outputs.append(query[chunk] @ state.mT + within[chunk] @ change)
        state = state * whole[chunk] + change.mT @ key[chunk]
    return torch.stack(outputs).transpose(1, 2).flatten(0, 1)[:tokens], state


def _normalised(part: torch.Tensor) -> torch.Tensor:
    return part * torch.rsqrt((part * part).sum(-1, keepdim=True) + 1e-6)
