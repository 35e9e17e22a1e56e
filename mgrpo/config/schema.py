"""Every setting of a run: one flat namespace on the command line and in YAML, sections in the code.

Names are Open Instruct's where it has one, and Megatron's for Megatron's own settings. The annotation holds the range and
the other trainers with a setting of the same name; the docstring under a field is its --help text. Each default is written
once, in its section; `None` means off unless the docstring says otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from mgrpo.config.adapter import Adapter
from mgrpo.config.annotations import (
    BELOW_ONE,
    MEGATRON,
    NO_ENTRIES,
    NOT_NEGATIVE,
    ONE_OR_MORE,
    OPEN_INSTRUCT,
    POSITIVE,
    SHARE,
    TRL,
    UP_TO_ONE,
    JSONObject,
    Range,
    Reason,
)
from mgrpo.config.checkpoint import Checkpoint
from mgrpo.config.experiment import Experiment
from mgrpo.config.hub import Hub
from mgrpo.config.loss import LossConfig
from mgrpo.config.provenance import Provenance
from mgrpo.config.reward import Reward
from mgrpo.config.tools import Tools
from mgrpo.config.tracking import Tracking


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    model_name_or_path: Annotated[str | None, OPEN_INSTRUCT] = None
    """Name of a model on the Hugging Face Hub, OWNER/NAME, which is downloaded into the cache (docs/hub.md); the folder of a
    checkpoint (config.json, safetensors, tokenizer files); or the output of mgrpo convert."""
    model_dtype: Annotated[Literal["bfloat16", "float16", "float32"], OPEN_INSTRUCT] = "bfloat16"
    """Type of weights and activations in training and in the engines; the optimizer always keeps float32. In float16 trainer and
    engine differ less than in bfloat16, numbers above 65504 overflow, and the loss is scaled (policy/loss_scale)."""
    cast_lm_head_to_fp32: Annotated[bool, TRL] = False
    """Compute logits in float32, in training and in the engines, from a head and its input in model_dtype: nearly removes the
    head's share of their mismatch, and takes twice the memory for logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    dataset_mixer_list: Annotated[tuple[str, ...], OPEN_INSTRUCT] = ()
    """Training data: path or dataset name, amount, path, amount, ... An amount with a decimal point is a share, one without
    is a number of rows."""
    dataset_mixer_eval_list: Annotated[tuple[str, ...], OPEN_INSTRUCT] = ()
    """Held-out data, in the same form; empty: no evaluation."""
    dataset_mixer_list_splits: Annotated[tuple[str, ...], OPEN_INSTRUCT] = ("train",)
    """Split of each training dataset: one for all of them, or one each."""
    dataset_mixer_eval_list_splits: Annotated[tuple[str, ...], OPEN_INSTRUCT] = ("test",)
    """Split of each held-out dataset: one for all of them, or one each."""
    ground_truths_key: Annotated[str, OPEN_INSTRUCT] = "ground_truth"
    """Column with the ground truth that the verifier compares with."""
    sft_messages_key: Annotated[str, OPEN_INSTRUCT] = "messages"
    """Column with the messages."""
    max_prompt_token_length: Annotated[int, ONE_OR_MORE, OPEN_INSTRUCT] = 256
    """Maximum tokens of a prompt; overlong_prompt_policy decides about longer ones."""
    overlong_prompt_policy: Literal["filter", "truncate_left", "error"] = "filter"
    """filter: leave them out and count them; truncate_left: keep their last tokens; error: do not start the run."""
    tokenizer_name_or_path: Annotated[str | None, OPEN_INSTRUCT] = None
    """Folder of the tokenizer, or its name on the Hub; none: the model's."""
    chat_template_name: Annotated[str, OPEN_INSTRUCT] = "auto"
    """For rows with `messages`: auto is the tokenizer's own template, none joins the contents as plain text; otherwise a
    name from docs/data.md or the path of a Jinja file."""
    chat_template_kwargs: Annotated[JSONObject, TRL] = NO_ENTRIES
    """More variables for the template, as a JSON object, for example {"enable_thinking": false}."""
    add_bos: Annotated[bool, OPEN_INSTRUCT] = False
    """Begin every prompt with the tokenizer's bos token; an error if the template already writes it."""
    system_prompt_override_file: Annotated[str | None, OPEN_INSTRUCT] = None
    """File with a system prompt that replaces that of every row."""
    shuffle_dataset: Annotated[bool, TRL] = True
    """Shuffle the prompts in every epoch; false: keep the order of the data."""
    dataset_local_cache_dir: Annotated[str | None, OPEN_INSTRUCT] = None
    """Folder for prepared data; none: mgrpo/datasets in the user's cache folder."""
    dataset_skip_cache: Annotated[bool, OPEN_INSTRUCT] = False
    """Prepare the data again even if prepared data exists."""
    dataset_num_proc: Annotated[int, NOT_NEGATIVE] = 0
    """Threads that tokenize; 0: one per core."""


MOST_KEPT = 64
"""Tokens that may be left to sample from, where the sampling is cut: each travels to the trainer with its token."""
MOST_MASKED = 2048
"""The same with engines that return masks, see `Rollout.needs_masks`: of more vLLM itself makes no lists on the GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    num_unique_prompts_rollout: Annotated[int, ONE_OR_MORE, OPEN_INSTRUCT] = 16
    """Prompts per training step."""
    num_samples_per_prompt_rollout: Annotated[int, ONE_OR_MORE, OPEN_INSTRUCT] = 4
    """Completions sampled for each prompt, which form its group."""
    response_length: Annotated[int, ONE_OR_MORE, OPEN_INSTRUCT] = 256
    """Maximum tokens of a completion."""
    temperature: Annotated[
        float,
        Range(low=0.01),
        Reason("the training logits are divided by it, and vLLM samples at 0.01 where less is asked for"),
        OPEN_INSTRUCT,
        TRL,
    ] = 1.0
    """Sampling temperature, also the divisor of the training logits."""
    top_k: Annotated[int, NOT_NEGATIVE, TRL] = 0
    """Sample from this many of the likeliest tokens; 0: from all. The trainer then computes with the same tokens that the
    engine had left (docs/algorithms.md). At most 64; with engines on GPUs 2048, where more than 64 bound evaluations as well. All
    other cuts need it."""
    top_p: Annotated[float, SHARE, TRL] = 1.0
    """Sample from the likeliest tokens whose probabilities add up to this; below 1 with top_k."""
    min_p: Annotated[float, UP_TO_ONE, TRL] = 0.0
    """Sample from tokens that are at least this share as likely as the likeliest; above 0 with top_k."""
    vllm_guided_decoding_regex: Annotated[str | None, TRL] = None
    """Sample only what can become a text that this regular expression matches, turn by turn; with top_k."""
    async_steps: Annotated[int, NOT_NEGATIVE, OPEN_INSTRUCT] = 0
    """Steps that generation may run ahead of training; 0: they take turns, and a run repeats to the bit."""
    max_staleness: Annotated[int | None, NOT_NEGATIVE, TRL] = None
    """A group is trained on at most this many steps after its sampling has begun; what would become older is waited for,
    never dropped. None: the least that is possible, async_steps, with which steps take groups in the order of their prompts; then
    replay_buffer_size has no limit of age.
    More: a step takes what has finished, so that the longest answers do not hold it up. Given alone, it makes async_steps half
    of it."""
    inflight_updates: Annotated[bool, OPEN_INSTRUCT] = False
    """With async_steps: engines take over new weights in the middle of completions; false: they finish them first."""
    inflight_kv: Literal["recompute", "keep"] = "recompute"
    """With inflight_updates, after an update: recompute what engines have cached of a completion, so that each token comes
    exactly from the weights that it is marked with; or keep keys and values of older weights, which saves that time."""
    stop_strings: Annotated[tuple[str, ...], OPEN_INSTRUCT] = ()
    """Texts that end a completion and stay in it, in addition to the model's own stop tokens."""
    eval_pass_at_k: Annotated[int, ONE_OR_MORE, OPEN_INSTRUCT] = 1
    """Completions sampled for each held-out prompt."""
    eval_temperature: Annotated[float | None, NOT_NEGATIVE] = None
    """Sampling temperature of evaluations; none: temperature; 0: greedy."""
    eval_top_p: Annotated[float, SHARE, OPEN_INSTRUCT] = 1.0
    """Evaluations sample from the likeliest tokens whose probabilities add up to this."""
    eval_response_length: Annotated[int | None, ONE_OR_MORE, OPEN_INSTRUCT] = None
    """Maximum tokens of a completion during evaluations; none: response_length."""
    save_traces: Annotated[bool, OPEN_INSTRUCT] = False
    """Write every completion that the run trains on to rollouts_save_path."""
    rollouts_save_path: Annotated[str | None, OPEN_INSTRUCT] = None
    """Folder for completions; none: output_dir/rollouts."""
    rollout_timeout: Annotated[int, ONE_OR_MORE] = 3600
    """Seconds that a step, an evaluation or a pause of the engines may wait for completions before the run ends with an error."""

    @property
    def is_cut(self) -> bool:
        """Whether training samples from a part of the vocabulary; `top_k` bounds it then."""
        return self.top_k > 0

    @property
    def needs_masks(self) -> bool:
        """Whether that may be so many tokens that only vLLM's sampling masks say which, which engines on GPUs have."""
        return self.top_k > MOST_KEPT


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    log_ref_kl: bool = False
    """Measure the KL to the reference model even when beta is 0."""
    alpha: Annotated[float, SHARE, OPEN_INSTRUCT] = 0.6
    """Weight of the policy in each update of the reference model: reference <- alpha x policy + (1 - alpha) x reference."""
    ref_policy_update_freq: Annotated[int | None, ONE_OR_MORE, OPEN_INSTRUCT] = None
    """Training steps between these updates; none: the reference never changes."""
    use_vllm_logprobs: Annotated[bool, OPEN_INSTRUCT] = False
    """Use the engine's logprobs as the old logprobs instead of computing these again."""
    advantage_normalization_type: Annotated[Literal["standard", "centered", "batch_std", "gdpo"], OPEN_INSTRUCT] = (
        "standard"
    )
    """standard: (reward - mean) / (std + eps) within the group; centered: reward - mean; batch_std: the std of the batch;
    gdpo: standard for each reward function, then their weighted sum over the batch."""
    advantage_ddof: Literal[0, 1] = 0
    """The standard deviation divides by the number of rewards minus this."""
    advantage_eps: Annotated[float, NOT_NEGATIVE] = 1e-8
    """Added to the standard deviation."""
    reward_weights: Annotated[tuple[float, ...], TRL] = ()
    """Weight of each reward function; empty: 1 for each."""
    filter_zero_std_samples: Annotated[bool, OPEN_INSTRUCT] = True
    """Leave out groups whose rewards are all equal."""
    active_sampling: Annotated[bool, OPEN_INSTRUCT] = False
    """Sample further prompts to replace the groups left out, until the batch is full."""
    active_sampling_max_rounds: Annotated[int, ONE_OR_MORE] = 10
    """Active sampling replaces groups of at most this many steps' worth, the step's own included; then the step trains on
    what it has."""
    active_sampling_oversample: Annotated[float, NOT_NEGATIVE] = 0.0
    """Prompts that are sampled in addition, as a share of a step's, so that groups left out are replaced at once."""
    replay_buffer_size: Annotated[int, NOT_NEGATIVE, TRL] = 0
    """Groups of earlier steps to keep, those whose rewards differ most, which take the place of groups left out; 0: none. Their
    tokens are of older policies, for which the loss needs a correction; max_staleness limits their age."""
    no_resampling_pass_rate: Annotated[float | None, SHARE, OPEN_INSTRUCT] = None
    """A prompt whose mean reward reaches this share of the highest one is never sampled again; none: off."""
    mask_truncated_completions: Annotated[bool, OPEN_INSTRUCT, TRL] = False
    """Do not train on truncated completions; they still count in the mean and standard deviation of their group."""
    overlong_cache_length: Annotated[int | None, ONE_OR_MORE] = None
    """Soft penalty for length: it grows from 0 to -1 over this many tokens before response_length; none: off."""
    top_entropy_quantile: Annotated[float, SHARE, TRL] = 1.0
    """Train only on this share of the tokens, those with the highest entropy; 1: all."""
    entropy_coef: Annotated[float, NOT_NEGATIVE, TRL] = 0.0
    """Weight of the entropy bonus."""
    use_adaptive_entropy: Annotated[bool, TRL] = False
    """Change entropy_coef by entropy_coef_delta after each optimizer step: up below entropy_target, otherwise down."""
    entropy_coef_min: Annotated[float, NOT_NEGATIVE, TRL] = 0.0
    """Lower limit of the adapted entropy_coef."""
    entropy_coef_max: Annotated[float, NOT_NEGATIVE, TRL] = 1.0
    """Upper limit of the adapted entropy_coef."""
    entropy_coef_delta: Annotated[float, NOT_NEGATIVE, TRL] = 0.005
    """Change of entropy_coef per optimizer step."""
    entropy_target: Annotated[float, NOT_NEGATIVE, TRL] = 0.2
    """Mean entropy per token to aim for."""
    num_epochs: Annotated[int, ONE_OR_MORE, OPEN_INSTRUCT] = 1
    """Passes over each rollout batch."""
    num_mini_batches: Annotated[int, ONE_OR_MORE, OPEN_INSTRUCT] = 1
    """Optimizer steps per pass."""
    reshuffle_mini_batches: bool = False
    """Form new mini-batches in every pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    learning_rate: Annotated[float, POSITIVE, OPEN_INSTRUCT, TRL] = 2e-5
    """Peak learning rate of AdamW."""
    lr_scheduler_type: Annotated[
        Literal[
            "linear",
            "cosine",
            "cosine_with_restarts",
            "cosine_with_min_lr",
            "polynomial",
            "constant",
            "constant_with_warmup",
        ],
        OPEN_INSTRUCT,
        TRL,
    ] = "linear"
    """How the rate changes after the warm-up, over all optimizer steps; linear and cosine end at min_lr."""
    min_lr: Annotated[float, NOT_NEGATIVE, MEGATRON] = 0.0
    """Learning rate at the end of a schedule that falls; with polynomial 0 means 1e-7."""
    warm_up_steps: Annotated[int, NOT_NEGATIVE, OPEN_INSTRUCT] = 0
    """Optimizer steps of linear warm-up; used when warmup_ratio is 0."""
    warmup_ratio: Annotated[float, BELOW_ONE, OPEN_INSTRUCT, TRL] = 0.0
    """Share of all optimizer steps used for warm-up."""
    weight_decay: Annotated[float, NOT_NEGATIVE, OPEN_INSTRUCT, TRL] = 0.0
    """AdamW's weight decay."""
    set_weight_decay_on_bias_and_norm: bool = False
    """Also decay biases and norms. (Open Instruct's flag of this name does the opposite.)"""
    max_grad_norm: Annotated[float, NOT_NEGATIVE, OPEN_INSTRUCT, TRL] = 1.0
    """Global norm to which gradients are clipped; 0: no clipping."""
    adam_beta1: Annotated[float, BELOW_ONE, TRL] = 0.9
    """AdamW's first decay rate."""
    adam_beta2: Annotated[float, BELOW_ONE, TRL] = 0.999
    """AdamW's second decay rate."""
    adam_epsilon: Annotated[float, POSITIVE, TRL] = 1e-8
    """AdamW's epsilon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    num_learners_per_node: Annotated[tuple[int, ...], OPEN_INSTRUCT] = ()
    """Learner ranks on each node, checked against those that torchrun started; empty: not checked."""
    tensor_model_parallel_size: Annotated[int, ONE_OR_MORE, MEGATRON] = 1
    """Ranks that share each layer's matrices."""
    pipeline_model_parallel_size: Annotated[int, ONE_OR_MORE, MEGATRON] = 1
    """Pipeline stages that the layers are divided into."""
    context_parallel_size: Annotated[int, ONE_OR_MORE, MEGATRON] = 1
    """Ranks that share each sequence."""
    cp_comm_type: Annotated[Literal["all_gather", "a2a"], MEGATRON] = "all_gather"
    """How context-parallel ranks attend to each other's tokens: all_gather gathers keys and values, a2a exchanges sequence for
    heads (Ulysses) and needs a multiple of context_parallel_size heads per tensor rank."""
    expert_model_parallel_size: Annotated[int, ONE_OR_MORE, MEGATRON] = 1
    """Ranks of a pipeline stage that share the experts of a mixture-of-experts model."""
    virtual_pipeline_model_parallel_size: Annotated[int, ONE_OR_MORE, MEGATRON] = 1
    """Chunks of layers per stage, interleaved: smaller bubbles, more communication."""
    num_layers_in_first_pipeline_stage: Annotated[int | None, ONE_OR_MORE, MEGATRON] = None
    """Layers in the first stage; none: as many as in the others."""
    num_layers_in_last_pipeline_stage: Annotated[int | None, ONE_OR_MORE, MEGATRON] = None
    """Layers in the last stage; none: as many as in the others."""
    sequence_parallel: Annotated[bool | Literal["auto"], MEGATRON] = "auto"
    """Megatron's sequence parallelism: split activations between layers across the tensor ranks; auto: if there are several."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """What is sharded over the data-parallel ranks, as in DeepSpeed: 0 nothing, 1 the optimizer's states (Megatron's
    distributed optimizer), 2 also gradients, 3 also parameters (both Megatron-FSDP)."""
    fsdp_shard_degree: Annotated[int | None, ONE_OR_MORE, OPEN_INSTRUCT] = None
    """With zero_stage=3: consecutive ranks that shard each parameter, replicated over the others (HSDP); none: all ranks."""
    overlap_grad_reduce: Annotated[bool, MEGATRON] = True
    """Sum the gradients of some layers over the data-parallel ranks while the backward pass of the others goes on; with
    zero_stage 2 and 3 that is always so."""
    overlap_param_gather: Annotated[bool, MEGATRON] = True
    """With zero_stage=1: gather the weights that other data-parallel ranks have updated while the host goes on and the next
    forward pass begins, of which each layer waits for its own; with zero_stage=3 that is always so."""
    optimizer_cpu_offload: Annotated[bool, MEGATRON] = False
    """Keep the optimizer's states in host memory and update them there; needs zero_stage=1."""
    optimizer_offload_fraction: Annotated[float, SHARE, MEGATRON] = 1.0
    """Share of the optimizer's states that is offloaded."""
    use_precision_aware_optimizer: Annotated[bool, MEGATRON] = False
    """Keep Adam's moments in exp_avg_dtype and exp_avg_sq_dtype; needs Transformer Engine."""
    exp_avg_dtype: Annotated[Literal["float32", "float16", "bfloat16"], MEGATRON] = "float32"
    """Type of Adam's first moment with use_precision_aware_optimizer."""
    exp_avg_sq_dtype: Annotated[Literal["float32", "float16", "bfloat16"], MEGATRON] = "float32"
    """Type of Adam's second moment with use_precision_aware_optimizer."""
    transformer_impl: Annotated[Literal["auto", "local", "transformer_engine"], MEGATRON] = "auto"
    """Whose matrix products and norms a layer is made of: Megatron's own (local) or Transformer Engine's, which need CUDA;
    auto: Transformer Engine's where it is installed and learners have GPUs. Weights and checkpoints do not depend on it."""
    recompute_granularity: Annotated[Literal["none", "selective", "full"], MEGATRON] = "none"
    """Activations that the backward pass recomputes: none, those of recompute_modules (selective), or whole layers (full)."""
    recompute_modules: Annotated[tuple[str, ...], MEGATRON] = ("core_attn", "mlp")
    """Modules to recompute with recompute_granularity=selective: core_attn, mlp, moe."""
    moe_enable_routing_replay: Annotated[bool, MEGATRON] = False
    """Route every token to the experts that were chosen when the policy scored the batch before its first update."""
    pack_length: Annotated[int, ONE_OR_MORE, OPEN_INSTRUCT] = 512
    """Maximum tokens of a pack, the unit of a micro-batch."""
    logits_chunk: Annotated[int | Literal["auto"], NOT_NEGATIVE] = "auto"
    """Columns of the LM head to compute at a time; 0: all at once; auto: 0 if the logits fit into memory, else 16384."""
    shared_prompt_packing: bool | Literal["auto"] = "auto"
    """Pack a group as one prompt with branches instead of repeating the prompt; auto: on CPU, where it saves work; on
    GPUs true takes FlexAttention for flash attention. Not with context_parallel_size above 1."""

    def recomputes(self, module: str) -> bool:
        """Whether a backward pass computes this part of a layer again.

        Args:
            module: as in `recompute_modules`; any other name for what only whole layers repeat.
        """
        is_named = self.recompute_granularity == "selective" and module in self.recompute_modules
        return is_named or self.recompute_granularity == "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    vllm_num_engines: Annotated[int, ONE_OR_MORE, OPEN_INSTRUCT] = 1
    """Number of vLLM engines."""
    vllm_tensor_parallel_size: Annotated[int, ONE_OR_MORE, OPEN_INSTRUCT, TRL] = 1
    """Workers of each engine."""
    vllm_mode: Annotated[Literal["ray", "server", "colocate"], TRL] = "ray"
    """Where engines come from: ray: the run starts them, on devices of their own; colocate: it starts them on the learners' GPUs,
    a worker on each; server: they are vLLM servers that run already."""
    vllm_enable_sleep_mode: Annotated[bool, TRL] = False
    """With vllm_mode=colocate: learners and engines take turns, and only those whose turn it is have their weights and states
    in the device's memory; false: all is there all the time."""
    vllm_gpu_memory_utilization: Annotated[float, SHARE, OPEN_INSTRUCT, TRL] = 0.9
    """Share of a GPU's memory that an engine may use; ignored on CPU."""
    vllm_kv_cache_mb: Annotated[int, ONE_OR_MORE] = 64
    """KV cache of an engine's worker in MiB on CPU, and on GPU with vllm_mode=colocate; otherwise
    vllm_gpu_memory_utilization decides."""
    vllm_kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head"] = "auto"
    """Type of the engines' keys and values: auto: model_dtype; fp8 (fp8_e4m3) and fp8_e5m2: rounded to 8 bits without a scale;
    fp8_per_token_head: on GPUs, with a scale for each token and head. All but auto need a correction, use_rho_correction."""
    vllm_max_num_seqs: Annotated[int, ONE_OR_MORE] = 256
    """Completions that an engine generates at once."""
    vllm_enforce_eager: Annotated[bool, OPEN_INSTRUCT] = False
    """Run without CUDA graphs; always on CPU."""
    vllm_enable_prefix_caching: Annotated[bool, OPEN_INSTRUCT] = True
    """Read a prompt once for all samples of its group, in whole blocks of the KV cache (32 tokens on a CPU)."""
    vllm_extra_args: Annotated[JSONObject, OPEN_INSTRUCT] = NO_ENTRIES
    """Further arguments of vLLM's AsyncEngineArgs, as a JSON object, for example {"max_num_batched_tokens": 8192}; untested
    ones may change the log-probabilities, which vllm_vs_local_logprob_diff shows."""
    vllm_server_base_url: Annotated[tuple[str, ...], TRL] = ()
    """Addresses of the servers, http://HOST:PORT, each of which is an engine; with vllm_mode=server."""
    vllm_server_timeout: Annotated[float, POSITIVE, TRL] = 240.0
    """Seconds that a server may take to answer at the start of the run."""
    vllm_server_allow_public: bool = False
    """Also connect to servers at public addresses, where anyone may control them unless a proxy stands before them."""
    ray_address: str | None = None
    """HOST:PORT of a Ray cluster to join, of which rank 0's machine must be a node, without the GPUs of learners; none: start
    one on this machine, on the loopback interface."""
    engine_start_timeout: Annotated[int, ONE_OR_MORE] = 600
    """Seconds that an engine may take to start."""
    engine_heartbeat_timeout: Annotated[int, ONE_OR_MORE] = 30
    """Seconds without an answer after which an engine counts as dead; after half of them it is given no more groups."""
    engine_max_restarts: Annotated[int, NOT_NEGATIVE] = 3
    """How many times an engine that has died is started again within 20 weight syncs, before it is given up."""
    min_engines: Annotated[int, ONE_OR_MORE] = 1
    """A run with fewer engines waits for those that are starting; without any that could start it ends."""
    weight_sync_bucket_mb: Annotated[int, ONE_OR_MORE] = 256
    """MiB of weights that travel to an engine's worker at once; it holds as many again, as do together the ranks that send to it."""
    weight_sync_timeout: Annotated[int, ONE_OR_MORE] = 120
    """Seconds that one weight sync may take; an engine that has not answered by then counts as dead."""
    weight_sync_check_every: Annotated[int, NOT_NEGATIVE] = 50
    """Steps between comparisons of the weights in trainer and engines by digest; 0: only before the first step."""

    @property
    def shares_gpus(self) -> bool:
        """Whether its workers are on the learners' GPUs."""
        return self.vllm_mode == "colocate"

    @property
    def takes_turns(self) -> bool:
        """Whether learners and engines give up their memory for each other."""
        return self.shares_gpus and self.vllm_enable_sleep_mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole configuration of a run. Types are not enough: `validate` says whether it can run."""

    experiment: Experiment = field(default_factory=Experiment)
    model: Model = field(default_factory=Model)
    adapter: Adapter = field(default_factory=Adapter)
    data: Data = field(default_factory=Data)
    rollout: Rollout = field(default_factory=Rollout)
    reward: Reward = field(default_factory=Reward)
    tools: Tools = field(default_factory=Tools)
    loss: LossConfig = field(default_factory=LossConfig)
    algorithm: Algorithm = field(default_factory=Algorithm)
    optimizer: Optimizer = field(default_factory=Optimizer)
    parallel: Parallel = field(default_factory=Parallel)
    engine: Engine = field(default_factory=Engine)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    hub: Hub = field(default_factory=Hub)
    tracking: Tracking = field(default_factory=Tracking)
    provenance: Provenance = field(default_factory=Provenance, compare=False, repr=False)

    @property
    def batch_size(self) -> int:
        """Completions per training step."""
        return self.rollout.num_unique_prompts_rollout * self.rollout.num_samples_per_prompt_rollout

    @property
    def completions_per_optimizer_step(self) -> int:
        """batch_size / num_mini_batches, rounded up."""
        return -(-self.batch_size // self.algorithm.num_mini_batches)

    @property
    def has_length(self) -> bool:
        """Whether the number of steps is known; with num_train_epochs it is when `counted` has been told of the data."""
        return self.experiment.num_train_epochs is None

    @property
    def num_training_steps(self) -> int:
        """Rollout batches of the run."""
        assert self.has_length, "the training prompts have not been counted"
        return self.experiment.total_episodes // self.batch_size

    @property
    def max_age(self) -> int:
        """Steps after which a group is trained on at the latest, counted from when its sampling began."""
        least = self.rollout.async_steps + math.ceil(self.algorithm.active_sampling_oversample)
        # Where nothing begins before its step, nothing ages.
        return least if self.rollout.max_staleness is None or not least else self.rollout.max_staleness

    @property
    def is_off_policy(self) -> bool:
        """Whether steps train on tokens of older policies."""
        return self.max_age > 0 or self.algorithm.replay_buffer_size > 0

    @property
    def num_extra_groups(self) -> int:
        """Groups that are sampled beyond those of the steps that may be under way."""
        return math.ceil(self.algorithm.active_sampling_oversample * self.rollout.num_unique_prompts_rollout)

    @property
    def tokenizer_path(self) -> str:
        """Folder of the tokenizer."""
        return self.provenance.folder("tokenizer_name_or_path", self.data.tokenizer_name_or_path) or self.model_path

    @property
    def model_path(self) -> str:
        """Folder of the model, of a configuration that has been checked."""
        return self.provenance.folder("model_name_or_path", self.model.model_name_or_path) or ""

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
        """How names that are not settings were understood, one sentence each."""
        return self.provenance.notes
