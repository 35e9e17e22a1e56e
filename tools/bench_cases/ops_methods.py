"""Methods and cases of the ops' groups, with float64 answers to each case. A peer library is imported when its method is loaded."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mgrpo.ops import KeptSets, LossSettings, linear_logprobs, policy_loss, token_logprobs

Scores = tuple[Tensor, Tensor | None]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CHECKED_ROWS, ORACLE_TOKENS = 128, 1024
LOGITS_CHUNK = {"cpu": 4096, "cuda": 16384}
SET, EXPERTS = 8, 32
"""Tokens of a kept set, the mean of top_p=0.97 in long reasoning; experts of a layer."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of a group's problem, and how often each of its methods runs on the clock."""

    tokens: int
    vocab: int
    hidden: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Method:
    """A row of the table. `load` imports what the method needs and returns it; `call(*arguments)` gives its outputs.

    A peer that cannot be loaded or fails is reported and left out; a failure of any other method ends the benchmark.
    """

    name: str
    load: Callable[[torch.device], Callable[..., tuple[Tensor | None, ...]]]
    note: str = ""
    is_peer: bool = False
    has_entropy: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem that all methods of a group solve.

    arguments: makes what a method is called with; tensors that require grad are differentiated, and are the method's
        own to overwrite.
    cotangents: gradient of the loss in each output.
    errors: the accuracy of outputs and gradients.
    logits_bytes: what memory is a share of; without logits the bytes of the weights or operands.
    """

    labels: dict[str, Any]
    arguments: Callable[[], tuple[Any, ...]]
    cotangents: tuple[Tensor, ...]
    errors: Callable[[list[Tensor], list[Tensor]], dict[str, float | None]]
    logits_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Methods that do the same work, the first being what the others' speed is a ratio to, and the cases of that work."""

    name: str
    title: str
    methods: list[Method]
    cases: Callable[[Shape, torch.device, Sequence[torch.dtype]], Iterator[Case]]
    shapes: dict[str, Shape]


def given(call: Callable[..., tuple[Tensor | None, ...]], **options: Any) -> Callable[[torch.device], Callable]:
    """Loader of a method that needs no import."""
    return lambda device: functools.partial(call, **options)


# ---- answers


def scores(logits: Tensor, targets: Tensor, with_entropy: bool) -> Scores:
    """Logprobs and entropy in the dtype of the logits, of which -inf adds nothing; in float64 the oracle."""
    logp = torch.log_softmax(logits, dim=-1)
    entropy = -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0)).sum(-1) if with_entropy else None
    return logp.gather(1, targets[:, None])[:, 0], entropy


def cotangents(tokens: int, with_entropy: bool, device: torch.device) -> tuple[Tensor, ...]:
    """The loss's factor of each token's logprob and entropy: both signs, never zero."""
    weights = torch.cos(torch.arange(tokens, device=device, dtype=torch.float32))
    return (weights, 0.5 * weights.flip(0)) if with_entropy else (weights,)


def expected(
    outputs: Scores | tuple[Tensor], weights: tuple[Tensor, ...], differentiated: tuple[Tensor, ...]
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients of the oracle."""
    kept = [output for output in outputs if output is not None]
    gradients = torch.autograd.grad(kept, differentiated, [weight.double() for weight in weights])
    return [output.detach() for output in kept], list(gradients)


def largest_errors(
    outputs: list[Tensor], gradients: list[Tensor], oracle: tuple[list[Tensor], list[Tensor]]
) -> dict[str, Any]:
    """Largest errors against the oracle: absolute ones of outputs, those of gradients divided by the largest entry."""
    by_token = [float((own.double() - exact).abs().max()) for own, exact in zip(outputs, oracle[0], strict=True)]
    pairs = zip(gradients, oracle[1], strict=True)
    relative = max(float((own.double() - exact).abs().max() / exact.abs().max()) for own, exact in pairs)
    entropy = by_token[1] if len(by_token) > 1 else None
    return {"logprob_error": by_token[0], "entropy_error": entropy, "gradient_error": relative}


def labels(dtype: torch.dtype, with_entropy: bool) -> dict[str, Any]:
    return {"dtype": str(dtype).removeprefix("torch."), "entropy": with_entropy}


# ---- from logits


def logits_cases(shape: Shape, device: torch.device, dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    """Logits given. The oracle covers up to `CHECKED_ROWS` rows from first to last: in float64 all would be too many.

    The last row weighs nothing, as at the end of a sequence, where no token follows.
    """
    for dtype, with_entropy in itertools.product(dtypes, (False, True)):
        torch.manual_seed(0)
        source = torch.empty(shape.tokens, shape.vocab, dtype=dtype, device=device).normal_(std=3)
        targets = torch.randint(0, shape.vocab, (shape.tokens,), device=device)
        weights = cotangents(shape.tokens, with_entropy, device)
        for weight in weights:
            weight[-1] = 0
        rows = torch.linspace(0, shape.tokens - 1, min(shape.tokens, CHECKED_ROWS), device=device).long()
        exact = source[rows].double().requires_grad_()
        oracle = expected(scores(exact, targets[rows], with_entropy), tuple(w[rows] for w in weights), (exact,))

        def arguments(source: Tensor = source, targets: Tensor = targets, with_entropy: bool = with_entropy) -> tuple:
            # The copy stands for the LM head's output: neither a leaf nor a view.
            return source.detach().requires_grad_().clone(), targets, with_entropy

        def errors(outputs: list[Tensor], gradients: list[Tensor], oracle: Any = oracle, rows: Tensor = rows) -> dict:
            return largest_errors([output[rows] for output in outputs], [gradients[0][rows]], oracle)

        yield Case(
            labels=labels(dtype, with_entropy),
            arguments=arguments,
            cotangents=weights,
            errors=errors,
            logits_bytes=source.numel() * source.element_size(),
        )


def by_log_softmax(logits: Tensor, targets: Tensor, with_entropy: bool) -> Scores:
    logp = torch.log_softmax(logits.float(), dim=-1)
    entropy = -(logp.exp() * logp).sum(-1) if with_entropy else None
    return logp.gather(1, targets[:, None])[:, 0], entropy


def ours(logits: Tensor, targets: Tensor, with_entropy: bool, *, inplace: bool) -> Scores:
    return token_logprobs(logits, targets, with_entropy=with_entropy, inplace=inplace)


def load_compiled(device: torch.device, *, call: Callable[..., Scores]) -> Callable[..., Scores]:
    """`call` under torch.compile; it is compiled when it first runs, once for each dtype, with and without an entropy."""
    if torch._dynamo.config.disable:
        raise RuntimeError("torch.compile is disabled (TORCH_COMPILE_DISABLE)")
    return torch.compile(call, fullgraph=True, dynamic=False)


@functools.cache
def one_rank_group(device_type: str) -> dist.ProcessGroup:
    """Megatron's tensor-parallel group of this process alone."""
    from megatron.core import parallel_state

    dist.init_process_group("nccl" if device_type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    return parallel_state.get_tensor_model_parallel_group()


def load_megatron(device: torch.device) -> Callable[..., Scores]:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    one_rank_group(device.type)
    return lambda logits, targets, with_entropy: (-vocab_parallel_cross_entropy(logits, targets), None)


def load_megatron_fused(device: torch.device) -> Callable[..., Scores]:
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    group = one_rank_group(device.type)
    return lambda logits, targets, with_entropy: (-fused_vocab_parallel_cross_entropy(logits, targets, group), None)


def load_trl(device: torch.device) -> Callable[..., Scores]:
    from trl.trainer.utils import selective_log_softmax, selective_log_softmax_and_entropy

    def call(logits: Tensor, targets: Tensor, with_entropy: bool) -> Scores:
        if with_entropy:
            return selective_log_softmax_and_entropy(logits, targets)
        return selective_log_softmax(logits, targets), None

    return call


def load_liger(device: torch.device) -> Callable[..., Scores]:
    from liger_kernel.transformers import LigerCrossEntropyLoss

    loss = LigerCrossEntropyLoss(reduction="none")
    return lambda logits, targets, with_entropy: (-loss(logits, targets), None)


# ---- from hidden states, over the whole vocabulary (`kept` is None) or over kept sets


def head_cases(
    shape: Shape, device: torch.device, dtypes: Sequence[torch.dtype], *, has_sets: bool = False
) -> Iterator[Case]:
    """Hidden states and weight given, both differentiated, such that the logits have a standard deviation of 3."""
    for dtype, with_entropy in itertools.product(dtypes, (False, True)):
        torch.manual_seed(0)
        hidden = torch.empty(shape.tokens, shape.hidden, dtype=dtype, device=device).normal_()
        weight = torch.empty(shape.vocab, shape.hidden, dtype=dtype, device=device).normal_(std=3 / shape.hidden**0.5)
        # Tokens that are some steps apart, from a random one on: no token twice.
        first = torch.randint(0, shape.vocab, (shape.tokens, 1), device=device)
        ids = (first + shape.vocab // SET * torch.arange(SET, device=device)) % shape.vocab
        targets, sets = first[:, 0].contiguous(), ids if has_sets else None
        weights = cotangents(shape.tokens, with_entropy, device)
        oracle = head_oracle(hidden, weight, targets, sets, with_entropy, weights)
        offsets = torch.arange(0, SET * shape.tokens + 1, SET, device=device)
        rest = targets, KeptSets(ids.flatten().int(), offsets.int()) if has_sets else None, with_entropy

        def arguments(hidden: Tensor = hidden, weight: Tensor = weight, rest: Any = rest) -> tuple:
            return hidden.detach().requires_grad_(), weight.detach().requires_grad_(), *rest

        yield Case(
            labels=labels(dtype, with_entropy),
            arguments=arguments,
            cotangents=weights,
            errors=functools.partial(largest_errors, oracle=oracle),
            logits_bytes=shape.tokens * shape.vocab * hidden.element_size(),
        )


def masked(logits: Tensor, sets: Tensor) -> Tensor:
    """Logits with -inf outside the sets `[tokens, SET]`."""
    return logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).scatter_(1, sets, False), -torch.inf)


def head_oracle(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    sets: Tensor | None,
    with_entropy: bool,
    weights: tuple[Tensor, ...],
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients in float64, some tokens at a time: float64 logits of all would not fit."""
    exact_weight = weight.double().requires_grad_()
    outputs, hidden_gradients, weight_gradient = [], [], torch.zeros_like(exact_weight)
    for at in torch.arange(hidden.shape[0], device=hidden.device).split(ORACLE_TOKENS):
        exact_hidden = hidden[at].double().requires_grad_()
        logits = exact_hidden @ exact_weight.T
        result = scores(logits if sets is None else masked(logits, sets[at]), targets[at], with_entropy)
        part, gradients = expected(result, tuple(w[at] for w in weights), (exact_hidden, exact_weight))
        outputs.append(part)
        hidden_gradients.append(gradients[0])
        weight_gradient += gradients[1]
    return [torch.cat(parts) for parts in zip(*outputs, strict=True)], [torch.cat(hidden_gradients), weight_gradient]


def head_by_log_softmax(hidden: Tensor, weight: Tensor, targets: Tensor, kept: None, with_entropy: bool) -> Scores:
    return by_log_softmax(hidden @ weight.T, targets, with_entropy)


def head_by_masked_softmax(
    hidden: Tensor, weight: Tensor, targets: Tensor, kept: KeptSets, with_entropy: bool
) -> Scores:
    return scores(masked((hidden @ weight.T).float(), kept.ids.view(-1, SET).long()), targets, with_entropy)


def our_head(hidden: Tensor, weight: Tensor, targets: Tensor, kept: KeptSets | None, with_entropy: bool) -> Scores:
    return token_logprobs(hidden @ weight.T, targets, kept=kept, with_entropy=with_entropy, inplace=True)


def our_fused_head(
    hidden: Tensor, weight: Tensor, targets: Tensor, kept: KeptSets | None, with_entropy: bool
) -> Scores:
    chunk = LOGITS_CHUNK[hidden.device.type]
    return linear_logprobs(hidden, weight, targets, kept=kept, with_entropy=with_entropy, logits_chunk=chunk)


def load_torch_head(device: torch.device) -> Callable[..., Scores]:
    from torch.nn.functional import linear_cross_entropy

    return lambda hidden, weight, targets, *_: (-linear_cross_entropy(hidden, weight, targets, reduction="none"), None)


def load_trl_head(device: torch.device) -> Callable[..., Scores]:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as chunk_size

    def call(hidden: Tensor, weight: Tensor, targets: Tensor, kept: None, with_entropy: bool) -> Scores:
        wanted = ("entropy",) if with_entropy else ()
        return ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, chunk_size, None, 1.0, wanted)[:2]

    return call


def load_liger_head(device: torch.device) -> Callable[..., Scores]:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(reduction="none")
    return lambda hidden, weight, targets, *_: (-loss(weight, hidden, targets), None)


# ---- the loss


SETTINGS = LossSettings(
    surrogate="ppo_clip", ratio_level="token", ratio_low=0.8, ratio_high=1.2, delta=0.0, dual_clip=0.0, beta=0.05, kl_estimator=2,
    kl_bias_correction=False, use_rho=True, rho_clamp_low=0.0, rho_clamp_high=2.0, rho_mask_low=0.0, rho_mask_high=0.0,
)  # fmt: skip


def loss_cases(shape: Shape, device: torch.device, dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    """PPO's clip, KL estimator 2 and truncated importance sampling, from logprobs, which are always float32.

    64 sequences of different lengths, off-policy enough that some tokens are clipped.
    """
    generator = torch.Generator(device).manual_seed(0)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(shape.tokens, device=device, generator=generator)

    logprobs, one = -1.0 + noise(0.3), torch.ones((), device=device)
    operands = {
        "old_logprobs": logprobs + noise(0.2),
        "ref_logprobs": logprobs + noise(0.2),
        "rollout_logprobs": logprobs + noise(0.1),
        "advantages": noise(1.0),
        "weights": torch.full_like(logprobs, 1 / shape.tokens),
        "cu_seqlens": torch.linspace(0, 1, 65, device=device).square().mul(shape.tokens).round().int(),
    }
    doubles = {name: x.double() if x.is_floating_point() else x for name, x in operands.items()}
    leaf = logprobs.double().requires_grad_()
    oracle = expected(loss_by_formula(leaf, doubles), (one,), (leaf,))
    yield Case(
        labels=labels(torch.float32, False) | {"case": "float32, ppo_clip + KL + rho"},
        arguments=lambda: (logprobs.clone().requires_grad_(), operands),
        cotangents=(one,),
        errors=functools.partial(largest_errors, oracle=oracle),
        logits_bytes=7 * 4 * shape.tokens,
    )


def loss_by_formula(logprobs: Tensor, operands: dict[str, Tensor]) -> tuple[Tensor]:
    old, advantages = operands["old_logprobs"], operands["advantages"]
    ratio = (logprobs - old).clamp(-40, 40).exp()
    policy = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    rho = (old - operands["rollout_logprobs"]).clamp(-10, 10).exp().clamp(max=2.0)
    d = (logprobs - operands["ref_logprobs"]).clamp(-40, 40)
    return ((operands["weights"] * (rho * policy + 0.05 * (torch.expm1(-d) + d))).sum(),)


def our_loss(logprobs: Tensor, operands: dict[str, Tensor]) -> tuple[Tensor]:
    return (policy_loss(logprobs, **operands, settings=SETTINGS)[0],)


# ---- experts


def expert_cases(shape: Shape, device: torch.device, dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    """Half the size and the whole; the inner width is `hidden`. The last expert has 60 times the rows of the first."""
    for divisor, dtype in itertools.product((2, 1), dtypes):
        torch.manual_seed(0)
        count, hidden = shape.tokens // divisor, shape.hidden // divisor
        sizes = torch.linspace(0, 1, EXPERTS + 1).square().mul(count).round().long().diff()
        rows = torch.randn(count, hidden, device=device).to(dtype)
        first, second = (
            torch.randn(EXPERTS * width * hidden, hidden, device=device).div(hidden**0.5).to(dtype) for width in (2, 1)
        )
        given = rows, torch.rand(count, device=device), first, second
        cotangent = torch.randn(count, hidden, device=device).to(dtype)
        exact = [x.double().requires_grad_() for x in given]
        oracle = expected(one_by_one(*[*exact, sizes]), (cotangent,), tuple(exact))

        def errors(outputs: list[Tensor], gradients: list[Tensor], oracle: Any = oracle) -> dict[str, Any]:
            found = largest_errors(outputs, gradients, oracle)
            scale = float(oracle[0][0].abs().max())
            return {"result_error": found["logprob_error"] / scale, "gradient_error": found["gradient_error"]}

        def arguments(given: Any = given, sizes: Tensor = sizes) -> tuple[Tensor, ...]:
            return *(x.detach().requires_grad_() for x in given), sizes

        own = labels(dtype, False)
        yield Case(
            labels=own | {"case": f"{own['dtype']}, {count} rows, hidden {hidden}"},
            arguments=arguments,
            cotangents=(cotangent,),
            errors=errors,
            logits_bytes=sum(x.numel() * x.element_size() for x in (first, second)),
        )


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


# ---- groups


peer = functools.partial(Method, is_peer=True)
COMPILED = "torch.compile by Inductor, compiled outside the clock"
LOST = "float32: works in the caller's logits, which are lost in forward; the memory of a copy is not counted"
ROUNDED = "float32: as above; rounds the gradient to bfloat16, also that of float32 logits"
TRL = "with entropy selective_log_softmax_and_entropy; on a CPU bfloat16 logits are computed in bfloat16"
LIGER = "LigerCrossEntropyLoss(reduction='none'), Triton; makes the gradients in forward, in the caller's logits, which are lost"
TRL_HEAD = "what TRL's GRPOTrainer takes its logprobs from, always with the entropy; Triton on a GPU, torch elsewhere"
OUR_HEADS = [
    Method("mgrpo, matmul + in place", given(our_head)),
    Method("mgrpo linear_logprobs", given(our_fused_head), "logits_chunk={logits_chunk}"),
]
LOGITS = Group(
    name="logits",
    title="from logits",
    methods=[
        Method("log_softmax + gather", given(by_log_softmax)),
        peer("log_softmax + gather, compiled", functools.partial(load_compiled, call=by_log_softmax), COMPILED),
        peer("Megatron cross entropy", load_megatron, LOST, has_entropy=False),
        peer("Megatron fused cross entropy", load_megatron_fused, ROUNDED, has_entropy=False),
        peer("TRL selective_log_softmax", load_trl, TRL),
        peer("Liger cross entropy", load_liger, LIGER, has_entropy=False),
        Method("mgrpo, new buffer", given(ours, inplace=False)),
        Method("mgrpo, in place", given(ours, inplace=True)),
    ],
    cases=logits_cases,
    shapes={"cpu": Shape(2048, 32000, 0, 4), "cuda": Shape(16384, 151936, 0, 10)},
)
HEAD = Group(
    name="head",
    title="from hidden states and the LM head's weight",
    methods=[
        Method("matmul, log_softmax", given(head_by_log_softmax)),
        peer("matmul, log_softmax, compiled", functools.partial(load_compiled, call=head_by_log_softmax), COMPILED),
        peer("torch linear_cross_entropy", load_torch_head, has_entropy=False),
        peer("TRL ChunkedLogProbFunction", load_trl_head, TRL_HEAD),
        peer("Liger fused linear CE", load_liger_head, "reduction='none', Triton", has_entropy=False),
        *OUR_HEADS,
    ],
    cases=head_cases,
    shapes={"cpu": Shape(512, 32000, 1024, 2), "cuda": Shape(16384, 151936, 4096, 5)},
)
KEPT = Group(
    name="kept",
    title=f"over kept sets of {SET}, from hidden states and the LM head's weight",
    methods=[Method("matmul, masked log_softmax", given(head_by_masked_softmax)), *OUR_HEADS],
    cases=functools.partial(head_cases, has_sets=True),
    shapes={"cpu": Shape(512, 32000, 1024, 2), "cuda": Shape(4096, 151936, 4096, 5)},
)
LOSS = Group(
    name="loss",
    title="the policy loss of packed sequences",
    methods=[
        Method("PyTorch formulas", given(loss_by_formula), "the loss alone, nothing is measured for metrics"),
        Method("mgrpo policy_loss", given(our_loss), "also the 24 sums of each sequence that metrics are made of"),
    ],
    cases=loss_cases,
    shapes={"cpu": Shape(16384, 0, 0, 20), "cuda": Shape(32768, 0, 0, 20)},
)
EXPERT_LAYER = Group(
    name="experts",
    title=f"{EXPERTS} experts of a layer, from rows sorted by expert",
    methods=[Method("one by one", given(one_by_one)), Method("mgrpo, grouped", load_grouped)],
    cases=expert_cases,
    shapes={"cpu": Shape(2048, 0, 512, 5), "cuda": Shape(16384, 0, 2048, 10)},
)
GROUPS = {group.name: group for group in (LOGITS, HEAD, KEPT, LOSS, EXPERT_LAYER)}
