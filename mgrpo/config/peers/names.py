"""Every name that a run accepts beside its own settings: Open Instruct's, TRL's, and flags of old scripts, in one table.

A name has exactly one status. A setting of the schema is "used" and is not repeated here, except for who else calls it so.
What an alias comes to is computed in `translate`; what the table refuses is refused by `resolve`, with the note as reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from mgrpo.config.fields import Setting, settings

Status = Literal["used", "derived", "alias", "no effect", "refused"]
OI, TRL, BOTH, OLD, OURS = "Open Instruct", "TRL", "Open Instruct, TRL", "old scripts", "mgrpo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """One accepted name."""

    name: str
    section: str
    source: str
    status: Status
    type: Any
    """Annotation its text is read as; None for an alias that is read as its target is."""
    plain: tuple[object, ...] = ()
    """Values that ask for nothing which is not done anyway: accepted without a word."""
    to: tuple[str, ...] = ()
    """Settings that an alias sets."""
    note: str = ""

    @property
    def setting(self) -> Setting:
        """How its text is read."""
        expected = settings()[self.to[0]].type if self.type is None else self.type
        return Setting(name=self.name, section=self.section, type=expected, default=None)


def alias(name: str, source: str, to: str, note: str = "", type: Any = None) -> dict[str, Any]:
    """A name that sets other settings."""
    return {
        "name": name, "source": source, "status": "alias", "type": type, "to": tuple(to.split()), "note": note,
    }  # fmt: skip


def derived(name: str, source: str, type: Any, note: str) -> dict[str, Any]:
    """A name whose value follows from others."""
    return {"name": name, "source": source, "status": "derived", "type": type, "plain": (None,), "note": note}


def no_effect(name: str, source: str, type: Any, plain: tuple[object, ...], note: str) -> dict[str, Any]:
    """A name that changes nothing here; `plain` values are not even mentioned."""
    return {"name": name, "source": source, "status": "no effect", "type": type, "plain": plain, "note": note}


def refused(name: str, source: str, type: Any, plain: tuple[object, ...], note: str) -> dict[str, Any]:
    """A name that may only have `plain` values."""
    return {"name": name, "source": source, "status": "refused", "type": type, "plain": plain, "note": note}


# Reasons that several names share.
TOOLS = "tools and environments do not exist yet"
RUBRIC = "rubrics do not evolve; verifier rubric judges by those of its row"
TRACKING = "Weights & Biases is not connected; metrics.jsonl and TensorBoard events are written to output_dir"
HUB = "nothing is pushed to the Hub; the trained model lies in output_dir/hf"
BEAKER = "jobs on Beaker are not launched; hf/step_N holds each exported model"
ADAPTER = "adapters are not trained here: all weights are"
QUANT = "weights are not quantised here; model_dtype is bfloat16 or float32"
TRUNCATED = (
    "the engine samples from the whole distribution, because a cut one makes the ratio of trainer to engine wrong"
)
SERVER = "a run starts its own engines (vllm_num_engines, vllm_tensor_parallel_size) and attaches to no server"
ROPE = "positions are read from the model's config.json"
TOKENIZER = "the tokenizer is the one in tokenizer_name_or_path, else in model_name_or_path"
LEGACY_BATCH = "use num_unique_prompts_rollout, num_samples_per_prompt_rollout and num_mini_batches"
CACHE = "the name of prepared data is computed from all that it is made of"
CONTINUOUS = "only vLLM generates here"
UNUSED = "unused by Open Instruct's GRPO, too"
BATCH = "TRL's batch arithmetic, see below"

JSON = dict[str, object]
WORDS = tuple[str, ...]

# fmt: off
_TABLE: dict[str, tuple[dict[str, Any], ...]] = {
    "experiment": (
        derived("run_name", BOTH, str | None, "always exp_name__seed; name a run with exp_name"),
        derived("world_size", OI, int | None, "learner ranks: as many as torchrun started; a value given must agree"),
        derived("num_nodes", OI, int | None, "length of num_learners_per_node; a value given must agree"),
        derived("num_training_steps", OI, int | None, "total_episodes / (prompts x samples); a value given must agree"),
        no_effect("data_loader_seed", OI, int | None, (None,), f"seed orders the data; {UNUSED}"),
        no_effect("data_seed", TRL, int | None, (None,), "seed orders the data"),
        no_effect("full_determinism", TRL, bool, (False,), "a run on CPU repeats bit by bit as it is"),
        no_effect("max_train_steps", OI, int | None, (None,), f"total_episodes is the length of a run; {UNUSED}"),
        refused("num_train_epochs", TRL, float, (), "passes over the data are counted in completions: set total_episodes to passes x rows x num_samples_per_prompt_rollout, or max_steps"),
        alias("max_steps", BOTH, "total_episodes", "TRL: optimizer steps of the run; Open Instruct: calls of tools, which do not exist yet (5 is accepted)", int),
        refused("auto_find_batch_size", TRL, bool, (False,), "pack_length bounds the memory of a micro-batch"),
        alias("ddp_timeout", TRL, "backend_timeout", "seconds to minutes, rounded up", int),
        alias("resume_from_checkpoint", BOTH, "resume", "true: auto; false: as if it were not given", str | None),
        no_effect("ignore_data_skip", TRL, bool, (False,), "a resumed run goes on with the prompts that it would have had"),
        no_effect("restore_callback_states_from_checkpoint", TRL, bool, (False,), "there are no callbacks"),
        no_effect("do_train", TRL, bool, (True, False), "the trainer of TRL does not read it either"),
        no_effect("do_predict", TRL, bool, (True, False), "the trainer of TRL does not read it either"),
        no_effect("use_cpu", TRL, bool, (True, False), "the CPU is used where there is no GPU"),
        no_effect("local_rank", TRL, int, (-1, 0), "torchrun numbers the ranks"),
        no_effect("debug", TRL, WORDS | None, ((), None), "no debugging aids of transformers here"),
        no_effect("overwrite_output_dir", TRL, bool, (True, False), "the files of an earlier run are moved aside, never overwritten"),
        no_effect("try_auto_save_to_beaker", OI, bool, (False,), BEAKER),
        refused("try_launch_beaker_eval_jobs_on_weka", OI, bool, (False,), BEAKER),
        refused("no_try_launch_beaker_eval_jobs", OLD, bool, (True,), BEAKER),
        no_effect("oe_eval_tasks", OI, WORDS | None, (None, ()), BEAKER),
        no_effect("oe_eval_max_length", OI, int, (4096,), BEAKER),
        no_effect("oe_eval_beaker_image", OI, str | None, (None,), BEAKER),
        no_effect("oe_eval_gpu_multiplier", OI, int | None, (None,), BEAKER),
        no_effect("eval_priority", OI, str, ("normal",), BEAKER),
        no_effect("eval_workspace", OI, str, ("ai2/tulu-3-results",), BEAKER),
        no_effect("eval_on_step_0", OI, bool, (False,), "held-out data is always evaluated before training, without a save"),
        alias("eval_strategy", TRL, "local_eval_every", "no: -1; steps: every eval_steps", Literal["no", "steps", "epoch"]),
        alias("eval_steps", TRL, "local_eval_every", "optimizer steps, turned into training steps", float | None),
        no_effect("eval_on_start", TRL, bool, (False, True), "held-out data is always evaluated before training"),
        no_effect("per_device_eval_batch_size", TRL, int, (8,), "all held-out prompts are sampled at once"),
        alias("num_generations_eval", TRL, "eval_pass_at_k", type=int | None),
        no_effect("do_eval", TRL, bool, (True, False), "dataset_mixer_eval_list decides"),
        no_effect("shuffle_eval_dataset", OI, bool, (False,), "every held-out prompt is sampled, whatever the order"),
    ),
    "loss": (
        alias("loss_fn", OI, "policy_loss aggregation", "dapo: ppo_clip, cispo: cispo; loss_denominator divides", Literal["dapo", "cispo"]),
        alias("loss_type", TRL, "policy_loss aggregation ratio_level", "see the table of losses below", Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]),
        alias("importance_sampling_level", TRL, "ratio_level", "sequence is GSPO"),
        alias("masked_mean_axis", OLD, "aggregation", "1: seq_mean; none: token", Literal[1] | None),
        alias("epsilon", TRL, "clip_lower clip_higher", "clip_higher too, unless epsilon_high or clip_higher is given", float),
        alias("epsilon_high", TRL, "clip_higher", "for cispo TRL's is the cap itself: clip_higher = epsilon_high - 1", float | None),
        alias("truncated_importance_sampling_ratio_cap", OLD, "use_rho_correction rho_clamp_upper_bound", "0: off", float),
        alias("rho_mask_sequence_level", OI, "rho_level rho_mask_level", "true: sequence_mean, of each document instead of the whole pack", bool),
        alias("vllm_importance_sampling_correction", TRL, "use_rho_correction rho_level rho_mask_level", "with TRL's mode sequence_mask and cap 3.0 unless they are given", bool),
        alias("vllm_importance_sampling_mode", TRL, "rho_level rho_mask_level", "truncate: clamp; mask: drop; sequence: exp of the sum over the sequence", Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]),
        alias("vllm_importance_sampling_clip_max", TRL, "rho_clamp_upper_bound rho_mask_upper_bound", "which of the two, the mode decides", float | None),
        alias("vllm_importance_sampling_clip_min", TRL, "rho_clamp_lower_bound rho_mask_lower_bound", "which of the two, the mode decides", float | None),
        alias("vllm_importance_sampling_cap", TRL, "rho_clamp_upper_bound rho_mask_upper_bound", "TRL's old name of vllm_importance_sampling_clip_max", float | None),
        alias("use_bias_correction_kl", TRL, "kl_bias_correction"),
    ),
    "algorithm": (
        alias("scale_rewards", TRL, "advantage_normalization_type advantage_ddof advantage_eps", "true or group: standard; false or none: centered; batch: batch_std; ddof 1, eps 1e-4", bool | Literal["group", "batch", "none"]),
        alias("multi_objective_aggregation", TRL, "advantage_normalization_type advantage_ddof advantage_eps", "normalize_then_sum: gdpo; sum_then_normalize: as scale_rewards says", Literal["sum_then_normalize", "normalize_then_sum"]),
        alias("no_filter_zero_std_samples", OLD, "filter_zero_std_samples", "the opposite", bool),
        alias("num_iterations", TRL, "num_epochs"),
        alias("sync_ref_model", TRL, "ref_policy_update_freq", "every ref_model_sync_steps", bool),
        alias("ref_model_sync_steps", TRL, "ref_policy_update_freq", "optimizer steps, turned into training steps; counts when sync_ref_model is true", int),
        alias("ref_model_mixup_alpha", TRL, "alpha"),
        alias("gradient_accumulation_steps", BOTH, "num_mini_batches", f"{BATCH}; without TRL's other batch names it has no effect, as in Open Instruct", int),
        no_effect("record_entropy", OI, bool, (True, False), "the entropy is always recorded"),
        no_effect("use_liger_loss", TRL, bool, (False, True), "the loss is always fused; delta works with it"),
        no_effect("use_liger_kernel", TRL, bool, (False, True), "the loss is always fused"),
        no_effect("liger_kernel_config", TRL, JSON | None, (None,), "the loss is always fused"),
        no_effect("loss_implementation", OI, str | None, ("default", None), "the loss is always fused"),
        no_effect("mask_tool_use", OI, bool, (True, False), "no token comes from a tool"),
        no_effect("average_tokens_across_devices", TRL, bool, (True, False), "aggregation says what is averaged over what"),
        refused("label_smoothing_factor", TRL, float, (0.0,), "there are no labels to smooth"),
        refused("max_staleness", TRL, int, (0,), "asynchronous rollout does not exist yet (async_steps)"),
        refused("replay_buffer_size", TRL, int, (0,), "there is no replay buffer; active_sampling replaces groups without a signal"),
        no_effect("queue_maxsize", TRL, int, (1024,), "asynchronous rollout does not exist yet"),
        no_effect("max_inflight_tasks", TRL, int, (-1,), "asynchronous rollout does not exist yet"),
        no_effect("heartbeat_stale_after_s", TRL, float, (300.0,), "a learner that hears nothing from rank 0 for a minute ends"),
        no_effect("fork_threshold_tokens", TRL, int, (1024,), "shared_prompt_packing says when the prompt of a group is shared"),
        refused("weight_sync_steps", TRL, int, (1,), "the engines get new weights after every training step"),
        refused("token_budget", TRL, int | None, (None,), "pack_length bounds the tokens of a micro-batch"),
    ),
    "rollout": (
        alias("num_generations", TRL, "num_samples_per_prompt_rollout", "at least 2", int | None),
        alias("number_samples_per_prompt", OLD, "num_samples_per_prompt_rollout"),
        alias("generation_batch_size", TRL, "num_unique_prompts_rollout num_mini_batches", BATCH, int | None),
        alias("steps_per_generation", TRL, "num_unique_prompts_rollout num_mini_batches", BATCH, int | None),
        alias("max_completion_length", TRL, "response_length pack_length", "pack_length grows with it unless it is given", int | None),
        refused("vllm_top_p", OI, float, (1.0,), TRUNCATED),
        refused("top_p", TRL, float, (1.0,), TRUNCATED),
        refused("top_k", TRL, int | None, (0, None, -1), TRUNCATED),
        refused("min_p", TRL, float | None, (None, 0.0), TRUNCATED),
        refused("repetition_penalty", TRL, float, (1.0,), "it changes the distribution that the trainer computes"),
        refused("generation_kwargs", TRL, JSON | None, (None, "{}"), "settings of the engine have names of their own"),
        refused("stop_token", OLD, str | None, ("eos", None), "name the texts that end a completion in stop_strings"),
        refused("inflight_updates", OI, bool, (False,), "weights change between steps only, so a completion has one policy"),
        refused("vllm_guided_decoding_regex", TRL, str | None, (None,), TRUNCATED),
        refused("vllm_structured_outputs_regex", TRL, str | None, (None,), TRUNCATED),
        no_effect("request_timeout", TRL, float, (600.0,), "rollout_timeout bounds the generation of a step"),
        no_effect("cache_implementation", TRL, str | None, (None,), CONTINUOUS),
        refused("use_vllm", TRL, bool, (True,), CONTINUOUS),
        refused("use_transformers_continuous_batching", TRL, bool, (False,), CONTINUOUS),
        refused("use_transformers_paged", TRL, bool, (False,), CONTINUOUS),
        no_effect("transformers_continuous_batching_config", TRL, JSON | None, (None,), CONTINUOUS),
        no_effect("inference_batch_size", OLD, int | None, (None,), "vllm_max_num_seqs bounds what an engine works on"),
        refused("local_rollout_batch_size", OLD, int, (), LEGACY_BATCH),
        refused("local_rollout_forward_batch_size", OLD, int, (), LEGACY_BATCH),
        refused("local_mini_batch_size", OLD, int, (), LEGACY_BATCH),
    ),
    "reward": (
        alias("add_r1_style_format_reward", OLD, "apply_r1_style_format_reward"),
        alias("penalty_reward_value", OLD, "non_stop_penalty_value"),
        derived("max_possible_score", OI, float | None, "verification_reward if verifiable + r1_style_format_reward if additive; a value given must agree"),
        no_effect("reward_aggregator", OI, Literal["last", "sum"], ("last", "sum"), "a completion has one turn"),
        refused("reward_model_multiplier", OLD, float, (), "name the reward model in reward_funcs, and its weight in reward_weights"),
        alias("reward_model_name_or_path", TRL, "reward_funcs", "the folder of a sequence-classification model, as one of reward_funcs", str | None),
        refused("apply_evolving_rubric_reward", OI, bool, (False,), RUBRIC),
        no_effect("max_active_rubrics", OI, int, (5,), RUBRIC),
        no_effect("cache_evolving_rubric_data_dir", OI, str | None, (None,), RUBRIC),
    ),
    "data": (
        alias("max_prompt_length", TRL, "max_prompt_token_length overlong_prompt_policy pack_length", "longer prompts are cut from the left, as in TRL", int | None),
        alias("chat_template", OLD, "chat_template_name"),
        no_effect("max_seq_length", OI, int | None, (None, 4096), f"max_prompt_token_length and response_length bound a sequence; {UNUSED}"),
        refused("dataset_transform_fn", OI, WORDS, (("rlvr_tokenize_v1", "rlvr_max_length_filter_v1"),), "rows are always templated, tokenised and filtered by length"),
        refused("dataset_cache_mode", OI, str, ("local",), "prepared data is cached in dataset_local_cache_dir; nothing is pushed to the Hub"),
        no_effect("dataset_config_hash", OI, str | None, (None,), CACHE),
        no_effect("dataset_config_eval_hash", OI, str | None, (None,), CACHE),
        refused("remove_unused_columns", TRL, bool, (False,), "reward functions get every column of the data"),
        no_effect("label_names", TRL, WORDS | None, (None, ()), "there are no label columns"),
        no_effect("dataloader_drop_last", TRL, bool, (False,), "an epoch's end is no batch's end: none is dropped"),
        no_effect("dataloader_num_workers", TRL, int, (0,), "prompts are tokenised once, at the start"),
        no_effect("dataloader_pin_memory", TRL, bool, (True, False), "prompts are tokenised once, at the start"),
        no_effect("dataloader_persistent_workers", TRL, bool, (False,), "prompts are tokenised once, at the start"),
        no_effect("dataloader_prefetch_factor", TRL, int | None, (None,), "prompts are tokenised once, at the start"),
    ),
    "model": (
        refused("model_revision", OI, str | None, (None, "main"), "a folder has no revisions; download the one you mean"),
        alias("dtype", OI, "model_dtype", "bfloat16 or float32", str | None),
        alias("torch_dtype", OLD, "model_dtype", "bfloat16 or float32", str | None),
        alias("bf16", TRL, "model_dtype", "true: bfloat16; false: float32", bool | None),
        refused("fp16", TRL, bool, (False,), "float16 needs loss scaling, which does not exist here; use bf16"),
        no_effect("bf16_full_eval", TRL, bool, (False,), "the engines evaluate, in model_dtype"),
        no_effect("fp16_full_eval", TRL, bool, (False,), "the engines evaluate, in model_dtype"),
        no_effect("tf32", TRL, bool | None, (None,), "torch's own setting stays"),
        no_effect("attn_implementation", OI, str | None, (None,), "attention follows the machine, and never crosses from one document of a pack to the next"),
        no_effect("use_cache", BOTH, bool | None, (None, False), "training keeps no key-value cache"),
        alias("gradient_checkpointing", BOTH, "recompute_granularity", "true: full; false: none, unless another name says more", bool),
        no_effect("gradient_checkpointing_kwargs", TRL, JSON | None, (None,), "Megatron recomputes; there is nothing to choose"),
        alias("activation_memory_budget", OI, "recompute_granularity", "1: none; from 0.5 on selective, which drops what recompute_modules computes, by default about 0.6 of a layer's activations; below 0.5 full, which keeps a layer's input only", float),
        alias("activation_checkpointing_mode", OI, "recompute_granularity", "budget: as activation_memory_budget says; full: full; selected_...: refused, OLMo-core's modules have no counterparts", Literal["budget", "full", "selected_blocks", "selected_modules", "selected_ops"]),
        no_effect("activation_checkpointing_modules", OI, WORDS | None, (None,), "these are modules of OLMo-core; recompute_modules names those that can be recomputed here"),
        no_effect("compile_model", OI, bool, (True, False), "the model runs as Megatron builds it"),
        no_effect("torch_compile", TRL, bool, (False,), "the model runs as Megatron builds it"),
        no_effect("torch_compile_backend", TRL, str | None, (None,), "the model runs as Megatron builds it"),
        no_effect("torch_compile_mode", TRL, str | None, (None,), "the model runs as Megatron builds it"),
        refused("model_init_kwargs", TRL, JSON | None, (None, "{}"), "settings of the model have names of their own, for example model_dtype"),
        no_effect("disable_dropout", TRL, bool, (True, False), "there is never any dropout: it would make the ratio differ from 1"),
        refused("cast_lm_head_to_fp32", TRL, bool, (False,), "the head computes in model_dtype, its log-softmax in float32; use model_dtype float32"),
        refused("router_aux_loss_coef", TRL, float | None, (None, 0.001, 0.0), "there is no auxiliary loss: routers learn from the rewards alone; TRL's default, 0.001, is accepted and ignored"),
        refused("config_name", OI, str | None, (None,), "config.json of model_name_or_path is read"),
        no_effect("low_cpu_mem_usage", OI, bool, (True, False), "each rank reads its own slices only"),
        refused("rope_scaling_factor", OI, float | None, (None,), ROPE),
        no_effect("rope_scaling_beta_fast", OI, float, (32.0,), ROPE),
        no_effect("rope_scaling_beta_slow", OI, float, (1.0,), ROPE),
        no_effect("rope_scaling_old_context_len", OI, int, (8192,), ROPE),
        refused("use_peft", OI, bool, (False,), ADAPTER),
        no_effect("lora_r", OI, int, (16,), ADAPTER),
        no_effect("lora_alpha", OI, int, (32,), ADAPTER),
        no_effect("lora_dropout", OI, float, (0.05,), ADAPTER),
        no_effect("lora_target_modules", OI, WORDS | None, (None,), ADAPTER),
        no_effect("lora_modules_to_save", OI, WORDS | None, (None,), ADAPTER),
        no_effect("lora_task_type", OI, str, ("CAUSAL_LM",), ADAPTER),
        refused("load_in_8bit", OI, bool, (False,), QUANT),
        refused("load_in_4bit", OI, bool, (False,), QUANT),
        no_effect("bnb_4bit_quant_type", OI, str, ("nf4",), QUANT),
        no_effect("use_bnb_nested_quant", OI, bool, (False,), QUANT),
        refused("neftune_noise_alpha", TRL, float | None, (None,), "noise in the embeddings makes trainer and engine two policies"),
        alias("tokenizer_name", OLD, "tokenizer_name_or_path"),
        refused("tokenizer_revision", OI, str | None, (None, "main"), TOKENIZER),
        refused("trust_remote_code", BOTH, bool, (False,), "code that comes with a checkpoint is never run"),
        refused("use_fast", OI, bool, (True,), TOKENIZER),
        no_effect("use_slow_tokenizer", OI, bool, (False,), "ignored by Open Instruct, too"),
        refused("get_tokenizer_fn", OI, str, ("get_tokenizer_tulu_v2_2",), TOKENIZER),
        no_effect("tokenizer_files_hash", OI, str | None, (None,), TOKENIZER),
    ),
    "optimizer": (
        alias("warmup_steps", TRL, "warm_up_steps warmup_ratio", "below 1 it is a ratio, as in transformers 5", float),
        no_effect("fused_optimizer", OI, bool, (True, False), "Adam is fused where Transformer Engine or apex is installed"),
        refused("optim", TRL, str, ("adamw_torch_fused", "adamw_torch", "adamw_apex_fused"), "the optimizer is AdamW"),
        no_effect("optim_args", TRL, str | None, (None,), "the optimizer is AdamW"),
        no_effect("optim_target_modules", TRL, WORDS | None, (None,), "the optimizer is AdamW on all weights"),
        refused("lr_scheduler_kwargs", TRL, JSON | None, (None, "{}"), "a schedule has a type, a warm-up and a length only"),
    ),
    "parallel": (
        alias("per_device_train_batch_size", BOTH, "num_unique_prompts_rollout num_mini_batches local_batch_size", f"TRL: sequences, {BATCH}; Open Instruct: packs of a micro-batch, of which there is 1", int),
        alias("actor_num_gpus_per_node", OLD, "num_learners_per_node"),
        alias("deepspeed_stage", OI, "zero_stage", "the same numbers; 1 is Megatron's distributed optimizer, 2 and 3 are Megatron-FSDP"),
        alias("sequence_parallel_size", OI, "context_parallel_size cp_comm_type", "Ulysses: ranks that share each sequence, and exchange it for heads: a2a, which the heads of a tensor rank must divide by; cp_comm_type=all_gather has no such rule. Not sequence_parallel, which splits activations over tensor ranks"),
        alias("cp_degree", OI, "context_parallel_size", type=int | None),
        alias("cp_strategy", OI, "cp_comm_type", "llama3 and zig_zag: all_gather; ulysses: a2a; each rank always has an early and a late stretch of a sequence, in zig-zag order", Literal["llama3", "zig_zag", "ulysses"]),
        alias("deepspeed_zpg", OI, "fsdp_shard_degree", "with stage 3 only; 1: off. So many ranks share all of a model's state, where ZeRO++ has a second copy of the weights among them", int),
        refused("deepspeed_offload_param", OI, bool, (False,), "weights stay on the GPU; share them with zero_stage=3, tensor_model_parallel_size or pipeline_model_parallel_size"),
        alias("deepspeed_offload_optimizer", OI, "optimizer_cpu_offload", "with stage 1 only"),
        no_effect("deepspeed_checkpoint_load_universal", OI, bool, (True, False), "a training state is resumed in any layout as it is"),
        refused("deepspeed", TRL, JSON | None, (None, ""), "learners are Megatron's; zero_stage has DeepSpeed's numbers, optimizer_cpu_offload moves the optimizer's states"),
        alias("fsdp", TRL, "zero_stage", "true and full_shard: 3; shard_grad_op: 2; hybrid_shard: 3, with fsdp_shard_degree; auto_wrap says nothing, layers are the unit; others are refused", WORDS | None),
        alias("fsdp_config", TRL, "zero_stage recompute_granularity", "with fsdp=true reshard_after_forward says 3 or 2; activation_checkpointing: full; cpu_offload is refused, other keys have no effect", JSON | None),
        alias("fsdp_num_replicas", OI, "fsdp_shard_degree", "data- and context-parallel ranks / replicas, with zero_stage=3", int | None),
        refused("parallelism_config", TRL, JSON | None, (None,), "the axes are tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size and expert_model_parallel_size"),
        no_effect("accelerator_config", TRL, JSON | None, (None,), "accelerate is not used"),
        no_effect("ddp_backend", TRL, str | None, (None,), "gloo on CPU, NCCL on GPUs"),
        no_effect("ddp_find_unused_parameters", TRL, bool | None, (None,), "gradients are reduced by Megatron"),
        no_effect("ddp_bucket_cap_mb", TRL, int | None, (None,), "gradients are reduced by Megatron"),
        no_effect("ddp_broadcast_buffers", TRL, bool | None, (None,), "gradients are reduced by Megatron"),
        refused("single_gpu_mode", OI, bool, (False,), "a learner and an engine cannot share a GPU yet; without a GPU both run on the CPU"),
        no_effect("pad_to_multiple_of", TRL, int | str | None, (None, "auto"), "packs are padded as the layout needs it"),
        no_effect("allow_world_padding", OLD, bool, (True, False), "no sample is dropped or doubled to fill the ranks"),
        no_effect("torch_empty_cache_steps", TRL, int | None, (None,), "the allocator keeps its memory"),
    ),
    "engine": (
        refused("vllm_mode", TRL, Literal["server", "colocate"], ("server",), "engines have devices of their own; a learner and an engine cannot share a GPU yet"),
        refused("vllm_server_base_url", TRL, str | None, (None,), SERVER),
        refused("vllm_server_host", TRL, str, ("0.0.0.0",), SERVER),
        refused("vllm_server_port", TRL, int, (8000,), SERVER),
        no_effect("vllm_server_timeout", TRL, float, (240.0,), "engine_start_timeout and weight_sync_timeout bound the waiting"),
        no_effect("vllm_group_port", TRL, int, (51216,), "the port of the weight sync is free to choose"),
        refused("vllm_enable_sleep_mode", TRL, bool, (False,), "engines have devices of their own and never sleep"),
        refused("vllm_model_impl", TRL, str, ("vllm",), "the weight sync knows vLLM's own models"),
        derived("vllm_max_model_length", TRL, int | None, "max_prompt_token_length + response_length; a value given must be at least that"),
        refused("vllm_attention_backend", OI, str | None, (None,), "vLLM chooses"),
        no_effect("vllm_sync_backend", OI, str, ("nccl",), "gloo on CPU, NCCL on GPUs"),
        no_effect("gather_whole_model", OI, bool, (True, False), "no rank ever holds the whole model; weight_sync_bucket_mb bounds what is in flight"),
        no_effect("ds3_gather_for_generation", TRL, bool, (True, False), "no rank ever holds the whole model; weight_sync_bucket_mb bounds what is in flight"),
        refused("vllm_pipeline_parallel_size", OURS, int, (1,), "an engine has one stage; use vllm_tensor_parallel_size"),
        refused("vllm_data_parallel_size", OURS, int, (1,), "use vllm_num_engines"),
        refused("vllm_kv_cache_dtype", OURS, str, ("auto",), "the key-value cache has the model's type"),
        refused("use_fp8_kv_cache", OLD, bool, (False,), "the key-value cache has the model's type"),
        refused("vllm_max_num_batched_tokens", OURS, int | None, (None,), "vLLM chooses; vllm_max_num_seqs bounds the completions"),
        refused("vllm_extra_args", OURS, JSON | None, (None, "{}"), "settings of the engine have names of their own"),
    ),
    "checkpoint": (
        alias("save_steps", TRL, "save_freq", "optimizer steps, turned into training steps", float),
        alias("save_strategy", TRL, "save_freq", "no: -1; steps: every save_steps", Literal["no", "steps", "epoch", "best"]),
        alias("beaker_eval_freq", OLD, "save_freq", "nothing is evaluated on Beaker"),
        alias("save_total_limit", TRL, "keep_last_n_checkpoints", "none, 0 or less: -1; of training states, no exported model is deleted", int | None),
        alias("gs_bucket_path", OI, "gs_checkpoint_state_dir", "the bucket, then checkpoint_state_dir", str | None),
        no_effect("checkpointing_steps", OI, int | str | None, (500, None), UNUSED),
        no_effect("ephemeral_save_interval", OI, int | None, (None,), UNUSED),
        no_effect("save_only_model", TRL, bool, (True,), "save_freq exports the model, checkpoint_state_freq saves the training state"),
        no_effect("save_on_each_node", TRL, bool, (False,), "each exported model is written once"),
        refused("load_best_model_at_end", TRL, bool, (False,), "the last model is exported; hf/step_N holds the earlier ones"),
        no_effect("metric_for_best_model", TRL, str | None, (None,), "the last model is exported"),
        no_effect("greater_is_better", TRL, bool | None, (None,), "the last model is exported"),
        refused("push_to_hub", BOTH, bool, (False,), HUB),
        no_effect("hf_entity", OI, str | None, (None,), HUB),
        no_effect("hf_repo_id", OI, str | None, (None,), HUB),
        no_effect("hf_repo_revision", OI, str | None, (None,), HUB),
        no_effect("hf_repo_url", OI, str | None, (None,), HUB),
        no_effect("hub_model_id", TRL, str | None, (None,), HUB),
        no_effect("hub_strategy", TRL, str, ("every_save",), HUB),
        no_effect("hub_token", TRL, str | None, (None,), HUB),
        no_effect("hub_private_repo", TRL, bool | None, (None,), HUB),
        no_effect("hub_always_push", TRL, bool, (False,), HUB),
        no_effect("hub_revision", TRL, str | None, (None,), HUB),
    ),
    "tools": (
        refused("tools", OI, WORDS, ((),), TOOLS),
        refused("tool_call_names", OI, WORDS | None, ((), None), TOOLS),
        refused("tool_configs", OI, WORDS | None, ((), None), TOOLS),
        refused("tool_parser_type", OI, str, ("legacy",), TOOLS),
        refused("max_tool_calls", OLD, int, (5,), TOOLS),
        refused("max_tool_calling_iterations", TRL, int | None, (None,), TOOLS),
        refused("per_turn_max_tokens", OI, int | None, (None,), TOOLS),
        no_effect("pass_tools_to_chat_template", OI, bool, (True, False), TOOLS),
        refused("pool_size", OI, int | None, (None,), TOOLS),
        refused("search_api_endpoint", OLD, str | None, (None,), TOOLS),
        refused("code_tool_api_endpoint", OLD, str | None, (None,), TOOLS),
    ),
    "logging": (
        no_effect("verbose", OI, bool, (False,), "the log has one level"),
        refused("with_tracking", OI, bool, (False,), TRACKING),
        no_effect("wandb_project", OI, str | None, (None, "open_instruct_internal"), TRACKING),
        no_effect("wandb_project_name", OLD, str | None, (None, "open_instruct_internal"), TRACKING),
        no_effect("wandb_entity", OI, str | None, (None,), TRACKING),
        no_effect("wandb_group_name", OI, str | None, (None,), TRACKING),
        refused("report_to", BOTH, WORDS | None, ((), None, ("none",), ("all",), ("tensorboard",)), TRACKING),
        no_effect("project", TRL, str, ("huggingface",), TRACKING),
        no_effect("trackio_space_id", TRL, str | None, (None, "trackio"), TRACKING),
        no_effect("logging_steps", BOTH, float, (1.0,), "every training step is logged"),
        no_effect("logging_strategy", TRL, str, ("steps",), "every training step is logged"),
        no_effect("logging_first_step", TRL, bool, (True, False), "every training step is logged"),
        no_effect("logging_dir", TRL, str | None, (None,), "everything is written to output_dir"),
        no_effect("logging_nan_inf_filter", TRL, bool, (True, False), "a loss that is not finite is shown as it is"),
        no_effect("log_on_each_node", TRL, bool, (True, False), "rank 0 logs"),
        no_effect("log_level", TRL, str, ("passive",), "the log has one level"),
        no_effect("log_level_replica", TRL, str, ("warning",), "the log has one level"),
        no_effect("disable_tqdm", TRL, bool | None, (None, True, False), "progress is a line a step"),
        refused("log_completions", TRL, bool, (False,), "completions are not printed yet"),
        no_effect("num_completions_to_print", TRL, int | None, (None,), "completions are not printed yet"),
        no_effect("wandb_log_unique_prompts", TRL, bool | None, (False, None), "completions are not printed yet"),
        no_effect("log_unique_prompts", TRL, bool, (False,), "completions are not printed yet"),
        no_effect("log_multimodal", TRL, bool, (True, False), "prompts are text"),
        refused("log_completions_hub_repo", TRL, str | None, (None,), HUB),
        no_effect("include_num_input_tokens_seen", TRL, str, ("no", "False", "false"), "val/num_step_tokens counts the tokens of a step"),
        no_effect("enable_queue_dashboard", OI, bool, (False,), "there is no dashboard; metrics.jsonl is written line by line"),
        no_effect("queue_dashboard_port", OI, int | None, (None,), "there is no dashboard"),
        refused("send_slack_alerts", OI, bool, (False,), "nothing is sent to Slack"),
    ),
}
# fmt: on

SECTIONS = tuple(_TABLE)

SPELLINGS: dict[str, dict[object, str]] = {
    "max_grad_norm": {None: "0"},
    "chat_template_name": {None: "auto"},
    "chat_template_kwargs": {None: "{}"},
    "eval_top_p": {None: "1.0"},
}
"""What other trainers write for a value that is spelled differently here."""


@cache
def table() -> dict[str, Name]:
    """Every name that is no setting of the schema."""
    found: dict[str, Name] = {}
    for section, rows in _TABLE.items():
        for row in rows:
            assert row["name"] not in found and row["name"] not in settings(), f"{row['name']} has two entries"
            found[row["name"]] = Name(section=section, **row)
    return found


@cache
def accepted() -> dict[str, Name]:
    """Every name that a command line or a file may hold: the settings, then the table."""
    own = {
        name: Name(name=name, section=setting.section, source=source_of(name), status="used", type=setting.type)
        for name, setting in settings().items()
    }
    return own | table()


def source_of(name: str) -> str:
    """Who else calls a setting by this name; mgrpo where nobody does."""
    return ", ".join(trainer.value for trainer in settings()[name].trainers) or OURS


def setting_of(name: str) -> Setting | None:
    """How the text of `name` is read; None for a name that nobody knows."""
    if name in settings():
        return settings()[name]
    return table()[name].setting if name in table() else None
