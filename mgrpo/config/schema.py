"""Every setting of a run: one flat namespace on the command line and in YAML, sections in the code.

Names are Open Instruct's where it has one, Megatron's for Megatron's knobs. The docstring under a field is its --help text.
A default stands here and nowhere else; `None` means off unless the docstring says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal, NewType

from mgrpo.config.loss import Level, LossConfig
from mgrpo.config.provenance import Provenance

JSONObject = NewType("JSONObject", str)
"""The text of a JSON object; a YAML file may hold a mapping for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    exp_name: str = "grpo"
    """Name of the experiment, shown in logs."""
    seed: int = 1
    """Seeds data order, sampling and every random state."""
    output_dir: str = "output"
    """Folder for everything the run writes; used as given."""
    total_episodes: int = 100_000
    """Completions to train on; the number of steps is total_episodes / (prompts x samples per step), rounded down."""
    local_eval_every: int = 100
    """Steps between evaluations on the held-out prompts; 0 or less evaluates only before and after training."""
    backend_timeout: int = 120
    """Minutes a collective between learners may take."""
    cache_dataset_only: bool = False
    """Prepare the data, say what came of it, and end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    model_name_or_path: str | None = None
    """Folder of a Hugging Face checkpoint (config.json, safetensors, tokenizer files), or what mgrpo convert made of one."""
    model_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of weights and activations in training and in the engines; the optimizer always keeps float32."""
    load_ref_policy: bool = True
    """May be false only when beta is 0; the reference model is loaded when beta is not 0 or log_ref_kl is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    dataset_mixer_list: tuple[str, ...] = ()
    """Training data: path or dataset name, amount, path, amount, ... An amount with a point is a share, else a count of rows."""
    dataset_mixer_eval_list: tuple[str, ...] = ()
    """Held-out data, same form; empty means no evaluation."""
    dataset_mixer_list_splits: tuple[str, ...] = ("train",)
    """Split of each training dataset: one for all, or one each."""
    dataset_mixer_eval_list_splits: tuple[str, ...] = ("test",)
    """Split of each held-out dataset: one for all, or one each."""
    ground_truths_key: str = "ground_truth"
    """Column of what the verifier compares with."""
    sft_messages_key: str = "messages"
    """Column of the messages."""
    max_prompt_token_length: int = 256
    """Longer prompts meet overlong_prompt_policy."""
    overlong_prompt_policy: Literal["filter", "truncate_left", "error"] = "filter"
    """filter: they are left out, and counted; truncate_left: their last tokens stay; error: the run does not start."""
    tokenizer_name_or_path: str | None = None
    """Folder of the tokenizer; none: the model's."""
    chat_template_name: str = "auto"
    """For rows with `messages`: auto is the tokenizer's own template, none joins the contents as plain text; else one of the
    names in docs/data.md or the path of a Jinja file."""
    chat_template_kwargs: JSONObject = JSONObject("{}")
    """Further variables of the template, a JSON object, for example {"enable_thinking": false}."""
    add_bos: bool = False
    """Begin every prompt with the tokenizer's bos token; an error where the template writes it already."""
    system_prompt_override_file: str | None = None
    """File with the system prompt of every row, in place of its own."""
    shuffle_dataset: bool = True
    """Shuffle the prompts anew every epoch; false: in the order of the data."""
    dataset_local_cache_dir: str | None = None
    """Folder of prepared data; none: mgrpo/datasets in the user's cache folder."""
    dataset_skip_cache: bool = False
    """Prepare the data even if that was done before."""
    dataset_num_proc: int = 0
    """Threads that tokenize; 0: one for each core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    num_unique_prompts_rollout: int = 16
    """Prompts a training step."""
    num_samples_per_prompt_rollout: int = 4
    """Completions sampled for each prompt: the group."""
    response_length: int = 256
    """Most tokens in a completion."""
    temperature: float = 1.0
    """Sampling temperature, also the divisor of the training logits."""
    async_steps: int = 0
    """Steps that generation may run ahead of training; only 0 (synchronous, repeatable) exists so far."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a completion, and stay in it; the model's own stop tokens always do."""
    eval_pass_at_k: int = 1
    """Completions sampled for each held-out prompt."""
    eval_temperature: float | None = None
    """Sampling temperature of evaluations; none: temperature; 0: greedy."""
    eval_top_p: float = 1.0
    """Evaluations sample from the likeliest tokens that make up this share."""
    eval_response_length: int | None = None
    """Most tokens in a completion of an evaluation; none: response_length."""
    save_traces: bool = False
    """Write every completion that is trained on to rollouts_save_path."""
    rollouts_save_path: str | None = None
    """Folder for completions; none: output_dir/rollouts."""
    rollout_timeout: int = 3600
    """Seconds that one step's generation may take before the run ends with an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    apply_verifiable_reward: bool = True
    """Score completions with the verifier each row names."""
    verification_reward: float = 10.0
    """Multiplier of the verifier's score."""
    apply_r1_style_format_reward: bool = False
    """Look for `...</think> <answer>...</answer>`."""
    r1_style_format_reward: float = 1.0
    """Reward for the format."""
    additive_format_reward: bool = False
    """Add the format reward to the verifier's; otherwise a completion without the format scores 0 (gate)."""
    non_stop_penalty: bool = False
    """Overwrite the reward of completions that did not stop by themselves."""
    non_stop_penalty_value: float = 0.0
    """The reward they get."""
    remap_verifier: str | None = None
    """old=new: rows that name verifier old use verifier new."""
    verifier_weights: tuple[str, ...] = ()
    """name=weight, ...: weights of verifiers whose scores are added up; 1 for the others."""
    only_reward_good_outputs: bool = False
    """Verify only completions that used a tool with success."""
    reward_funcs: tuple[str, ...] = ()
    """Reward functions in place of verifiers: package.module.function, file.py:function, one of TRL's six names, or the folder
    of a sequence-classification model. reward_weights weighs them."""
    verifier_modules: tuple[str, ...] = ()
    """Python modules with verifiers of your own, found by their names."""
    max_length_verifier_max_length: int = 32768
    """Tokens by which a length must miss for a score of 0, in the verifiers max_length and up_to_max_length."""
    code_api_url: str | None = None
    """URL of a code service, .../test_program; none: CODE_API_URL of the environment, else a sandbox on this machine."""
    code_max_execution_time: float = 1.0
    """Seconds a test of a program may take."""
    code_pass_rate_reward_threshold: float = 0.0
    """A program that passes a smaller share of its tests scores 0."""
    code_apply_perf_penalty: bool = False
    """A passed test counts less, the longer it took."""
    code_sandbox_memory_mb: int = 1024
    """MiB of memory a program may take in the sandbox of this machine."""
    code_sandbox_accept_risk: bool = False
    """Run programs even where this machine cannot isolate them."""
    llm_judge_model: str | None = None
    """Model that judges; hosted_vllm/NAME and azure/NAME find their servers in the environment, see docs/rewards.md."""
    llm_judge_base_url: str | None = None
    """OpenAI-compatible endpoint of the judge, for example http://localhost:8000/v1."""
    llm_judge_max_tokens: int = 2048
    """Most tokens of a judgement."""
    llm_judge_max_context_length: int = 8192
    """Tokens of the judge's context; a longer answer is shortened in its middle."""
    llm_judge_temperature: float = 1.0
    """Temperature of the judge."""
    llm_judge_timeout: int = 60
    """Seconds one judgement may take."""
    rubric_judge_model: str | None = None
    """Model that judges the criteria of rubrics; none: RUBRIC_JUDGE_MODEL of the environment, else llm_judge_model."""
    remote_verifier_concurrency: int = 64
    """Calls of judges and code services under way at once."""
    verifier_memory_mb: int = 2048
    """MiB of memory of a verifier process."""
    verifier_timeout: float = 10.0
    """Seconds a verifier may spend on one completion before it is killed and the completion has no score."""
    verifier_workers: int = 1
    """Verifier processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    policy_loss: Literal["ppo_clip", "cispo", "sapo", "vespo", "reinforce"] = "ppo_clip"
    """The surrogate: clipped ratio, capped weight (CISPO), soft gate (SAPO), sequence gate (VESPO), or none."""
    ratio_level: Literal["token", "sequence", "sequence_token"] = "token"
    """token: a ratio each; sequence: one for the completion (GSPO); sequence_token: its value, the token's own gradient."""
    aggregation: Literal["token", "constant", "seq_mean", "local_token", "dr_grpo", "luspo"] | None = None
    """What the sum over tokens is divided by; none: loss_denominator decides, token or constant."""
    loss_denominator: str = "token"
    """token: mean over response tokens of the mini-batch; a number: divide the sum by it (Dr. GRPO)."""
    local_batch_size: int = 8
    """Completions of one mean over tokens under aggregation local_token, whatever the packs."""
    clip_lower: float = 0.2
    """The ratio is clipped below at 1 - clip_lower."""
    clip_higher: float = 0.2
    """The ratio is clipped above at 1 + clip_higher, which is also CISPO's cap."""
    delta: float | None = None
    """Two-sided clip: the unclipped ratio goes no higher than this."""
    dual_clip: float | None = None
    """Dual clip: the loss of a token with advantage A < 0 is at most dual_clip x |A|."""
    sapo_temperature_pos: float = 1.0
    """SAPO's gate for positive advantages."""
    sapo_temperature_neg: float = 1.05
    """SAPO's gate for the others."""
    vespo_k_pos: float = 2.0
    """VESPO's exponent of the sequence ratio, advantage >= 0."""
    vespo_lambda_pos: float = 3.0
    """VESPO's decay, advantage >= 0."""
    vespo_k_neg: float = 3.0
    """VESPO's exponent of the sequence ratio, advantage < 0."""
    vespo_lambda_neg: float = 2.0
    """VESPO's decay, advantage < 0."""
    beta: float = 0.05
    """Weight of the KL penalty towards the reference model; 0 loads no reference unless log_ref_kl is set."""
    kl_estimator: Literal[0, 1, 2, 3] = 2
    """0: d; 1: d^2/2; 2: exp(-d) - 1 + d; 3: ratio x d, where d = logprob - reference logprob."""
    kl_bias_correction: bool = False
    """Multiply the KL estimate by the ratio, through which gradients flow too."""
    log_ref_kl: bool = False
    """Measure the KL to the reference model even when beta is 0."""
    alpha: float = 0.6
    """Share of the policy in each update of the reference model: reference <- alpha x policy + (1 - alpha) x reference."""
    ref_policy_update_freq: int | None = None
    """Training steps between these updates; none: the reference stays as it is."""
    use_rho_correction: bool = False
    """Weigh the policy loss by rho = exp(old logprob - the engine's logprob), bounded as the settings below say."""
    rho_level: Level = "token"
    """The rho that weighs: each token's, or exp of the mean or of the sum over the completion."""
    rho_clamp_lower_bound: float = 0.0
    """Smallest weight; 0: no bound."""
    rho_clamp_upper_bound: float = 2.0
    """Largest weight (truncated importance sampling); 0: no bound."""
    rho_mask_level: Level = "token"
    """The rho that decides what is dropped."""
    rho_mask_lower_bound: float = 0.0
    """Below this the policy loss is dropped; 0: no bound."""
    rho_mask_upper_bound: float = 0.0
    """Above this the policy loss is dropped; 0: no bound."""
    rho_mask_tv_divergence: bool = False
    """The upper bound is one of the completion's mean |rho - 1|, and only tokens whose step would raise it are dropped."""
    off_policy_mask_threshold: float | None = None
    """Drop completions with advantage < 0 whose mean of engine's - present logprob is above this; none: off."""
    use_vllm_logprobs: bool = False
    """Take the engine's logprobs as the old ones instead of computing them again."""
    advantage_normalization_type: Literal["standard", "centered", "batch_std", "gdpo"] = "standard"
    """standard: (reward - mean) / (std + eps) within the group; centered: reward - mean; batch_std: the std of the batch;
    gdpo: standard for each reward function, then their weighted sum over the batch."""
    advantage_ddof: Literal[0, 1] = 0
    """The std divides by the number of rewards minus this."""
    advantage_eps: float = 1e-8
    """Added to the std."""
    reward_weights: tuple[float, ...] = ()
    """Weight of each reward function; empty: 1 each."""
    filter_zero_std_samples: bool = True
    """Leave out groups whose rewards are all equal."""
    active_sampling: bool = False
    """Sample other prompts in place of the groups left out, until the batch is full."""
    active_sampling_max_rounds: int = 10
    """Most rounds of that in a step; then it trains on what there is."""
    no_resampling_pass_rate: float | None = None
    """A prompt whose mean reward reaches this share of the highest one is never sampled again; none: off."""
    mask_truncated_completions: bool = False
    """Completions that did not stop by themselves train nothing; they still count in their group's mean and std."""
    overlong_cache_length: int | None = None
    """Soft punishment: the reward falls from 0 to -1 over the last so many tokens of response_length; none: off."""
    top_entropy_quantile: float = 1.0
    """Train only this share of the tokens, those of the highest entropy; 1: all."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    use_adaptive_entropy: bool = False
    """Move the weight of the bonus by entropy_coef_delta each optimizer step: up below entropy_target, else down."""
    entropy_coef_min: float = 0.0
    """Smallest weight it may reach."""
    entropy_coef_max: float = 1.0
    """Largest weight it may reach."""
    entropy_coef_delta: float = 0.005
    """Size of a move."""
    entropy_target: float = 0.2
    """Entropy a token to hold."""
    num_epochs: int = 1
    """Passes over each rollout batch."""
    num_mini_batches: int = 1
    """Optimizer steps a pass."""
    reshuffle_mini_batches: bool = False
    """Cut the batch into other mini-batches in every pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    learning_rate: float = 2e-5
    """Peak learning rate of AdamW."""
    lr_scheduler_type: Literal[
        "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"
    ] = "linear"
    """How the rate falls over all optimizer steps, after the warm-up; linear and cosine end at 0."""
    warm_up_steps: int = 0
    """Optimizer steps of linear warm-up; used when warmup_ratio is 0."""
    warmup_ratio: float = 0.0
    """Share of all optimizer steps spent warming up."""
    weight_decay: float = 0.0
    """AdamW's decay."""
    set_weight_decay_on_bias_and_norm: bool = False
    """Decay biases and norms, too. Open Instruct's flag of this name does the opposite of what it says."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this global norm; 0 turns clipping off."""
    adam_beta1: float = 0.9
    """AdamW's first decay rate."""
    adam_beta2: float = 0.999
    """AdamW's second decay rate."""
    adam_epsilon: float = 1e-8
    """AdamW's epsilon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    num_learners_per_node: tuple[int, ...] = ()
    """Learner ranks on each node, to compare with what torchrun started; empty: as many as were started."""
    tensor_model_parallel_size: int = 1
    """Ranks that share each layer's matrices."""
    pipeline_model_parallel_size: int = 1
    """Stages the layers are cut into."""
    context_parallel_size: int = 1
    """Ranks that share each sequence."""
    cp_comm_type: Literal["all_gather", "a2a"] = "all_gather"
    """How they attend to each other's tokens: gather keys and values, or exchange sequence for heads (Ulysses), of which
    each tensor rank then needs a multiple of context_parallel_size."""
    expert_model_parallel_size: int = 1
    """Ranks that share the experts of a mixture-of-experts model, among those of a pipeline stage."""
    virtual_pipeline_model_parallel_size: int = 1
    """Chunks of layers a stage, interleaved: smaller bubbles, more messages."""
    num_layers_in_first_pipeline_stage: int | None = None
    """Layers of the first stage; none: as many as the others."""
    num_layers_in_last_pipeline_stage: int | None = None
    """Layers of the last stage; none: as many as the others."""
    sequence_parallel: bool | Literal["auto"] = "auto"
    """Megatron's sequence parallelism: split activations between layers over the tensor ranks; auto = tensor size > 1."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """What data-parallel ranks share instead of repeat, as in DeepSpeed: 0 nothing, 1 the optimizer's states (Megatron's
    distributed optimizer), 2 gradients, too, 3 parameters, too (Megatron-FSDP)."""
    fsdp_shard_degree: int | None = None
    """With zero_stage=3: neighbouring ranks that share each parameter; the rest are replicas (HSDP). none: all share."""
    optimizer_cpu_offload: bool = False
    """Keep the optimizer's states in host memory and update there; needs zero_stage=1."""
    optimizer_offload_fraction: float = 1.0
    """Share of the states that go there."""
    use_precision_aware_optimizer: bool = False
    """Keep Adam's moments in exp_avg_dtype and exp_avg_sq_dtype; needs Transformer Engine."""
    exp_avg_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Type of Adam's first moment with use_precision_aware_optimizer."""
    exp_avg_sq_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Type of Adam's second moment with use_precision_aware_optimizer."""
    recompute_granularity: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass instead of kept: none, those of recompute_modules, whole layers."""
    recompute_modules: tuple[str, ...] = ("core_attn", "mlp")
    """With recompute_granularity=selective: core_attn, mlp, moe."""
    moe_enable_routing_replay: bool = False
    """Train on the experts that were chosen when the policy scored the batch before its first update."""
    pack_length: int = 512
    """Most tokens in a pack, the unit of a micro-batch."""
    logits_chunk: int | Literal["auto"] = "auto"
    """Columns of the LM head computed at a time: 0 computes all at once; auto = 0 where the logits fit, else 16384."""
    shared_prompt_packing: bool | Literal["auto"] = "auto"
    """Put a group into a pack as one prompt with branches instead of repeating the prompt; auto = on CPU, where it saves work.
    Not with context_parallel_size above 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    vllm_num_engines: int = 1
    """vLLM engines."""
    vllm_tensor_parallel_size: int = 1
    """Workers of each engine."""
    vllm_gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory an engine may use; no meaning on CPU."""
    vllm_kv_cache_mb: int = 64
    """KV cache of an engine in MiB on CPU; on GPU vllm_gpu_memory_utilization decides."""
    vllm_max_num_seqs: int = 256
    """Completions an engine works on at once."""
    vllm_enforce_eager: bool = False
    """No CUDA graphs; always so on CPU."""
    vllm_enable_prefix_caching: bool = False
    """Reuse the cache of equal prompt beginnings within a step."""
    ray_address: str | None = None
    """Join this Ray cluster; otherwise one is started on this machine, on loopback."""
    engine_start_timeout: int = 600
    """Seconds an engine may take to start."""
    weight_sync_bucket_mb: int = 256
    """Most MiB of weights in flight between two processes."""
    weight_sync_timeout: int = 120
    """Seconds one weight sync may take before the run ends, naming who was waited for."""
    weight_sync_check_every: int = 50
    """Compare a digest of every weight in trainer and engines before the first step and every so many; 0: then only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    save_freq: int = 200
    """Steps between exports of the model in Hugging Face format; 0 or less: only at the end."""
    save_final: bool = True
    """Export the trained model at the end."""
    checkpoint_state_freq: int = -1
    """Steps between saves of the whole training state, from which a run resumes in any layout; 0 or less: none."""
    checkpoint_state_dir: str | None = None
    """Folder of these states, or a URL such as s3://bucket/run; none: output_dir/checkpoints."""
    gs_checkpoint_state_dir: str | None = None
    """The same on Google Cloud Storage, gs://bucket/run; wins over checkpoint_state_dir."""
    keep_last_n_checkpoints: int = 3
    """Newest states that stay; -1: all."""
    checkpoint_async: bool = False
    """Write a state in the background, from a copy in host memory."""
    resume: str = "auto"
    """auto: go on from the newest complete state of this run, if there is one; never: start anew; or the path of a state,
    .../checkpoints/step_N."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole configuration of a run, as `mgrpo.config.parse` returns it: typed, but checked only by `validate`."""

    experiment: Experiment = field(default_factory=Experiment)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    rollout: Rollout = field(default_factory=Rollout)
    reward: Reward = field(default_factory=Reward)
    algorithm: Algorithm = field(default_factory=Algorithm)
    optimizer: Optimizer = field(default_factory=Optimizer)
    parallel: Parallel = field(default_factory=Parallel)
    engine: Engine = field(default_factory=Engine)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    provenance: Provenance = field(default_factory=Provenance, compare=False, repr=False)

    @property
    def batch_size(self) -> int:
        """Completions a training step."""
        return self.rollout.num_unique_prompts_rollout * self.rollout.num_samples_per_prompt_rollout

    @property
    def num_training_steps(self) -> int:
        """Rollout batches of the run."""
        return self.experiment.total_episodes // self.batch_size

    @property
    def tokenizer_path(self) -> str | None:
        """Folder of the tokenizer."""
        return self.data.tokenizer_name_or_path or self.model.model_name_or_path

    @property
    def max_model_length(self) -> int:
        """Tokens of the longest sequence in an engine."""
        rollout = self.rollout
        return self.data.max_prompt_token_length + max(rollout.response_length, rollout.eval_response_length or 0)

    @property
    def num_optimizer_steps(self) -> int:
        """Optimizer steps of the run, the horizon of the learning-rate schedule."""
        return self.num_training_steps * self.algorithm.num_epochs * self.algorithm.num_mini_batches

    @property
    def notes(self) -> tuple[str, ...]:
        """What was understood of names that are not settings, one sentence each."""
        return self.provenance.notes

    @property
    def loss(self) -> LossConfig:
        """What the policy loss needs."""
        own = self.algorithm
        aggregation = own.aggregation or ("token" if own.loss_denominator == "token" else "constant")
        # Dr. GRPO divides by the length that a completion may have.
        constants = {"constant": own.loss_denominator, "dr_grpo": self.rollout.response_length}
        shared = {field.name for field in fields(LossConfig)} & {field.name for field in fields(Algorithm)}
        return LossConfig(
            **{name: getattr(own, name) for name in shared - {"aggregation"}},
            aggregation=aggregation,
            constant=float(constants[aggregation]) if aggregation in constants else None,
            rho_clamp_lower=own.rho_clamp_lower_bound,
            rho_clamp_upper=own.rho_clamp_upper_bound,
            rho_mask_lower=own.rho_mask_lower_bound,
            rho_mask_upper=own.rho_mask_upper_bound,
            rho_mask_tv=own.rho_mask_tv_divergence,
        )
