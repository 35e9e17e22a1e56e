"""`mgrpo.trl.GRPOConfig`: TRL's fields for scripts, parsers and dataclasses of their own."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import HfArgumentParser

import mgrpo
from mgrpo.algo import policy_loss
from mgrpo.algo.training_samples import train_samples
from mgrpo.config import ConfigError
from mgrpo.config.fields import flat
from mgrpo.moving import from_values
from mgrpo.moving.grpo_config import preset_of
from mgrpo.moving.presets import KEPT
from mgrpo.moving.trl_config import AsyncGRPOConfig, GRPOConfig, recorded, recorded_defaults
from tests import builders

PINS = Path(__file__).parents[3] / "requirements" / "bench_trl.txt"
TRL_MAIN, TRL_ASYNC = (from_values({}, preset=preset) for preset in ("trl_main", "trl_async"))
OURS = {"tensor_model_parallel_size": 2}


@dataclasses.dataclass
class ScriptConfig(GRPOConfig):
    """As scripts derive it: a field of their own, another default, and a name that is a setting here."""

    benchmarks: list[str] = dataclasses.field(default_factory=list)
    learning_rate: float = 2e-5
    wandb_entity: str | None = None


def test_the_recorded_release_is_the_pinned_one():
    """After a change of the pin tools/peers/record_trl.py has to run again, else defaults are those of an old TRL."""
    pins = dict(re.findall(r"^(trl|transformers)==(\S+)$", PINS.read_text(), re.MULTILINE))
    assert recorded()["release"] == pins and len(recorded()["fields"]) > 150


def test_a_field_that_is_not_given_reads_as_in_trl():
    """Scripts read fields that they have not set, to choose a dtype or to name a run."""
    config = GRPOConfig()
    assert (config.learning_rate, config.num_generations, config.loss_type) == (1e-6, 8, "dapo")
    assert (config.output_dir, config.bf16, config.steps_per_generation) == ("trainer_output", True, 1)
    assert (config.generation_batch_size, GRPOConfig(fp16=True).bf16) == (8, False)
    assert GRPOConfig(model_init_kwargs='{"dtype": "bfloat16"}').model_init_kwargs == {"dtype": "bfloat16"}
    assert GRPOConfig().include_for_metrics is not GRPOConfig().include_for_metrics


def test_a_script_with_another_loss_by_default_keeps_the_other_defaults():
    """They are those of this version of TRL, whose fields the class has; an old TRL's preset has others."""

    @dataclasses.dataclass
    class OldLoss(GRPOConfig):
        loss_type: str = "bnpo"

    assert preset_of(OldLoss("out")) == "trl_main"
    made = mgrpo.GRPOConfig.from_trl(OldLoss("out"))
    assert made.loss.aggregation == "local_token" and made.rollout.top_k == TRL_MAIN.rollout.top_k


def test_only_what_is_given_is_given():
    """A field with TRL's default that a script does not give must leave room for a setting of this project."""
    config = GRPOConfig("out", learning_rate=1e-6, vllm_mode="colocate", **OURS)
    given = {"output_dir": "out", "learning_rate": 1e-6, "vllm_mode": "colocate"} | OURS
    assert config.given() == given
    made = mgrpo.GRPOConfig.from_trl(config)
    assert (made.engine.vllm_mode, made.parallel.tensor_model_parallel_size) == ("colocate", 2)
    assert mgrpo.GRPOConfig.from_trl(GRPOConfig(clip_lower=0.1)).loss.clip_lower == 0.1
    config.beta = 0.04
    assert config.given() == given | {"beta": 0.04}


def test_a_config_can_be_replaced_and_copied():
    """What a script has given must not be lost on the way, least of all the layout."""
    config = GRPOConfig("out", learning_rate=1e-6, **OURS)
    assert dataclasses.replace(config, num_generations=4).given() == config.given() | {"num_generations": 4}
    twice = dataclasses.replace(dataclasses.replace(config, per_device_train_batch_size=16), fp16=True)
    assert twice.given() == config.given() | {"per_device_train_batch_size": 16, "fp16": True}
    assert (twice.generation_batch_size, twice.bf16) == (16, False)
    assert dataclasses.replace(config, tensor_model_parallel_size=4).given()["tensor_model_parallel_size"] == 4
    for copied in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert copied == config and copied.given() == config.given()


def test_a_script_may_derive_a_config_of_its_own():
    """Its own fields are its own affair; those that are settings here are used."""
    config = ScriptConfig("out", benchmarks=["a"])
    assert (config.benchmarks, config.given()) == (["a"], {"output_dir": "out", "learning_rate": 2e-5})
    assert dataclasses.replace(config, wandb_entity="me").given()["wandb_entity"] == "me"


def test_what_cannot_be_done_is_said_by_the_constructor():
    with pytest.raises(ConfigError, match="unknown setting num_generation "):
        GRPOConfig(num_generation=4)
    with pytest.raises(ConfigError, match="repetition_penalty"):
        ScriptConfig(repetition_penalty=1.1)


def test_a_parser_of_transformers_takes_it():
    """TrlParser is this parser; what a command leaves out has to stay not given, although it hands over every field."""
    words = [
        "--output_dir",
        "out",
        "--learning_rate",
        "2e-6",
        "--model_init_kwargs",
        '{"dtype":"bfloat16"}',
        "--reward_weights",
        "1",
        "2",
        "--no_shuffle_dataset",
        "--report_to",
        "wandb",
        "--scale_rewards",
        "none",
        "--lr_scheduler_type",
        "cosine",
        "--delta",
        "3",
        "--tf32",
        "true",
        "--fsdp",
        "--top_k",
        "8",
        "--log_completions",
        "--gradient-checkpointing",
        "false",
    ]
    (config,) = HfArgumentParser((GRPOConfig,)).parse_args_into_dataclasses(words, look_for_args_file=False)
    assert config.given() == {
        "output_dir": "out",
        "learning_rate": 2e-6,
        "model_init_kwargs": {"dtype": "bfloat16"},
        "reward_weights": [1.0, 2.0],
        "shuffle_dataset": False,
        "report_to": "wandb",
        "scale_rewards": "none",
        "lr_scheduler_type": "cosine",
        "delta": 3.0,
        "tf32": True,
        "fsdp": True,
        "top_k": 8,
        "log_completions": True,
        "gradient_checkpointing": False,
    }


def test_a_parser_refuses_a_word_that_a_field_may_not_be(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        HfArgumentParser((ScriptConfig,)).parse_args_into_dataclasses(["--eval_strategy", "often"])
    assert "invalid choice: 'often'" in capsys.readouterr().err


@pytest.mark.parametrize("name", recorded()["fields"])
def test_a_default_of_trl_is_the_presets(name: str):
    """A script that leaves a field out must train as TRL does with it left out; no field of TRL's is an unknown name."""
    given = from_values({name: recorded()["fields"][name]["default"]}, preset="trl_main")
    differs = {setting for setting, value in flat(given).items() if value != flat(TRL_MAIN)[setting]}
    assert bool(differs) == (name in KEPT["trl_main"] and name != "hub_private_repo"), differs
    assert (given.provenance.due, given.provenance.has_prompt_limit) == ({}, False)


@pytest.mark.parametrize(
    "name", sorted(recorded_defaults("trl_async").keys() - KEPT["trl_main"].keys() - KEPT["trl_async"].keys())
)
def test_a_default_of_the_asynchronous_trainer_is_the_presets(name: str):
    given = from_values({name: recorded_defaults("trl_async")[name]}, preset="trl_async")
    differs = {setting for setting, value in flat(given).items() if value != flat(TRL_ASYNC)[setting]}
    assert not differs and not given.provenance.has_prompt_limit


def test_the_asynchronous_config_has_its_own_fields_and_defaults():
    """A script that moves by its import alone must keep them, with all that a parser and dataclasses do."""
    config = AsyncGRPOConfig("out", max_completion_length=512, **OURS)
    assert (config.max_staleness, config.lr_scheduler_type, config.logging_steps) == (4, "constant", 1)
    assert not hasattr(config, "loss_type") and AsyncGRPOConfig().max_completion_length == 2048
    assert dataclasses.replace(config, max_staleness=2).given() == config.given() | {"max_staleness": 2}
    made = mgrpo.GRPOConfig.from_trl(config)
    assert (made.provenance.preset, made.rollout.response_length, made.max_age) == ("trl_async", 512, 4)
    assert made.parallel.tensor_model_parallel_size == 2
    (parsed,) = HfArgumentParser((AsyncGRPOConfig,)).parse_args_into_dataclasses(
        ["--max_staleness", "3"], look_for_args_file=False
    )
    assert parsed.given() == {"output_dir": "trainer_output", "max_staleness": 3}
    served = mgrpo.GRPOConfig.from_trl(AsyncGRPOConfig(vllm_server_base_url="http://a:8000"))
    assert (served.engine.vllm_mode, made.engine.vllm_mode) == ("server", "ray")


def test_settings_of_this_project_as_defaults_of_a_derived_class_are_given():
    @dataclasses.dataclass
    class Sharded(GRPOConfig):
        tensor_model_parallel_size: int = 2

    assert mgrpo.GRPOConfig.from_trl(Sharded("out")).parallel.tensor_model_parallel_size == 2


def test_the_asynchronous_preset_computes_trls_loss_and_advantages():
    """Ratio to the engine's log-probabilities, clipped on both sides, a mean over tokens; a deviation of the whole group."""
    config = mgrpo.GRPOConfig.from_trl(AsyncGRPOConfig("out", epsilon=0.1, epsilon_high=0.3))
    rewards, lengths = np.array([0.0, 1.0, 1.0, 3.0]), [3, 1, 2, 4]
    groups = [builders.scored_group(list(rewards), completions=[builders.completion(length) for length in lengths])]
    algorithm = config.algorithm
    samples = train_samples(
        groups,
        normalization=algorithm.advantage_normalization_type,
        ddof=algorithm.advantage_ddof,
        eps=algorithm.advantage_eps,
    )
    wanted = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
    assert [sample.advantage for sample in samples] == pytest.approx(list(wanted), rel=1e-6)

    generator = torch.Generator().manual_seed(0)
    engine = -torch.rand(10, generator=generator, dtype=torch.float64)
    new = (engine + 0.5 * torch.randn(10, generator=generator, dtype=torch.float64)).requires_grad_()
    advantages = torch.from_numpy(wanted).repeat_interleave(torch.tensor(lengths))
    ratio = (new - engine).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.3) * advantages).sum() / 10
    (gradient,) = torch.autograd.grad(loss, new)
    # The learner hands over the engine's log-probabilities as the old ones, with which nothing is left to correct.
    assert algorithm.use_vllm_logprobs and config.loss.aggregation == "token"
    ours = policy_loss(
        new,
        old_logprobs=engine,
        rollout_logprobs=engine,
        ref_logprobs=None,
        advantages=advantages,
        loss_mask=torch.ones(10, dtype=torch.bool),
        cu_seqlens=torch.tensor([0, 3, 4, 6, 10]).int(),
        config=config.loss,
        denominator=10,
    ).loss
    assert ours.item() == pytest.approx(loss.item(), abs=1e-9)
    assert torch.allclose(torch.autograd.grad(ours, new)[0], gradient, rtol=0, atol=1e-9)


def test_a_real_object_of_trl_has_the_new_name_for_recomputation():
    """transformers 5.23 sets activation_checkpointing in every object, whatever a script gave."""

    @dataclasses.dataclass
    class Filled:
        gradient_checkpointing: bool = True
        activation_checkpointing: bool | None = None

    assert mgrpo.GRPOConfig.from_trl(Filled(activation_checkpointing=True)).parallel.recompute_granularity == "full"
    off = mgrpo.GRPOConfig.from_trl(Filled(gradient_checkpointing=False, activation_checkpointing=False))
    assert off.parallel.recompute_granularity == "none"
    assert GRPOConfig(activation_checkpointing=False).given() == {
        "output_dir": "trainer_output",
        "activation_checkpointing": False,
    }
