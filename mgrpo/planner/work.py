"""Tokens and floating-point operations of a training step, by the usual count of two per weight and token.

A forward pass has `2 x active weights` operations per token and, in attention, `2 x heads x (head_dim + v_dim)` per pair
of a query and a visible key; a backward pass twice that (Narayanan et al., arXiv:2104.04473, appendix; attention counted
causally). A gated delta net has `delta_flops` per token instead. The LM head runs on response tokens only. Sampling, norms,
softmaxes and the loss are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from mgrpo.config.schema import Config, Parallel
from mgrpo.layout import Layout
from mgrpo.models.memory import holdings, padded_vocab, stage_layers
from mgrpo.models.shape import DeltaNet, ModelShape
from mgrpo.planner.hardware import Assumptions, Flops


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The batch of one training step; lengths are means."""

    prompts: int
    sequences: int
    """Completions: prompts x samples."""
    prompt_tokens: float
    response_tokens: float
    longest_response: int
    shares_prompts: bool
    """True if training computes a group's prompt only once."""
    response_spread: float = 0.0
    """Standard deviation of the logarithm of response lengths, before they are cut; 0: all are equally long."""
    response_lengths: tuple[float, ...] = ()
    """Recorded response lengths, ascending, which stand for all; empty: log-normal ones."""

    @property
    def length(self) -> float:
        """Tokens of a sequence."""
        return self.prompt_tokens + self.response_tokens

    @property
    def trained_tokens(self) -> float:
        """Tokens of one forward pass over the batch."""
        prompts = self.prompts if self.shares_prompts else self.sequences
        return prompts * self.prompt_tokens + self.sequences * self.response_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Number of passes over the batch in a step."""

    train: int
    """Forward and backward: num_epochs."""
    reference: int
    """Forward, of the reference model."""
    old: int
    """Forward, for the policy's logprobs before its first update."""
    optimizer_steps: int
    backward: int = 2
    """Forward passes with as many operations as a backward pass: one for the gradients of inputs, one for those of weights.

    Weights that only have adapters need none of the second; adapters add a few numbers for each token.
    """

    @property
    def in_forward(self) -> int:
        """Number of forward passes with as many operations."""
        return (1 + self.backward) * self.train + self.reference + self.old


def workload_of(config: Config, assumed: Assumptions) -> Workload:
    """The batch that `config` defines, with assumed mean lengths."""
    longest = config.rollout.response_length
    recorded = tuple(min(length, longest) for length in assumed.response_lengths)
    return Workload(
        prompts=config.rollout.num_unique_prompts_rollout,
        sequences=config.batch_size,
        prompt_tokens=config.data.max_prompt_token_length * assumed.prompt_share,
        response_tokens=sum(recorded) / len(recorded) if recorded else longest * assumed.response_share,
        longest_response=longest,
        response_spread=assumed.response_spread,
        response_lengths=recorded,
        shares_prompts=config.parallel.shared_prompt_packing is True,
    )


def passes_of(config: Config) -> Passes:
    """Number of passes that the learners make over a batch."""
    algorithm = config.algorithm
    updates = algorithm.num_epochs * algorithm.num_mini_batches
    computes_old = (updates > 1 and not algorithm.use_vllm_logprobs) or algorithm.top_entropy_quantile < 1
    return Passes(
        train=algorithm.num_epochs,
        reference=int(has_reference(config)),
        old=int(computes_old),
        optimizer_steps=updates,
        backward=1 if config.adapter.use_peft else 2,
    )


def has_reference(config: Config) -> bool:
    """True if a reference model scores the batch."""
    return config.loss.beta != 0 or config.algorithm.log_ref_kl


@cache
def active_weights(shape: ModelShape) -> tuple[int, ...]:
    """Per layer, the weights that process a token: of the experts the shared one and those it is routed to."""
    share = shape.experts.top_k / shape.experts.count if shape.experts else 0
    return tuple(layer.dense + int(layer.experts * share) for layer in holdings(shape, tensor=1, expert=1).layers)


@cache
def fused_weights(shape: ModelShape) -> tuple[int, ...]:
    """Per layer, the weights whose products are Transformer Engine's where it is installed: of attention and of an MLP without experts.

    Projections of latent attention and of gated delta nets, shared experts and routers stay Megatron's own layers.
    """
    return tuple(
        (layer.dense - own_mlp(shape, number)) * (shape.latent is None and shape.has_attention(number))
        + 3 * shape.hidden * shape.ffn * (not shape.has_experts(number))
        for number, layer in enumerate(holdings(shape, tensor=1, expert=1).layers)
    )


def own_mlp(shape: ModelShape, layer: int) -> int:
    """Weights of a layer's MLP, or of its router and shared expert."""
    if experts := shape.experts_of(layer):
        return shape.hidden * (experts.count + 3 * experts.shared_ffn)
    return 3 * shape.hidden * shape.ffn


def seen_pairs(length: float, window: int | None) -> float:
    """Pairs of a query and a key in causal attention over one document, at most `window` keys per query."""
    reach = min(length, window) if window else length
    return length * reach - reach * reach / 2


DELTA_CHUNK = 64
"""Tokens that the delta rule computes at a time."""


def delta_flops(delta: DeltaNet) -> int:
    """Operations of the gated delta rule per token, in chunks of C tokens (arXiv:2412.06464, section 3.3).

    In each value head six products of chunk x chunk: keys x keys, queries x keys, those for pseudo-keys and
    pseudo-values, and scores x pseudo-values, of which three have key_dim columns and two value_dim; the inverse of a triangle,
    C^2 / 3 a token; and three products with the state: its reads by key and by query, and its update.
    """
    key, value, chunk = delta.key_dim, delta.value_dim, DELTA_CHUNK
    within = 2 * chunk * (3 * key + 2 * value) + 2 * chunk**2 // 3
    return delta.value_heads * (within + 3 * 2 * key * value)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFlops:
    """One layer's forward pass over the batch, by the parts that recomputation can repeat."""

    core: Flops
    """Queries x keys and scores x values, or the delta rule."""
    mlp: Flops
    """Experts, including the shared one."""
    rest: Flops

    @property
    def total(self) -> Flops:
        """All parts."""
        return self.core + self.mlp + self.rest


@cache
def layer_flops(shape: ModelShape, work: Workload) -> tuple[LayerFlops, ...]:
    """Per layer, one forward pass over the batch, all ranks together."""
    pairs = {}
    for window in set(shape.windows):
        pairs[window] = work.sequences * seen_pairs(work.length, window)
        if work.shares_prompts:
            pairs[window] -= (work.sequences - work.prompts) * seen_pairs(work.prompt_tokens, window)
    # The delta rule runs over a copy of the prompt for every completion.
    return _layer_flops(shape, work.trained_tokens, pairs, in_states=work.sequences * work.length)


def _layer_flops(
    shape: ModelShape, tokens: float, pairs: Mapping[int | None, float], *, in_states: float
) -> tuple[LayerFlops, ...]:
    """Per layer; `pairs` of a query and a visible key by the layer's window, and tokens that the delta rule computes."""
    flops = []
    for layer, weights in enumerate(active_weights(shape)):
        experts = shape.experts_of(layer)
        routed = shape.hidden * experts.count if experts else 0
        whole = own_mlp(shape, layer) - routed
        chosen = 3 * shape.hidden * experts.ffn * experts.top_k if experts else 0
        rest = 2 * (weights - whole - chosen - routed) * tokens
        has_own = shape.latent is not None or not shape.has_attention(layer)
        if shape.delta and not shape.has_attention(layer):
            core = Flops(delta_flops(shape.delta) * in_states)
        else:
            core = Flops(attention=2 * shape.heads * (shape.head_dim + shape.v_dim) * pairs[shape.windows[layer]])
        flops.append(
            LayerFlops(
                core=core,
                mlp=Flops(own=2 * whole * tokens, experts=2 * chosen * tokens)
                if experts
                else Flops(2 * whole * tokens),
                rest=Flops(rest * (not has_own), own=rest * has_own + 2 * routed * tokens),
            )
        )
    return tuple(flops)


def head_flops(shape: ModelShape, responses: float) -> Flops:
    """The LM head's forward pass over this many response tokens."""
    return Flops(head=2 * shape.hidden * padded_vocab(shape) * responses)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFlops:
    """One forward pass over the batch, all ranks of a pipeline stage together; a backward pass has twice as many."""

    forward: Flops
    repeated: Flops
    """Operations that recomputation adds to a backward pass."""


def stage_flops(
    shape: ModelShape, layout: Layout, work: Workload, settings: Parallel, *, stage: int, logits_chunk: int
) -> StageFlops:
    """The layers of a stage, and the LM head on the last one."""
    layers = layer_flops(shape, work)
    held = stage_layers(layout, shape.num_layers, stage)
    forward = sum((layers[layer].total for layer in held), Flops())
    repeated = sum((_repeated(layers[layer], shape.has_experts(layer), settings) for layer in held), Flops())
    if stage == layout.pipeline - 1:
        head = head_flops(shape, work.sequences * work.response_tokens)
        forward += head
        repeated += head * bool(logits_chunk)
    return StageFlops(forward=forward, repeated=repeated)


def _repeated(layer: LayerFlops, has_experts: bool, settings: Parallel) -> Flops:
    parts = {"core_attn": layer.core, "moe" if has_experts else "mlp": layer.mlp, "projections": layer.rest}
    return sum((flops for module, flops in parts.items() if settings.recomputes(module)), Flops())


def forward_flops(shape: ModelShape, work: Workload) -> Flops:
    """One forward pass of the whole model over the batch."""
    head = head_flops(shape, work.sequences * work.response_tokens)
    return sum((layer.total for layer in layer_flops(shape, work)), head)


def packed_flops(shape: ModelShape, runs: np.ndarray, *, responses: int) -> Flops:
    """One forward pass of the whole model over real packs; a step has `Passes.in_forward` times as many.

    These are the operations that model FLOPs utilisation counts, without recomputation. Ranks that hold
    parts of one model share them; those of all data-parallel ranks' packs over all learners are the mean of a rank.

    Args:
        runs: `[runs, 2]` integers, first position and number of tokens, as in `PackLengths`: a token at position p attends to
            p + 1 keys, also behind a shared prompt, or as many as a layer's window has.
        responses: tokens on which the LM head runs.
    """
    first, length = runs.T
    pairs = {w: float((_seen_up_to(first + length, w) - _seen_up_to(first, w)).sum()) for w in set(shape.windows)}
    tokens = int(length.sum())
    layers = _layer_flops(shape, tokens, pairs, in_states=tokens)
    return sum((layer.total for layer in layers), head_flops(shape, responses))


def _seen_up_to(end: np.ndarray, window: int | None) -> np.ndarray:
    """Keys that the tokens before position `end` attend to, summed."""
    growing = np.minimum(end, window) if window else end
    return growing * (growing + 1) // 2 + (end - growing) * (window or 0)


def generation_flops(shape: ModelShape, work: Workload) -> Flops:
    """Prefill and decoding: one forward pass in which no prompt is shared."""
    return forward_flops(shape, replace(work, shares_prompts=False))
