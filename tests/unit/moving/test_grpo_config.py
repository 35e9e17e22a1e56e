"""From another trainer: its scripts, its config objects."""

from __future__ import annotations

import dataclasses
import enum
import subprocess
import sys
from typing import Any

import pytest

import mgrpo
from mgrpo.config import Config, ConfigError
from mgrpo.config.fields import flat
from mgrpo.config.validate import problems
from mgrpo.moving import from_values
from mgrpo.moving.config_doors import as_config
from mgrpo.moving.grpo_config import given_fields

THINK_32B = """
    python open_instruct/grpo_fast.py
    --exp_name think --beta 0.0 --async_steps 8 --inflight_updates True --active_sampling --no_resampling_pass_rate 0.875
    --truncated_importance_sampling_ratio_cap 2.0 --advantage_normalization_type centered
    --num_samples_per_prompt_rollout 8 --num_unique_prompts_rollout 64 --num_mini_batches 1 --learning_rate 1e-6
    --per_device_train_batch_size 1 --kl_estimator 2 --dataset_mixer_list owner/rows 1.0 --dataset_mixer_list_splits train
    --max_prompt_token_length 2048 --response_length 32768 --pack_length 35840 --model_name_or_path owner/model
    --chat_template_name olmo_thinker --non_stop_penalty False --temperature 1.0 --total_episodes 10000000
    --deepspeed_stage 3 --deepspeed_zpg 32 --gather_whole_model False
    --num_learners_per_node 8 8 8 8 8 8 8 8 8 8 8 8 --vllm_num_engines 6 --vllm_tensor_parallel_size 8
    --lr_scheduler_type constant --apply_verifiable_reward true --seed 1 --local_eval_every 50 --save_freq 25
    --checkpoint_state_freq 100 --gradient_checkpointing --with_tracking --vllm_enable_prefix_caching
    --clip_higher 0.272 --mask_truncated_completions False --oe_eval_max_length 32768
    --try_launch_beaker_eval_jobs_on_weka True --eval_priority high --keep_last_n_checkpoints -1 --push_to_hub False
    --llm_judge_model hosted_vllm/judge --code_api_url http://code/test_program --backend_timeout 1200
"""
PLAIN_7B = """
    --exp_name rlvr --beta 0.01 --num_samples_per_prompt_rollout 16 --num_unique_prompts_rollout 48 --num_mini_batches 1
    --num_epochs 1 --learning_rate 5e-7 --per_device_train_batch_size 1 --kl_estimator 3
    --dataset_mixer_list owner/rows 1.0 --dataset_mixer_eval_list owner/rows 16 --max_prompt_token_length 2048
    --response_length 8192 --pack_length 16384 --model_name_or_path owner/model --non_stop_penalty
    --temperature 1.0 --total_episodes 2000000 --deepspeed_stage 1 --num_learners_per_node 6 --vllm_num_engines 2
    --vllm_tensor_parallel_size 1 --lr_scheduler_type linear --warm_up_steps 20 --apply_verifiable_reward true --seed 3
    --local_eval_every 25 --save_freq 200 --verbose False --single_gpu_mode False --no_try_launch_beaker_eval_jobs
    --ground_truths_key ground_truth --sft_messages_key messages --vllm_sync_backend nccl --loss_fn dapo
    --masked_mean_axis none --async_steps 0
"""


class Schedule(str, enum.Enum):
    """As transformers writes its choices."""

    LINEAR = "linear"
    COSINE = "cosine"


@dataclasses.dataclass
class TrlConfig:
    """A part of TRL's class, with what it fills in by itself."""

    output_dir: str | None = None
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    num_generations: int = 8
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    loss_type: str = "dapo"
    epsilon: float = 0.2
    use_vllm: bool = False
    lr_scheduler_type: Schedule = Schedule.LINEAR
    model_init_kwargs: dict[str, Any] | None = None
    report_to: list[str] = dataclasses.field(default_factory=list)
    disable_tqdm: bool | None = None
    gradient_checkpointing: bool = True

    def __post_init__(self):
        self.steps_per_generation = self.steps_per_generation or self.gradient_accumulation_steps
        self.generation_batch_size = self.per_device_train_batch_size * self.world_size * self.steps_per_generation
        self.disable_tqdm = False

    @property
    def world_size(self):
        return 2


def test_trl_fields_give_trl_defaults_and_what_was_asked():
    """A user who leaves a field out relies on TRL's default, not on ours."""
    config = mgrpo.GRPOConfig.from_trl(learning_rate=2e-6, num_generations=4, epsilon_high=0.28)
    assert isinstance(config, Config)
    assert (config.loss.beta, config.loss.aggregation, config.optimizer.learning_rate) == (0.0, "token", 2e-6)
    assert (config.loss.clip_lower, config.loss.clip_higher) == (0.2, 0.28)
    assert (config.rollout.num_samples_per_prompt_rollout, config.rollout.num_unique_prompts_rollout) == (4, 2)
    assert config.rollout.response_length == 512 and config.parallel.pack_length == 1024
    assert "epsilon_high -> clip_higher (0.28)" in config.notes
    assert config.provenance.sources["learning_rate"] == "argument"
    assert mgrpo.GRPOConfig.from_trl(preset="trl_seed").loss.aggregation == "local_token"


def test_a_trl_object_counts_what_differs_from_its_defaults():
    """Every field of the object is set; taken literally they would override every preset."""
    given = TrlConfig(
        output_dir="out",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        lr_scheduler_type=Schedule.COSINE,
    )
    config = mgrpo.GRPOConfig.from_trl(given, tensor_model_parallel_size=2, response_length=99)
    # 4 sequences x 1 data-parallel rank x 4 steps
    assert (config.rollout.num_unique_prompts_rollout, config.algorithm.num_mini_batches) == (2, 1)
    assert (config.experiment.output_dir, config.optimizer.lr_scheduler_type) == ("out", "cosine")
    assert (config.rollout.response_length, config.parallel.tensor_model_parallel_size) == (99, 2)
    assert not any("disable_tqdm" in note or "generation_batch_size" in note for note in config.notes)
    assert config.parallel.recompute_granularity == "full"
    assert mgrpo.GRPOConfig.from_trl(TrlConfig(gradient_checkpointing=False)).parallel.recompute_granularity == "none"
    assert mgrpo.GRPOConfig.from_trl().parallel.recompute_granularity == "full"


def test_an_object_of_trls_asynchronous_trainer_is_asynchronous():
    """Its defaults are other ones than GRPOConfig's, and so is its loss, whose old log-probabilities are the engine's."""

    @dataclasses.dataclass
    class AsyncGRPOConfig:
        num_generations: int = 8
        max_staleness: int = 4
        max_completion_length: int = 2048
        lr_scheduler_type: str = "constant"

    @dataclasses.dataclass
    class Shorter(AsyncGRPOConfig):
        max_completion_length: int = 512
        lr_scheduler_type: str = "linear"
        max_staleness: int = 2

    config, shorter = mgrpo.GRPOConfig.from_trl(AsyncGRPOConfig()), mgrpo.GRPOConfig.from_trl(Shorter())
    assert (config.rollout.async_steps, config.max_age, config.loss.use_rho_correction) == (2, 4, False)
    assert (config.rollout.response_length, config.optimizer.lr_scheduler_type) == (2048, "constant")
    assert config.algorithm.use_vllm_logprobs
    assert (shorter.rollout.response_length, shorter.optimizer.lr_scheduler_type, shorter.max_age) == (512, "linear", 2)
    assert mgrpo.GRPOConfig.from_trl(TrlConfig()).max_age == 0


def of_trl(**defaults: Any) -> type:
    """A class with TRL's name and package, of some version."""
    made = dataclasses.make_dataclass(
        "GRPOConfig", [(name, Any, dataclasses.field(default=value)) for name, value in defaults.items()]
    )
    made.__module__ = "trl.trainer.grpo_config"
    return made


def test_what_a_class_changes_against_trls_counts_as_given():
    """A script that has its settings as defaults of a class of its own would train with TRL's, without a word."""
    own = of_trl(beta=0.0, learning_rate=1e-6, reward_weights=None, num_generations=8, unknown_here=1)

    @dataclasses.dataclass
    class Script(own):
        beta: float = 0.04
        reward_weights: list[float] = dataclasses.field(default_factory=lambda: [1.0, 2.0])
        tensor_model_parallel_size: int = 2
        benchmarks: tuple[str, ...] = ("a",)
        wandb_entity: str | None = None

    @dataclasses.dataclass
    class Variant(Script):
        learning_rate: float = 5e-6
        beta: float = 0.0

        def __post_init__(self):
            self.num_generations = 4
            self.vllm_num_engines = 3

    given = {"beta": 0.04, "reward_weights": [1.0, 2.0], "tensor_model_parallel_size": 2}
    assert given_fields(own()) == {} and given_fields(own(beta=0.1)) == {"beta": 0.1}
    assert given_fields(Script()) == given and given_fields(Script(beta=0.0)) == {
        k: given[k] for k in given if k != "beta"
    }
    more = {"learning_rate": 5e-6, "num_generations": 4, "vllm_num_engines": 3}
    assert given_fields(Variant()) == {name: given[name] for name in given if name != "beta"} | more
    config = mgrpo.GRPOConfig.from_trl(Variant())
    assert (config.loss.beta, config.optimizer.learning_rate, config.engine.vllm_num_engines) == (0.0, 5e-6, 3)


def test_defaults_of_another_version_of_trl_count_as_given():
    """The preset has those of one version: another one's run would be neither."""
    older = of_trl(beta=0.04, max_completion_length=256, temperature=1.0)
    config = mgrpo.GRPOConfig.from_trl(older())
    assert (config.loss.beta, config.rollout.response_length) == (0.04, 256)
    # What a script sets to the default of the preset's version is given as well.
    assert mgrpo.GRPOConfig.from_trl(older(beta=0.0)).loss.beta == 0.0


def test_a_class_derived_from_open_instructs_keeps_its_defaults():
    """Launchers in Python have their settings there."""
    own = dataclasses.make_dataclass("ExperimentConfig", [("beta", float, 0.05), ("push_to_hub", bool, True)])
    own.__module__ = "open_instruct.grpo_utils"

    @dataclasses.dataclass
    class Script(own):
        beta: float = 0.3

    config = mgrpo.GRPOConfig.from_open_instruct(Script())
    assert config.loss.beta == 0.3 and not config.hub.push_to_hub


def test_a_version_of_trl_that_recomputes_nothing_is_taken_at_its_word():
    """The default became true between two versions that no other field distinguishes."""

    @dataclasses.dataclass
    class Between:
        loss_type: str = "dapo"
        gradient_checkpointing: bool = False
        fsdp: bool | None = None
        fsdp_config: dict[str, Any] | None = None

    assert mgrpo.GRPOConfig.from_trl(Between()).parallel.recompute_granularity == "none"
    sharded = mgrpo.GRPOConfig.from_trl(Between(fsdp=True, fsdp_config={"min_num_params": 0, "cpu_offload": False}))
    assert (sharded.parallel.zero_stage, sharded.parallel.recompute_granularity) == (3, "none")


def test_an_object_of_an_old_trl_has_the_old_defaults():
    """The default loss was another one then."""

    @dataclasses.dataclass
    class OldConfig:
        loss_type: str = "bnpo"
        num_generations: int = 8

    assert mgrpo.GRPOConfig.from_trl(OldConfig()).loss.aggregation == "local_token"
    assert mgrpo.GRPOConfig.from_trl(OldConfig(loss_type="dr_grpo")).loss.aggregation == "dr_grpo"


def test_what_trl_does_and_we_do_not_is_refused_together():
    """One start for each field that does not exist here would be many."""
    with pytest.raises(ConfigError) as caught:
        mgrpo.GRPOConfig.from_trl(
            TrlConfig(model_init_kwargs={"dtype": "int8", "subfolder": "a"}),
            repetition_penalty=1.1,
            no_such=1,
        )
    assert [sentence.split("=")[0] for sentence in caught.value.problems] == [
        "unknown setting no_such (a Python value); docs/config.md lists every setting",
        "repetition_penalty",
        "model_init_kwargs: dtype",
        "model_init_kwargs: subfolder",
    ]
    with pytest.raises(TypeError, match="expected a dataclass object"):
        mgrpo.GRPOConfig.from_trl(["beta", 0.1])


def test_a_config_can_be_made_of_keywords_a_dict_or_a_file(tmp_path):
    """`mgrpo.GRPOConfig(learning_rate=...)` and `mgrpo.train({...})` are what everybody writes first."""
    by_keyword = mgrpo.GRPOConfig(learning_rate=1e-5, beta=0.1)
    assert isinstance(by_keyword, Config) and (by_keyword.optimizer.learning_rate, by_keyword.loss.beta) == (1e-5, 0.1)
    assert mgrpo.GRPOConfig({"beta": 0.2}, learning_rate=1e-5) == mgrpo.GRPOConfig(learning_rate=1e-5, beta=0.2)
    assert mgrpo.GRPOConfig(preset="trl_main").loss.beta == 0.0
    assert mgrpo.GRPOConfig.from_trl({"beta": 0.1}) == mgrpo.GRPOConfig.from_trl(beta=0.1)
    path = tmp_path / "run.yaml"
    path.write_text("beta: 0.3\n")
    assert as_config(str(path)).loss.beta == as_config({"beta": 0.3}).loss.beta == 0.3
    assert as_config(by_keyword) is by_keyword
    with pytest.raises(ConfigError, match="did you mean beta"):
        mgrpo.GRPOConfig(betta=1)
    with pytest.raises(TypeError, match="a dict of settings or the path of a YAML file, got int"):
        as_config(3)
    for door in ({"betta": 1}, tmp_path / "none.yaml"):
        with pytest.raises(ConfigError):
            mgrpo.train(door)


def test_olmo_core_sharding_means_stage_3():
    """Its scripts name the degree and the replicas of its FSDP, and nothing else."""
    config = mgrpo.GRPOConfig(fsdp_shard_degree=4, fsdp_num_replicas=2, world_size=8)
    assert (config.parallel.zero_stage, config.parallel.fsdp_shard_degree) == (3, 4)
    assert any(note.startswith("zero_stage is 3") for note in config.notes)


def test_the_32b_script_runs_as_it_is():
    """The largest published recipe, asynchronous with updates in flight: no flag of it may be refused, or lost."""
    config = mgrpo.GRPOConfig.from_open_instruct(THINK_32B.split())
    assert config.data.chat_template_name == "olmo_thinker"
    assert config.reward.llm_judge_model == "hosted_vllm/judge"
    assert config.reward.code_api_url == "http://code/test_program"
    assert problems(config, world_size=96) == []
    rollout = config.rollout
    assert (rollout.async_steps, config.max_age, rollout.inflight_updates, rollout.inflight_kv) == (8, 8, True, "keep")
    assert sorted(note.split(" ")[0] for note in config.notes if not note.startswith("preset")) == [
        "deepspeed_stage", "deepspeed_zpg", "eval_priority", "gradient_checkpointing", "oe_eval_max_length",
        "truncated_importance_sampling_ratio_cap", "try_launch_beaker_eval_jobs_on_weka", "with_tracking",
    ]  # fmt: skip
    assert (config.batch_size, config.loss.rho_clamp_upper_bound, config.parallel.pack_length) == (512, 2.0, 35840)
    parallel = config.parallel
    assert (parallel.zero_stage, parallel.fsdp_shard_degree, parallel.recompute_granularity) == (3, 32, "full")
    assert config.algorithm.filter_zero_std_samples and config.algorithm.active_sampling
    (started,) = [line for line in problems(config, world_size=8) if "num_learners_per_node" in line]
    assert "asks for 96 learner ranks, but 8 were started" in started


def test_the_7b_script_runs_as_it_is():
    """The recipe that this project can do must not lose a flag on the way."""
    config = mgrpo.GRPOConfig.from_open_instruct(PLAIN_7B)
    assert problems(config, world_size=6) == []
    assert (config.loss.beta, config.loss.kl_estimator, config.loss.aggregation) == (0.01, 3, "token")
    assert (config.parallel.zero_stage, config.parallel.num_learners_per_node) == (1, (6,))
    assert (config.batch_size, config.num_training_steps, config.reward.non_stop_penalty) == (768, 2604, True)
    assert config.algorithm.advantage_normalization_type == "centered"
    seed = mgrpo.GRPOConfig.from_open_instruct(PLAIN_7B, preset="seed")
    assert seed.algorithm.advantage_normalization_type == "standard"


def test_open_instruct_settings_may_come_as_a_mapping_or_an_object():
    """A launcher in Python has them as one or the other."""

    @dataclasses.dataclass
    class ExperimentConfig:
        clip_lower: float = 0.2
        loss_fn: str = "dapo"

    expected = {"loss_fn": "cispo", "preset": "open_instruct_main"}
    assert mgrpo.GRPOConfig.from_open_instruct({"loss_fn": "cispo"}) == from_values(expected)
    config = mgrpo.GRPOConfig.from_open_instruct(ExperimentConfig(loss_fn="cispo"))
    assert flat(config) == flat(from_values(expected))


def test_the_door_opens_without_torch():
    """A launcher converts flags on a login node; importing torch there takes seconds, or fails."""
    program = (
        "import sys, mgrpo\nmgrpo.GRPOConfig.from_trl(beta=0.1)\n"
        "print(sorted({'torch', 'ray', 'transformers', 'vllm', 'megatron', 'numpy', 'trl'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_the_launchers_own_flags_are_not_the_scripts():
    """Scripts are pasted whole, with accelerate or mason in front."""
    script = (
        "accelerate launch --num_processes 8 --config_file x.yaml open_instruct/grpo_fast.py --beta 0.01 --exp_name a"
    )
    config = mgrpo.GRPOConfig.from_open_instruct(script)
    assert (config.loss.beta, config.experiment.exp_name) == (0.01, "a")


def test_what_is_not_applied_is_noted_in_every_door():
    """Scripts give it for families that need none of it here; a coefficient that a user gives would be missed."""
    door = mgrpo.GRPOConfig
    verl = [
        "algorithm.adv_estimator=grpo",
        "data.trust_remote_code=True",
        "actor_rollout_ref.model.trust_remote_code=True",
    ]
    for made in (
        door.from_open_instruct("--trust_remote_code --beta 0.1"),
        door.from_trl(trust_remote_code=True),
        door.from_verl(verl),
    ):
        assert [note for note in made.notes if "no effect: classes beside the weights are never run" in note]
    assert any(
        "trust_remote_code has no effect" in note
        for note in door.from_trl(model_init_kwargs={"trust_remote_code": True}).notes
    )
    assert not any(
        "trust_remote_code" in note for note in door.from_trl(model_init_kwargs={"trust_remote_code": False}).notes
    )
    said = {
        value: [note for note in door.from_trl(router_aux_loss_coef=value).notes if "router" in note]
        for value in (0.001, 0.0)
    }
    assert (
        said[0.001][0].startswith("router_aux_loss_coef has no effect: routers have no auxiliary loss")
        and said[0.0] == []
    )
