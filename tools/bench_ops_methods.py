"""Methods and cases of bench_ops.py's groups, with float64 answers to each case.

A peer library is imported when its method is loaded. Nothing is timed or printed here.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mgrpo.ops import LossSettings, linear_logprobs, policy_loss, token_logprobs

Scores = tuple[Tensor, Tensor | None]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CHECKED_ROWS = 128
ORACLE_TOKENS = 1024
LOGITS_CHUNK = {"cpu": 4096, "cuda": 16384}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Size of a group's problem, and how often each of its methods runs on the clock."""

    tokens: int
    vocab: int
    hidden: int
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A row of the table. `load` imports what the method needs and returns it; `call(*arguments)` gives its outputs.

    An output is `[tokens]`, or a scalar for a method that only returns a loss. A peer that cannot be loaded or fails is
    reported and left out; a failure of any other method ends the benchmark. A method without accuracy solves another problem.
    """

    name: str
    load: Callable[[torch.device], Callable[..., tuple[Tensor | None, ...]]]
    is_peer: bool = False
    has_entropy: bool = True
    has_accuracy: bool = True
    note: str = ""


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
    is_bandwidth_bound: bool


# ---- what is computed


def scores(logits: Tensor, targets: Tensor, with_entropy: bool) -> Scores:
    """Logprobs and entropy in the dtype of the logits; in float64 the oracle."""
    logp = torch.log_softmax(logits, dim=-1)
    entropy = -(logp.exp() * logp).sum(-1) if with_entropy else None
    return logp.gather(1, targets[:, None])[:, 0], entropy


def token_weights(tokens: int, device: torch.device) -> Tensor:
    """The loss's factor of each token's logprob: both signs, never zero."""
    return torch.cos(torch.arange(tokens, device=device, dtype=torch.float32))


def cotangents(tokens: int, with_entropy: bool, device: torch.device) -> tuple[Tensor, ...]:
    weights = token_weights(tokens, device)
    return (weights, 0.5 * weights.flip(0)) if with_entropy else (weights,)


def expected(
    outputs: Scores, weights: tuple[Tensor, ...], differentiated: tuple[Tensor, ...]
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients of the oracle."""
    kept = [output for output in outputs if output is not None]
    gradients = torch.autograd.grad(kept, differentiated, [weight.double() for weight in weights])
    return [output.detach() for output in kept], list(gradients)


def largest_errors(
    outputs: list[Tensor], gradients: list[Tensor], oracle: tuple[list[Tensor], list[Tensor]]
) -> dict[str, float | None]:
    """Largest errors against the oracle; None for what a method does not return token by token."""
    oracle_outputs, oracle_gradients = oracle
    by_token = [
        (output.double() - exact).abs().max().item() if output.dim() else None
        for output, exact in zip(outputs, oracle_outputs, strict=True)
    ]
    relative = [
        ((gradient.double() - exact).abs().max() / exact.abs().max()).item()
        for gradient, exact in zip(gradients, oracle_gradients, strict=True)
    ]
    return {
        "logprob_error": by_token[0],
        "entropy_error": by_token[1] if len(by_token) > 1 else None,
        "gradient_error": max(relative),
    }


def logits_cases(shape: Shape, device: torch.device, dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    """Logits given. The oracle covers up to `CHECKED_ROWS` rows from first to last: in float64 all would be too many.

    The last row weighs nothing, as at the end of a sequence, where no token follows: Liger's loss expects such a row.
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
            checked = [output[rows] if output.dim() else output for output in outputs]
            return largest_errors(checked, [gradients[0][rows]], oracle)

        yield Case(
            labels={"dtype": str(dtype).removeprefix("torch."), "entropy": with_entropy},
            arguments=arguments,
            cotangents=weights,
            errors=errors,
            logits_bytes=source.numel() * source.element_size(),
        )


def head_cases(shape: Shape, device: torch.device, dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    """Hidden states and weight given, both differentiated, such that the logits have a standard deviation of 3."""
    for dtype, with_entropy in itertools.product(dtypes, (False, True)):
        torch.manual_seed(0)
        hidden = torch.empty(shape.tokens, shape.hidden, dtype=dtype, device=device).normal_()
        weight = torch.empty(shape.vocab, shape.hidden, dtype=dtype, device=device).normal_(std=3 / shape.hidden**0.5)
        targets = torch.randint(0, shape.vocab, (shape.tokens,), device=device)
        weights = cotangents(shape.tokens, with_entropy, device)
        oracle = head_oracle(hidden, weight, targets, with_entropy, weights)

        yield head_case(hidden, weight, targets, with_entropy, cotangents=weights, oracle=oracle)


def head_case(hidden: Tensor, weight: Tensor, *rest: Any, cotangents: tuple[Tensor, ...], oracle: Any) -> Case:
    """The case of an LM head, both of whose operands are differentiated; the last of `rest` is whether there is an entropy."""
    return Case(
        labels={"dtype": str(hidden.dtype).removeprefix("torch."), "entropy": rest[-1]},
        arguments=lambda: (hidden.detach().requires_grad_(), weight.detach().requires_grad_(), *rest),
        cotangents=cotangents,
        errors=functools.partial(largest_errors, oracle=oracle),
        logits_bytes=hidden.shape[0] * weight.shape[0] * hidden.element_size(),
    )


def head_oracle(
    hidden: Tensor, weight: Tensor, targets: Tensor, with_entropy: bool, weights: tuple[Tensor, ...]
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients in float64, some tokens at a time: float64 logits of all would not fit."""
    exact_weight = weight.double().requires_grad_()
    outputs, hidden_gradients, weight_gradient = [], [], torch.zeros_like(exact_weight)
    for at in torch.arange(hidden.shape[0], device=hidden.device).split(ORACLE_TOKENS):
        exact_hidden = hidden[at].double().requires_grad_()
        result = scores(exact_hidden @ exact_weight.T, targets[at], with_entropy)
        part, gradients = expected(result, tuple(w[at] for w in weights), (exact_hidden, exact_weight))
        outputs.append(part)
        hidden_gradients.append(gradients[0])
        weight_gradient += gradients[1]
    return [torch.cat(parts) for parts in zip(*outputs, strict=True)], [torch.cat(hidden_gradients), weight_gradient]


# ---- methods that start from logits


def by_log_softmax(logits: Tensor, targets: Tensor, with_entropy: bool) -> Scores:
    return scores(logits.float(), targets, with_entropy)


def by_logsumexp(logits: Tensor, targets: Tensor, with_entropy: bool) -> Scores:
    x = logits.float()
    lse = torch.logsumexp(x, dim=-1)
    entropy = lse - (torch.softmax(x, dim=-1) * x).sum(-1) if with_entropy else None
    return x.gather(1, targets[:, None])[:, 0] - lse, entropy


def load_compiled(device: torch.device, *, call: Callable[..., Scores]) -> Callable[..., Scores]:
    """`call` under torch.compile; it is compiled when it first runs, once for each dtype, with and without an entropy."""
    if torch._dynamo.config.disable:
        raise RuntimeError("torch.compile is disabled (TORCH_COMPILE_DISABLE)")
    return torch.compile(call, fullgraph=True, dynamic=False)


def ours(logits: Tensor, targets: Tensor, with_entropy: bool, *, inplace: bool) -> Scores:
    return token_logprobs(logits, targets, with_entropy=with_entropy, inplace=inplace)


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


def load_liger_logits(device: torch.device) -> Callable[..., Scores]:
    from liger_kernel.transformers import LigerCrossEntropyLoss

    loss = LigerCrossEntropyLoss(reduction="none")
    return lambda logits, targets, with_entropy: (-loss(logits, targets), None)


def load_liger_logits_grpo(device: torch.device) -> Callable[..., Scores]:
    """Liger's loss with ratio 1 and advantage -1, whose gradient is that of the log-probability, summed as `token_weights`.

    It takes logits `[1, tokens, vocab]` with targets `[1, tokens - 1]`: the last row is not scored.
    """
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    def call(logits: Tensor, targets: Tensor, with_entropy: bool) -> Scores:
        advantages = torch.full((1,), -1.0, device=logits.device)
        scored = targets[None, :-1].contiguous()
        losses = triton_grpo_loss(logits[None], None, None, scored, advantages, temperature=1.0, beta=0.0)[0]
        return (losses[0] * token_weights(len(targets), logits.device)[:-1]).sum(), None

    return call


# ---- methods that start from hidden states


def head_by_log_softmax(hidden: Tensor, weight: Tensor, targets: Tensor, with_entropy: bool) -> Scores:
    return by_log_softmax(hidden @ weight.T, targets, with_entropy)


def our_head(hidden: Tensor, weight: Tensor, targets: Tensor, with_entropy: bool) -> Scores:
    return token_logprobs(hidden @ weight.T, targets, with_entropy=with_entropy, inplace=True)


def load_our_fused_head(device: torch.device) -> Callable[..., Scores]:
    def call(hidden: Tensor, weight: Tensor, targets: Tensor, with_entropy: bool) -> Scores:
        chunk = LOGITS_CHUNK[device.type]
        return linear_logprobs(hidden, weight, targets, with_entropy=with_entropy, logits_chunk=chunk)

    return call


def load_torch_head(device: torch.device, *, is_chunked: bool) -> Callable[..., Scores]:
    from torch.nn.functional import linear_cross_entropy

    options = torch.nn.LinearCrossEntropyOptions() if is_chunked else None

    def call(hidden: Tensor, weight: Tensor, targets: Tensor, with_entropy: bool) -> Scores:
        return -linear_cross_entropy(hidden, weight, targets, reduction="none", options=options), None

    return call


def load_trl_head(device: torch.device) -> Callable[..., Scores]:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as chunk_size

    def call(hidden: Tensor, weight: Tensor, targets: Tensor, with_entropy: bool) -> Scores:
        wanted = ("entropy",) if with_entropy else ()
        return ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, chunk_size, None, 1.0, wanted)[:2]

    return call


def load_liger_head(device: torch.device) -> Callable[..., Scores]:
    from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

    def call(hidden: Tensor, weight: Tensor, targets: Tensor, with_entropy: bool) -> Scores:
        return LigerFusedLinearPPOBase.chunk_forward(hidden[None], weight, targets[None])[0], None

    return call


def load_liger_grpo(device: torch.device) -> Callable[..., Scores]:
    """Liger's loss made the weighted sum of logprobs that the other methods' cotangents stand for.

    At ratio 1 cispo is -sum(advantage * logprob) / tokens, an advantage belongs to a sequence: one token a sequence.
    """
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(
        loss_type="cispo", epsilon_high=5.0, beta=0.0, use_ref_model=False, compiled=False, chunk_size=2048
    )

    def call(hidden: Tensor, weight: Tensor, targets: Tensor, with_entropy: bool) -> Scores:
        tokens = hidden.shape[0]
        advantages = -tokens * token_weights(tokens, hidden.device)
        mask = torch.ones_like(targets[:, None])
        return loss(hidden[:, None], weight, targets[:, None], mask, advantages)[0], None

    return call


def load_liger_cross_entropy(device: torch.device) -> Callable[..., Scores]:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(reduction="none")
    return lambda hidden, weight, targets, with_entropy: (-loss(weight, hidden, targets), None)


# ---- groups


def loss_operands(shape: Shape, device: torch.device) -> dict[str, Tensor]:
    """64 sequences of different lengths, off-policy enough that some tokens are clipped."""
    generator = torch.Generator(device).manual_seed(0)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(shape.tokens, device=device, generator=generator)

    logprobs = -1.0 + noise(0.3)
    cuts = torch.linspace(0, 1, 65, device=device).square().mul(shape.tokens).round().int()
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs + noise(0.2),
        "ref_logprobs": logprobs + noise(0.2),
        "rollout_logprobs": logprobs + noise(0.1),
        "advantages": noise(1.0),
        "weights": torch.full_like(logprobs, 1 / shape.tokens),
        "cu_seqlens": cuts,
    }


def loss_by_formula(logprobs: Tensor, operands: dict[str, Tensor]) -> tuple[Tensor]:
    old, advantages = operands["old_logprobs"], operands["advantages"]
    ratio = (logprobs - old).clamp(-40, 40).exp()
    policy = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    rho = (old - operands["rollout_logprobs"]).clamp(-10, 10).exp().clamp(max=2.0)
    d = (logprobs - operands["ref_logprobs"]).clamp(-40, 40)
    return ((operands["weights"] * (rho * policy + 0.05 * (torch.expm1(-d) + d))).sum(),)


SETTINGS = LossSettings(
    surrogate="ppo_clip",
    ratio_level="token",
    ratio_low=0.8,
    ratio_high=1.2,
    delta=0.0,
    dual_clip=0.0,
    beta=0.05,
    kl_estimator=2,
    kl_bias_correction=False,
    use_rho=True,
    rho_clamp_low=0.0,
    rho_clamp_high=2.0,
    rho_mask_low=0.0,
    rho_mask_high=0.0,
)


def our_loss(logprobs: Tensor, operands: dict[str, Tensor]) -> tuple[Tensor]:
    loss, _ = policy_loss(logprobs, **operands, settings=SETTINGS)
    return (loss,)


def loss_cases(shape: Shape, device: torch.device, dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    """PPO's clip, KL estimator 2 and truncated importance sampling, from logprobs, which are always float32."""
    operands = loss_operands(shape, device)
    logprobs, one = operands.pop("logprobs"), torch.ones((), device=device)
    doubles = {name: x.double() if x.is_floating_point() else x for name, x in operands.items()}
    leaf = logprobs.double().requires_grad_()
    outputs, gradients = expected(loss_by_formula(leaf, doubles), (one,), (leaf,))

    def errors(got: list[Tensor], got_gradients: list[Tensor]) -> dict[str, float | None]:
        worst = (got_gradients[0] - gradients[0]).abs().max() / gradients[0].abs().max()
        return {"logprob_error": float((got[0] - outputs[0]).abs()), "gradient_error": float(worst)}

    yield Case(
        labels={"dtype": "float32", "entropy": False, "case": "float32, ppo_clip + KL + rho"},
        arguments=lambda: (logprobs.clone().requires_grad_(), operands),
        cotangents=(one,),
        errors=errors,
        logits_bytes=7 * 4 * shape.tokens,
    )


def given(call: Callable[..., Scores]) -> Callable[[torch.device], Callable[..., Scores]]:
    """Loader of a method that needs no import."""
    return lambda device: call


LOGITS = Group(
    name="logits",
    title="from logits",
    methods=[
        Method(name="log_softmax + gather", load=given(by_log_softmax)),
        Method(name="gather - logsumexp", load=given(by_logsumexp)),
        Method(
            name="log_softmax + gather, compiled",
            load=functools.partial(load_compiled, call=by_log_softmax),
            is_peer=True,
            note="torch.compile by Inductor, compiled outside the clock",
        ),
        Method(
            name="Megatron cross entropy",
            load=load_megatron,
            is_peer=True,
            has_entropy=False,
            note="float32: works in the caller's logits, which are lost in forward; the memory of a copy is not counted",
        ),
        Method(
            name="Megatron fused cross entropy",
            load=load_megatron_fused,
            is_peer=True,
            has_entropy=False,
            note="float32: as above; rounds the gradient to bfloat16, also that of float32 logits",
        ),
        Method(
            name="TRL selective_log_softmax",
            load=load_trl,
            is_peer=True,
            note="with entropy selective_log_softmax_and_entropy; on a CPU bfloat16 logits are computed in bfloat16",
        ),
        Method(
            name="Liger cross entropy",
            load=load_liger_logits,
            is_peer=True,
            has_entropy=False,
            note="LigerCrossEntropyLoss(reduction='none'), Triton; makes the gradients in forward, in the caller's logits, "
            "which are lost",
        ),
        Method(
            name="Liger GRPO loss",
            load=load_liger_logits_grpo,
            is_peer=True,
            has_entropy=False,
            note="triton_grpo_loss, a whole loss: returns no logprobs; the gradients overwrite the logits in backward",
        ),
        Method(name="mgrpo, new buffer", load=given(functools.partial(ours, inplace=False))),
        Method(name="mgrpo, in place", load=given(functools.partial(ours, inplace=True))),
    ],
    cases=logits_cases,
    shapes={
        "cpu": Shape(tokens=2048, vocab=32000, hidden=0, rounds=4),
        "cuda": Shape(tokens=16384, vocab=151936, hidden=0, rounds=10),
    },
    is_bandwidth_bound=True,
)
HEAD = Group(
    name="head",
    title="from hidden states and the LM head's weight",
    methods=[
        Method(name="matmul, log_softmax", load=given(head_by_log_softmax)),
        Method(
            name="matmul, log_softmax, compiled",
            load=functools.partial(load_compiled, call=head_by_log_softmax),
            is_peer=True,
            note="torch.compile by Inductor, compiled outside the clock",
        ),
        Method(
            name="torch linear_cross_entropy",
            load=functools.partial(load_torch_head, is_chunked=False),
            is_peer=True,
            has_entropy=False,
        ),
        Method(
            name="torch, chunked",
            load=functools.partial(load_torch_head, is_chunked=True),
            is_peer=True,
            has_entropy=False,
            note="linear_cross_entropy(options=LinearCrossEntropyOptions())",
        ),
        Method(
            name="TRL ChunkedLogProbFunction",
            load=load_trl_head,
            is_peer=True,
            note="what TRL's GRPOTrainer takes its logprobs from, always with the entropy; Triton on a GPU, torch elsewhere",
        ),
        Method(
            name="Liger chunk_forward",
            load=load_liger_head,
            is_peer=True,
            has_entropy=False,
            note="the logprobs inside Liger's fused linear GRPO and PPO losses",
        ),
        Method(
            name="Liger fused linear GRPO",
            load=load_liger_grpo,
            is_peer=True,
            has_entropy=False,
            note="a whole loss, uncompiled: returns no logprobs, makes the gradients in forward",
        ),
        Method(
            name="Liger fused linear CE",
            load=load_liger_cross_entropy,
            is_peer=True,
            has_entropy=False,
            note="LigerFusedLinearCrossEntropyLoss(reduction='none'), Triton",
        ),
        Method(name="mgrpo, matmul + in place", load=given(our_head)),
        Method(name="mgrpo linear_logprobs", load=load_our_fused_head, note="logits_chunk={logits_chunk}"),
    ],
    cases=head_cases,
    shapes={
        "cpu": Shape(tokens=512, vocab=32000, hidden=1024, rounds=2),
        "cuda": Shape(tokens=16384, vocab=151936, hidden=4096, rounds=5),
    },
    is_bandwidth_bound=False,
)
LOSS = Group(
    name="loss",
    title="the policy loss of packed sequences",
    methods=[
        Method(
            name="PyTorch formulas",
            load=given(loss_by_formula),
            has_entropy=False,
            note="the loss alone, nothing is measured for metrics",
        ),
        Method(
            name="mgrpo policy_loss",
            load=given(our_loss),
            has_entropy=False,
            note="also the 24 sums of each sequence that metrics are made of",
        ),
    ],
    cases=loss_cases,
    shapes={
        "cpu": Shape(tokens=16384, vocab=0, hidden=0, rounds=20),
        "cuda": Shape(tokens=32768, vocab=0, hidden=0, rounds=20),
    },
    is_bandwidth_bound=False,
)
