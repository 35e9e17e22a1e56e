"""Group `experts` of bench_ops.py: the experts of a layer by grouped products, compared with one product an expert."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from bench_ops_methods import Case, Group, Method, Shape
from torch import Tensor

EXPERTS = 32


def gated(gate_and_up: Tensor, weights: Tensor) -> Tensor:
    """The activation between both matrices of an expert, times the router's weight of each row."""
    gate, up = gate_and_up.chunk(2, dim=-1)
    return (F.silu(gate) * up * weights[:, None]).to(gate.dtype)


def one_by_one(rows: Tensor, weights: Tensor, first: Tensor, second: Tensor, sizes: Tensor) -> tuple[Tensor]:
    """Rows are sorted by expert, of which each has `sizes`; in float64 the oracle."""
    each, counts = (matrices.chunk(EXPERTS) for matrices in (first, second)), sizes.tolist()
    parts = zip(rows.split(counts), weights.split(counts), *each, strict=True)
    return (torch.cat([gated(own @ a.T, scale) @ b.T for own, scale, a, b in parts]),)


def load_grouped(device: torch.device) -> Callable[..., tuple[Tensor]]:
    from mgrpo.parallel.moe.experts import GroupedLinear

    config: Any = SimpleNamespace(params_dtype=torch.float32, expert_model_parallel_size=1)
    group: Any = None
    layer = GroupedLinear(EXPERTS, 1, 1, config, group, split_dim=0)  # its own weight is not used

    def call(rows: Tensor, weights: Tensor, first: Tensor, second: Tensor, sizes: Tensor) -> tuple[Tensor]:
        def product(x: Tensor, weight: Tensor) -> Tensor:
            return torch.func.functional_call(layer, {"weight": weight}, (x, ends))

        ends = sizes.to(device, non_blocking=True).cumsum(0, dtype=torch.int32)
        return (product(gated(product(rows, first), weights), second),)

    return call


def expert_cases(shape: Shape, device: torch.device, dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    """Half the size and the whole; the inner width is `hidden`. The last expert has 60 times the rows of the first."""
    for divisor, dtype in itertools.product((2, 1), dtypes):
        torch.manual_seed(0)
        count, hidden = shape.tokens // divisor, shape.hidden // divisor
        sizes = torch.linspace(0, 1, EXPERTS + 1).square().mul(count).round().long().diff()
        given = [
            torch.randn(size, device=device).div(divide).to(dtype)
            for size, divide in (
                ((count, hidden), 1),
                ((EXPERTS * 2 * hidden, hidden), hidden**0.5),
                ((EXPERTS * hidden, hidden), hidden**0.5),
            )
        ]
        given.insert(1, torch.rand(count, device=device))
        cotangent = torch.randn(count, hidden, device=device).to(dtype)
        exact = [x.double().requires_grad_() for x in given]
        (result,) = one_by_one(*exact, sizes)
        truth = [result.detach(), *torch.autograd.grad(result, exact, cotangent.double())]

        def errors(outputs: list[Tensor], gradients: list[Tensor], truth: list[Tensor] = truth) -> dict[str, Any]:
            pairs = zip([*outputs, *gradients], truth, strict=True)
            found = [float((own.double() - right).abs().max() / right.abs().max()) for own, right in pairs]
            return {"result_error": found[0], "gradient_error": max(found[1:])}

        def arguments(given: list[Tensor] = given, sizes: Tensor = sizes) -> tuple[Tensor, ...]:
            return *(x.detach().requires_grad_() for x in given), sizes

        name = str(dtype).removeprefix("torch.")
        yield Case(
            labels={"dtype": name, "entropy": False, "case": f"{name}, {count} rows, hidden {hidden}"},
            arguments=arguments,
            cotangents=(cotangent,),
            errors=errors,
            logits_bytes=sum(x.numel() * x.element_size() for x in given[2:]),
        )


EXPERT_LAYER = Group(
    name="experts",
    title=f"{EXPERTS} experts of a layer, from rows sorted by expert",
    methods=[
        Method(name="one by one", load=lambda device: one_by_one, has_entropy=False),
        Method(name="mgrpo, grouped", load=load_grouped, has_entropy=False),
    ],
    cases=expert_cases,
    shapes={
        "cpu": Shape(tokens=2048, vocab=0, hidden=512, rounds=5),
        "cuda": Shape(tokens=16384, vocab=0, hidden=2048, rounds=10),
    },
    is_bandwidth_bound=False,
)
