"""Configurations of lesser runs: whether each setting has been thought of, and what one step of a run leaves out."""

from __future__ import annotations

import pytest

from mgrpo.config.fields import flat, settings
from mgrpo.config.schema import Reward
from mgrpo.moving import from_values
from mgrpo.run.inputs.lesser_runs import for_evaluation, for_one_step

CHANGED_FOR_EVALUATION = {
    *("total_episodes", "num_train_epochs", "output_dir", "dataset_mixer_list", "dataset_mixer_list_splits"),
    *("async_steps", "max_staleness", "inflight_updates", "save_traces"),
    *("vllm_mode", "vllm_num_engines", "vllm_server_base_url", "vllm_server_timeout"),
    *("apply_evolving_rubric_reward", "max_active_rubrics"),
    "cache_evolving_rubric_data_dir",
}
CHANGED_FOR_ONE_STEP = {
    *("total_episodes", "num_train_epochs", "output_dir", "local_eval_every", "save_traces"),
    *("filter_zero_std_samples", "active_sampling", "cache_evolving_rubric_data_dir"),
}
KEPT_IN_BOTH = {
    *("vllm_enable_expert_parallel", "vllm_data_parallel_size"),
    *("vllm_speculative_method", "vllm_num_speculative_tokens"),
    *("exp_name", "seed", "backend_timeout", "learner_timeout", "profile_steps"),
    *("cache_dataset_only", "dataset_mixer_eval_list", "dataset_mixer_eval_list_splits", "ground_truths_key"),
    *("sft_messages_key", "max_prompt_token_length", "overlong_prompt_policy", "tokenizer_name_or_path"),
    *("chat_template_name", "chat_template_kwargs", "add_bos", "system_prompt_override_file", "shuffle_dataset"),
    *("dataset_local_cache_dir", "dataset_skip_cache", "num_unique_prompts_rollout"),
    *("num_samples_per_prompt_rollout", "response_length", "temperature", "top_k", "top_p", "min_p"),
    *("vllm_guided_decoding_regex", "inflight_kv", "stop_strings", "eval_pass_at_k", "eval_temperature"),
    *("eval_top_p", "eval_response_length", "rollouts_save_path", "rollout_timeout", "vllm_tensor_parallel_size"),
    *("vllm_enable_sleep_mode", "vllm_gpu_memory_utilization", "vllm_kv_cache_mb", "vllm_kv_cache_dtype"),
    *("vllm_max_num_seqs", "vllm_enforce_eager", "vllm_enable_prefix_caching", "vllm_extra_args"),
    *("vllm_server_allow_public", "ray_address", "engine_start_timeout", "engine_heartbeat_timeout"),
    *("engine_max_restarts", "min_engines", "weight_sync_bucket_mb", "weight_sync_timeout"),
    *("weight_sync_steps", "weight_sync_check_every", "max_initial_mismatch"),
    *("apply_verifiable_reward", "verification_reward", "apply_r1_style_format_reward"),
    *("r1_style_format_reward", "additive_format_reward", "non_stop_penalty", "non_stop_penalty_value"),
    *("remap_verifier", "verifier_weights", "reward_funcs", "reward_funcs_timeout", "reward_model_gpu"),
    *("verifier_modules", "max_length_verifier_max_length", "code_api_url"),
    *("code_max_execution_time", "code_pass_rate_reward_threshold", "code_apply_perf_penalty"),
    *("code_sandbox_accept_risk", "llm_judge_model", "llm_judge_base_url"),
    *("llm_judge_max_tokens", "llm_judge_max_context_length", "llm_judge_temperature", "llm_judge_timeout"),
    *("remote_verifier_concurrency", "verifier_memory_mb", "verifier_timeout"),
    "verifier_workers",
}
KEPT_FOR_EVALUATION = KEPT_IN_BOTH | {"local_eval_every", "reward_weights", "overlong_cache_length"}
KEPT_FOR_ONE_STEP = (
    KEPT_IN_BOTH
    | CHANGED_FOR_EVALUATION - CHANGED_FOR_ONE_STEP
    | {
        *("log_ref_kl", "alpha", "ref_policy_update_freq", "use_vllm_logprobs", "advantage_normalization_type"),
        *(
            "advantage_std",
            "reward_weights",
            "active_sampling_oversample",
        ),
        *("replay_buffer_size", "no_resampling_pass_rate", "mask_truncated_completions", "overlong_cache_length"),
        *("top_entropy_quantile", "entropy_coef", "use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max"),
        *("entropy_coef_delta", "entropy_target", "num_epochs", "num_mini_batches"),
    }
)
WHOLE = {"agent", "model", "adapter", "tools", "hub"}
"""Sections that both keep as they are."""
AFRESH_FOR_EVALUATION = {"loss", "algorithm", "distillation", "optimizer", "parallel", "checkpoint", "tracking"}
"""Sections that begin with their defaults."""
AFRESH_FOR_ONE_STEP = {"checkpoint", "tracking"}
ALSO_WHOLE_FOR_ONE_STEP = {"loss", "distillation", "optimizer", "parallel", "engine", "data"}


def decided(kept: set[str], changed: set[str], sections: set[str]) -> set[str]:
    """Settings of other sections than these about which nothing has been decided."""
    named = {name for name, setting in settings().items() if setting.section not in sections}
    return named - kept - changed


def test_every_setting_of_a_section_that_is_rewritten_has_been_thought_of() -> None:
    """A new one would be kept in silence: a longer evaluation, or a dry run that writes where the run does.

    Decide whether `lesser_runs` changes it, and add its name to one of the sets of each of the two.
    """
    assert decided(KEPT_FOR_EVALUATION, CHANGED_FOR_EVALUATION, WHOLE | AFRESH_FOR_EVALUATION) == set()
    whole = WHOLE | ALSO_WHOLE_FOR_ONE_STEP | AFRESH_FOR_ONE_STEP
    assert decided(KEPT_FOR_ONE_STEP, CHANGED_FOR_ONE_STEP, whole) == set()


@pytest.mark.parametrize("vllm_mode", ["ray", "server"])
def test_what_is_said_to_be_kept_is_kept_and_the_rest_is_changed_or_a_default(vllm_mode) -> None:
    """Values that are not the defaults show what each of the two does."""
    given = {
        **{"temperature": 0.5, "seed": 9, "num_epochs": 2, "lr_scheduler_type": "linear", "beta": 0.1},
        **{"checkpoint_state_freq": 3, "load_best_model_at_end": True, "save_traces": True, "async_steps": 2},
        **{"reward_weights": (2.0,), "local_eval_every": 4, "tensor_model_parallel_size": 2, "resume": "auto"},
        **{"apply_evolving_rubric_reward": True, "cache_evolving_rubric_data_dir": "rubrics"},
        **{"dataset_mixer_list": ("rows.jsonl", "1.0"), "report_to": ("tensorboard",), "active_sampling": True},
        **({"vllm_mode": "server", "vllm_server_base_url": ("http://a", "http://b")} if vllm_mode == "server" else {}),
    }
    config = from_values({"output_dir": "out", "model_name_or_path": "somewhere/model", **given})
    before, section = flat(config), {name: setting.section for name, setting in settings().items()}
    for own, kept, afresh in (
        (for_evaluation(config), KEPT_FOR_EVALUATION, AFRESH_FOR_EVALUATION),
        (for_one_step(config, "folder"), KEPT_FOR_ONE_STEP, AFRESH_FOR_ONE_STEP),
    ):
        after = flat(own)
        assert {name for name in kept if after[name] != before[name]} <= {"vllm_server_timeout"}
        assert not after["save_traces"] and after["total_episodes"] == config.batch_size
        set_anew = {"resume", "save_final", "report_to", "pack_length"}
        for name in after.keys() - kept - set_anew:
            if section[name] in afresh:
                assert after[name] == settings()[name].default, name
            if section[name] in WHOLE:
                assert after[name] == before[name], name
    assert flat(for_evaluation(config))["output_dir"] == "out/eval/model"
    step = for_one_step(config, "folder")
    assert step.num_training_steps == 1 and step.experiment.output_dir == "folder"
    assert (step.checkpoint.resume, step.checkpoint.save_final, step.tracking.report_to) == ("never", False, ("none",))
    assert step.loss == config.loss and not step.algorithm.active_sampling
    assert step.reward.apply_evolving_rubric_reward and step.reward.cache_evolving_rubric_data_dir is None
    assert for_evaluation(config).reward == Reward()
