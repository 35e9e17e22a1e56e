"""policy_loss's arguments: which operands and settings it takes, which it refuses, and that both sides name them alike."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from policy_loss_cases import EVERYTHING, LEVELS, OFF, make_operands, raw_arguments, run, to
from torch import Tensor

from mgrpo.ops import COLUMNS, LossSettings, reference
from mgrpo.ops.settings import RATIO_LEVELS, SURROGATES


def test_opcheck_accepts_the_op_with_and_without_its_optional_operands(compiled: None) -> None:
    """A wrong schema or fake shows up as a wrong graph under torch.compile, far from its cause."""
    operands = make_operands((4, 0, 9), smooth=True)
    optional = ("ref_logprobs", "rollout_logprobs", "keep", "seq_log_rho", "seq_log_rho_mask")
    op = torch.ops.mgrpo.policy_loss.default
    torch.library.opcheck(op, raw_arguments(operands, ratio_level=1))
    torch.library.opcheck(op, raw_arguments(operands, **dict.fromkeys(optional)))
    # One at a time, without the slower graph checks: which of them is absent must not matter to schema and fake.
    for name in optional:
        torch.library.opcheck(
            op, raw_arguments(operands, ratio_level=2, **{name: None}), test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.parametrize(
    "absent", [("ref_logprobs",), ("rollout_logprobs",), ("keep",), ("seq_log_rho",), ("seq_log_rho_mask",)]
)
@pytest.mark.parametrize("ratio_level", [0, 1])
def test_raw_op_equals_the_reference_without_each_optional_operand(
    compiled: None, absent: tuple[str, ...], ratio_level: int
) -> None:
    """A null pointer that is read, or an operand taken for another, is a crash or a wrong run on other settings."""
    operands = make_operands()
    arguments = raw_arguments(operands, ratio_level=ratio_level, **dict.fromkeys(absent))
    exact = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments]
    for got, expected in zip(torch.ops.mgrpo.policy_loss(*arguments), reference.policy_loss(*exact), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-5)


def test_an_advantage_a_sequence_is_that_of_each_of_its_tokens() -> None:
    """One number per response is the common case; read as one per token, sequences would train on each other's reward."""
    operands = make_operands()
    advantages = torch.randn(len(operands["cu_seqlens"]) - 1)
    each = torch.repeat_interleave(advantages, operands["cu_seqlens"].diff())
    expected = run({**operands, "advantages": each}, EVERYTHING)
    for got, want in zip(run({**operands, "advantages": advantages}, EVERYTHING), expected, strict=True):
        assert torch.equal(got, want)
    # As many as there are tokens: one per token, here in sequences of 2, 0 and 1.
    three = make_operands((2, 0, 1), smooth=True)
    result = run({**three, "advantages": torch.tensor([1.0, 0.0, 0.0])}, {"surrogate": "reinforce"})
    assert (result.grad != 0).tolist() == [three["keep"][0].item() != 0, False, False]


def test_operands_may_be_views() -> None:
    """Slices of a packed batch arrive with strides, expanded scalars with stride 0."""
    operands = make_operands()
    expected = run(operands, EVERYTHING | {"ratio_level": "sequence", "by_sequence": True})
    strided = {
        name: x if name == "cu_seqlens" else torch.stack((x, torch.full_like(x, torch.nan)), 1)[:, 0]
        for name, x in operands.items()
    }
    got = run(strided, EVERYTHING | {"ratio_level": "sequence", "by_sequence": True})
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    ones = {**operands, "keep": torch.ones(1).expand(sum(operands["cu_seqlens"].diff().tolist()))}
    assert torch.equal(run(ones, {}).grad, run({**operands, "keep": None}, {}).grad)


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0)])
@pytest.mark.parametrize("ratio_level", LEVELS)
def test_no_token_is_a_legal_batch(lengths: tuple[int, ...], ratio_level: str) -> None:
    """A rank whose micro-batch has no response token still joins every backward."""
    for dtype in (torch.float32, torch.float64):
        operands = to(make_operands(lengths, smooth=True), dtype)
        result = run(operands, EVERYTHING | {"ratio_level": ratio_level, "by_sequence": True})
        assert result.loss == 0 and result.grad.shape == (0,)
        assert result.seq_grad.tolist() == [0.0] * len(lengths)
        assert result.sums.tolist() == [[0.0] * (len(COLUMNS) - 1) + [-math.inf]] * len(lengths)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": torch.zeros(13, dtype=torch.float64)}, "logprobs has the wrong dtype"),
        ({"old_logprobs": torch.zeros(13, dtype=torch.bfloat16)}, "old_logprobs has the wrong dtype"),
        ({"weights": torch.ones(13, dtype=torch.bool)}, "weights has the wrong dtype"),
        ({"ref_logprobs": torch.zeros(12)}, "ref_logprobs must have 13 elements, got 12"),
        ({"rollout_logprobs": torch.zeros(0)}, "rollout_logprobs must have 13 elements, got 0"),
        ({"keep": torch.zeros(14)}, "keep must have 13 elements, got 14"),
        ({"weights": torch.zeros(26)[::2]}, "weights must be contiguous"),
        ({"advantages": torch.zeros(4)}, "advantages must have 13 or 3 elements, got 4"),
        ({"seq_log_rho": torch.zeros(2)}, "seq_log_rho must have 3 elements, got 2"),
        ({"seq_log_rho_mask": torch.zeros(4)}, "seq_log_rho_mask must have 3 elements, got 4"),
        ({"ratio_level": 1, "seq_log_ratio": torch.zeros(4)}, "seq_log_ratio must have 3 elements, got 4"),
        ({"ratio_level": 2, "seq_log_ratio": None}, "seq_log_ratio belongs to ratio_level 1 and 2"),
        ({"seq_log_ratio": torch.zeros(3)}, "seq_log_ratio belongs to ratio_level 1 and 2"),
        ({"cu_seqlens": torch.tensor([0, 4, 4, 13])}, "cu_seqlens has the wrong dtype"),
        ({"cu_seqlens": torch.tensor([0, 4, 4, 12]).int()}, "cu_seqlens must reach from 0 to 13, got 0 to 12"),
        ({"cu_seqlens": torch.tensor([0, 4, 4, 99]).int()}, "cu_seqlens must reach from 0 to 13, got 0 to 99"),
        ({"cu_seqlens": torch.tensor([1, 4, 4, 13]).int()}, "cu_seqlens must reach from 0 to 13, got 1 to 13"),
        ({"cu_seqlens": torch.tensor([0, 14, 4, 13]).int()}, r"cu_seqlens\[2\]=4 is below 14"),
        ({"cu_seqlens": torch.tensor([0, -4, 4, 13]).int()}, r"cu_seqlens\[1\]=-4 is below 0"),
        ({"cu_seqlens": torch.zeros(0).int()}, r"cu_seqlens must be \[num_seqs \+ 1\], got no element"),
        ({"surrogate": 3}, r"surrogate=3 is outside \[0, 2\]"),
        ({"surrogate": -1}, r"surrogate=-1 is outside \[0, 2\]"),
        ({"ratio_level": 3}, r"ratio_level=3 is outside \[0, 2\]"),
        ({"kl_estimator": 4}, r"kl_estimator=4 is outside \[0, 3\]"),
        ({"kl_estimator": math.nan}, r"kl_estimator=nan is outside \[0, 3\]"),
    ],
)
def test_raw_op_refuses_what_would_read_foreign_memory(compiled: None, changes: dict, message: str) -> None:
    """No caller should do this, but it must not end in a crash or in garbage."""
    with pytest.raises(RuntimeError, match=message):
        torch.ops.mgrpo.policy_loss(*raw_arguments(make_operands((4, 0, 9), smooth=True), **changes))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"surrogate": "ppo"}, "surrogate='ppo' is unknown; choose one of ppo_clip, cispo, reinforce"),
        ({"ratio_level": "tokens"}, "ratio_level='tokens' is unknown; choose one of token, sequence, sequence_token"),
    ],
)
def test_unknown_names_are_refused(settings: dict, message: str) -> None:
    """A misspelt loss must not train as another one."""
    with pytest.raises(ValueError, match=message):
        LossSettings(**OFF | settings)


def test_settings_come_back_from_their_numbers() -> None:
    """The reference reads what the kernel reads; a number in the wrong place would make it the oracle of another loss."""
    settings = LossSettings(**OFF | EVERYTHING | {"surrogate": "reinforce", "ratio_level": "sequence_token"})
    assert LossSettings.of_numbers(settings.numbers()) == settings


def test_raw_op_refuses_settings_of_another_length(compiled: None) -> None:
    """Settings travel without names; one too few would shift all that follow."""
    *tensors, settings = raw_arguments(make_operands((4, 0, 9), smooth=True))
    with pytest.raises(RuntimeError, match=f"settings must have {len(settings)} numbers, got {len(settings) - 1}"):
        torch.ops.mgrpo.policy_loss(*tensors, settings[1:])


@pytest.mark.parametrize(
    ("enum", "names"),
    [("enum Column", COLUMNS), ("enum class Surrogate", SURROGATES), ("enum class RatioLevel", RATIO_LEVELS)],
)
def test_enums_have_the_order_that_the_kernel_gives_them(enum: str, names: tuple[str, ...]) -> None:
    """Metrics pick columns by name, settings name a surrogate; one line moved in the header would mean another one."""
    header = (Path(__file__).resolve().parents[3] / "csrc" / "core" / "policy_loss.h").read_text()
    body = re.search(rf"{enum} \{{(.*?)\}};", header, re.DOTALL).group(1)
    *values, count = re.findall(r"\bk([A-Z]\w*)", re.sub(r"//.*", "", body))
    assert count in ("NumColumns", "Count")
    assert tuple(re.sub(r"(?<!^)(?=[A-Z])", "_", value).lower() for value in values) == names
