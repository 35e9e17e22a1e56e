"""Adam as Transformer Engine and apex have it: it counts the updates of a group, and has no state before its first step."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.ranks import cases
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.learners


class GroupAdam(torch.optim.Optimizer):
    """AdamW by the contract of Transformer Engine's FusedAdam, whose kernels need CUDA.

    A group's "step" appears with its first step, a parameter's state with the first step that finds it empty, and a state
    holds nothing else.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: Any,
        eps: float,
        weight_decay: float,
        adam_w_mode: bool,
        capturable: bool = False,  # megatron-core 0.19 says it
    ) -> None:
        assert adam_w_mode and not capturable
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            (first, second), count = group["betas"], group["step"]
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter) for _ in range(2))
                assert state.keys() == {"exp_avg", "exp_avg_sq"}
                if parameter.grad is not None:
                    mean = state["exp_avg"].lerp_(parameter.grad, 1 - first) / (1 - first**count)
                    square = state["exp_avg_sq"].lerp_(parameter.grad.square(), 1 - second) / (1 - second**count)
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.sub_(group["lr"] * mean / (square.sqrt() + group["eps"]))


def train_steps(is_fused: bool, **arguments: Any) -> dict[str, Any]:
    """`cases.train_steps`, with the stand-in where Megatron imports FusedAdam."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    if not is_fused:
        return cases.train_steps(**arguments)
    with (
        patch.object(optimizer, "Adam", GroupAdam),
        patch.object(optimizer, "USING_PYTORCH_OPTIMIZER", False),
        patch.object(distrib_optimizer, "Adam", GroupAdam),
        patch.object(distrib_optimizer, "HAVE_APEX_OR_TE", True),
    ):
        return cases.train_steps(**arguments)


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_a_run_continues_whosever_adam_it_was_and_is(run_ranks, tmp_path, zero_stage):
    """A count that begins again at 1 multiplies the first updates after a resume; nothing says so."""
    folder = save_tiny(tmp_path, "qwen2")
    common = {
        "model_dir": str(folder),
        "layout": {"zero_stage": zero_stage},
        "samples": cases.random_samples(seed=4, groups=2, group_size=2),
        "steps": 4,
    }
    whole = run_ranks(2, train_steps, is_fused=False, **common)[0]
    for saved_by in (True, False):
        place = str(tmp_path / f"state_{saved_by}")
        saved = run_ranks(2, train_steps, is_fused=saved_by, save_to=place, save_after=2, **common)[0]
        assert saved["losses"] == pytest.approx(whole["losses"], rel=5e-7)
        for continued_by in (True, False):
            rest = run_ranks(2, train_steps, is_fused=continued_by, resume_from=f"{place}/step_2", **common)[0]
            assert rest["losses"] == pytest.approx(whole["losses"][2:], rel=5e-7), (saved_by, continued_by)
