"""Commands of verl and slime: what each becomes, and everything in them that cannot be done."""

from __future__ import annotations

import launch_scripts
import pytest
import slime_cases
import verl_cases

import mgrpo
from mgrpo.config import ConfigError
from mgrpo.config.fields import flat, settings
from mgrpo.config.validate import problems
from mgrpo.moving import from_values
from mgrpo.moving.command_words import TRAINERS, find, words
from mgrpo.moving.scripts.command_config import CONVERT

VERL = {
    "FSDP": {
        "num_unique_prompts_rollout": 1024, "num_samples_per_prompt_rollout": 5, "num_mini_batches": 4, "beta": 0.001,
        "kl_estimator": 2, "num_learners_per_node": (8,), "vllm_num_engines": 4, "vllm_tensor_parallel_size": 2,
        "vllm_mode": "colocate", "vllm_enable_sleep_mode": True, "zero_stage": 3, "num_train_epochs": 15.0, "pack_length": 1536,
        "overlong_prompt_policy": "filter", "recompute_granularity": "full", "checkpoint_state_freq": 20,
        "local_eval_every": 5, "lr_scheduler_type": "constant", "weight_decay": 0.01, "dual_clip": 3.0, "aggregation": "token",
        "advantage_std": "verl", "filter_zero_std_samples": False, "eval_temperature": 0.0, "exp_name": "e",
        "dataset_mixer_list": ("/data/gsm8k/train.parquet", "1.0"), "resume": "auto", "report_to": ("tensorboard", "wandb"),
        "wandb_project": "p",
    },
    "LORA": {
        "use_peft": True, "lora_r": 64, "lora_alpha": 32, "lora_target_modules": ("all-linear",), "zero_stage": 1,
        "shuffle_dataset": False, "learning_rate": 3e-6, "num_mini_batches": 1, "vllm_num_engines": 1,
    },
    "MEGATRON": {
        "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 1,
        "zero_stage": 1, "vllm_num_engines": 4, "vllm_tensor_parallel_size": 2, "vllm_data_parallel_size": 2, "vllm_enable_expert_parallel": True, "recompute_granularity": "none", "report_to": ("tensorboard",), "wandb_project": None,
    },
    "DAPO": {
        "beta": 0.0, "clip_lower": 0.2, "clip_higher": 0.28, "dual_clip": 10.0, "context_parallel_size": 4, "cp_comm_type": "a2a",
        "pack_length": 40960, "num_mini_batches": 16, "active_sampling": True,
        "filter_zero_std_samples": True, "overlong_cache_length": 4096, "total_episodes": 100 * 512 * 16, "num_train_epochs": None,
        "lr_scheduler_type": "constant_with_warmup", "warm_up_steps": 10, "overlong_prompt_policy": "truncate_left",
        "eval_temperature": 1.0, "eval_top_p": 0.7, "num_learners_per_node": (8, 8), "resume": "never",
        "vllm_num_engines": 4, "vllm_tensor_parallel_size": 4, "vllm_data_parallel_size": 1,
    },
}  # fmt: skip
SLIME = {
    "DENSE_COLOCATED": {
        "model_name_or_path": "/models/4B", "num_learners_per_node": (8,), "vllm_mode": "colocate", "vllm_num_engines": 4,
        "vllm_tensor_parallel_size": 2, "vllm_gpu_memory_utilization": 0.7, "total_episodes": 3000 * 256, "num_mini_batches": 1,
        "pack_length": 10240, "response_length": 8192, "aggregation": "seq_mean", "beta": 0.0, "clip_higher": 0.28,
        "adam_beta2": 0.98, "seed": 1234, "checkpoint_state_freq": 20, "checkpoint_state_dir": "/runs/4B", "eval_pass_at_k": 16,
        "dataset_mixer_eval_list": ("/data/aime.jsonl", "1.0"), "ground_truths_key": "label", "sft_messages_key": "messages",
        "sequence_parallel": True, "recompute_granularity": "full", "lr_scheduler_type": "constant",
    },
    "SEPARATE": {
        "num_train_epochs": 2.0, "vllm_mode": "ray", "vllm_num_engines": 2, "num_mini_batches": 2, "ratio_level": "sequence",
        "active_sampling": True, "active_sampling_oversample": 1.0, "beta": 0.001, "kl_estimator": 2, "clip_lower": 4e-4,
        "clip_higher": 4e-4, "lr_scheduler_type": "cosine", "min_lr": 1e-7, "warm_up_steps": 10, "use_rho_correction": True,
        "rho_clamp_upper_bound": 2.0, "report_to": ("tensorboard", "wandb"), "wandb_project": "p", "pack_length": 10240, "shuffle_dataset": False, "resume": "never",
        "weight_sync_steps": 2,
    },
    "EXPERTS": {
        "expert_model_parallel_size": 8, "optimizer_cpu_offload": True, "use_precision_aware_optimizer": False,
        "aggregation": "token", "beta": 0.0, "pack_length": 20480, "vllm_num_engines": 1,
    },
}  # fmt: skip


def assert_holds(config, expected):
    values = flat(config)
    assert {name: values[name] for name in expected} == expected


@pytest.mark.parametrize("name", VERL)
def test_verl_commands_become_what_they_ask_for(name):
    """Values are translated as well, and what is left out has verl's default: a run here is the run there."""
    config = mgrpo.GRPOConfig.from_verl(getattr(verl_cases, name))
    assert_holds(config, VERL[name])
    ranks = sum(config.parallel.num_learners_per_node)
    assert not [p for p in problems(config, world_size=ranks) if not p.startswith("model_name_or_path")]


@pytest.mark.parametrize("name", SLIME)
def test_slime_commands_become_what_they_ask_for(name):
    """The same; what describes the architecture is read from the model."""
    config = mgrpo.GRPOConfig.from_slime(getattr(slime_cases, name))
    assert_holds(config, SLIME[name])
    ranks = sum(config.parallel.num_learners_per_node)
    assert all(problem.startswith("model_name_or_path") for problem in problems(config, world_size=ranks))
    (note,) = [note for note in config.notes if note.endswith("the architecture is read from config.json")]
    assert "num_layers, hidden_size" in note


@pytest.mark.parametrize(
    ("door", "command", "expected"),
    [
        (
            mgrpo.GRPOConfig.from_verl,
            verl_cases.REFUSED,
            ["algorithm.use_kl_in_reward=True", "loss_agg_mode=sample-mean", "fsdp_config.offload_policy=True", "swanlab is not among the trackers",
             "model.path=$MODEL_PATH", "custom_reward_function.path=reward.py", "unknown name nonsense.name", "rollout.n=many",
             "tensor_model_parallel_size=2 does not divide", "expert_parallel_size=4 is refused", "ppo_mini_batch_size=32 does not divide", "adv_estimator=gae"],
        ),
        (
            mgrpo.GRPOConfig.from_slime,
            slime_cases.OWN_CODE,
            ["custom_generate_function_path=generate.generate", "custom_rm_path=generate.reward_func", "optimizer=sgd",
             "unknown name no_such_name", "advantage_estimator=ppo"],
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_at_once(door, command, expected):
    """One start for each would be many."""
    with pytest.raises(ConfigError) as caught:
        door(command)
    for words_ in expected:
        assert sum(words_ in problem for problem in caught.value.problems) == 1, (words_, caught.value.problems)
    assert len(caught.value.problems) in (len(expected), len(expected) + 1)


@pytest.mark.parametrize("count", [0, 2, 10])
def test_a_number_of_batches_that_active_sampling_does_not_have_is_refused(count):
    """With fewer, steps end there with smaller batches, which is another run."""
    command = f"algorithm.adv_estimator=grpo algorithm.filter_groups.max_num_gen_batches={count}"
    if count != 2:
        assert mgrpo.GRPOConfig.from_verl(command)
        return
    with pytest.raises(
        ConfigError, match=r"max_num_gen_batches=2 is refused.*: active_sampling gives up .* give 0 or 10"
    ):
        mgrpo.GRPOConfig.from_verl(command)


def test_a_setting_given_beside_a_command_takes_the_place_of_what_is_refused():
    """A reward function has another signature here: naming the new one must be enough."""
    config = mgrpo.GRPOConfig.from_verl(
        "custom_reward_function.path=a.py algorithm.adv_estimator=grpo",
        reward_funcs="b.py:f",
        vllm_mode="ray",
        beta=0.5,
    )
    assert (config.reward.reward_funcs, config.engine.vllm_mode, config.loss.beta) == (("b.py:f",), "ray", 0.5)
    assert "custom_reward_function.path=a.py has no effect: reward_funcs is given in its place" in config.notes


def test_verl_settings_may_come_in_any_form(tmp_path):
    """A launcher has them as words, a file or a tree."""
    words_ = [
        "algorithm.adv_estimator=grpo",
        "data.train_files=['a', 'b']",
        "+data.apply_chat_template_kwargs.enable_thinking=False",
    ]
    tree = {
        "algorithm": {"adv_estimator": "grpo"},
        "data": {"train_files": ["a", "b"], "apply_chat_template_kwargs.enable_thinking": False},
    }
    path = tmp_path / "run.yaml"
    path.write_text(
        "algorithm:\n  adv_estimator: grpo\ndata:\n  train_files: [a, b]\n  tool_config_path: ${oc.select:x,null}\n"
        "  apply_chat_template_kwargs: {enable_thinking: false}\n"
    )
    by_words, by_tree, by_file = (mgrpo.GRPOConfig.from_verl(given) for given in (words_, tree, path))
    assert by_words == by_tree == by_file == mgrpo.GRPOConfig.from_verl(str(path))
    assert by_words.data.dataset_mixer_list == ("a", "1.0", "b", "1.0")
    with pytest.raises(ConfigError, match="cannot read the YAML file"):
        mgrpo.GRPOConfig.from_verl("missing.yaml")
    by_flags = mgrpo.GRPOConfig.from_slime(
        ["--rollout-batch-size", "4", "--rollout-num-gpus", "1", "--lr=1e-5", "--lr=2e-5", "--num-rollout", "9",
         "--global-batch-size=4", "--rollout-max-response-len", "8"]
    )  # fmt: skip
    names = {"num_rollout": 9, "global_batch_size": 4, "rollout_max_response_len": 8}
    by_names = mgrpo.GRPOConfig.from_slime({"rollout_batch_size": 4, "rollout-num-gpus": 1, "lr": 2e-5} | names)
    assert by_flags == by_names and by_flags.optimizer.learning_rate == 2e-5


def test_the_tables_name_what_exists():
    """A row with a setting or a conversion that is gone fails when somebody needs it."""
    for trainer in TRAINERS:
        for name, word in words(trainer).items():
            assert set(word.targets) <= settings().keys(), name
            assert word.status in ("alias", "combined", "no effect", "refused") and word.convert in CONVERT, name
            assert word.status != "alias" or word.targets, name
            assert word.status != "no effect" or word.sentence, name
    assert find("verl", "critic.optim.num_cycles").name == "critic.*"
    assert find("slime", "sglang_mem_fraction_static").name == "sglang_mem_fraction_static"
    assert find("slime", "nothing") is None and from_values({}).rollout.num_samples_per_prompt_rollout == 4


def test_a_script_of_verl_is_read_as_a_file(tmp_path):
    """Its users keep scripts, with the sizes in variables and sums of them: a size that is lost is another run."""
    path = tmp_path / "run.sh"
    path.write_text(launch_scripts.VERL)
    config = mgrpo.GRPOConfig.from_verl(path)
    expected = {
        "model_name_or_path": "/models/Qwen2.5-7B", "exp_name": "DAPO-7B", "max_prompt_token_length": 2048,
        "zero_stage": 3, "optimizer_cpu_offload": False, "vllm_enable_sleep_mode": True,
        "lr_scheduler_type": "cosine", "min_lr": 2e-7, "response_length": 8192, "pack_length": 20480, "num_unique_prompts_rollout": 512, "num_samples_per_prompt_rollout": 16,
        "dataset_mixer_list": ("/data/a.parquet", "1.0", "/data/b.parquet", "1.0"), "aggregation": "seq_mean",
    }  # fmt: skip
    assert_holds(config, expected)
    assert mgrpo.GRPOConfig.from_verl(str(path)) == mgrpo.GRPOConfig.from_verl(launch_scripts.VERL) == config
    with pytest.raises(ConfigError, match="cannot read the script missing"):
        mgrpo.GRPOConfig.from_verl("missing.sh")


def test_a_script_of_slime_is_read_as_a_file(tmp_path):
    """Every script of its examples is made of lists, one of them from a file that describes the architecture."""
    path = tmp_path / "run.sh"
    path.write_text(launch_scripts.SLIME)
    expected = {
        "model_name_or_path": "/models/Qwen3-4B", "checkpoint_state_dir": "/runs/4B/", "checkpoint_state_freq": 20,
        "num_unique_prompts_rollout": 32, "num_mini_batches": 1, "total_episodes": 3000 * 256, "vllm_mode": "colocate",
        "response_length": 8192,
    }  # fmt: skip
    assert_holds(mgrpo.GRPOConfig.from_slime(path), expected)
    with pytest.raises(ConfigError) as caught:
        mgrpo.GRPOConfig.from_slime(launch_scripts.SLIME.replace("CKPT_ARGS=(", "OTHER=("))
    assert "only a shell knows" in str(caught.value) and "${CKPT_ARGS[@]}" in str(caught.value)
    with pytest.raises(ConfigError, match=r"rm_type=remote is refused \(line 19\)"):
        mgrpo.GRPOConfig.from_slime(launch_scripts.SLIME.replace("--rm-type deepscaler", "--rm-type remote"))


VERL_REFUSED = {
    "~data.shuffle": "~data.shuffle is refused (line 4): only name=value is read",
    "~trainer.total_epochs=3": "~trainer.total_epochs=3 is refused (line 4)",
    "nonsense": "nonsense is refused (line 4): only name=value is read",
    "model_engine=megatron": "unknown name model_engine of verl (line 4)",
    "actor@actor_rollout_ref.actor=dp_actor": "unknown name actor@actor_rollout_ref.actor of verl (line 4)",
    "data.trian_batch_size=64": "unknown name data.trian_batch_size of verl (line 4)",
    "actor_rollout_ref.actor.new_loss=True": "unknown name actor_rollout_ref.actor.new_loss of verl (line 4)",
    "--config-name=my_trainer": "the file my_trainer is refused (line 4)",
    "--config-path=/mine": "--config-path=/mine is refused (line 4)",
    "--multirun": "--multirun is refused (line 4)",
    "trainer.total_epochs=1,2": "trainer.total_epochs=1,2 is refused (line 4): it is a choice of Hydra's",
    "'data.seed=range(1,3)'": "data.seed=range(1,3) is refused (line 4): it is a choice of Hydra's",
    "data.train_files='[a, b'": "data.train_files=[a, b is refused (line 4): its brackets or quotes cannot be read",
    "'data.apply_chat_template_kwargs={a:1}'": "is refused (line 4): write a blank behind each colon",
    "'trainer.nnodes=${oc.env:NOT_SET_ANYWHERE}'": "trainer.nnodes=${oc.env:NOT_SET_ANYWHERE} is refused (line 4): it leads to no value",
    "'data.seed=${nothing.there}'": "data.seed=${nothing.there} is refused (line 4): it leads to no value",
    "$MORE": "$MORE' has a value that only a shell knows (line 4: $MORE is set nowhere)",
    "data.seed=$MORE": "data.seed=$MORE has a value that only a shell knows (line 4: $MORE is set nowhere)",
    "actor_rollout_ref.actor.strategy=veomni": "actor_rollout_ref.actor.strategy=veomni is refused (line 4)",
    "actor_rollout_ref.actor.policy_loss.loss_mode=gpg": "policy_loss.loss_mode=gpg is refused (line 4): choose from vanilla, gspo",
    "actor_rollout_ref.actor.policy_loss.loss_mode=gspo actor_rollout_ref.actor.use_kl_loss=True": "loss_agg_mode=token-mean is refused",
    "actor_rollout_ref.actor.policy_loss.loss_mode=cispo algorithm.rollout_correction.bypass_mode=True": "loss_mode=cispo is refused (line 4)",
    "actor_rollout_ref.actor.entropy_coeff=0.1 actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean": "entropy_coeff=0.1 is refused (line 4)",
    "algorithm.adv_estimator=gdpo": "algorithm.adv_estimator=gdpo is refused (line 4): choose from grpo, grpo_vectorized, rloo",
    "actor_rollout_ref.actor.use_kl_loss=maybe": "actor_rollout_ref.actor.use_kl_loss=maybe must be true or false (line 4)",
    "actor_rollout_ref.actor.ppo_mini_batch_size=300": "ppo_mini_batch_size=300 does not divide data.train_batch_size=1024 (line 4)",
    "actor_rollout_ref.model.lora_rank=2.5": "lora_rank=2.5 must be a whole number above -1 (line 4)",
    "actor_rollout_ref.actor.tis_imp_ratio_cap=2": "tis_imp_ratio_cap=2 is refused (line 4)",
    "actor_rollout_ref.actor.optim.optimizer=SGD": "optimizer=SGD is refused (line 4): the optimizer is AdamW",
    "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16": "model_dtype=bf16 is refused (line 4)",
    "actor_rollout_ref.ref.model.path=other": "ref.model.path=other is refused (line 4)",
    "actor_rollout_ref.rollout.do_sample=False": "rollout.do_sample=False is refused (line 4)",
    "actor_rollout_ref.rollout.ignore_eos=True": "rollout.ignore_eos=True is refused (line 4)",
    "actor_rollout_ref.rollout.response_length=99": "rollout.response_length=99 is refused (line 4): data.max_response_length is 512",
    "actor_rollout_ref.rollout.val_kwargs.top_k=50": "val_kwargs.top_k=50 is refused (line 4)",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.seed=1": "engine_kwargs.vllm.seed=1 is refused (line 4)",
    "algorithm.rollout_correction.rollout_is_batch_normalize=True": "rollout_is_batch_normalize=True is refused (line 4)",
    "algorithm.use_pf_ppo=True": "algorithm.use_pf_ppo=True is refused (line 4)",
    "actor_rollout_ref.actor.shuffle=True": "actor.shuffle=True is refused (line 4)",
    "+reward_model.reward_kwargs.scale=2": "reward_model.reward_kwargs.scale=2 is refused (line 4)",
    "trainer.resume_mode=resume_path": "trainer.resume_mode=resume_path needs trainer.resume_from_path (line 4)",
}  # fmt: skip
"""Words of a command whose fourth line they are, and what is said of them."""
SLIME_REFUSED = {
    "--moe-aux-loss-coeff 0.001": "moe_aux_loss_coeff=0.001 is refused (line 4)",
    "--moe-router-bias-update-rate 0.001": "moe_router_bias_update_rate=0.001 is refused (line 4)",
    "--sglang-kv-cache-dtype fp8_e5m2": "sglang_kv_cache_dtype=fp8_e5m2 is refused (line 4)",
    "--entropy-coef 0.1": "entropy_coef=0.1 is refused (line 4): with calculate_per_token_loss off the bonus",
    "--advantage-estimator gspo --use-kl-loss --use-unbiased-kl": "use_unbiased_kl=true is refused (line 4)",
    "--advantage-estimator grpo --normalize-advantages": "normalize_advantages=true is refused (line 4)",
    "--advantage-estimator reinforce_plus_plus": "advantage_estimator=reinforce_plus_plus needs normalize_advantages, as in slime; add it (line 4)",
    "--eval-top-k 20": "eval_top_k=20 is refused (line 4)",
    "--lr-decay-style cosine --lr-decay-iters 100": "lr_decay_iters=100 is refused (line 4)",
    "--rollout-max-context-len 100": "rollout_max_context_len=100 is refused (line 4)",
    "--num-steps-per-rollout 2": "global_batch_size=32 differs from 32 completions / num_steps_per_rollout=2 (line 3)",
    "--over-sampling-batch-size 2": "over_sampling_batch_size=2 must be at least rollout_batch_size=4 (line 4)",
    "--rollout-num-gpus 4": "rollout_num_gpus=4 is refused (line 4): with colocate engines have all 8 GPUs",
    "--eval-prompt-data a a.jsonl b": "eval_prompt_data=a a.jsonl b is refused (line 4)",
    "--use-kl-loss maybe": "use_kl_loss=maybe must be true or false (line 4)",
    "--seed $MORE": "seed=$MORE has a value that only a shell knows (line 4: $MORE is set nowhere)",
    "${MORE[@]}": "only a shell knows (line 4: the list MORE is set nowhere)",
    "--new-flag 3": "unknown name new_flag of slime (line 4)",
}  # fmt: skip
LACKING = {
    "--num-rollout 3": "neither num_rollout nor num_epoch is given",
    "--global-batch-size 32": "neither global_batch_size nor num_steps_per_rollout is given",
    "--rollout-max-response-len 99": "rollout_max_response_len is not given",
}
VERL_LINES = "python3 -m verl.trainer.main_ppo \\\n  algorithm.adv_estimator=grpo \\\n  actor_rollout_ref.rollout.n=8 \\\n  {} \\\n  data.shuffle=True\n"  # fmt: skip
SLIME_LINES = (
    "python train.py --colocate \\\n  --rollout-batch-size 4 --n-samples-per-prompt 8 --num-rollout 3 \\\n"
    "  --global-batch-size 32 --rollout-max-response-len 99 \\\n  {} \\\n  --lr 1e-6\n"
)


def refusals(door, text):
    try:
        door(text)
    except ConfigError as err:
        return err.problems
    return []


@pytest.mark.parametrize(
    ("door", "lines", "cases"),
    [
        (mgrpo.GRPOConfig.from_verl, VERL_LINES, VERL_REFUSED),
        (mgrpo.GRPOConfig.from_slime, SLIME_LINES, SLIME_REFUSED),
    ],
    ids=["verl", "slime"],
)
def test_what_would_be_guessed_is_refused_with_its_line(door, lines, cases):
    """A word that is passed over, or read in another sense, trains another run without a word about it."""
    assert refusals(door, lines.format("")) == []
    found = {words_: refusals(door, lines.format(words_)) for words_ in cases}
    assert {words_: said for words_, said in found.items() if not any(cases[words_] in one for one in said)} == {}


def test_what_slime_itself_demands_has_no_default_of_ours():
    """The length of a run, or of a completion, would be a number that nobody has given."""
    for words_, said in LACKING.items():
        found = refusals(mgrpo.GRPOConfig.from_slime, SLIME_LINES.format("").replace(words_, ""))
        assert len(found) == 1 and said in found[0], words_


ACTOR = "actor_rollout_ref.actor."


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("policy_loss.loss_mode=cispo clip_ratio_low=0.1", f"{ACTOR}clip_ratio_low -> clip_lower (0.1)"),
        ("policy_loss.loss_mode=sapo clip_ratio_low=0.1", f"{ACTOR}clip_ratio_low has no effect: loss_mode=sapo has no clip"),
        ("policy_loss.loss_mode=gspo clip_ratio_c=4", f"{ACTOR}clip_ratio_c has no effect: loss_mode=gspo has no dual clip"),
        ("clip_ratio=0.3", f"{ACTOR}clip_ratio has no effect: verl reads clip_ratio_low and clip_ratio_high"),
        ("clip_ratio=0.3 clip_ratio_low=null", f"{ACTOR}clip_ratio -> clip_lower (0.3), clip_higher (0.2)"),
        ("policy_loss.loss_mode=gspo", "aggregation is seq_mean: loss_mode=gspo averages over each sequence first"),
    ],
)  # fmt: skip
def test_a_word_of_verls_loss_that_is_not_read_is_not_said_to_be(given, said):
    """A run that lists a bound that its loss never reads is believed."""
    words_ = [f"{ACTOR}{word}" for word in given.split()]
    notes = mgrpo.GRPOConfig.from_verl(["algorithm.adv_estimator=grpo", *words_]).notes
    assert [note for note in notes if said in note]
    named = [note for note in notes for word in words_ if note.startswith(f"{word.partition('=')[0]} ")]
    assert len(named) == len(set(named)) <= len(words_)


def test_references_in_a_file_of_verl_are_followed(tmp_path, monkeypatch):
    """Its files say a value once and refer to it; what is dropped would be a default."""
    monkeypatch.setenv("MGRPO_TEST_NODES", "2")
    path = tmp_path / "run.yaml"
    text = """
        algorithm: {adv_estimator: grpo}
        data: {max_response_length: 100, max_prompt_length: "${.max_response_length}", train_batch_size: 64}
        trainer: {nnodes: "${oc.env:MGRPO_TEST_NODES}", project_name: a, experiment_name: "${trainer.project_name}-${oc.env:NONE_SET,x}"}
        actor_rollout_ref:
          actor: {ppo_mini_batch_size: "${data.train_batch_size}", ppo_epochs: "${oc.select:nothing.there,3}"}
          rollout: {n: 8, response_length: "${oc.select:data.max_response_length,512}", name: "???"}
        """
    path.write_text(text)
    config = mgrpo.GRPOConfig.from_verl(path)
    expected = {
        "max_prompt_token_length": 100, "response_length": 100, "num_mini_batches": 1, "num_epochs": 3,
        "num_learners_per_node": (8, 8), "exp_name": "a-x",
    }  # fmt: skip
    assert_holds(config, expected)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("algorithm: {adv_estimator: grpo}\ndata: {seed: '${nothing.there}'}\n", "data.seed=${nothing.there} is refused (line 2)"),
        ("defaults:\n  - mine\nalgorithm: {adv_estimator: grpo}\n", "the file mine is refused (line 2)"),
        ("algorithm:\n  adv_estimator: gae\n", "algorithm.adv_estimator=gae is refused (line 2)"),
        ("algorithm: {adv_estimator: grpo}\ndata:\n  train_files: [[a]]\n", "data.train_files is refused (line 3)"),
        ("- a\n", "must hold `name: value` lines"),
    ],
)  # fmt: skip
def test_what_a_file_of_verl_does_not_say_is_refused_with_its_line(tmp_path, text, said):
    """The same for files, which other files complete."""
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert any(said in problem for problem in refusals(mgrpo.GRPOConfig.from_verl, path))
