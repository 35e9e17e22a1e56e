"""The shape of a model: input of Megatron, the rule table, the engines and the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mgrpo.models.rope import Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Experts of an MoE layer, in place of the MLP."""

    count: int
    top_k: int
    ffn: int
    """Intermediate size of one expert."""
    normalised: bool
    """True if the weights of the chosen experts add up to 1, before `scale`."""
    dense_layers: tuple[int, ...] = ()
    """Layers that have a plain MLP instead."""
    names: Literal["mlp", "block_sparse_moe", "gpt_oss"] = "mlp"
    """Their names in the checkpoint, see `table`."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Function from the router's logits to weights."""
    choice_bias: bool = False
    """A bias in float32 is added to the scores by which experts are chosen, and not to their weights (arXiv:2408.15664).

    It is never trained: an update of it would move the policy outside the loss.
    """
    groups: int = 1
    """Experts are chosen in `top_groups` of this many equal groups; a group's score is the sum of its two best."""
    top_groups: int = 1
    scale: float = 1.0
    """Multiplies the weights of the chosen experts."""
    shared_ffn: int = 0
    """Intermediate size of a gated MLP that every token goes through besides its experts; 0: none."""
    shared_gate: bool = False
    """Its output is multiplied by the sigmoid of a linear function of its input."""
    biases: bool = False
    """The router and both matrices of an expert have biases."""
    clamp: float | None = None
    """The gate is `min(gate, clamp) * sigmoid(1.702 * gate)` and multiplies `1 + up`, up within [-clamp, clamp]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (arXiv:2405.04434, section 2.1): queries, keys and values are made of short latent vectors.

    A head's queries and keys have `nope_dim` dimensions that are not rotated and then `rope_dim` that are: `head_dim` together.
    Of the latter 2i and 2i + 1 turn together. The rotated part of the key is the same for all heads.
    """

    q_rank: int | None
    """Width of the queries' latent vector; None: queries are made of the hidden state."""
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    """Dimensions of a head's values."""
    norm_eps: float = 1e-6
    """Epsilon of the norms of both latent vectors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """Gated delta nets (arXiv:2412.06464) in place of the attention of some layers."""

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    """Dimensions of a head's queries and keys."""
    value_dim: int
    conv: int
    """Width of the causal convolution over queries, keys and values."""
    names: Literal["by_head", "apart"] = "by_head"
    """Input projections: "in_proj_qkvz" and "in_proj_ba", rows by key head; or "in_proj_qkv", "in_proj_z", "in_proj_b" and "in_proj_a"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The shape of a decoder, as far as Megatron, the rule table and the engines need it."""

    family: str
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    tied: bool
    norm_eps: float
    norms: Literal["before", "after", "around"] = "before"
    """Place of the norms of attention and MLP: on their input, on their output before the residual sum, or on both."""
    zero_centred_norms: bool = False
    """Norms multiply by 1 + weight."""
    qkv_bias: bool = False
    qk_norm: Literal["head", "whole"] | None = None
    """Queries and keys are normalised, each head separately or all heads of a token together."""
    ropes: tuple[Rope, ...]
    """RoPE of each layer."""
    windows: tuple[int | None, ...]
    """Tokens that a token attends to in each layer, itself included; None: all before it."""
    attention_scale: float
    """Multiplies queries x keys."""
    attention_softcap: float | None = None
    """Scores are `cap * tanh(score / cap)`."""
    logit_softcap: float | None = None
    """The same for the LM head's logits."""
    embedding_scale: float = 1.0
    """Multiplies embeddings but not the tied LM head; rounded to the embeddings' dtype."""
    activation: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    """Activation of the gate, which multiplies the up projection."""
    experts: Experts | None = None
    latent: LatentAttention | None = None
    delta: DeltaNet | None = None
    gated_attention: bool = False
    """The output of attention is multiplied by the sigmoid of a gate, whose rows follow each head's in the query projection."""
    sinks: bool = False
    """Each head has a learned logit without a value: its share of the softmax is dropped."""
    out_bias: bool = False
    """The output projection of attention has a bias."""
    draft_layers: int = 0
    """Multi-token prediction layers after the last (arXiv:2412.19437, section 2.2): not built, and left out of exports."""
    prefix: str = "model."
    """Prefix of the names of all tensors of the checkpoint but the LM head's."""

    @property
    def rope_kinds(self) -> tuple[Rope, ...]:
        """The distinct entries of `ropes`."""
        return tuple(dict.fromkeys(self.ropes))

    def experts_of(self, layer: int) -> Experts | None:
        """Experts of this layer; None if it has a plain MLP."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    @property
    def v_dim(self) -> int:
        """Dimensions of a head's values."""
        return self.latent.v_dim if self.latent else self.head_dim

    @property
    def rope_dim(self) -> int:
        """Dimensions of a head of which `Rope.share` are rotated."""
        return self.latent.rope_dim if self.latent else self.head_dim

    def has_attention(self, layer: int) -> bool:
        """True if this layer has attention, not a gated delta net."""
        return self.delta is None or layer not in self.delta.layers

    def has_experts(self, layer: int) -> bool:
        """True if this is an MoE layer."""
        return self.experts_of(layer) is not None

    def with_layers(self, layers: Sequence[int]) -> ModelShape:
        """The same model with no layers but these."""
        numbers = range(len(layers))
        dense = tuple(new for new in numbers if not self.has_experts(layers[new]))
        delta = tuple(new for new in numbers if not self.has_attention(layers[new]))
        return replace(
            self,
            num_layers=len(layers),
            ropes=tuple(self.ropes[layer] for layer in layers),
            windows=tuple(self.windows[layer] for layer in layers),
            experts=self.experts and replace(self.experts, dense_layers=dense),
            delta=self.delta and replace(self.delta, layers=delta),
        )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelShape:
        """The inverse of `dataclasses.asdict`, also after JSON."""
        experts, latent, delta = (values.get(name) for name in ("experts", "latent", "delta"))
        parts = {
            "ropes": tuple(Rope(**rope) for rope in values["ropes"]),
            "windows": tuple(values["windows"]),
            "experts": experts and Experts(**experts | {"dense_layers": tuple(experts["dense_layers"])}),
            "latent": latent and LatentAttention(**latent),
            "delta": delta and DeltaNet(**delta | {"layers": tuple(delta["layers"])}),
        }
        return cls(**values | parts)
