"""Every name of the other trainers is understood, or refused with a reason: none is unknown."""

from __future__ import annotations

import itertools
import typing
from pathlib import Path

from mgrpo.config import ConfigError
from mgrpo.config.annotations import FINITE
from mgrpo.config.fields import alternatives, in_python, read, settings
from mgrpo.moving import from_values, load_file
from mgrpo.moving.command_words import TRAINERS, words
from mgrpo.moving.foreign_names import accepted, sections, table
from mgrpo.moving.name_hints import hints, tried
from tests.shipped import EXAMPLES, FILES
from tools.docs import peers
from tools.docs.links import anchors
from tools.docs.settings import FIRST, to_markdown

ROOT = Path(__file__).parents[3]

PEERS = {
    "Open Instruct: experiment": """
        exp_name seed data_loader_seed run_name learning_rate lr_scheduler_type warm_up_steps warmup_ratio weight_decay
        max_grad_norm set_weight_decay_on_bias_and_norm fused_optimizer per_device_train_batch_size
        gradient_accumulation_steps total_episodes world_size num_training_steps local_eval_every save_freq backend_timeout
        num_epochs num_mini_batches beta clip_lower clip_higher truncated_importance_sampling_ratio_cap use_rho_correction
        rho_clamp_lower_bound rho_clamp_upper_bound rho_mask_lower_bound rho_mask_upper_bound rho_mask_sequence_level
        rho_mask_tv_divergence kl_estimator loss_denominator alpha ref_policy_update_freq load_ref_policy loss_fn
        record_entropy use_vllm_logprobs temperature single_gpu_mode num_learners_per_node num_nodes sequence_parallel_size
        deepspeed_stage deepspeed_zpg deepspeed_offload_param deepspeed_offload_optimizer
        deepspeed_checkpoint_load_universal gather_whole_model fsdp_shard_degree fsdp_num_replicas model_dtype
        enable_queue_dashboard queue_dashboard_port verbose with_tracking wandb_project_name wandb_project wandb_entity
        wandb_group_name logging_steps report_to push_to_hub hf_entity hf_repo_id hf_repo_revision hf_repo_url output_dir
        cache_dataset_only keep_last_n_checkpoints checkpoint_state_freq checkpoint_state_dir gs_checkpoint_state_dir
        gs_bucket_path checkpointing_steps ephemeral_save_interval resume_from_checkpoint max_seq_length max_train_steps
        activation_memory_budget activation_checkpointing_mode activation_checkpointing_modules compile_model cp_degree
        cp_strategy try_launch_beaker_eval_jobs_on_weka try_auto_save_to_beaker oe_eval_tasks oe_eval_max_length
        oe_eval_beaker_image oe_eval_gpu_multiplier eval_priority eval_workspace send_slack_alerts eval_on_step_0
        eval_pass_at_k eval_top_p""",
    "Open Instruct: data loader": """
        max_prompt_token_length response_length pack_length async_steps num_samples_per_prompt_rollout
        num_unique_prompts_rollout active_sampling filter_zero_std_samples no_resampling_pass_rate
        advantage_normalization_type mask_truncated_completions mask_tool_use dataset_mixer_list dataset_mixer_eval_list
        dataset_mixer_list_splits dataset_mixer_eval_list_splits dataset_transform_fn dataset_cache_mode
        dataset_local_cache_dir dataset_config_hash dataset_config_eval_hash dataset_skip_cache shuffle_eval_dataset
        system_prompt_override_file temperature stop_strings inflight_updates inflight_updates_recompute_kv_cache
        eval_response_length
        apply_r1_style_format_reward r1_style_format_reward additive_format_reward apply_verifiable_reward
        verification_reward remap_verifier reward_aggregator llm_judge_model llm_judge_max_tokens
        llm_judge_max_context_length llm_judge_temperature llm_judge_timeout code_api_url code_max_execution_time
        code_pass_rate_reward_threshold code_apply_perf_penalty max_length_verifier_max_length non_stop_penalty
        non_stop_penalty_value apply_evolving_rubric_reward max_active_rubrics cache_evolving_rubric_data_dir save_traces
        rollouts_save_path max_possible_score""",
    "Open Instruct: vLLM": """
        vllm_num_engines vllm_tensor_parallel_size vllm_enforce_eager vllm_attention_backend vllm_sync_backend
        vllm_gpu_memory_utilization vllm_enable_prefix_caching vllm_top_p vllm_pipeline_parallel_size
        vllm_data_parallel_size vllm_kv_cache_dtype vllm_max_num_seqs vllm_max_num_batched_tokens vllm_extra_args top_k
        min_p""",
    "Open Instruct: model": """
        model_name_or_path model_revision dtype attn_implementation use_cache gradient_checkpointing use_peft lora_r
        lora_alpha lora_dropout lora_target_modules lora_modules_to_save lora_task_type load_in_8bit load_in_4bit
        bnb_4bit_quant_type use_bnb_nested_quant config_name loss_implementation low_cpu_mem_usage rope_scaling_factor
        rope_scaling_beta_fast rope_scaling_beta_slow rope_scaling_old_context_len""",
    "Open Instruct: tokenizer": """
        tokenizer_name_or_path tokenizer_revision trust_remote_code use_fast chat_template_name add_bos get_tokenizer_fn
        tokenizer_files_hash use_slow_tokenizer tokenizer_name ground_truths_key sft_messages_key""",
    "Open Instruct: tools": """
        tools tool_call_names tool_configs tool_parser_type max_steps max_tool_calls per_turn_max_tokens
        only_reward_good_outputs pass_tools_to_chat_template pool_size""",
    "flags of old scripts": """
        no_filter_zero_std_samples chat_template max_tool_calls number_samples_per_prompt actor_num_gpus_per_node
        add_r1_style_format_reward stop_token penalty_reward_value no_try_launch_beaker_eval_jobs beaker_eval_freq
        masked_mean_axis warm_up_steps truncated_importance_sampling_ratio_cap wandb_project_name use_fp8_kv_cache
        allow_world_padding inference_batch_size search_api_endpoint code_tool_api_endpoint local_rollout_batch_size
        local_rollout_forward_batch_size local_mini_batch_size reward_model_multiplier number_documents_to_search
        tool_max_concurrency""",
    "TRL: first version": """
        learning_rate logging_steps bf16 model_init_kwargs disable_dropout remove_unused_columns max_prompt_length
        num_generations max_completion_length ds3_gather_for_generation shuffle_dataset generation_batch_size
        steps_per_generation temperature top_p top_k min_p repetition_penalty cache_implementation use_vllm
        vllm_server_base_url vllm_mode vllm_guided_decoding_regex vllm_server_host vllm_server_port vllm_server_timeout
        vllm_gpu_memory_utilization vllm_tensor_parallel_size beta num_iterations epsilon delta epsilon_high reward_weights
        scale_rewards loss_type mask_truncated_completions sync_ref_model ref_model_mixup_alpha ref_model_sync_steps
        use_liger_loss log_completions num_completions_to_print wandb_log_unique_prompts""",
    "TRL: of TrainingArguments": """
        per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps lr_scheduler_type warmup_ratio
        weight_decay max_grad_norm adam_beta1 adam_beta2 adam_epsilon seed save_steps save_total_limit eval_strategy
        report_to push_to_hub gradient_checkpointing gradient_checkpointing_kwargs deepspeed fsdp
        fsdp_config warmup_steps per_device_eval_batch_size eval_steps
        save_strategy output_dir run_name fp16 optim ddp_timeout data_seed resume_from_checkpoint""",
    "TRL: later": """
        importance_sampling_level sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg
        vespo_lambda_neg multi_objective_aggregation top_entropy_quantile entropy_coef use_adaptive_entropy entropy_coef_min
        entropy_coef_max entropy_coef_delta entropy_target vllm_importance_sampling_correction
        vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
        vllm_importance_sampling_cap off_policy_mask_threshold use_bias_correction_kl cast_lm_head_to_fp32
        router_aux_loss_coef num_generations_eval pad_to_multiple_of generation_kwargs chat_template_kwargs
        trust_remote_code vllm_model_impl vllm_enable_sleep_mode vllm_max_model_length vllm_group_port
        vllm_structured_outputs_regex max_tool_calling_iterations use_transformers_continuous_batching
        transformers_continuous_batching_config use_transformers_paged log_multimodal log_unique_prompts
        log_completions_hub_repo use_liger_kernel auto_find_batch_size parallelism_config""",
    "TRL: of its trainer": "reward_funcs tools environment_factory rollout_func",
    "TRL: asynchronous and replay": """
        num_generations max_completion_length epsilon epsilon_high token_budget fork_threshold_tokens max_inflight_tasks
        max_staleness queue_maxsize weight_sync_steps heartbeat_stale_after_s request_timeout vllm_server_base_url
        vllm_server_timeout max_tool_calling_iterations replay_buffer_size""",
}

SAMPLES = {
    bool: ("true", "false"),
    int: ("3", "4"),
    float: ("0.25", "2.5"),
    str: ("something", "else"),
    dict: ('{"a": 1}', '{"b": 2}'),
}
"""Two texts for each type; one of them is not among the plain values of any name."""


def texts(expected):
    """Texts that have the type `expected`."""
    for kind in alternatives(expected):
        if kind is type(None):
            continue
        origin = typing.get_origin(kind)
        if origin is tuple:
            yield from SAMPLES[typing.get_args(kind)[0]]
        elif origin is typing.Literal:
            yield from map(str, typing.get_args(kind))
        else:
            yield from SAMPLES[origin or kind]


def test_no_name_of_another_trainer_is_unknown():
    """The first pasted flag that ends in `unknown setting` sends its owner back to the other trainer."""
    assert {group: [name for name in text.split() if name not in accepted()] for group, text in PEERS.items()} == {
        group: [] for group in PEERS
    }


def names_with(status):
    found = [name for name, entry in accepted().items() if entry.status == status]
    assert found
    return found


def test_a_refused_name_says_why_and_what_to_give():
    """A refusal without the way out is a dead end."""
    wrong = [found for name in names_with("refused") for found in faults_of_a_refusal(name)]
    assert wrong == []


def faults_of_a_refusal(name):
    entry, refused = table()[name], []
    for text in texts(entry.type):
        try:
            from_values({name: text})
        except ConfigError as err:
            refused += err.problems
    if not refused:
        yield f"every sample of {name} is accepted"
    elif not any(in_python(entry.sentence) in sentence for sentence in refused):
        yield f"{name} is refused without its reason"
    yield from (f"{name}: {said}" for said in refused if not said.startswith(f"{name}=") or "leave it out" not in said)


def test_a_value_that_asks_for_nothing_is_accepted_in_silence():
    """Scripts spell out defaults: `--use_peft False` must not be refused, nor cost a line."""
    names = [name for name, entry in accepted().items() if entry.neutral]
    wrong = [(name, value) for name in names for value in table()[name].neutral if not is_silent(name, value)]
    assert names and wrong == []


def is_silent(name, value):
    config = from_values({name: value} if value != () else {name: []})
    return config.notes == () and config == from_values({})


def test_a_name_without_effect_changes_nothing_and_says_so():
    """A run that silently ignores a flag is misunderstood by its owner."""
    cases = [(table()[name], text) for name in names_with("no effect") for text in texts(table()[name].type)]
    assert [(entry.name, text) for entry, text in cases if not is_idle(entry, text)] == []


def is_idle(entry, text):
    config = from_values({entry.name: text})
    said = () if read(text, entry.type) in entry.neutral else (f"{entry.name} has no effect: {entry.sentence}",)
    return config == from_values({}) and config.notes == said


def test_every_alias_sets_settings_and_is_translated():
    """An alias without a translation would be accepted and lost."""
    for name, entry in table().items():
        if entry.status not in ("alias", "translated"):
            continue
        assert entry.targets and set(entry.targets) <= settings().keys(), name
        assert entry.status == "translated" or len(entry.targets) == 1, name
        assert any(map(is_understood, itertools.repeat(name), texts(entry.setting.type))), name


def is_understood(name, text):
    """Whether the value changes a setting, or is answered with a note or a problem."""
    try:
        config = from_values({name: text})
    except ConfigError:
        return True
    return config != from_values({}) or config.notes != ()


def test_every_name_has_one_status_and_a_section():
    """docs/config.md is made of the table: a name in two places would be explained twice, and differently."""
    assert not table().keys() & settings().keys()
    assert {entry.section for entry in accepted().values()} <= set(sections())
    for entry in table().values():
        assert entry.sentence or entry.targets
        assert not entry.sentence.endswith(".")


def test_the_page_of_settings_is_current():
    """A page that lags behind sends users after settings that are gone. `python -m tools.docs.settings > docs/config.md`"""
    page = (ROOT / "docs/config.md").read_text()
    assert page == to_markdown()
    found = anchors(page)
    assert accepted().keys() | settings().keys() | tried().keys() <= found


def test_the_settings_to_begin_with_are_those_of_every_example():
    """A newcomer who copies an example looks them up first."""
    first = " ".join(FIRST.values()).split()
    assert set(first) <= settings().keys() and len(set(first)) == len(first)
    given = [load_file(EXAMPLES / path).provenance.sources.keys() for path in FILES]
    assert set.intersection(*map(set, given)) <= set(first)


def test_the_page_says_all_of_a_setting():
    """Limits and needs that only an error tells are found after the run was started."""
    rows = {
        row.partition("`")[2].partition("`")[0]: row for row in to_markdown().splitlines() if row.startswith("| <a")
    }
    for name, setting in settings().items():
        limits = str(setting.range).removesuffix(" and finite")
        assert setting.range in (None, FINITE) or limits in rows[name]
        assert all(
            f"Needs {need.condition.split()[0].split('=')[0]}" in rows[name].replace("[`", "") for need in setting.needs
        )
        assert all(peer.value in rows[name] for peer in setting.peers)
    assert "`INT`, at least 1 |" in rows["pack_length"]
    assert "Needs [`use_rho_correction`](#use_rho_correction)=true. |" in rows["rho_level"]


def test_the_page_of_other_commands_is_current():
    """The same. `python -m tools.docs.peers > docs/config_peers.md`"""
    page = (ROOT / "docs/config_peers.md").read_text()
    assert page == peers.to_markdown()
    assert all(f"| `{name}` |" in page for trainer in TRAINERS for name in words(trainer))


def test_the_examples_use_settings_by_their_own_names():
    """An example teaches; an alias in it would teach a detour."""
    configs = {path: load_file(path) for path in sorted((ROOT / "examples/configs").glob("*.yaml"))}
    assert configs
    sources = {path: (config.notes, set(config.provenance.sources.values())) for path, config in configs.items()}
    assert sources == {path: ((), {f"file {path}"}) for path in configs}


def test_every_hint_names_settings_and_no_accepted_name():
    """A hint to a setting that is gone sends its reader in a circle, and one for an accepted name is never read."""
    for name, hint in hints().items():
        assert name not in accepted(), name
        assert set(hint.targets) <= settings().keys(), name
        assert hint.targets or hint.sentence, name
