"""Where a loader of vLLM's kind copies what it is given, and copies that a sync would not reach."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mgrpo.models.placement.boxes import Box
from mgrpo.sync.vllm_plugin.live_weights import check_in_place, check_written, loaded_boxes

SHAPES = {
    "experts.gate_up": (4, 6, 10),
    "experts.bias": (4, 6),
    "conv.weight": (8, 1, 4),
    "gate.e_score_correction_bias": (4,),
    "fused": (2, 3, 5),
}


class Loader(nn.Module):
    """The second of two workers: half of the columns of all experts, transposed, half of a convolution, and a bias of the first's."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.full((4, 5, 6), 9.0, dtype=torch.bfloat16))
        self.w2_bias = nn.Parameter(torch.full((4, 6), 9.0, dtype=torch.bfloat16))
        self.conv = nn.Parameter(torch.full((4, 1, 4), 9.0, dtype=torch.bfloat16))
        self.bias = nn.Parameter(torch.full((4,), 9.0))
        self.each = nn.ParameterList(torch.full((5, 3), 9.0, dtype=torch.bfloat16) for _ in range(2))

    def load_weights(self, weights) -> None:
        for name, weight in weights:
            if name == "experts.gate_up":
                self.w13.copy_(weight[:, :, 5:].permute(0, 2, 1).contiguous())
            elif name == "experts.bias":
                weight.zero_()
                self.w2_bias.copy_(weight)
            elif name == "conv.weight":
                self.conv[:2].copy_(weight[2:4])
                self.conv[2:].copy_(weight[6:8])
            elif name == "fused":
                for one, parameter in enumerate(self.each):
                    parameter.copy_(weight[one].t())
            else:
                assert weight.dtype is torch.float32  # its own type, whatever the model's
                self.bias.copy_(weight)


def test_views_have_the_shape_of_their_boxes_where_the_loader_transposes():
    """A sync writes the checkpoint's layout through them."""
    model, generator = Loader(), torch.Generator().manual_seed(0)
    boxes, zeros = loaded_boxes(model, SHAPES)
    assert [view.data_ptr() for view in zeros] == [model.w2_bias.data_ptr()]
    assert {box for box, _ in boxes} == {
        Box("experts.gate_up", (0, 0, 5), (4, 6, 5)),
        Box("conv.weight", (2, 0, 0), (2, 1, 4)),
        Box("conv.weight", (6, 0, 0), (2, 1, 4)),
        Box("gate.e_score_correction_bias", (0,), (4,)),
        Box("fused", (0, 0, 0), (1, 3, 5)),
        Box("fused", (1, 0, 0), (1, 3, 5)),
    }
    values = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    with torch.no_grad():
        for box, view in boxes:
            view.copy_(values[box.name][box.within(Box(box.name, (0,) * len(box.start), SHAPES[box.name]))])

    def kept(name: str) -> torch.Tensor:
        return values[name].bfloat16()

    assert torch.equal(model.w13, kept("experts.gate_up")[:, :, 5:].transpose(1, 2))
    assert torch.equal(model.conv, kept("conv.weight")[[2, 3, 6, 7]])
    assert torch.equal(model.bias, values["gate.e_score_correction_bias"])
    assert all(torch.equal(parameter, kept("fused")[one].t()) for one, parameter in enumerate(model.each))


@pytest.mark.parametrize("change", [lambda weight: weight * 2, lambda weight: weight.contiguous().clone()[1:]])
def test_loaders_that_change_weights_are_refused(change):
    """What is written in place would not be what the engine computes with."""
    model = SimpleNamespace(
        load_weights=lambda weights: [torch.empty(0).copy_(change(weight)) for _, weight in weights],
        named_parameters=lambda: [("w", torch.empty(1))],
    )
    with pytest.raises(RuntimeError, match="changes weights while it loads them"):
        loaded_boxes(model, {"w": (4, 6)})


def test_loaders_that_reshape_weights_are_refused():
    """Rows of a reshaped tensor are no box."""
    model = SimpleNamespace(
        load_weights=lambda weights: [torch.empty(2, 12).copy_(weight.view(2, 12)) for _, weight in weights],
        named_parameters=lambda: [("w", torch.empty(1))],
    )
    with pytest.raises(RuntimeError, match="reshapes w"):
        loaded_boxes(model, {"w": (4, 6)})


def latent(matrix) -> nn.Module:
    """Latent attention as vLLM's: `matrix` of the weight of `kv_b_proj` is what it computes with."""
    attention = nn.Module()
    attention.kv_b_proj = nn.Linear(4, 6, bias=False)
    attention.W_UV = matrix(attention.kv_b_proj.weight.detach())
    return nn.Sequential(attention)


def test_copies_that_a_sync_does_not_reach_are_refused():
    """It would succeed, digests would agree, and the engine would sample from another model."""
    check_in_place(latent(lambda weight: weight[2:].t()))
    with pytest.raises(RuntimeError, match=r"computes with 0.W_UV, a copy of kv_b_proj"):
        check_in_place(latent(lambda weight: weight[2:].t().contiguous()))
    freed = latent(lambda weight: weight.clone())
    freed[0].kv_b_proj.weight = nn.Parameter(torch.empty(0))
    with pytest.raises(RuntimeError, match="--attention-backend CPU_MLA"):
        check_in_place(freed)
    packed = nn.Sequential(nn.Conv1d(2, 2, 4))
    packed[0]._cpu_unpacked_conv_weight = torch.empty(2, 4)
    with pytest.raises(RuntimeError, match="packed the weights of 0 in place"):
        check_in_place(packed)


class Attention(nn.Module):
    """With what vLLM itself sets, what is made anew from the configuration, whole numbers, and a view of another weight."""

    def __init__(self, experts: nn.Parameter) -> None:
        super().__init__()
        for scale in ("_q_scale", "_k_scale", "_v_scale", "_prob_scale"):
            self.register_buffer(scale, torch.ones(()))
        self.register_buffer("cos_sin_cache", torch.ones(4), persistent=False)
        self.register_buffer("expert_map", torch.ones(4, dtype=torch.int32))
        self.absorbed = nn.Parameter(experts[:, 0])


class Tower(nn.Module):
    """Weights that no loader of the language model's fills."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(2, 2)
        self.register_buffer("mean", torch.ones(4))


@pytest.mark.parametrize("missing", ["", "visual", "row"])
def test_an_engine_without_the_models_files_must_get_all_of_them(missing):
    """It would sample with the numbers that vLLM has made up, and no digest of the model's tensors would show it."""
    model = Loader()
    model.attention = Attention(model.w13)
    model.visual = Tower() if missing == "visual" else None
    boxes, zeros = loaded_boxes(model, SHAPES)
    views = [view for _, view in boxes]
    if missing == "row":
        # One of two parts of the convolution, twice.
        views = [view for view in views if view.data_ptr() != model.conv[2:].data_ptr()]
        views += [view for view in views if view.data_ptr() == model.conv.data_ptr()]
    if not missing:
        return check_written(model, [*views, *zeros])
    names = {"visual": "visual.mean, visual.patches.weight, visual.patches.bias of", "row": "does not write conv of"}
    with pytest.raises(RuntimeError, match=names[missing]):
        check_written(model, [*views, *zeros])
    if missing == "row":
        with pytest.raises(RuntimeError, match="w2_bias"):
            check_written(model, [view for _, view in boxes])
