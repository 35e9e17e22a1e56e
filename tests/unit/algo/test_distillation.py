"""What is learned from teachers: advantages against loops, gradients against whole distributions in float64."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mgrpo.algo import TeacherSignal, policy_loss
from mgrpo.algo.distillation import divergence
from mgrpo.config.distillation import Distillation
from mgrpo.ops import KeptSets, linear_logprobs, token_logprobs
from tests.unit.algo.loss_cases import LENGTHS, batch, loop_loss, loss_config, plain, reduced

NAMED = ("ppo_clip", "cispo", "sapo", "vespo", "reinforce")
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
TOKENS = sum(LENGTHS)


def settings(**values) -> Distillation:
    return Distillation(**{"teacher_model_name_or_path": ("math:A", "code:B"), "distillation_coef": 0.7} | values)


def signal_of(b: dict[str, Tensor], **values) -> TeacherSignal:
    """Two teachers and a sequence without; of some tokens nothing is known, of which one was not sampled."""
    generator = torch.Generator().manual_seed(1)
    logprobs = b["logprobs"].detach() + torch.randn(TOKENS, generator=generator, dtype=torch.float64).to(b["logprobs"])
    logprobs[[4, 9]], logprobs[6] = math.nan, -math.inf
    b["rollout_logprobs"][9], b["old_logprobs"][2] = math.nan, math.nan
    b["loss_mask"][[2, 4, 6, 9]] = True
    teachers = torch.tensor([0, 1, 1, -1, 0, 1], dtype=torch.int8).repeat_interleave(torch.tensor(LENGTHS))
    return TeacherSignal(
        settings=settings(**values), teachers=teachers, logprobs=logprobs, targets=torch.arange(TOKENS)
    )


def expected_mask_and_advantages(b: dict[str, list], signal: TeacherSignal) -> tuple[list[bool], list[float]]:
    """By loops over Python floats."""
    chosen, teachers, logprobs = signal.settings, signal.teachers.tolist(), signal.logprobs.tolist()
    mask, advantages = list(b["loss_mask"]), []
    for t in range(TOKENS):
        sequence = next(s for s in range(len(LENGTHS)) if b["cu_seqlens"][s] <= t < b["cu_seqlens"][s + 1])
        own = b["advantages"][t if len(b["advantages"]) == TOKENS else sequence]
        advantage = 0.0 if chosen.distillation_only else own
        is_known = teachers[t] >= 0 and math.isfinite(logprobs[t])
        if is_known:
            old = b["old_logprobs"][t]
            gap = logprobs[t] - (b["logprobs"][t] if math.isnan(old) else old)
            advantage += chosen.distillation_coef * gap
        elif chosen.distillation_only or (teachers[t] >= 0 and not math.isnan(b["rollout_logprobs"][t])):
            mask[t] = False
        advantages.append(advantage)
    return mask, advantages


def per_token(b: dict[str, Tensor]) -> Tensor:
    return torch.randn(TOKENS, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


@pytest.mark.parametrize("values", [{}, {"distillation_only": True}], ids=str)
@pytest.mark.parametrize("of_turns", [False, True])
@pytest.mark.parametrize("policy_loss_name", NAMED)
def test_sampled_advantages_equal_a_loop_over_tokens(policy_loss_name, of_turns, values):
    """The wrong sign unlearns the teacher; the wrong policy's logprob rewards what has been learned already."""
    b = batch()
    if of_turns:
        b["advantages"] = per_token(b)
    signal = signal_of(b, **values)
    mask, advantages = expected_mask_and_advantages(plain(b), signal)
    config = loss_config(policy_loss=policy_loss_name, use_rho_correction=True, rho_clamp_upper_bound=1.1, beta=0.02)
    b["loss_mask"] = signal.trained(b["loss_mask"], b["rollout_logprobs"])
    assert b["loss_mask"].tolist() == mask and sum(mask) > 8

    keep = (torch.arange(TOKENS) % 3).double()
    logprobs = b.pop("logprobs").requires_grad_()
    given = b | {"advantages": torch.tensor(advantages, dtype=torch.float64)}
    for factor in (None, keep):
        taught = policy_loss(logprobs, **b, config=config, signal=signal, keep=factor)
        told = policy_loss(logprobs, **given, config=config, keep=factor)
        got, want = (torch.autograd.grad(x.loss, logprobs)[0] for x in (taught, told))
        assert taught.loss.item() == pytest.approx(told.loss.item(), rel=1e-12)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)
        assert want[torch.tensor(mask)].count_nonzero() > 5

    known = plain(given | {"logprobs": logprobs.detach()})
    for t in range(TOKENS):  # as the loss takes what it does not know
        known["old_logprobs"][t] = (
            known["logprobs"][t] if math.isnan(known["old_logprobs"][t]) else known["old_logprobs"][t]
        )
        if math.isnan(known["rollout_logprobs"][t]):
            known["rollout_logprobs"][t] = known["old_logprobs"][t]
    loss, _ = loop_loss(known, config)
    assert policy_loss(logprobs, **b, config=config, signal=signal).loss.item() == pytest.approx(loss, rel=1e-10)


def chain() -> tuple[Tensor, Tensor, Tensor]:
    """Logits `[1 + 5, 5]` of a policy of two tokens, the first and after each first one, and log-distributions of others."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher, engine = (torch.randn(6, 5, generator=generator, dtype=torch.float64).log_softmax(1) for _ in range(2))
    return logits, teacher, engine


# The gate of vespo takes the place of rho.
@pytest.mark.parametrize(
    ("policy_loss_name", "by_engine"),
    [*((name, False) for name in NAMED), *((name, True) for name in NAMED if name != "vespo")],
)
def test_the_expected_sampled_gradient_is_that_of_the_exact_reverse_kl(policy_loss_name, by_engine):
    """The policy would end elsewhere than at its teacher.

    Over every sequence of two tokens, weighed by its probability: KL(policy, teacher) of each place, whose context is given.
    """
    logits, teacher, engine = chain()
    rows = [((0, a), (1 + a, b)) for a, b in itertools.product(range(5), repeat=2)]
    state, token = torch.tensor(rows).reshape(-1, 2).T
    logprobs = logits.log_softmax(1)[state, token]
    rollout = engine[state, token] if by_engine else logprobs.detach()
    sequences = rollout.reshape(-1, 2).sum(1).exp()
    signal = TeacherSignal(
        settings=settings(distillation_only=True),
        teachers=torch.zeros(50, dtype=torch.int8),
        logprobs=teacher[state, token],
        targets=token,
    )
    rho = {"use_rho_correction": by_engine, "rho_level": "token"}
    loss = policy_loss(
        logprobs,
        logprobs.detach(),
        torch.randn(25),
        torch.ones(50),
        2 * torch.arange(26),
        config=loss_config(policy_loss=policy_loss_name, **rho),
        rollout_logprobs=rollout,
        # Each sequence's probability as the inverse of its denominator.
        denominator=1 / sequences,
        signal=signal,
    ).loss
    # The contexts are those of the sequences' own sampler.
    first = (engine if by_engine else logits.detach().log_softmax(1))[0].exp()
    every = logits.log_softmax(1)
    kl = (every.exp() * (every - teacher)).sum(1)
    exact = 0.7 * (kl[0] + (first * kl[1:]).sum())
    got, want = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (loss, exact))
    assert want.abs().max() > 0.05
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def coarse(row: Tensor, chosen: list[int]) -> Tensor:
    """Probabilities of the chosen tokens and of all others together."""
    others = [token for token in range(len(row)) if token not in chosen]
    return torch.stack([*(row[token] for token in chosen), row[others].sum() if others else row.new_zeros(())])


def exact_divergence(p: Tensor, q: Tensor, chosen: Distillation) -> Tensor:
    """Of whole distributions, teacher first; 0 log 0 is 0."""

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return torch.stack([x * (x / y).log() for x, y in zip(a, b, strict=True) if x > 0]).sum()

    if chosen.distillation_loss == "forward_kl":
        return kl(p, q)
    if chosen.distillation_loss == "reverse_kl":
        return kl(q, p)
    mixture = (p + q) / 2
    return (kl(p, mixture) + kl(q, mixture)) / 2


VOCAB, ROWS = 11, 6


@pytest.mark.parametrize("cut", ["whole", "kept"])
@pytest.mark.parametrize("k", [1, 4, VOCAB])
@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 3e-5)], ids=["64", "32"])
def test_a_divergence_has_the_value_and_gradient_of_whole_distributions(name, k, cut, dtype, tolerance):
    """The tail, the sampled token among the likeliest or beside them, and ids that are missing: each is a term of the gradient."""
    generator = torch.Generator().manual_seed(k)
    student, teacher = (1.5 * torch.randn(ROWS, VOCAB, generator=generator, dtype=torch.float64) for _ in range(2))
    targets = torch.randint(VOCAB, (ROWS,), generator=generator)
    is_kept = torch.ones(ROWS, VOCAB, dtype=torch.bool)
    if cut == "kept":
        is_kept = torch.rand(ROWS, VOCAB, generator=generator) < 0.5
        is_kept[torch.arange(ROWS), targets] = True
    kept = KeptSets(is_kept.nonzero()[:, 1].int(), torch.cat((torch.zeros(1), is_kept.sum(1).cumsum(0))).int())
    taught = (teacher / 1.2).masked_fill(~is_kept, -torch.inf).log_softmax(1)
    likeliest, ids = taught.topk(k)
    ids[likeliest == -torch.inf], likeliest[likeliest == -torch.inf] = -1, math.nan
    ids[0, 0], likeliest[0, 0] = -1, math.nan  # the teacher gave fewer
    signal = TeacherSignal(
        settings=settings(distillation_loss=name, distillation_topk=k, distillation_only=True),
        teachers=torch.tensor([0, 1, 0, 0, -1, 1], dtype=torch.int8),
        logprobs=taught.gather(1, targets[:, None])[:, 0].index_fill(0, torch.tensor([3]), math.nan),
        targets=targets,
        ids=ids,
        likeliest=likeliest,
    )
    mask = signal.trained(torch.ones(ROWS, dtype=torch.bool), torch.zeros(ROWS))
    assert mask.tolist() == [True, True, True, False, False, True]

    leaf = student.to(dtype).requires_grad_()
    tokens = torch.cat((targets[:, None], ids), 1)
    options = {"temperature": 0.8, "kept": kept if cut == "kept" else None}
    if dtype == torch.float64:
        # Dots with the unit vectors: the gradient of the factors is that of the logits.
        candidates, _ = linear_logprobs(leaf, torch.eye(VOCAB, dtype=dtype), tokens, logits_chunk=4, **options)
    else:
        candidates, _ = token_logprobs(leaf, tokens, **options)
    weights = torch.tensor([1, 1, 1, 1, 1, 1.0])
    result = policy_loss(
        candidates[:, 0],
        candidates[:, 0].detach(),
        torch.randn(2),
        mask,
        torch.tensor([0, 4, 6]),
        config=loss_config(aggregation="seq_mean"),
        denominator=2.0,
        signal=signal,
        candidates=candidates,
    )
    (gradient,) = torch.autograd.grad(result.loss, leaf)

    exact_leaf = student.clone().requires_grad_()
    q = (exact_leaf / 0.8).masked_fill(~is_kept, -torch.inf).log_softmax(1).exp()
    # seq_mean over the trained tokens of each of the two sequences, of which the second has one.
    weights = {0: 1 / 6, 1: 1 / 6, 2: 1 / 6, 5: 1 / 2}
    total, values = 0.0, []
    for row, weight in weights.items():
        chosen = sorted({int(targets[row]), *(token for token in ids[row].tolist() if token >= 0)})
        p_row, q_row = coarse(taught[row].exp(), chosen), coarse(q[row], chosen)
        values.append(exact_divergence(p_row, q_row, signal.settings))
        total = total + 0.7 * weight * values[-1]
        if k == VOCAB and row:
            whole = exact_divergence(taught[row].exp()[is_kept[row]], q[row][is_kept[row]], signal.settings)
            assert values[-1].item() == pytest.approx(whole.item(), rel=1e-12)
    (want,) = torch.autograd.grad(total, exact_leaf)
    assert result.loss.item() == pytest.approx(total.item(), rel=tolerance, abs=tolerance)
    torch.testing.assert_close(gradient.double(), want, rtol=tolerance, atol=tolerance)
    assert want.abs().max() > 0.01
    logged = reduced(result.metrics)
    assert logged["distillation/kl"] == pytest.approx(sum(x.item() for x in values) / 4, rel=1e-4)
    assert logged["distillation/code/kl"] == pytest.approx((values[1] + values[3]).item() / 2, rel=1e-4)
    assert logged["distillation/missing"] == pytest.approx(1 / 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_an_equal_teacher_teaches_nothing(name, dtype):
    """A student that has arrived would be pushed on, most of all by a tail that is nothing but rounding."""
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    logits[1, 3], logits[2] = 40.0, 0.0  # certain of one token, and of none
    every = logits.log_softmax(1).requires_grad_()
    for ids in (slice(0, 4), slice(0, 9), slice(3, 4)):
        student = every[:, ids]
        values = divergence(
            student,
            student.detach().clone(),
            torch.ones_like(student, dtype=torch.bool),
            settings(distillation_loss=name),
        )
        (gradient,) = torch.autograd.grad(values.sum(), every)
        assert values.abs().max() < 1e-6 and gradient.isfinite().all()
        # What reaches the logits.
        pulled = gradient - every.detach().exp() * gradient.sum(1, keepdim=True)
        assert pulled.abs().max() < 2e-6


@pytest.mark.parametrize("name", DIVERGENCES)
def test_no_mass_outside_of_the_tokens_stays_finite(name):
    """A teacher that is certain has a sum of 1 or, by rounding, more: the logarithm of what is left ends the run."""
    student = torch.tensor([[-1e-7, -20.0], [-3.0, -0.05], [0.0, -40.0]], requires_grad=True)
    teacher = torch.tensor([[0.0, -30.0], [1e-7, -16.0], [-0.7, -0.69]])
    is_token = torch.ones(3, 2, dtype=torch.bool)
    values = divergence(student, teacher, is_token, settings(distillation_loss=name))
    (gradient,) = torch.autograd.grad(values.sum(), student)
    assert values.isfinite().all() and gradient.isfinite().all() and values.abs().max() < 40


def test_the_rest_of_a_sharp_teacher_keeps_its_digits_in_float32():
    """reverse_kl takes the rest's logarithm; in a float32 sum a rest of 4e-6 has two digits, and the gradient is off by as much."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 256, 4096, generator=generator, dtype=torch.float64)
    logits[0, :, :16] += 6.2  # the student: a rest of a third
    logits[1, :, :16] += 18.0  # the teacher: 4e-6
    student, teacher = logits.log_softmax(-1)[..., :16].unbind()
    assert 2e-6 < (1 - teacher.exp().sum(1)).median() < 8e-6
    found = {}
    for dtype in (torch.float64, torch.float32):
        leaf = student.detach().to(dtype).requires_grad_()
        values = divergence(
            leaf,
            teacher.to(dtype),
            torch.ones_like(student, dtype=torch.bool),
            settings(distillation_loss="reverse_kl"),
        )
        (gradient,) = torch.autograd.grad(values.sum(), leaf)
        found[dtype] = values.detach().double(), gradient.double()
    (value, gradient), (exact, exact_gradient) = found[torch.float32], found[torch.float64]
    # Rounding of 16 log-probabilities to float32 moves the rest by 6e-9 and its logarithm by 1.5e-3.
    assert ((value - exact) / exact).abs().median() < 3e-4
    assert (gradient - exact_gradient).norm() < 6e-4 * exact_gradient.norm()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_small_rest_counts(name):
    """Where nearly all is said by a few tokens, the others still decide whether the policy may leave them."""
    teacher, student = torch.tensor([[0.5, 0.4999]]), torch.tensor([[0.4, 0.59999]])
    chosen = settings(distillation_loss=name)
    got = divergence(student.log(), teacher.log(), torch.ones(1, 2, dtype=torch.bool), chosen)
    p, q = (torch.cat((x, 1 - x.sum(1, keepdim=True)), 1).double()[0] for x in (teacher, student))
    assert got.item() == pytest.approx(exact_divergence(p, q, chosen).item(), abs=2e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["sampled", *DIVERGENCES])
def test_tokens_that_are_not_trained_add_nothing_whatever_they_hold(name, poison):
    """A token between turns, or without a teacher, would end the step or move the policy."""
    b = batch()
    signal = signal_of(b, distillation_loss=name)
    b["loss_mask"] = signal.trained(b["loss_mask"], b["rollout_logprobs"])
    generator = torch.Generator().manual_seed(2)
    ids = torch.stack([torch.randperm(50, generator=generator)[:3] for _ in range(TOKENS)])
    likeliest = torch.randn(TOKENS, 3, generator=generator, dtype=torch.float64) - 3
    others = torch.randn(TOKENS, 3, generator=generator, dtype=torch.float64) - 3
    is_out = ~b["loss_mask"] | (signal.teachers < 0)
    is_untrained = ~b["loss_mask"]
    found = []
    for value in (None, poison):
        own = dict(b)
        logprobs, candidates, teacher, likely = own.pop("logprobs"), others, signal.logprobs, likeliest
        if value is not None:
            logprobs, candidates = (
                logprobs.masked_fill(is_untrained, value),
                others.masked_fill(is_untrained[:, None], value),
            )
            teacher, likely = teacher.masked_fill(is_out, value), likeliest.masked_fill(is_out[:, None], value)
        logprobs = logprobs.clone().requires_grad_()
        candidates = torch.cat((logprobs[:, None], candidates), 1)
        taught = replace(signal, logprobs=teacher, ids=ids, likeliest=likely)
        result = policy_loss(
            logprobs, **own, config=loss_config(), signal=taught, candidates=None if name == "sampled" else candidates
        )
        found.append((result, torch.autograd.grad(result.loss, logprobs)[0]))
    (clean, gradient), (poisoned, other) = found
    assert torch.equal(clean.loss, poisoned.loss) and torch.equal(gradient, other)
    for metric in ("distillation/kl", "distillation/math/kl", "loss/policy_avg"):
        assert torch.equal(clean.metrics[metric], poisoned.metrics[metric]), metric


def test_metrics_follow_the_hand_worked_case():
    """A run is steered by them: whether the policy has reached its teacher, and whether the teacher answers."""
    signal = TeacherSignal(
        settings=settings(),
        teachers=torch.tensor([0, 0, 0, 1, 1, -1, 0], dtype=torch.int8),
        logprobs=torch.tensor([-1.0, -4.0, math.nan, -2.0, -2.5, math.nan, math.nan]),
        targets=torch.arange(7),
    )
    rollout = torch.tensor([-2.0] * 6 + [math.nan])
    mask = signal.trained(torch.ones(7, dtype=torch.bool), rollout)
    assert mask.tolist() == [True, True, False, True, True, True, True]
    logprobs = torch.full((7,), -2.0, requires_grad=True)
    values = (logprobs, logprobs.detach(), torch.ones(1), mask, torch.tensor([0, 7]))
    logged = reduced(policy_loss(*values, config=loss_config(), rollout_logprobs=rollout, signal=signal).metrics)
    assert {name: value for name, value in logged.items() if name.startswith("distillation/")} == pytest.approx(
        {
            "distillation/kl": (-1 + 2 + 0 + 0.5) / 4,
            "distillation/math/kl": 0.5,
            "distillation/code/kl": 0.25,
            "distillation/missing": 1 / 5,
        }
    )

    signal = replace(
        signal,
        settings=settings(distillation_loss="forward_kl", teacher_model_name_or_path=("A",)),
        teachers=torch.zeros(7, dtype=torch.int8),
        logprobs=torch.full((7,), -1.5),
        ids=torch.tensor([[0, 9], [8, 9], [9, 8], [8, 9], [8, 9], [-1, -1], [8, 9]]),
        likeliest=torch.tensor([[-1.5, -2.0], [-0.9, -2.0]] + [[-0.9, -2.0]] * 5),
    )
    rows = [[-1.0, -1.0, -2.0], [-1.0, -0.9, -3.0], [-1.0, -2.0, -1.5], [-0.9, -1.0, -4.0], [-3.0, -0.5, -2.0]]
    rows += [[-1.0, -math.inf, -math.inf], [-2.0, -2.1, -1.9]]
    candidates = torch.tensor(rows, requires_grad=True)
    mask = torch.tensor([True] * 6 + [False])
    values = (candidates[:, 0], candidates[:, 0].detach(), torch.ones(1), mask, torch.tensor([0, 7]))
    logged = reduced(policy_loss(*values, config=loss_config(), signal=signal, candidates=candidates).metrics)
    # Agree: the target itself, the first of the likeliest, and where the target is all that is known.
    assert logged["distillation/top1_agreement"] == pytest.approx(4 / 6)
    assert not any("/A/" in name for name in logged)


def test_a_loss_of_ones_own_is_given_the_teacher_and_what_is_learned_of_it():
    """A user's distillation reads it; the named signals are his as well."""
    b = batch()
    signal = signal_of(b)
    seen = []

    def function(inputs):
        seen.append(inputs)
        return inputs.total(-inputs.advantages * inputs.logprobs)

    logprobs = b.pop("logprobs").requires_grad_()
    policy_loss(logprobs, **b, config=loss_config(), function=function, signal=signal)
    policy_loss(logprobs, **b, config=loss_config(), function=function)
    assert torch.equal(seen[0].teacher_logprobs.nan_to_num(), signal.logprobs.nan_to_num())
    assert torch.equal(seen[0].advantages, signal.advantages(seen[1].advantages, seen[1].old_logprobs))
    assert seen[1].teacher_logprobs is None
