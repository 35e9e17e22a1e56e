"""Experts computed together against Megatron's, which are computed one by one."""

from __future__ import annotations

import pytest
import torch

from mgrpo.models.family import read_hf_config, shape_of
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

    from mgrpo.parallel.experts import GroupedExperts
    from mgrpo.policy.architecture import transformer_config

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
    """A row of a neighbour's matrix, or a gradient for an expert without rows, trains another model."""
    tolerance = 1e-6 if dtype == "float32" else 2**-7
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


def idle_experts_gradient() -> list[float]:
    """Of three experts, the sums of a gradient that is 1 everywhere, where the second has no rows."""
    from mgrpo.parallel.experts import without_idle

    return without_idle(torch.ones(3, 2, 5), torch.tensor([4, 4, 6], dtype=torch.int32)).sum((1, 2)).tolist()


def test_an_expert_without_rows_gets_no_gradient(run_ranks):
    """What a GPU leaves in memory that its kernel did not write is neither 0 nor always finite."""
    assert run_ranks(1, idle_experts_gradient) == [[10, 0, 10]]


@pytest.mark.parametrize("with_probs", [True, False])
def test_rows_are_sorted_by_expert_as_megatron_does(run_ranks, with_probs):
    """Rows, probabilities, places and gradients, to the bit: a row for another expert would train it silently."""
    assert run_ranks(1, sorted_by_expert, with_probs=with_probs) == [[]]


def sorted_by_expert(with_probs: bool) -> list[str]:
    """What differs; three rows of seven have chosen the same two of five experts, and one expert has none."""
    from megatron.core.transformer.moe.moe_utils import permute as theirs

    from mgrpo.parallel.experts import permute as ours

    chosen = torch.zeros(7, 5, dtype=torch.bool)
    for row, pair in enumerate([(0, 3), (0, 3), (3, 4), (0, 3), (1, 4), (1, 0), (4, 3)]):
        chosen[row, list(pair)] = True
    draw = torch.Generator().manual_seed(3)
    rows, probs = torch.randn(7, 4, generator=draw), torch.rand(7, 5, generator=draw)

    def run(permute) -> dict[str, torch.Tensor]:
        own_rows, own_probs = rows.clone().requires_grad_(), probs.clone().requires_grad_()
        moved, kept, numbers = permute(own_rows, chosen, own_probs if with_probs else None, num_out_tokens=14)
        (moved.square().sum() + (0 if kept is None else kept.pow(3).sum())).backward()
        found = {"moved": moved.detach(), "numbers": numbers, "rows": own_rows.grad}
        return found | ({"kept": kept.detach(), "probs": own_probs.grad} if with_probs else {})

    expected, found = run(theirs), run(ours)
    return [name for name in expected if not torch.equal(expected[name], found[name])]
