"""Advantages that other trainers' own functions give, for tests.

    PYTHONPATH=.:CLONE python -m tools.peers.record_advantages verl CLONE > tests/unit/algo/advantages_of_verl.json

and likewise slime (with TORCHDYNAMO_DISABLE=1) and openrlhf. CLONE is a clone of that trainer, which needs what record_verl and
record_slime say; OpenRLHF needs torch, Ray and transformers. What a trainer's module imports beside its estimators, and is not
here, is a stand-in. Run it again when the trainer changes.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tools.peers.losses import version_of

LONGEST = 8
MASKS: tuple[tuple[str, ...], ...] = (
    ("111", "1", "1100111", "11", "11111", "1011", "11111111", "101", "1", "111111", "11", "1111"),
    ("11111111", "11", "111001", "1"),
)
"""By batch and completion: which of its tokens are trained."""
REWARDS: tuple[tuple[tuple[float, ...], ...], ...] = (
    ((1.0, 0.0, 1.0), (0.25, -0.5, 2.0), (1.0, 1.0, 1.0), (0.0, 0.0, 3.0)),
    ((1.0, 0.0), (0.0, 0.75)),
)
"""By batch, prompt and completion."""
ABSENT = ("sglang", "deepspeed", "flash_attn", "pylatexenc", "torchdata")


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules whose every name exists."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        is_absent = name.partition(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_absent else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module: Any = MagicMock(name=spec.name)
        module.__path__, module.__spec__ = [], spec
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def rows(masks: Sequence[str], rewards: Sequence[Sequence[float]]) -> tuple[Tensor, Tensor, np.ndarray]:
    """`[sequences, LONGEST]` mask and `[sequences]` rewards in float64, and the number of each sequence's prompt."""
    mask = torch.tensor([[float(mark) for mark in text.ljust(LONGEST, "0")] for text in masks], dtype=torch.float64)
    flat = torch.tensor(rewards, dtype=torch.float64).flatten()
    return mask, flat, np.repeat(np.arange(len(rewards)), len(rewards[0]))


def of_verl(checkout: Path) -> Iterator[tuple[Any, int, Tensor, Tensor]]:
    """verl's words, the batch, `[sequences, LONGEST]` advantages and mask."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo import core_algos

    defaults = OmegaConf.load(checkout / "verl/trainer/config/_generated_ppo_trainer.yaml")
    names = (
        "grpo",
        "grpo_vectorized",
        "rloo",
        "rloo_vectorized",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
    )
    words = [[f"algorithm.adv_estimator={name}"] for name in names]
    words.append(["algorithm.adv_estimator=grpo", "algorithm.norm_adv_by_std_in_grpo=False"])
    for given, at in itertools.product(words, range(len(MASKS))):
        given = [*given, f"actor_rollout_ref.rollout.n={len(REWARDS[at][0])}"]
        config = OmegaConf.merge(defaults, OmegaConf.from_dotlist(given)).algorithm
        mask, rewards, index = rows(MASKS[at], REWARDS[at])
        by_token = torch.zeros_like(mask)
        by_token[torch.arange(len(mask)), [text.rindex("1") for text in MASKS[at]]] = rewards
        more = {"norm_adv_by_std_in_grpo": config.norm_adv_by_std_in_grpo} if "grpo" in config.adv_estimator else {}
        estimate = core_algos.get_adv_estimator_fn(config.adv_estimator)
        found, _ = estimate(token_level_rewards=by_token, response_mask=mask, index=index, config=config, **more)
        yield given, at, found, mask


def of_slime(checkout: Path) -> Iterator[tuple[Any, int, Tensor, Tensor]]:
    """The same, of slime's flags."""
    sys.modules["slime.backends.sglang_utils.arguments"] = MagicMock()
    from slime.backends.megatron_utils import loss as slime_loss
    from slime.ray.rollout import RolloutManager
    from slime.utils.arguments import get_slime_extra_args_provider

    post_process = RolloutManager.__ray_metadata__.modified_class._post_process_rewards
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel = MagicMock()
    parallel.get_context_parallel_world_size.return_value = 1
    parallel.get_data_parallel_group.return_value = None
    flags = [
        *(f"{name}{more}" for name in ("grpo", "gspo", "cispo") for more in ("", " --disable-grpo-std-normalization")),
        *(f"{name} --normalize-advantages" for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline")),
        "cispo --disable-grpo-std-normalization --normalize-advantages",
    ]
    for flag, at in itertools.product(flags, range(len(MASKS))):
        num_prompts, group = len(REWARDS[at]), len(REWARDS[at][0])
        given = (
            f"--rollout-batch-size {num_prompts} --n-samples-per-prompt {group} --num-rollout 3 --colocate "
            f"--global-batch-size {num_prompts * group} --rollout-max-response-len {LONGEST} --advantage-estimator {flag}"
        )
        arguments = get_slime_extra_args_provider()(argparse.ArgumentParser()).parse_args(given.split())
        arguments.custom_advantage_function_path, arguments.use_opd = None, False
        mask, rewards, _ = rows(MASKS[at], REWARDS[at])
        samples = [SimpleNamespace(get_reward_value=lambda _, r=reward: r) for reward in rewards.tolist()]
        manager = SimpleNamespace(args=arguments, custom_reward_post_process_func=None)
        cut = [row[: len(text)] for row, text in zip(mask, MASKS[at], strict=True)]
        data = {
            "log_probs": [torch.zeros_like(row) for row in cut],
            "rewards": post_process(manager, samples)[1],
            "response_lengths": [len(row) for row in cut],
            "total_lengths": [len(row) for row in cut],
            "loss_masks": cut,
        }
        with patch.object(slime_loss, "mpu", parallel), patch("megatron.core.mpu", parallel):
            slime_loss.compute_advantages_and_returns(arguments, data)
        found = torch.stack([torch.nn.functional.pad(row, (0, LONGEST - len(row))) for row in data["advantages"]])
        yield given, at, found, mask


def of_openrlhf(checkout: Path) -> Iterator[tuple[Any, int, Tensor, Tensor]]:
    """The same, of OpenRLHF's values of algo.advantage.estimator."""
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker as Maker

    names = ("reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo")
    for name, at in itertools.product(names, range(len(MASKS))):
        mask, rewards, _ = rows(MASKS[at], REWARDS[at])
        advantage = SimpleNamespace(estimator=name, gamma=1.0, no_std_norm=False)
        arguments = SimpleNamespace(
            algo=SimpleNamespace(advantage=advantage),
            rollout=SimpleNamespace(n_samples_per_prompt=len(REWARDS[at][0])),
            reward=SimpleNamespace(clip_range=(-10, 10)),
        )
        maker = SimpleNamespace(
            strategy=SimpleNamespace(args=arguments),
            kl_ctl=SimpleNamespace(value=0.0),
            advantage_estimator=name,
            get_cumulative_returns=lambda *given: Maker.get_cumulative_returns(None, *given),
        )
        experience = Experience(
            index=list(range(len(mask))), rewards=rewards, kl=torch.zeros_like(mask), action_mask=mask
        )
        (experience,) = Maker.compute_advantages_and_returns(maker, [experience])
        yield name, at, experience.advantages, mask


TRAINERS: dict[str, Callable[[Path], Iterator[tuple[Any, int, Tensor, Tensor]]]] = {
    "verl": of_verl,
    "slime": of_slime,
    "openrlhf": of_openrlhf,
}


def main(trainer: str, checkout: Path) -> None:
    sys.meta_path.append(_StandIns())
    cases = []
    for given, at, found, mask in TRAINERS[trainer](checkout):
        values = [row[is_trained.bool()].unique().tolist() for row, is_trained in zip(found, mask, strict=True)]
        assert all(len(own) == 1 for own in values), "all tokens of a completion have one advantage"
        cases.append({"given": given, "batch": at, "advantages": [float(f"{own[0]:.12g}") for own in values]})
    batches = [{"masks": masks, "rewards": rewards} for masks, rewards in zip(MASKS, REWARDS, strict=True)]
    lines = [",\n".join(json.dumps(record, separators=(",", ":")) for record in part) for part in (batches, cases)]
    source = json.dumps(f"{trainer} {version_of(checkout)}")
    print(f'{{"source": {source},\n"batches": [\n{lines[0]}\n],\n"cases": [\n{lines[1]}\n]}}')


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
