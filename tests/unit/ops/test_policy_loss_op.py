"""policy_loss's values: the compiled op against float64, and both against formulas worked out here without a line of theirs."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from policy_loss_cases import (
    EVERYTHING,
    EXTREME,
    LEVELS,
    UNTRAINED,
    Result,
    all_settings,
    check_close,
    chosen,
    make_operands,
    run,
    to,
)
from policy_loss_oracle import python_loss
from torch import Tensor

from mgrpo.algo.losses.sapo import soft_gate
from mgrpo.ops import COLUMNS, LossSettings, SurrogateFunction, policy_loss

COMPILED = ("ppo_clip", "cispo", "reinforce")
IN_PYTORCH = soft_gate(1.0, 1.05)


@pytest.mark.parametrize("kl_estimator", range(4))
@pytest.mark.parametrize("ratio_level", LEVELS)
@pytest.mark.parametrize("surrogate", COMPILED)
def test_compiled_loss_equals_float64(compiled: None, surrogate: str, ratio_level: str, kl_estimator: int) -> None:
    """Each combination of settings is a training run; the kernel must also be right in combinations that are never tried."""
    operands = make_operands()
    exact = to(operands, torch.float64)
    for settings in all_settings(surrogate, ratio_level, kl_estimator):
        check_close(run(operands, settings), run(exact, settings), settings)


@pytest.mark.parametrize("ratio_level", LEVELS)
@pytest.mark.parametrize("surrogate", COMPILED)
def test_loss_equals_the_formulas_token_by_token(surrogate: str, ratio_level: str) -> None:
    """Kernel and reference were written together; an error of thought in both is found only by a third version."""
    operands = make_operands((5, 0, 9, 13, 1, 4))
    exact = to(operands, torch.float64)
    combinations = [s for kl_estimator in range(4) for s in all_settings(surrogate, ratio_level, kl_estimator)]
    for settings in combinations[::13]:  # 13 has no factor in common with how they repeat
        expected = python_loss(exact, settings)
        torch.testing.assert_close(tuple(run(exact, settings)), tuple(expected), rtol=1e-7, atol=1e-8)
        check_close(run(operands, settings), expected, settings)


LOG2 = math.log(2)
DUAL = {"dual_clip": 3.0}
DELTA = {"delta": 4.0}
HAND_WORKED = {
    # Clip range [0.8, 1.2]: name -> ratio, advantage, settings, loss, gradient, columns that are then 1.
    "gain above the range is cut": (1.5, 1.0, {}, -1.2, 0.0, ["clipped_high"]),
    "gain below the range is not": (0.5, 1.0, {}, -0.5, -0.5, []),
    "loss above the range is not": (1.5, -1.0, {}, 1.5, 1.5, []),
    "loss below the range is cut": (0.5, -1.0, {}, 0.8, 0.0, ["clipped_low"]),
    "inside nothing is cut": (1.1, 2.0, {}, -2.2, -2.2, []),
    "no advantage, no loss": (1.5, 0.0, {}, 0.0, 0.0, []),
    "dual clip bounds a loss": (5.0, -2.0, DUAL, 6.0, 0.0, ["bounded"]),
    "dual clip leaves a smaller loss": (2.0, -2.0, DUAL, 4.0, 4.0, []),
    "dual clip leaves a gain": (5.0, 1.0, DUAL, -1.2, 0.0, ["clipped_high"]),
    "dual clip leaves a small ratio": (0.1, -1.0, DUAL, 0.8, 0.0, ["clipped_low"]),
    "delta bounds a loss": (5.0, -1.0, DELTA, 4.0, 0.0, ["bounded"]),
    "delta leaves a smaller loss": (3.0, -1.0, DELTA, 3.0, 3.0, []),
    "delta leaves a gain": (5.0, 1.0, DELTA, -1.2, 0.0, ["clipped_high"]),
    "the smaller bound counts": (5.0, -1.0, DELTA | DUAL, 3.0, 0.0, ["bounded"]),
    # The logprob is -0.7.
    "cispo caps the factor, not the gradient": (1.5, 2.0, {"surrogate": "cispo"}, 1.68, -2.4, ["clipped_high"]),
    "cispo also caps losses": (1.5, -2.0, {"surrogate": "cispo"}, -1.68, 2.4, ["clipped_high"]),
    "cispo lifts the factor, not the gradient": (0.5, 2.0, {"surrogate": "cispo"}, 1.12, -1.6, ["clipped_low"]),
    "cispo also lifts losses": (0.5, -2.0, {"surrogate": "cispo"}, -1.12, 1.6, ["clipped_low"]),
    "cispo need not have a floor": (0.5, 2.0, {"surrogate": "cispo", "ratio_low": 0.0}, 0.7, -1.0, []),
    "reinforce knows no ratio": (5.0, 2.0, {"surrogate": "reinforce"}, 1.4, -2.0, []),
}


@pytest.mark.parametrize("ratio_level", LEVELS)
@pytest.mark.parametrize("name", HAND_WORKED)
def test_surrogate_of_one_token_is_the_one_worked_by_hand(name: str, ratio_level: str) -> None:
    """A clip on the wrong side pays the policy for moving away from good tokens, and still looks like training."""
    ratio, advantage, settings, loss, gradient, ones = HAND_WORKED[name]
    result = run_one_token(ratio, advantage, {"ratio_level": ratio_level, **settings})
    # At level "sequence" the ratio's gradient goes to the sequence's log ratio.
    takes_ratio = settings.get("surrogate", "ppo_clip") == "ppo_clip"
    expected = (0.0, gradient) if ratio_level == "sequence" and takes_ratio else (gradient, 0.0)
    assert (result.loss.item(), result.grad.item(), result.seq_grad.item()) == pytest.approx((loss, *expected))
    for column in ("clipped_low", "clipped_high", "bounded"):
        assert column_of(result, column) == float(column in ones), column
    assert column_of(result, "ratio") == pytest.approx(ratio)
    assert column_of(result, "ratio_deviation") == pytest.approx((ratio - 1) ** 2)


@pytest.mark.parametrize(
    ("log_rho", "bounds", "used", "ones"),
    [
        (math.log(3), (0.0, 0.0, 0.0, 0.0), 3.0, []),
        (math.log(3), (0.5, 2.0, 0.0, 0.0), 2.0, ["rho_clamped"]),  # truncated importance sampling
        (math.log(0.25), (0.5, 2.0, 0.0, 0.0), 0.5, ["rho_clamped"]),
        (math.log(1.5), (0.5, 2.0, 0.0, 0.0), 1.5, []),
        (math.log(1.5), (0.0, 0.0, 0.5, 2.0), 1.5, []),  # IcePop: kept as it is inside, dropped outside
        (math.log(3), (0.0, 0.0, 0.5, 2.0), 0.0, ["rho_dropped_high"]),
        (math.log(0.25), (0.0, 0.0, 0.5, 2.0), 0.0, ["rho_dropped_low"]),
        (math.log(3), (0.5, 2.0, 0.0, 4.0), 2.0, ["rho_clamped"]),  # the mask looks at rho before the clamp
        (math.log(5), (0.5, 2.0, 0.0, 4.0), 0.0, ["rho_clamped", "rho_dropped_high"]),
        (12.0, (0.0, 0.0, 0.0, 0.0), math.exp(10.0), []),
    ],
)
@pytest.mark.parametrize("is_sequence", [False, True])
def test_rho_of_one_token_is_the_one_worked_by_hand(
    log_rho: float, bounds: tuple, used: float, ones: list[str], is_sequence: bool
) -> None:
    """A correction for the engine that is applied the wrong way round doubles the bias it is there to remove."""
    names = ("rho_clamp_low", "rho_clamp_high", "rho_mask_low", "rho_mask_high")
    settings = {"use_rho": True, "beta": 0.5, "kl_estimator": 0, **dict(zip(names, bounds, strict=True))}
    if is_sequence:  # the token's own rho is then not looked at
        one = torch.tensor([log_rho], dtype=torch.float64)
        settings |= {"seq_log_rho": one, "seq_log_rho_mask": one}
    result = run_one_token(1.1, 2.0, settings, log_rho=0.01 if is_sequence else log_rho, log_ratio_to_ref=LOG2)
    assert column_of(result, "rho") == pytest.approx(used)
    for column in ("rho_clamped", "rho_dropped_low", "rho_dropped_high"):
        assert column_of(result, column) == float(column in ones), column
    # The penalty stays when the policy term is dropped.
    assert result.loss.item() == pytest.approx(-2.2 * used + 0.5 * LOG2)
    assert result.grad.item() == pytest.approx(-2.2 * used + 0.5)


# d = log 2 and r = 1.1: estimate, and its derivative in the logprob where the ratio is the token's own.
KL_BY_HAND = [
    (LOG2, 1.0),
    (LOG2**2 / 2, LOG2),
    (0.5 - 1 + LOG2, 0.5),
    (1.1 * LOG2, 1.1 + 1.1 * LOG2),
]


@pytest.mark.parametrize("is_corrected", [False, True])
@pytest.mark.parametrize("kl_estimator", range(4))
def test_kl_of_one_token_is_the_one_worked_by_hand(kl_estimator: int, is_corrected: bool) -> None:
    """k3 without the gradient of its ratio, or k1 used as a loss, pulls towards nothing or the wrong way."""
    kl, slope = KL_BY_HAND[kl_estimator]
    if is_corrected:
        kl, slope = 1.1 * kl, 1.1 * slope + 1.1 * kl
    settings = {"beta": 0.5, "kl_estimator": kl_estimator, "kl_bias_correction": is_corrected}
    result = run_one_token(1.1, 0.0, settings, log_ratio_to_ref=LOG2)
    assert result.loss.item() == pytest.approx(0.5 * kl)
    assert result.grad.item() == pytest.approx(0.5 * slope)
    assert column_of(result, "penalty") == pytest.approx(0.5 * kl)
    for k, (value, _) in enumerate(KL_BY_HAND):
        assert column_of(result, f"kl{k}") == pytest.approx(value)


@pytest.mark.parametrize("surrogate", ["ppo_clip", IN_PYTORCH], ids=["compiled", "reference"])
@pytest.mark.parametrize("ratio_level", ["token", "sequence_token"])
@pytest.mark.parametrize("log_ratio_to_ref", [-5.0, -20.0, -30.0])
def test_corrected_kl_keeps_its_digits_on_tokens_the_policy_finds_unlikely(
    compiled: None, log_ratio_to_ref: float, ratio_level: str, surrogate: str | SurrogateFunction
) -> None:
    """The correction makes k2's gradient d r; as a difference of two e^-d it is noise of any size, which is then a step."""
    operands = make_operands((1,), smooth=True)
    operands["ref_logprobs"] = operands["logprobs"] - log_ratio_to_ref
    operands["advantages"] = torch.zeros(1)
    settings = {"surrogate": surrogate, "ratio_level": ratio_level}
    settings |= {"beta": 0.5, "kl_estimator": 2, "kl_bias_correction": True}
    log_ratio = operands["logprobs"] - operands["old_logprobs"] if ratio_level == "token" else operands["seq_log_ratio"]
    d = (operands["logprobs"] - operands["ref_logprobs"]).double()
    expected = 0.5 * operands["weights"] * d * log_ratio.double().exp()
    torch.testing.assert_close(run(operands, settings).grad.double(), expected, rtol=2e-6, atol=0)


def test_mismatch_of_one_token_is_the_one_worked_by_hand() -> None:
    """These columns are what a person looks at when engine and trainer are suspected to differ."""
    result = run_one_token(1.5, 1.0, {}, log_rho=-0.2)  # old = -0.7 - log 1.5, rollout = old + 0.2
    assert column_of(result, "known_rollout") == column_of(result, "mismatch_tail") == 1
    assert column_of(result, "mismatch") == column_of(result, "mismatch_max") == pytest.approx(0.2)
    assert column_of(result, "mismatch_square") == pytest.approx(0.04)
    assert column_of(result, "rollout_kl") == pytest.approx(0.2 - math.log(1.5))
    assert column_of(result, "approx_kl") == pytest.approx(math.log(1.5) ** 2 / 2)
    assert column_of(result, "rho") == 0  # nothing was corrected
    assert column_of(run_one_token(1.5, 1.0, {}, log_rho=-0.1), "mismatch_tail") == 0  # e^-0.1 = 0.905
    assert column_of(run_one_token(1.5, 1.0, {}, log_rho=0.1), "mismatch_tail") == 1  # e^0.1 = 1.105


def run_one_token(
    ratio: float,
    advantage: float,
    settings: dict,
    *,
    log_rho: float | None = None,
    log_ratio_to_ref: float | None = None,
) -> Result:
    """One token with logprob -0.7 and weight 1, in fp32 where the library is compiled and in float64; checks that both
    give the same, and returns the first."""
    old = -0.7 - math.log(ratio)
    operands = {
        "logprobs": -0.7,
        "old_logprobs": old,
        "ref_logprobs": None if log_ratio_to_ref is None else -0.7 - log_ratio_to_ref,
        "rollout_logprobs": None if log_rho is None else old - log_rho,
        "advantages": advantage,
        "weights": 1.0,
        "seq_log_ratio": math.log(ratio),
    }
    tensors = {name: None if x is None else torch.tensor([x]).double() for name, x in operands.items()}
    tensors["cu_seqlens"] = torch.tensor([0, 1], dtype=torch.int32)
    by_sequence = {name: x for name, x in settings.items() if name.startswith("seq_")}
    settings = {name: x for name, x in settings.items() if not name.startswith("seq_")}
    if by_sequence:
        settings["by_sequence"] = True
    exact = run(tensors | by_sequence, settings)
    result = run(to(tensors | by_sequence, torch.float32), settings)
    torch.testing.assert_close(tuple(x.double() for x in result), tuple(exact), rtol=1e-5, atol=1e-6)
    return exact


def column_of(result: Result, name: str) -> float:
    """Of the one sequence there is."""
    return result.sums[0, COLUMNS.index(name)].item()


SMOOTH = [
    {},
    {"beta": 0.3, "kl_estimator": 0},
    {"beta": 0.3, "kl_estimator": 1},
    {"beta": 0.3, "kl_estimator": 2, "kl_bias_correction": True},
    {"beta": 0.3, "kl_estimator": 3},
    EVERYTHING,
]


@pytest.mark.parametrize("surrogate", [*COMPILED, IN_PYTORCH])
@pytest.mark.parametrize("ratio_level", ["token", "sequence"])
def test_gradient_is_the_derivative_of_the_loss(surrogate: str, ratio_level: str) -> None:
    """Finite differences in float64. Level "sequence_token" is left out: its gradient is not that of its value."""
    operands = to(make_operands((3, 0, 6), smooth=True), torch.float64)
    for settings in SMOOTH:
        settings = {"ratio_level": ratio_level, "surrogate": surrogate, **settings}
        if surrogate == "cispo":
            settings |= {
                "ratio_high": 0.1
            }  # its factor is a constant to autograd, so it must also be one to differences
        names = ["logprobs", *(["seq_log_ratio"] if ratio_level == "sequence" else [])]
        rest, options = chosen(operands, settings)

        def loss(*leaves: Tensor, names: list = names, rest: dict = rest, options: dict = options) -> Tensor:
            return policy_loss(**rest | dict(zip(names, leaves, strict=True)), settings=LossSettings(**options))[0]

        assert torch.autograd.gradcheck(loss, [operands[name].clone().requires_grad_() for name in names])


def test_sapo_equals_its_formula() -> None:
    """SAPO exists in PyTorch only; a gate with the two temperatures swapped is soft where it should be hard."""
    operands = make_operands((7, 20), smooth=True)
    settings = {"surrogate": soft_gate(1.0, 2.0)}
    x = {name: value.double() for name, value in operands.items()}
    logprobs = x["logprobs"].clone().requires_grad_()
    ratio = (logprobs - x["old_logprobs"]).exp()
    tau = torch.where(x["advantages"] > 0, 1.0, 2.0)
    policy = -x["advantages"] * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    expected = (x["weights"] * x["keep"] * policy).sum()
    (expected_grad,) = torch.autograd.grad(expected, logprobs)
    for dtype in (torch.float32, torch.float64):
        result = run(to(operands, dtype), settings)
        torch.testing.assert_close(result.loss.double(), expected.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(result.grad.double(), expected_grad, rtol=1e-5, atol=1e-6)


def test_sequence_token_has_the_value_of_sequence_and_the_gradient_of_token() -> None:
    """GSPO-token: where a sequence's tokens all have its ratio, the three levels are one loss."""
    operands = make_operands((4, 30, 11), smooth=True)
    segment = torch.repeat_interleave(torch.arange(3), torch.tensor([4, 30, 11]))
    operands["old_logprobs"] = operands["logprobs"] - operands["seq_log_ratio"][segment]
    settings = EVERYTHING | {"use_rho": False}
    token, sequence, both = (run(operands, settings | {"ratio_level": level}) for level in LEVELS)
    torch.testing.assert_close(both.grad, token.grad, rtol=1e-5, atol=1e-6)
    for other in (token, sequence):
        torch.testing.assert_close(both.loss, other.loss, rtol=1e-5, atol=1e-6)
    assert both.seq_grad.count_nonzero() == 0
    # The ratio's part of the gradient moves from the tokens to the sequence.
    moved = torch.zeros(3).index_add_(0, segment, token.grad - sequence.grad)
    torch.testing.assert_close(sequence.seq_grad, moved, rtol=1e-4, atol=1e-5)


def test_without_beta_a_reference_only_feeds_the_columns() -> None:
    """Watching the KL must not change the step that is watched."""
    operands = make_operands()
    watched, blind = run(operands, {}), run({**operands, "ref_logprobs": None}, {})
    assert torch.equal(watched.loss, blind.loss) and torch.equal(watched.grad, blind.grad)
    kls = [COLUMNS.index(f"kl{k}") for k in range(4)]
    assert watched.sums[:, kls].count_nonzero() and not blind.sums[:, kls].count_nonzero()


def test_gradient_is_scaled_by_what_comes_after_the_loss() -> None:
    """Gradient accumulation and loss scaling multiply the loss; a backward that ignores its cotangent undoes them."""
    operands, settings = chosen(make_operands(), {"ratio_level": "sequence", "beta": 0.1})
    once = run(operands, settings)
    logprobs, ratio = (operands[name].clone().requires_grad_() for name in ("logprobs", "seq_log_ratio"))
    loss, sums = policy_loss(
        **operands | {"logprobs": logprobs, "seq_log_ratio": ratio}, settings=LossSettings(**settings)
    )
    assert loss.requires_grad and not sums.requires_grad
    (loss * 0.25).backward(retain_graph=True)
    (loss * 0.5).backward()
    for got, expected in ((logprobs.grad, once.grad), (ratio.grad, once.seq_grad)):
        torch.testing.assert_close(got, 0.75 * expected)


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
@pytest.mark.parametrize(("ratio_level", "by_sequence"), [("token", False), ("sequence", True)])
def test_compiled_graph_equals_eager(compiled: None, ratio_level: str, by_sequence: bool) -> None:
    """The op must not break a compiled loss into pieces, nor change a bit of it."""
    operands = make_operands()
    settings = EVERYTHING | {"ratio_level": ratio_level, "by_sequence": by_sequence}
    eager = run(operands, settings)
    torch.compiler.reset()
    graph = torch.compile(policy_loss, fullgraph=True, backend="aot_eager")
    for got, expected in zip(run(operands, settings, graph), eager, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("ratio_level", LEVELS)
def test_tokens_of_weight_zero_add_exactly_nothing(ratio_level: str) -> None:
    """Prompt and padding tokens hold whatever was in memory; one NaN of theirs would end the run."""
    for dtype in (torch.float32, torch.float64):
        operands = to(make_operands(), dtype)
        for surrogate in (*COMPILED, IN_PYTORCH):
            settings = EVERYTHING | {"ratio_level": ratio_level, "surrogate": surrogate, "by_sequence": True}
            result = run(operands, settings)
            assert all(torch.isfinite(x).all() for x in (result.loss, result.grad, result.seq_grad))
            assert result.grad[operands["weights"] == 0].count_nonzero() == 0
            assert result.seq_grad[UNTRAINED] == 0
            assert result.sums[UNTRAINED].tolist() == [0.0] * (len(COLUMNS) - 1) + [-math.inf]
            # And they may be left out, which also says that nothing of them leaks into their neighbours.
            alone = run(without_untrained(operands), settings)
            torch.testing.assert_close(alone.sums, result.sums, rtol=1e-6, atol=1e-7)
            assert torch.equal(alone.grad, result.grad[operands["weights"] != 0])


def without_untrained(operands: dict[str, Tensor]) -> dict[str, Tensor]:
    is_trained = operands["weights"] != 0
    ends = torch.cat((torch.zeros(1, dtype=torch.int64), is_trained.cumsum(0)))[operands["cu_seqlens"].long()]
    return {
        name: ends.int() if name == "cu_seqlens" else x if name.startswith("seq_") else x[is_trained]
        for name, x in operands.items()
    }


@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
def test_huge_log_ratios_stay_finite(log_ratio: float) -> None:
    """A token that became impossible must cost a bounded step and a readable metric, not an infinite one."""
    operands = make_operands((3, 2), smooth=True)
    for name in ("old_logprobs", "ref_logprobs"):
        operands[name] = operands["logprobs"] - log_ratio
    operands["rollout_logprobs"] = operands["old_logprobs"] - log_ratio
    for name in ("seq_log_ratio", "seq_log_rho", "seq_log_rho_mask"):
        operands[name] = torch.full((2,), log_ratio)
    for surrogate, level, kl_estimator in itertools.product((*COMPILED, IN_PYTORCH), LEVELS, range(4)):
        settings = {"surrogate": surrogate, "ratio_level": level, "kl_estimator": kl_estimator, "beta": 0.1}
        settings |= {"kl_bias_correction": True, "use_rho": True}
        for x in run(operands, settings):
            assert torch.isfinite(x).all(), settings


def test_nan_of_a_trained_token_shows_in_the_loss() -> None:
    """The trainer skips a step whose loss is not finite; a clip that turns NaN into a number would hide it."""
    for surrogate, ratio_level, name in itertools.product(
        (*COMPILED, IN_PYTORCH), LEVELS, ("logprobs", "advantages", "ref_logprobs")
    ):
        operands = make_operands((3, 4), smooth=True)
        operands["keep"] = torch.ones(7)
        operands[name][4] = torch.nan
        settings = {"surrogate": surrogate, "ratio_level": ratio_level, "beta": 0.1}
        result = run(operands, settings | ({"dual_clip": 3.0, "delta": 4.0} if surrogate == "ppo_clip" else {}))
        assert result.sums[:, 0].isnan().tolist() == [False, True], (settings, name)


def many_sequences() -> dict[str, Tensor]:
    """More sequences than several threads take at once, of 0 to 39 tokens."""
    return make_operands((5, 0, 1, 2, 3, 8, *(torch.randperm(100) % 40).tolist()))


def order_of(operands: dict[str, Tensor], sequences: list[int]) -> tuple[dict[str, Tensor], Tensor]:
    """The operands of these sequences in this order, and where their tokens were."""
    begin, end = operands["cu_seqlens"][:-1].tolist(), operands["cu_seqlens"][1:].tolist()
    tokens = torch.tensor([i for s in sequences for i in range(begin[s], end[s])], dtype=torch.int64)
    ends = itertools.accumulate(end[s] - begin[s] for s in sequences)
    picked = {
        name: x[sequences] if name.startswith("seq_") else x[tokens]
        for name, x in operands.items()
        if name != "cu_seqlens"
    }
    return picked | {"cu_seqlens": torch.tensor([0, *ends], dtype=torch.int32)}, tokens


@pytest.mark.parametrize("ratio_level", LEVELS)
def test_a_sequence_does_not_depend_on_its_pack(ratio_level: str) -> None:
    """Packing order follows lengths and ranks; if it changed a bit, no run could be compared with another."""
    operands = many_sequences()
    settings = EVERYTHING | {"ratio_level": ratio_level, "by_sequence": True}
    whole = run(operands, settings)
    orders = [torch.randperm(len(operands["cu_seqlens"]) - 1).tolist(), *([s] for s in range(20)), [7, EXTREME, 50]]
    for sequences in orders:
        picked, tokens = order_of(operands, sequences)
        result = run(picked, settings)
        assert torch.equal(result.sums, whole.sums[sequences])
        assert torch.equal(result.grad, whole.grad[tokens])
        assert torch.equal(result.seq_grad, whole.seq_grad[sequences])


def test_results_repeat_bitwise_and_do_not_depend_on_threads() -> None:
    """Exact resume needs the same numbers from the same inputs, on any number of threads."""
    operands = many_sequences()
    settings = EVERYTHING | {"ratio_level": "sequence", "by_sequence": True}
    first = run(operands, settings)
    threads = torch.get_num_threads()
    try:
        for num_threads in (threads, 1, 2, 3):
            torch.set_num_threads(num_threads)
            for got, expected in zip(run(operands, settings), first, strict=True):
                assert torch.equal(got, expected)
    finally:
        torch.set_num_threads(threads)
