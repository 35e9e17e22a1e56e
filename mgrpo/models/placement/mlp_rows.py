"""Table part of a layer's MLP, or of the experts in its place."""

from __future__ import annotations

from collections.abc import Sequence

from mgrpo.models.placement.boxes import Shape
from mgrpo.models.placement.layout_rules import Replicated, Rule, Slices, Stacked
from mgrpo.models.shape import Experts, ModelShape

GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
EXPERT_MATRICES = {"mlp": GATE_UP_DOWN, "block_sparse_moe": ("w1", "w3", "w2")}
"""Gate, up and down projection of an expert by `Experts.names`."""
FUSED_EXPERTS = {"gate_up_proj": 2, "gate_up_proj_bias": 1, "down_proj": 1, "down_proj_bias": None}
"""gpt-oss' tensors of all experts of a layer, and the dimension that tensor ranks share out; None: the sum's bias, which is added once."""
CHOICE_BIAS = "e_score_correction_bias"


def mlp_tensors(model: ModelShape, layer: int, at: str) -> dict[str, Shape]:
    """Name and shape of the HF tensors; `at` is the layer's prefix, like "model.layers.3."."""
    experts = model.experts_of(layer)
    if experts is None:
        return _gated_tensors(at + "mlp.", GATE_UP_DOWN, model.hidden, model.ffn)
    if experts.names == "gpt_oss":
        return _gpt_oss_tensors(experts, model.hidden, at + "mlp.")
    moe = f"{at}{experts.names}."
    tensors: dict[str, Shape] = {moe + "gate.weight": (experts.count, model.hidden)}
    if experts.biases:
        tensors[moe + "gate.bias"] = (experts.count,)
    if experts.choice_bias:
        tensors[f"{moe}gate.{CHOICE_BIAS}"] = (experts.count,)
    for expert in range(experts.count):
        matrices = EXPERT_MATRICES[experts.names]
        tensors |= _gated_tensors(f"{moe}experts.{expert}.", matrices, model.hidden, experts.ffn, biases=experts.biases)
    if experts.shared_ffn:
        tensors |= _gated_tensors(moe + _shared(experts), GATE_UP_DOWN, model.hidden, experts.shared_ffn)
    if experts.shared_gate:
        tensors[moe + "shared_expert_gate.weight"] = (1, model.hidden)
    return tensors


def mlp_rules(model: ModelShape, layer: int, at: str) -> dict[str, Rule]:
    """Megatron's parameters and their rules, without those of experts, which expert ranks share out."""
    experts = model.experts_of(layer)
    if experts is None:
        return _gated_rules("mlp.", [at + "mlp."])
    if experts.names == "gpt_oss":
        return {f"mlp.router.{kind}": Replicated(f"{at}mlp.router.{kind}") for kind in ("weight", "bias")}
    moe = f"{at}{experts.names}."
    rules: dict[str, Rule] = {"mlp.router.weight": Replicated(moe + "gate.weight")}
    if experts.biases:
        rules["mlp.router.bias"] = Replicated(moe + "gate.bias")
    if experts.choice_bias:
        rules["mlp.router.expert_bias"] = Replicated(f"{moe}gate.{CHOICE_BIAS}")
    if experts.shared_ffn:
        rules |= _gated_rules("mlp.shared_experts.", [moe + _shared(experts)])
    if experts.shared_gate:
        rules["mlp.shared_experts.gate_weight"] = Replicated(moe + "shared_expert_gate.weight")
    return rules


def expert_rules(experts: Experts, own: range, at: str) -> dict[str, Rule]:
    """Megatron's parameters of the layer's experts with the numbers `own`, and their rules."""
    if experts.names == "gpt_oss":
        return _gpt_oss_expert_rules(own, at + "mlp.experts.")
    hf_at = [f"{at}{experts.names}.experts.{expert}." for expert in own]
    return _gated_rules("mlp.experts.", hf_at, EXPERT_MATRICES[experts.names], biases=experts.biases)


def is_frozen(name: str) -> bool:
    """True if the HF tensor stays as loaded, in float32: it is never trained."""
    return name.endswith(CHOICE_BIAS)


def _shared(experts: Experts) -> str:
    """The name of the shared MLP: with a gate that of Qwen's checkpoints, else that of DeepSeek's."""
    return "shared_expert." if experts.shared_gate else "shared_experts."


def _gpt_oss_tensors(experts: Experts, hidden: int, at: str) -> dict[str, Shape]:
    """Matrices of experts are `[inputs, outputs]`; gate and up columns alternate."""
    return {
        at + "router.weight": (experts.count, hidden),
        at + "router.bias": (experts.count,),
        at + "experts.gate_up_proj": (experts.count, hidden, 2 * experts.ffn),
        at + "experts.gate_up_proj_bias": (experts.count, 2 * experts.ffn),
        at + "experts.down_proj": (experts.count, experts.ffn, hidden),
        at + "experts.down_proj_bias": (experts.count, hidden),
    }


def _gpt_oss_expert_rules(own: range, hf_at: str) -> dict[str, Rule]:
    names = ("linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight", "linear_fc2.bias")
    return {
        f"mlp.experts.{name}": Slices(hf_at + tensor, own, dim)
        for name, (tensor, dim) in zip(names, FUSED_EXPERTS.items(), strict=True)
    }


def _gated_tensors(
    at: str, matrices: tuple[str, str, str], hidden: int, ffn: int, *, biases: bool = False
) -> dict[str, Shape]:
    shapes = ((ffn, hidden), (ffn, hidden), (hidden, ffn))
    tensors: dict[str, Shape] = {}
    for name, shape in zip(matrices, shapes, strict=True):
        tensors[f"{at}{name}.weight"] = shape
        if biases:
            tensors[f"{at}{name}.bias"] = shape[:1]
    return tensors


def _gated_rules(
    at: str, hf_at: Sequence[str], matrices: tuple[str, str, str] = GATE_UP_DOWN, *, biases: bool = False
) -> dict[str, Rule]:
    """The rules of one gated layer, or of several one above the other."""
    gate, up, down = matrices
    rules: dict[str, Rule] = {}
    for kind in ("weight", "bias") if biases else ("weight",):
        rules |= {
            f"{at}linear_fc1.{kind}": Stacked(tuple(f"{one}{name}.{kind}" for one in hf_at for name in (gate, up))),
            f"{at}linear_fc2.{kind}": Stacked(
                tuple(f"{one}{down}.{kind}" for one in hf_at), dim=1 if kind == "weight" else None
            ),
        }
    return rules
