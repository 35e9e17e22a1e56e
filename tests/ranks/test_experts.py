"""Experts computed together against Megatron's, which are computed one by one."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from tests.ranks import cases
from tests.tiny_models import save_tiny


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("experts"), "qwen3_moe"))


def against_sequential(model_dir: str, layout: dict, dtype: str, rows_per_expert: list[int]) -> dict[str, list[float]]:
    """On this rank, for outputs and gradients: the largest difference and the largest value."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP

    from mgrpo.parallel.moe.experts import GroupedExperts
    from mgrpo.policy.layers.architecture import transformer_config

    policy = cases.make_policy(model_dir, layout, dtype=getattr(torch, dtype))
    config = transformer_config(shape_of(read_hf_config(model_dir)), policy.layout, getattr(torch, dtype))
    groups = ProcessGroupCollection.use_mpu_process_groups()
    together = GroupedExperts(len(rows_per_expert), config, groups)
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    one_by_one = SequentialMLP(len(rows_per_expert), config, linears, groups)
    draw = torch.Generator().manual_seed(policy.rank)
    for name in ("linear_fc1", "linear_fc2"):
        stacked = getattr(together, name).weight
        parts = [getattr(expert, name).weight for expert in one_by_one.local_experts]
        stacked.data.copy_(torch.randn(stacked.shape, generator=draw) / 8)
        for part, values in zip(parts, stacked.data.chunk(len(parts)), strict=True):
            assert part.allreduce == stacked.allreduce
            part.data.copy_(values)
    rows = torch.randn(sum(rows_per_expert), config.hidden_size, generator=draw).to(config.params_dtype)
    weights, upstream = torch.rand(len(rows), generator=draw), torch.randn(rows.shape, generator=draw).to(rows)

    def run(experts: torch.nn.Module) -> dict[str, torch.Tensor]:
        own_rows, own_weights = rows.clone().requires_grad_(), weights.clone().requires_grad_()
        output, bias = experts(own_rows, torch.tensor(rows_per_expert), own_weights)
        assert bias is None
        output.backward(upstream)
        found = {"output": output.detach(), "rows": own_rows.grad, "weights": own_weights.grad}
        for name in ("fc1", "fc2"):
            own = [p for full_name, p in experts.named_parameters() if name in full_name]
            # A product that is not computed leaves no gradient, which the optimizer takes as 0.
            found[name] = torch.cat([torch.zeros_like(p) if p.grad is None else p.grad for p in own])
        return found

    ours, theirs = run(together), run(one_by_one)
    return {
        name: [float((ours[name] - theirs[name]).abs().amax()), float(theirs[name].abs().amax())]
        for name in ours
        if ours[name].numel()
    }


@pytest.mark.parametrize(
    ("layout", "dtype", "rows_per_expert"),
    [
        ({}, "float32", [7, 0, 20, 5]),  # one has nothing to do
        ({}, "bfloat16", [7, 0, 20, 5]),
        ({"expert": 2}, "float32", [11, 6]),
        ({"expert": 2}, "bfloat16", [0, 0]),  # a rank to which no token is sent
        ({"tensor": 2, "sequence_parallel": True}, "float32", [3, 9, 1, 4]),  # ranks hold halves of each expert
    ],
)
def test_experts_computed_together_equal_megatrons(run_ranks, model_dir, layout, dtype, rows_per_expert):
    """A row of a neighbour's matrix, or a gradient for an expert without rows, trains another model.

    Sums in another order round a result of bfloat16 the other way, to a neighbour that is 2^-7 away, and before it what it is
    made from.
    """
    tolerance = 2e-6 if dtype == "float32" else 2**-6
    for found in run_ranks(
        2 if layout else 1,
        against_sequential,
        model_dir=model_dir,
        layout=layout,
        dtype=dtype,
        rows_per_expert=rows_per_expert,
    ):
        for name, (difference, largest) in found.items():
            assert difference <= tolerance * max(largest, 1e-3), (name, difference, largest)
        assert found["fc1"][1] > 0 or not any(rows_per_expert)


CHOSEN = [(0, 3), (0, 3), (3, 4), (0, 3), (1, 4), (1, 0), (4, 3)]
"""Two of five experts for each of seven rows; three rows have the same two, and one expert has none."""


def who_chose() -> torch.Tensor:
    """`[rows, experts]` bool."""
    return torch.zeros(len(CHOSEN), 5, dtype=torch.bool).scatter_(1, torch.tensor(CHOSEN), value=True)


def on_blackwell(grouped_mm: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`grouped_mm` whose gradient of a matrix without rows is what the memory held before."""

    def call(rows: torch.Tensor, matrices: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        is_idle = torch.diff(offs, prepend=offs.new_zeros(1)) == 0
        matrices.register_hook(lambda gradient: gradient.masked_fill(is_idle[:, None, None], torch.nan))
        return grouped_mm(rows, matrices, offs=offs)

    return call


def single_products(rows: torch.Tensor, probs: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """What a layer of experts computes, in the type of its arguments; `first` and `second` are stacked matrices."""
    first, second = first.unflatten(0, (5, -1)), second.unflatten(0, (5, -1))
    sums = [torch.zeros_like(row) for row in rows]
    for number, pair in enumerate(CHOSEN):
        for expert in pair:
            gate, up = (first[expert] @ rows[number]).chunk(2)
            sums[number] = sums[number] + second[expert] @ (F.silu(gate) * up) * probs[number, expert]
    return torch.stack(sums)


def against_float64(model_dir: str, dtype: str) -> dict[str, list[float]]:
    """Of a layer behind its router, for its result and its gradients: the largest difference and the largest value."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    from mgrpo.parallel.moe.experts import GroupedExperts, permute
    from mgrpo.policy.layers.architecture import transformer_config

    policy = cases.make_policy(model_dir, {})
    config = transformer_config(shape_of(read_hf_config(model_dir)), policy.layout, getattr(torch, dtype))
    experts = GroupedExperts(5, config, ProcessGroupCollection.use_mpu_process_groups())
    draw = torch.Generator().manual_seed(3)
    for weight in experts.parameters():
        weight.data.copy_(torch.randn(weight.shape, generator=draw) / 8)
    rows = torch.randn(7, config.hidden_size, generator=draw).to(config.params_dtype).requires_grad_()
    probs, upstream = torch.rand(7, 5, generator=draw).requires_grad_(), torch.randn(rows.shape, generator=draw)
    leaves = [rows, probs, experts.linear_fc1.weight, experts.linear_fc2.weight]
    with patch.object(F, "grouped_mm", on_blackwell(F.grouped_mm)):
        moved, kept, numbers, *_ = permute(rows, who_chose(), probs, num_out_tokens=14)
        results, _ = experts(moved, who_chose().sum(0), kept)
        found = torch.zeros_like(rows).index_add(0, numbers, results)
        found = [found.detach(), *torch.autograd.grad(found, leaves, upstream.to(found))]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    truth = single_products(*exact)
    truth = [truth.detach(), *torch.autograd.grad(truth, exact, upstream.to(rows.dtype).double())]
    names = ("result", "rows", "probs", "fc1", "fc2")
    return {
        name: [float((own - exact).abs().amax()), float(exact.abs().amax())]
        for name, own, exact in zip(names, found, truth, strict=True)
    }


# In bfloat16 up to eight results are rounded one after the other, each by at most 2^-8.
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 3e-6), ("bfloat16", 2**-5)])
def test_a_layers_experts_equal_single_products_in_float64(run_ranks, model_dir, dtype, tolerance):
    """Rows, offsets, matrices and probabilities must name the same expert, and an expert without rows learns nothing."""
    (found,) = run_ranks(1, against_float64, model_dir=model_dir, dtype=dtype)
    for name, (difference, largest) in found.items():
        assert difference <= tolerance * largest, (name, difference, largest)


@pytest.mark.parametrize("with_probs", [True, False])
def test_rows_are_sorted_by_expert_as_megatron_does(run_ranks, with_probs):
    """Rows, probabilities, places and gradients, to the bit: a row for another expert would train it silently."""
    assert run_ranks(1, sorted_by_expert, with_probs=with_probs) == [[]]


def sorted_by_expert(with_probs: bool) -> list[str]:
    """What differs."""
    from megatron.core.transformer.moe.moe_utils import permute as theirs

    from mgrpo.parallel.moe.experts import permute as ours

    chosen = who_chose()
    draw = torch.Generator().manual_seed(3)
    rows, probs = torch.randn(7, 4, generator=draw), torch.rand(7, 5, generator=draw)

    def run(permute) -> dict[str, torch.Tensor]:
        own_rows, own_probs = rows.clone().requires_grad_(), probs.clone().requires_grad_()
        moved, kept, numbers, *_ = permute(own_rows, chosen, own_probs if with_probs else None, num_out_tokens=14)
        (moved.square().sum() + (0 if kept is None else kept.pow(3).sum())).backward()
        found = {"moved": moved.detach(), "numbers": numbers, "rows": own_rows.grad}
        return found | ({"kept": kept.detach(), "probs": own_probs.grad} if with_probs else {})

    expected, found = run(theirs), run(ours)
    return [name for name in expected if not torch.equal(expected[name], found[name])]
