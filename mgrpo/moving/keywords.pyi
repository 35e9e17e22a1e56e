"""The settings as keywords. Written by `python -m tools.docs.keywords > mgrpo/moving/keywords.pyi`; do not edit."""

# fmt: off
from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

class Keywords(TypedDict, total=False):
    """Arguments of `mgrpo.GRPOConfig`."""

    preset: Literal["mgrpo", "seed", "open_instruct_main", "trl_seed", "trl_main", "trl_async"]
    """Whose defaults to use. (default: mgrpo)"""
    exp_name: str
    """Name of the experiment in logs. (default: grpo)"""
    seed: int
    """Seed of the data order, of sampling and of every other random state. (default: 1)"""
    output_dir: str
    """Folder for everything that the run writes; used as given. (default: output)"""
    total_episodes: int
    """Completions to train on; the number of steps is total_episodes / (prompts x samples per step), rounded down. (default: 100000)"""
    num_train_epochs: float | None
    """Passes over the training prompts, instead of total_episodes, which is worked out when the data have been read: passes x prompts x samples. Steps go on from one pass into the next; a part of a step at the end is left out. (default: none)"""
    local_eval_every: int
    """Steps between evaluations on the held-out prompts; 0 or less evaluates only before and after training. (default: 100)"""
    backend_timeout: int
    """Minutes that a collective between learners may take; one of the training itself at most 15. (default: 120)"""
    learner_timeout: int
    """Seconds that a learner may stay in one part of a step, such as an optimizer step, an export or a saved state, before the run ends with its rank, process and place; one whose process has stopped is named after 50 s, or this if less. (default: 1800)"""
    profile_steps: Sequence[int]
    """Training steps (from 1) whose training and weight sync are profiled on rank 0: traces in output_dir/profile, or nsys ranges. (default: empty)"""
    cache_dataset_only: bool
    """Prepare the data, print a summary and exit. (default: false)"""
    model_name_or_path: str | None
    """Name of a model on the Hugging Face Hub, OWNER/NAME, which is downloaded into the cache (docs/hub.md); the folder of a checkpoint (config.json, safetensors, tokenizer files); or the output of mgrpo convert. (default: none)"""
    model_dtype: Literal["bfloat16", "float16", "float32"]
    """Type of weights and activations in training and in the engines; the optimizer always keeps float32. In float16 trainer and engine differ less than in bfloat16, numbers above 65504 overflow, and the loss is scaled (policy/loss_scale). (default: bfloat16)"""
    cast_lm_head_to_fp32: bool
    """Compute logits in float32, in training and in the engines, from a head and its input in model_dtype: nearly removes the head's share of their mismatch, and takes twice the memory for logits. (default: false)"""
    use_peft: bool
    """Train low-rank adapters (LoRA) and leave the model's own weights as they are; see docs/lora.md. (default: false)"""
    lora_r: int
    """Rank of the adapters; in reinforcement learning small ones, even 1, learn as much. (default: 16)"""
    lora_alpha: int
    """An adapter adds lora_alpha / lora_r x B A to its matrix. (default: 32)"""
    lora_target_modules: Sequence[str] | str
    """Matrices with an adapter, by their last names in the checkpoint, such as q_proj gate_proj; all-linear: all of attention, MLP and experts, without embeddings, head and routers. (default: all-linear)"""
    use_rslora: bool
    """Divide lora_alpha by the square root of lora_r instead (rank-stabilised LoRA). (default: false)"""
    lora_sync: Literal["merged", "adapter"]
    """What engines are sent. merged: the model with the adapters added to its weights; adapter: A and B alone, which vLLM adds in each product to the model that it has loaded itself: about a hundredth of the bytes, and slower generation. Learners compute as engines do. (default: merged)"""
    lora_adapter_path: str | None
    """Folder of an adapter in peft's format to start from, or its name on the Hub; its rank, alpha and modules apply where none are given. (default: none)"""
    dataset_mixer_list: Sequence[str] | str
    """Training data: path or dataset name, amount, path, amount, ... An amount with a decimal point is a share, one without is a number of rows. (default: empty)"""
    dataset_mixer_eval_list: Sequence[str] | str
    """Held-out data, in the same form; empty: no evaluation. (default: empty)"""
    dataset_mixer_list_splits: Sequence[str] | str
    """Split of each training dataset: one for all of them, or one each. (default: train)"""
    dataset_mixer_eval_list_splits: Sequence[str] | str
    """Split of each held-out dataset: one for all of them, or one each. (default: test)"""
    ground_truths_key: str
    """Column with the ground truth that the verifier compares with, or the path of a value inside one: reward_model.ground_truth. (default: ground_truth)"""
    sft_messages_key: str
    """Column with the messages. (default: messages)"""
    max_prompt_token_length: int
    """Maximum tokens of a prompt; overlong_prompt_policy decides about longer ones. (default: 256)"""
    overlong_prompt_policy: Literal["filter", "truncate_left", "error"]
    """filter: leave them out and count them; truncate_left: keep their last tokens; error: do not start the run. (default: filter)"""
    tokenizer_name_or_path: str | None
    """Folder of the tokenizer, or its name on the Hub; none: the model's. (default: none)"""
    chat_template_name: str
    """For rows with `messages`: auto is the tokenizer's own template, none joins the contents as plain text; otherwise a name from docs/data.md or the path of a Jinja file. (default: auto)"""
    chat_template_kwargs: Mapping[str, object] | str
    """More variables for the template, as a JSON object, for example {"enable_thinking": false}. (default: {})"""
    add_bos: bool
    """Begin every prompt with the tokenizer's bos token; an error if the template already writes it. (default: false)"""
    system_prompt_override_file: str | None
    """File with a system prompt that replaces that of every row. (default: none)"""
    shuffle_dataset: bool
    """Shuffle the prompts in every epoch; false: keep the order of the data. (default: true)"""
    dataset_local_cache_dir: str | None
    """Folder for prepared data; none: mgrpo/datasets in the user's cache folder. (default: none)"""
    dataset_skip_cache: bool
    """Prepare the data again even if prepared data exists. (default: false)"""
    num_unique_prompts_rollout: int
    """Prompts per training step. (default: 16)"""
    num_samples_per_prompt_rollout: int
    """Completions sampled for each prompt, which form its group. (default: 4)"""
    response_length: int
    """Maximum tokens of a completion. (default: 256)"""
    temperature: float
    """Sampling temperature, also the divisor of the training logits. (default: 1.0)"""
    top_k: int
    """Sample from this many of the likeliest tokens; 0: from all. The trainer then computes with the same tokens that the engine had left (docs/algorithms.md). At most 64; with engines on GPUs 2048, where more than 64 bound evaluations as well. All other cuts need it; where they are given without it, engines on GPUs take 2048. (default: 0)"""
    top_p: float
    """Sample from the likeliest tokens whose probabilities add up to this; below 1 with top_k. (default: 1.0)"""
    min_p: float
    """Sample from tokens that are at least this share as likely as the likeliest; above 0 with top_k. (default: 0.0)"""
    vllm_guided_decoding_regex: str | None
    """Sample only what can become a text that this regular expression matches, turn by turn; with top_k. (default: none)"""
    async_steps: int
    """Steps that generation may run ahead of training; 0: they take turns, and a run repeats to the bit. (default: 0)"""
    max_staleness: int | None
    """A group is trained on at most this many steps after its sampling has begun; what would become older is waited for, never dropped. None: the least that is possible, async_steps, with which steps take groups in the order of their prompts; then replay_buffer_size has no limit of age. More: a step takes what has finished, so that the longest answers do not hold it up. Given alone, it makes async_steps half of it. (default: none)"""
    inflight_updates: bool
    """With async_steps: engines take over new weights in the middle of completions; false: they finish them first. (default: false)"""
    inflight_kv: Literal["recompute", "keep"]
    """With inflight_updates, after an update: recompute what engines have cached of a completion, so that each token comes exactly from the weights that it is marked with; or keep keys and values of older weights, which saves that time. (default: recompute)"""
    stop_strings: Sequence[str] | str
    """Texts that end a completion and stay in it, in addition to the model's own stop tokens. (default: empty)"""
    eval_pass_at_k: int
    """Completions sampled for each held-out prompt. (default: 1)"""
    eval_temperature: float | None
    """Sampling temperature of evaluations; none: temperature; 0: greedy. (default: none)"""
    eval_top_p: float
    """Evaluations sample from the likeliest tokens whose probabilities add up to this. (default: 1.0)"""
    eval_response_length: int | None
    """Maximum tokens of a completion during evaluations; none: response_length. (default: none)"""
    save_traces: bool
    """Write every completion that the run trains on to rollouts_save_path. (default: false)"""
    rollouts_save_path: str | None
    """Folder for completions; none: output_dir/rollouts. (default: none)"""
    rollout_timeout: int
    """Seconds that a step, an evaluation or a pause of the engines may wait for completions before the run ends with an error. (default: 3600)"""
    apply_verifiable_reward: bool
    """Score completions with the verifiers that each row names. (default: true)"""
    verification_reward: float
    """Factor of the verifiers' score. (default: 10.0)"""
    apply_r1_style_format_reward: bool
    """Reward the format `...</think> <answer>...</answer>`. (default: false)"""
    r1_style_format_reward: float
    """Reward for the format. (default: 1.0)"""
    additive_format_reward: bool
    """Add the format reward to the verifiers'; false: a completion without the format scores 0 (gate). (default: false)"""
    non_stop_penalty: bool
    """Replace the reward of completions that did not stop by themselves. (default: false)"""
    non_stop_penalty_value: float
    """Reward of completions that did not stop by themselves, with non_stop_penalty. (default: 0.0)"""
    remap_verifier: Sequence[str] | str
    """old=new, ...: rows that name the verifier old use the verifier new. (default: empty)"""
    verifier_weights: Sequence[str] | str
    """name=weight, ...: weights of verifiers in the sum of their scores; 1 for the others. (default: empty)"""
    reward_funcs: Sequence[str] | str
    """Reward functions in place of verifiers: package.module.function, file.py:function, one of TRL's six names, or the folder of a sequence-classification model. reward_weights weighs them. (default: empty)"""
    reward_funcs_timeout: int
    """Seconds that a reward function may take for one batch of completions before the run ends with its name. (default: 3600)"""
    reward_model_gpu: int | None
    """Number of the GPU on which reward models run, in bfloat16; it must be left out of CUDA_VISIBLE_DEVICES, because learners and engines use all that are there. none: on one core of the CPU, in float32. (default: none)"""
    verifier_modules: Sequence[str] | str
    """Python modules with verifiers of your own, which rows refer to by name. (default: empty)"""
    max_length_verifier_max_length: int
    """Deviation in tokens at which the verifiers max_length and up_to_max_length score 0. (default: 32768)"""
    code_api_url: str | None
    """URL of a code service, .../test_program; none: the environment variable CODE_API_URL, else a sandbox on this machine. (default: none)"""
    code_max_execution_time: float
    """Seconds that each test of a program may take. (default: 1.0)"""
    code_pass_rate_reward_threshold: float
    """Programs that pass a smaller share of their tests score 0. (default: 0.0)"""
    code_apply_perf_penalty: bool
    """Passed tests count less the longer they took. (default: false)"""
    code_sandbox_accept_risk: bool
    """Run programs even if this machine cannot isolate them. (default: false)"""
    llm_judge_model: str | None
    """Judge model; hosted_vllm/NAME and azure/NAME find their servers in the environment, and RUBRIC_JUDGE_MODEL there names another one for rubrics, see docs/judges.md. (default: none)"""
    llm_judge_base_url: str | None
    """OpenAI-compatible endpoint of the judge, for example http://localhost:8000/v1. (default: none)"""
    llm_judge_max_tokens: int
    """Maximum tokens of a judgement. (default: 2048)"""
    llm_judge_max_context_length: int
    """Tokens in the judge's context; longer answers are shortened in the middle. (default: 8192)"""
    llm_judge_temperature: float
    """Sampling temperature of the judge. (default: 1.0)"""
    llm_judge_timeout: int
    """Seconds that one judgement may take. (default: 60)"""
    apply_evolving_rubric_reward: bool
    """Have a judge read each group of rows with the verifier rubric and propose criteria that tell its answers apart; rewards count them as well, see docs/judges.md. (default: false)"""
    max_active_rubrics: int
    """Proposed criteria of a question that stay in use: those whose verdicts on a group have differed most. (default: 5)"""
    cache_evolving_rubric_data_dir: str | None
    """Folder for evolving_rubrics.jsonl: each group's answers, criteria and verdicts, and which criteria stay. none: not written. (default: none)"""
    remote_verifier_concurrency: int
    """Most concurrent calls of judges and code services. (default: 64)"""
    verifier_memory_mb: int
    """MiB of memory that a verifier process may use. (default: 2048)"""
    verifier_timeout: float
    """Seconds a verifier may spend on one completion before it is killed and the completion has no score. (default: 10.0)"""
    verifier_workers: int
    """Number of verifier processes. (default: 1)"""
    tools: object
    """Tools that the model may call and environments that it plays against: names from docs/environments.md, or functions and environments of your own, package.module:name or file.py:name. (default: empty)"""
    tool_call_names: Sequence[str] | str
    """Name of each of them for the model; empty: their own names. (default: empty)"""
    tool_configs: Sequence[Mapping[str, object] | str]
    """Settings of each of them, of rollout_func or of agent, as JSON objects, {} for none; empty: none for all. (default: empty)"""
    environment_factory: object
    """Environments in TRL's form, classes whose public methods are the tools: package.module:Class or file.py:Class; of several, NAME=file.py:Class each. (default: empty)"""
    rollout_func: object
    """A program that drives the model in place of tools: a function of your own, package.module:function or file.py:function. (default: none)"""
    tool_parser_type: str
    """How calls are written in a turn, a name from docs/environments.md; auto: as the chat template writes them. (default: auto)"""
    pass_tools_to_chat_template: bool
    """Describe the tools in every prompt, in the chat template's way. (default: true)"""
    max_tool_calls: int | None
    """Calls that a completion may make, and turns against an environment; then it has one more turn to answer. A row's env_config may give another number as max_steps. none: no limit. (default: 5)"""
    max_tool_calling_iterations: int | None
    """Turns of a completion that may call tools, whatever the number of calls in each; none or 0: no limit. (default: none)"""
    per_turn_max_tokens: int | None
    """Maximum tokens of one turn; none: what is left of response_length. (default: none)"""
    max_observation_tokens: int | None
    """Maximum tokens of what a tool answers, which is cut in the middle; none: a quarter of response_length. (default: none)"""
    thinking_history: Literal["keep", "strip"]
    """Whether earlier turns keep their thinking when the user speaks again. strip: they are seen without it, where the chat template writes them so, and each part of such a completion is trained on by itself. (default: keep)"""
    mask_tool_use: bool
    """Do not train on what tools answered; false: train on it as if the model had written it. (default: true)"""
    scored_text: Literal["final", "assistant", "all"]
    """Text that verifiers are given: the last turn without its calls and thinking, nothing if it was still calling; every turn of the model; or also what tools answered. (default: final)"""
    reward_aggregator: Literal["last", "sum"]
    """A completion's reward from those of its turns; the score of verifiers or reward functions is added to the last. (default: last)"""
    only_reward_good_outputs: bool
    """Scores of verifiers and reward functions count only for completions that have called a tool, and whose calls all succeeded in time. (default: false)"""
    turn_credit: Literal["trajectory", "return"]
    """trajectory: every token has the advantage of the whole completion; return: that of the rewards from its turn on. (default: trajectory)"""
    tool_timeout: float
    """Seconds that a call may take; a later one has failed, which the model is told. An environment may take twice as long to begin, and at least 60; a completion whose environment fails to twice has no score. (default: 30.0)"""
    trajectory_timeout: float | None
    """Seconds that a completion may take with all its turns; then it ends without a score. none: no limit. (default: none)"""
    pool_size: int | None
    """Environments that exist at once; none: one for each completion. (default: none)"""
    env_workers: int | None
    """Processes that tools and environments run in; none: one for each core but one, at most 8. (default: none)"""
    env_python: str | None
    """Interpreter of these processes, with the packages that environments need; it needs none of the trainer's. none: the trainer's own. (default: none)"""
    agent: str | None
    """A program that only knows a model's address, in place of tools: a command, such as "python agent.py"; an async function(row, endpoint), file.py:function or package.module:function; remote: programs elsewhere that ask for tasks; verifiers: environments of verifiers 0.4 and later. tool_configs holds the settings of a function or of verifiers. (default: none)"""
    agent_check: str | None
    """A command that judges what the agent has left behind, in the folder MGRPO_WORK, with the row's ground truth; it starts in a folder of its own. Exit status 0 is the reward 1 and any other 0, unless it writes a reward to the file MGRPO_RESULT. none: nothing is checked. (default: none)"""
    agent_sets_reward: bool
    """Whether the agent's own word about its reward counts: what it returns, writes to MGRPO_RESULT or sends to /reward. false: only agent_check, verifiers and reward functions. (default: true)"""
    agent_box: str
    """Where a command runs. local: within walls on this machine, without root or a daemon; docker or podman: in a container; another name: an entry point of mgrpo.boxes, such as a hosted sandbox; none: as any program of this user. (default: local)"""
    agent_image: str | None
    """The image of its containers, or the folder that is the root of its walls; in containers a row's column image goes before it, but they need this one for the check at the start. none: this machine's programs, read-only. (default: none)"""
    agent_network: bool
    """Whether it may reach more of the network than its endpoint. (default: false)"""
    agent_files: str | None
    """Folder that is copied into the working folder of each agent. none: it begins empty. (default: none)"""
    agent_env: Sequence[str] | str
    """Names of variables of the run's environment that it is given as well, such as keys of other services. (default: empty)"""
    agent_max_turns: int
    """Turns of the model that one trajectory may have, in all its branches. (default: 1024)"""
    agent_max_processes: int
    """Processes and threads of one agent. (default: 256)"""
    agent_memory_mb: int
    """Memory of one agent's processes in MiB. (default: 4096)"""
    agent_disk_mb: int
    """What one agent may write, in MiB. Behind walls that is memory; a container that has written more ends without a score. (default: 1024)"""
    agent_cpus: float | None
    """Cores that the processes of one agent may take together. none: any. (default: none)"""
    agent_endpoint_host: str
    """Address on which the endpoint listens; agents elsewhere need another one than this machine's own, and TLS is up to you. (default: 127.0.0.1)"""
    agent_endpoint_port: int
    """Its port, and the next ones where there are several; 0: any that is free. (default: 0)"""
    agent_endpoints: int
    """Processes that serve agents, each on one core. (default: 1)"""
    agent_endpoint_url: str | None
    """Address by which agents reach the endpoint, if that is another one, as of a balancer before several, which sends paths that begin with /s/N- to endpoint N, counted from 0. none: each has its own. (default: none)"""
    agent_endpoint_join: str | None
    """HOST:PORT of this machine where endpoints of other machines join the run, by mgrpo agent-endpoint; all have RAY_AUTH_TOKEN set to the same secret. none: none join. (default: none)"""
    policy_loss: Literal["ppo_clip", "cispo", "sapo", "vespo", "reinforce"] | str
    """ppo_clip: clipped ratio; cispo: capped weight; sapo: soft gate; vespo: sequence gate; reinforce: no ratio; or your own, file.py:function or package.module:function. (default: ppo_clip)"""
    ratio_level: Literal["token", "sequence", "sequence_token"]
    """token: one ratio per token; sequence: one per completion (GSPO); sequence_token: its value with each token's gradient. (default: token)"""
    aggregation: Literal["token", "constant", "seq_mean", "local_token", "dr_grpo", "luspo"] | None
    """Divisor of the sum over tokens; none: token or constant, as loss_denominator says. (default: none)"""
    loss_denominator: str
    """token: mean over the response tokens of the mini-batch; a number: divide the sum by it (Dr. GRPO). (default: token)"""
    local_batch_size: int
    """With aggregation local_token: completions in one mean over tokens, however they are packed. (default: 8)"""
    clip_lower: float
    """The ratio is clipped below at 1 - clip_lower. (default: 0.2)"""
    clip_higher: float
    """The ratio is clipped above at 1 + clip_higher, which is also CISPO's cap. (default: 0.2)"""
    cispo_two_sided: bool
    """CISPO's weight is also at least 1 - clip_lower, as in verl and slime. (default: false)"""
    delta: float | None
    """Two-sided clip: upper bound of the unclipped ratio. (default: none)"""
    dual_clip: float | None
    """Dual clip: the loss of a token with advantage A < 0 is at most dual_clip x |A|. (default: none)"""
    sapo_temperature_pos: float
    """SAPO's temperature where the advantage is above 0. (default: 1.0)"""
    sapo_temperature_neg: float
    """SAPO's temperature elsewhere. (default: 1.05)"""
    vespo_k_pos: float
    """VESPO's exponent of the sequence ratio, advantage >= 0. (default: 2.0)"""
    vespo_lambda_pos: float
    """VESPO's decay, advantage >= 0. (default: 3.0)"""
    vespo_k_neg: float
    """VESPO's exponent of the sequence ratio, advantage < 0. (default: 3.0)"""
    vespo_lambda_neg: float
    """VESPO's decay, advantage < 0. (default: 2.0)"""
    beta: float
    """Weight of the KL penalty towards the reference model; 0: no reference is loaded unless log_ref_kl is set. (default: 0.05)"""
    kl_estimator: Literal[0, 1, 2, 3]
    """0: d; 1: d^2/2; 2: exp(-d) - 1 + d; 3: ratio x d, where d = logprob - reference logprob. (default: 2)"""
    kl_bias_correction: bool
    """Multiply the KL estimate by the ratio, including its gradient. (default: false)"""
    use_rho_correction: bool
    """Multiply the policy loss by rho = exp(old logprob - engine's logprob), bounded by the rho settings. (default: false)"""
    rho_level: Literal["token", "sequence_mean", "sequence_sum"]
    """Level of the rho that multiplies: token, or exp of the mean or of the sum over the completion. (default: token)"""
    rho_clamp_lower_bound: float
    """Smallest rho that multiplies; 0: no bound. (default: 0.0)"""
    rho_clamp_upper_bound: float
    """Largest rho that multiplies (truncated importance sampling); 0: no bound. (default: 2.0)"""
    rho_mask_level: Literal["token", "sequence_mean", "sequence_sum", "divergence"]
    """Level of the rho that decides what is dropped; divergence: the upper bound is one of the completion's mean |rho - 1|, and only tokens whose update would raise that are dropped. (default: token)"""
    rho_mask_lower_bound: float
    """The policy loss is dropped where rho is below this; 0: no bound. (default: 0.0)"""
    rho_mask_upper_bound: float
    """The policy loss is dropped where rho is above this; 0: no bound. (default: 0.0)"""
    off_policy_mask_threshold: float | None
    """Drop completions with advantage < 0 whose mean of engine's minus current logprob is above this; none: off. (default: none)"""
    log_ref_kl: bool
    """Measure the KL to the reference model even when beta is 0. (default: false)"""
    alpha: float
    """Weight of the policy in each update of the reference model: reference <- alpha x policy + (1 - alpha) x reference. (default: 0.6)"""
    ref_policy_update_freq: int | None
    """Training steps between these updates; none: the reference never changes. (default: none)"""
    use_vllm_logprobs: bool
    """Use the engine's logprobs as the old logprobs instead of computing these again. (default: false)"""
    advantage_normalization_type: Literal["standard", "centered", "batch_std", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"] | str
    """standard: (reward - mean) / (std + eps) within the group; centered: reward - mean; batch_std: the std of the batch; rloo: reward - mean of the group's other completions; reinforce_plus_plus: (reward - mean) / (std + eps) over all tokens of the batch; reinforce_plus_plus_baseline: the same of centered; gdpo: standard for each reward function, then their weighted sum over the batch; or your own, file.py:function or package.module:function. (default: standard)"""
    advantage_std: Literal["population", "sample", "verl", "trl"]
    """The standard deviation divides by the number n of rewards, or of tokens (population), or by n - 1 (the others); eps is 1e-8, with verl 1e-6 and with trl 1e-4, as these trainers have it. (default: population)"""
    reward_weights: Sequence[float]
    """Weight of each reward function; empty: 1 for each. (default: empty)"""
    filter_zero_std_samples: bool
    """Leave out groups whose rewards are all equal. (default: true)"""
    active_sampling: bool
    """Sample further prompts to replace the groups left out, until the batch is full or ten steps' worth have been sampled. (default: false)"""
    active_sampling_oversample: float
    """Prompts that are sampled in addition, as a share of a step's, so that groups left out are replaced at once. (default: 0.0)"""
    replay_buffer_size: int
    """Groups of earlier steps to keep, those whose rewards differ most, which take the place of groups left out; 0: none. Their tokens are of older policies, for which the loss needs a correction; max_staleness limits their age. (default: 0)"""
    no_resampling_pass_rate: float | None
    """A prompt whose mean reward reaches this share of the highest one is never sampled again; none: off. (default: none)"""
    mask_truncated_completions: bool
    """Do not train on truncated completions; they still count in the mean and standard deviation of their group. (default: false)"""
    overlong_cache_length: int | None
    """Soft penalty for length: it grows from 0 to -1 over this many tokens before response_length; none: off. (default: none)"""
    top_entropy_quantile: float
    """Train only on this share of the tokens, those with the highest entropy; 1: all. (default: 1.0)"""
    entropy_coef: float
    """Weight of the entropy bonus. (default: 0.0)"""
    use_adaptive_entropy: bool
    """Change entropy_coef by entropy_coef_delta after each optimizer step: up below entropy_target, otherwise down. (default: false)"""
    entropy_coef_min: float
    """Lower limit of the adapted entropy_coef. (default: 0.0)"""
    entropy_coef_max: float
    """Upper limit of the adapted entropy_coef. (default: 1.0)"""
    entropy_coef_delta: float
    """Change of entropy_coef per optimizer step. (default: 0.005)"""
    entropy_target: float
    """Mean entropy per token to aim for. (default: 0.2)"""
    num_epochs: int
    """Passes over each rollout batch. (default: 1)"""
    num_mini_batches: int
    """Optimizer steps per pass. (default: 1)"""
    teacher_model_name_or_path: Sequence[str] | str
    """Models to learn from, each a folder or a name on the Hub, with the policy's tokenizer: MODEL teaches all rows, NAME:MODEL those of the dataset NAME or with NAME in their column teacher. self: the policy itself, which then sees teacher_prompt_template. With teacher_mode=server the names by which the servers know their models. Empty: no teacher. (default: empty)"""
    teacher_mode: Literal["learner", "engine", "server"]
    """Where teachers run: learner: on the learners' layout, beside the policy; engine: on vLLM engines of their own, which the run starts; server: on vLLM servers that run already. (default: learner)"""
    teacher_server_base_url: Sequence[str] | str
    """Addresses of the teachers' servers, http://HOST:PORT; several with one model share its work. (default: empty)"""
    teacher_num_engines: int
    """Engines of each teacher. (default: 1)"""
    teacher_tensor_parallel_size: int
    """Workers of each of these engines. (default: 1)"""
    teacher_gpu_memory_utilization: float
    """Share of a GPU's memory that such an engine may use; on a GPU that several share, their shares add up to at most 1. (default: 0.9)"""
    teacher_prompt_template: str | None
    """What a teacher reads in place of the last message of the user: a text with {prompt} and any of {answer} (a right answer of the group), {feedback} (of a reward function or an environment) and columns of the row, {solution}; the completion's tokens stay the same. none: what the policy read. (default: none)"""
    teacher_update_rate: float
    """Of the teacher self: below 1 it is an average of the policies so far, average <- rate x policy + (1 - rate) x average after every step. (default: 1.0)"""
    teacher_temperature: float
    """Teachers' logits are divided by this; a server's cannot be. (default: 1.0)"""
    distillation_coef: float
    """Weight of what is learned from teachers. (default: 1.0)"""
    distillation_only: bool
    """Learn from teachers alone: rewards are measured and not trained on. (default: false)"""
    distillation_loss: Literal["sampled", "forward_kl", "reverse_kl", "jsd"]
    """sampled: the advantage of each sampled token gains distillation_coef x (teacher's - policy's log-probability); the others are added to the loss, over the teacher's likeliest tokens: KL(teacher, policy), KL(policy, teacher), or the Jensen-Shannon divergence of GKD. (default: sampled)"""
    distillation_topk: int
    """The teacher's likeliest tokens that are compared, beside the sampled one; all others count as one token. (default: 16)"""
    learning_rate: float
    """Peak learning rate of AdamW. (default: 2e-05)"""
    lr_scheduler_type: Literal["linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "polynomial", "constant", "constant_with_warmup"]
    """How the rate changes after the warm-up, over all optimizer steps; linear and cosine end at min_lr. (default: linear)"""
    min_lr: float
    """Learning rate at the end of a schedule that falls; with polynomial 0 means 1e-7. (default: 0.0)"""
    warm_up_steps: int
    """Optimizer steps of linear warm-up; used when warmup_ratio is 0. (default: 0)"""
    warmup_ratio: float
    """Share of all optimizer steps used for warm-up, rounded down to whole steps as in Open Instruct; transformers rounds up. (default: 0.0)"""
    weight_decay: float
    """AdamW's weight decay. (default: 0.0)"""
    set_weight_decay_on_bias_and_norm: bool
    """Also decay biases and norms. (Open Instruct's flag of this name does the opposite.) (default: false)"""
    max_grad_norm: float
    """Global norm to which gradients are clipped; 0: no clipping. (default: 1.0)"""
    adam_beta1: float
    """AdamW's first decay rate. (default: 0.9)"""
    adam_beta2: float
    """AdamW's second decay rate. (default: 0.999)"""
    adam_epsilon: float
    """AdamW's epsilon. (default: 1e-08)"""
    num_learners_per_node: Sequence[int]
    """Learner ranks on each node, checked against those that torchrun started; empty: not checked. (default: empty)"""
    tensor_model_parallel_size: int
    """Ranks that share each layer's matrices. (default: 1)"""
    pipeline_model_parallel_size: int
    """Pipeline stages that the layers are divided into. (default: 1)"""
    context_parallel_size: int
    """Ranks that share each sequence. (default: 1)"""
    cp_comm_type: Literal["all_gather", "a2a"]
    """How context-parallel ranks attend to each other's tokens: all_gather gathers keys and values, a2a exchanges sequence for heads (Ulysses) and needs a multiple of context_parallel_size heads per tensor rank. (default: all_gather)"""
    expert_model_parallel_size: int
    """Ranks of a pipeline stage that share the experts of a mixture-of-experts model. (default: 1)"""
    moe_token_dispatcher_type: Literal["alltoall", "deepep", "hybridep"]
    """How tokens reach the ranks of their experts: alltoall sends a copy for each expert; deepep and hybridep send one to each rank, or node, in bfloat16 between GPUs, by the package DeepEP (deep_ep) or its branch HybridEP. They have not run on GPUs here. (default: alltoall)"""
    virtual_pipeline_model_parallel_size: int
    """Chunks of layers per stage, interleaved: smaller bubbles, more communication. (default: 1)"""
    num_layers_in_first_pipeline_stage: int | None
    """Layers in the first stage; none: as many as in the others. (default: none)"""
    num_layers_in_last_pipeline_stage: int | None
    """Layers in the last stage; none: as many as in the others. (default: none)"""
    sequence_parallel: bool | Literal["auto"]
    """Megatron's sequence parallelism: split activations between layers across the tensor ranks; auto: if there are several. (default: auto)"""
    zero_stage: Literal[0, 1, 2, 3]
    """State that is sharded over the data-parallel ranks, as in DeepSpeed: 0 nothing, 1 the optimizer's states (Megatron's distributed optimizer), 2 also gradients, 3 also parameters (both Megatron-FSDP). (default: 1)"""
    fsdp_shard_degree: int | None
    """With zero_stage=3: consecutive ranks that shard each parameter, replicated over the others (HSDP); none: all ranks. (default: none)"""
    optimizer_cpu_offload: bool
    """Keep the optimizer's states in host memory and update them there; needs zero_stage=1. (default: false)"""
    optimizer_offload_fraction: float
    """Share of the optimizer's states that is offloaded. (default: 1.0)"""
    use_precision_aware_optimizer: bool
    """Keep Adam's moments in exp_avg_dtype and exp_avg_sq_dtype; needs Transformer Engine. (default: false)"""
    exp_avg_dtype: Literal["float32", "float16", "bfloat16"]
    """Type of Adam's first moment with use_precision_aware_optimizer. (default: float32)"""
    exp_avg_sq_dtype: Literal["float32", "float16", "bfloat16"]
    """Type of Adam's second moment with use_precision_aware_optimizer. (default: float32)"""
    transformer_impl: Literal["auto", "local", "transformer_engine"]
    """Source of a layer's matrix products and norms: Megatron's own (local) or Transformer Engine's, which need CUDA; auto: Transformer Engine's where it is installed and learners have GPUs. Weights and checkpoints do not depend on it. (default: auto)"""
    fused_layers: bool | Literal["auto"]
    """Compute norms, SwiGLU and rotary embeddings by the Triton kernels of Liger (liger-kernel); auto: where it is installed and learners have GPUs; false: by torch's own and compiled ones. It has not run on GPUs here. (default: auto)"""
    fp8: Literal["none", "hybrid", "e4m3"]
    """8-bit matrix products of attention's projections, MLPs and experts, by Transformer Engine: hybrid rounds weights and activations to e4m3 and gradients to e5m2, e4m3 all of them. Attention itself, routers and the LM head keep model_dtype. It has not run on GPUs here. (default: none)"""
    fp8_recipe: Literal["tensorwise", "blockwise", "mxfp8"]
    """Numbers that share a scale with fp8: a tensor, blocks of 128 (Hopper or newer), or 32 (Blackwell). All are of the present values. (default: tensorwise)"""
    tp_comm_overlap: bool
    """Send between tensor-parallel ranks, by Transformer Engine's userbuffers, while a product is computed. They have one size, so every pack is padded to pack_length. Needs sequence parallelism, and tensor ranks within a node; it has not run on GPUs here. (default: false)"""
    recompute_granularity: Literal["none", "selective", "full"]
    """Activations that the backward pass recomputes: none, those of recompute_modules (selective), or whole layers (full). (default: none)"""
    recompute_modules: Sequence[str] | str
    """Modules to recompute with recompute_granularity=selective: core_attn, mlp, moe. (default: core_attn mlp)"""
    activation_offloading: bool
    """Activations wait for the backward pass in page-locked host memory, except those of a chunk's last layer: copied while the next layer computes, and back before they are needed. It has not run on GPUs here. (default: false)"""
    routing_replay: Literal["auto", "none", "learner", "rollout"]
    """Experts of a token in training: rollout: those that the engine chose when it sampled (R3); learner: those that were chosen when the policy scored the batch before its first update; none: the router's choice in each pass; auto: rollout for mixtures of experts if engines say what they chose, else none. (default: auto)"""
    pack_length: int
    """Maximum tokens of a pack, the unit of a micro-batch. (default: 512)"""
    logits_chunk: int | Literal["auto"]
    """Columns of the LM head to compute at a time; 0: all at once; auto: 0 if the logits fit into memory, else 16384. (default: auto)"""
    shared_prompt_packing: bool | Literal["auto"]
    """Pack a group as one prompt with branches instead of repeating the prompt; auto: where that is less work. On GPUs documents with branches take FlexAttention in place of flash attention. Not with context_parallel_size above 1. (default: auto)"""
    vllm_num_engines: int
    """Number of vLLM engines. (default: 1)"""
    vllm_tensor_parallel_size: int
    """Workers of each engine that cut its weights among them. (default: 1)"""
    vllm_enable_expert_parallel: bool
    """Workers of an engine share out the experts of a mixture, each whole; false: every worker has a part of every expert. (default: false)"""
    vllm_data_parallel_size: int
    """With vllm_enable_expert_parallel: copies of an engine's attention, of vllm_tensor_parallel_size workers each and with completions of their own; all workers together share out the experts. Without it a copy of the model is an engine of its own: this many times vllm_num_engines. (default: 1)"""
    vllm_mode: Literal["ray", "server", "colocate"]
    """Where engines come from: ray: the run starts them, on devices of their own; colocate: it starts them on the learners' GPUs, a worker on each; server: they are vLLM servers that run already. (default: ray)"""
    vllm_enable_sleep_mode: bool
    """With vllm_mode=colocate: learners and engines take turns, and only those whose turn it is have their weights and states in the device's memory; false: all is there all the time. (default: false)"""
    vllm_gpu_memory_utilization: float
    """Share of a GPU's memory that an engine may use; ignored on CPU. (default: 0.9)"""
    vllm_kv_cache_mb: int
    """KV cache of an engine's worker in MiB on CPU, and on GPU with vllm_mode=colocate; otherwise vllm_gpu_memory_utilization decides. (default: 64)"""
    vllm_kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head"]
    """Type of the engines' keys and values: auto: model_dtype; fp8 (fp8_e4m3) and fp8_e5m2: rounded to 8 bits without a scale; fp8_per_token_head: on GPUs, with a scale for each token and head. All but auto need a correction, use_rho_correction. (default: auto)"""
    vllm_max_num_seqs: int
    """Completions that an engine generates at once, each of the copies of vllm_data_parallel_size. (default: 256)"""
    vllm_enforce_eager: bool
    """Run without CUDA graphs; always on CPU. (default: false)"""
    vllm_enable_prefix_caching: bool
    """Read a prompt once for all samples of its group, in whole blocks of the KV cache (32 tokens on a CPU). Models with gated delta nets have no such cache on a CPU. (default: true)"""
    vllm_speculative_method: Literal["none", "ngram", "suffix", "mtp"]
    """What engines draft tokens from, which the model then judges several at a time: ngram: earlier occurrences of the last tokens in prompt and answer; suffix: the same in earlier answers too, as many tokens as are likely; mtp: heads of the model's own, as its checkpoint has them, which are not trained. The distribution and its log-probabilities stay. (default: none)"""
    vllm_num_speculative_tokens: int
    """Tokens that are drafted at a time; with suffix the most. (default: 3)"""
    vllm_extra_args: Mapping[str, object] | str
    """Further arguments of vLLM's AsyncEngineArgs, as a JSON object, for example {"max_num_batched_tokens": 8192}; untested ones may change the log-probabilities, which vllm_vs_local_logprob_diff shows. (default: {})"""
    vllm_server_base_url: Sequence[str] | str
    """Addresses of the servers, http://HOST:PORT, each of which is an engine; with vllm_mode=server. (default: empty)"""
    vllm_server_timeout: float
    """Seconds that a server may take to answer at the start of the run. (default: 240.0)"""
    vllm_server_allow_public: bool
    """Also connect to servers at public addresses, where anyone may control them unless a proxy stands before them; also to teachers'. (default: false)"""
    ray_address: str | None
    """HOST:PORT of a Ray cluster to join, of which rank 0's machine must be a node, without the GPUs of learners; none: start one on this machine, on the loopback interface. (default: none)"""
    engine_start_timeout: int
    """Seconds that an engine may take to start. (default: 600)"""
    engine_heartbeat_timeout: int
    """Seconds without an answer after which an engine counts as dead; after half of them it is given no more groups. (default: 30)"""
    engine_max_restarts: int
    """How many times an engine that has died is started again within 20 weight syncs, before it is given up. (default: 3)"""
    min_engines: int
    """A run with fewer engines waits for those that are starting; without any that could start it ends. (default: 1)"""
    weight_sync_bucket_mb: int
    """MiB of weights that travel to an engine's worker at once; it holds as many again, as do together the ranks that send to it. (default: 256)"""
    weight_sync_steps: int
    """Training steps between weight syncs; engines also receive the weights before each evaluation. Above 1 steps train on tokens of weights that are up to this many steps less one older, which adds to async_steps and needs the same correction. (default: 1)"""
    weight_sync_timeout: int
    """Seconds that one weight sync may take; an engine that has not answered by then counts as dead. (default: 120)"""
    weight_sync_check_every: int
    """Steps between comparisons of the weights in trainer and engines by digest, at the next weight sync; 0: only before the first step. (default: 50)"""
    max_initial_mismatch: float | Literal["auto"] | None
    """Mean difference between the log-probabilities of learner and engines, in nats, that ends the run before its first update; auto: ten times what rounding explains (1e-3 in float32, 1 in bfloat16); none: no limit. What rounding does not explain is a warning. (default: auto)"""
    save_freq: int
    """Steps between exports of the model in Hugging Face format; 0 or less: none before the end. (default: 200)"""
    save_final: bool
    """Export the trained model at the end. (default: true)"""
    load_best_model_at_end: bool
    """Keep track of the export with the best evaluation: hf/best leads to it, and the run's end names it as the model. Every export must be evaluated: save_freq a multiple of local_eval_every. (default: false)"""
    metric_for_best_model: str
    """The metric of an evaluation whose greatest value load_best_model_at_end takes for the best, or after a minus sign, as in -eval/sequence_lengths, whose least; the earlier of equal ones is the best. (default: eval/scores)"""
    checkpoint_state_freq: int
    """Steps between checkpoints of the training state, which a run can resume from in any layout; 0 or less: none. (default: -1)"""
    save_every_minutes: float | None
    """Minutes after which the next training step ends with a checkpoint of the training state, beside those of checkpoint_state_freq; 0: none by time. Without either, a run on 64 GPUs or more saves as often as its size asks for (docs/checkpoints.md), and others do not. (default: none)"""
    checkpoint_state_dir: str | None
    """Folder of the training states, or a URL such as s3://bucket/run or gs://bucket/run; none: output_dir/checkpoints. (default: none)"""
    keep_last_n_checkpoints: int
    """Number of newest training states to keep; -1: all. (default: 3)"""
    checkpoint_async: bool
    """Write training states in the background, from a copy in host memory: 12 bytes a weight on all ranks together, page-locked and kept for the next one on GPUs, elsewhere until they are written. (default: false)"""
    checkpoint_local_dir: str | None
    """Folder on a disk of each node, $VARIABLES included: states that are due by time stay there and on the disk of another node, those of checkpoint_state_freq go to storage as well. A run goes on from the newest of both that is complete. (default: none)"""
    resume: str
    """auto: continue from the newest complete state of this run, if there is one, and refuse to start when that is damaged; intact: continue from the newest one that is not damaged; never: start afresh; or the path of a state, .../checkpoints/step_N. (default: auto)"""
    model_revision: str | None
    """Branch, tag or commit of a model that is given by its name on the Hub; none: main. (default: none)"""
    tokenizer_revision: str | None
    """The same of the tokenizer; none: main, or model_revision where tokenizer_name_or_path is not given. (default: none)"""
    push_to_hub: bool
    """Upload the trained model, or the best one (load_best_model_at_end), with its model card when the run is over. It needs a token (hf auth login, or HF_TOKEN), without which the run does not start; where a preset has set it, there is a warning. (default: false)"""
    hub_model_id: str | None
    """OWNER/NAME of the repository, or only its name for the owner of the token; none: exp_name__seed. It is made if it is not there. (default: none)"""
    hub_revision: str | None
    """Branch to upload to, which is made if it is not there; none: main. (default: none)"""
    hub_private_repo: bool
    """Whether a repository that the run makes is private; one that exists stays as it is. (default: true)"""
    hub_strategy: Literal["end", "every_save"]
    """end: upload once; every_save: also each export of save_freq, in the background, unless the previous upload is still running. (default: end)"""
    report_to: Sequence[str] | str
    """Where metrics, settings and samples go beside metrics.jsonl: tensorboard, wandb (Weights & Biases; WANDB_MODE=offline needs no account) and trackio, or several of them; all: those that are installed and set up; none: nowhere. (default: tensorboard)"""
    run_name: str | None
    """Name of the run in wandb and trackio; none: exp_name__seed. (default: none)"""
    wandb_project: str | None
    """Project of the run in wandb and trackio; none: WANDB_PROJECT of the environment, or mgrpo. (default: none)"""
    wandb_entity: str | None
    """Account or team that owns the project in wandb; none: WANDB_ENTITY, or the default of the account that is logged in. (default: none)"""
    wandb_group_name: str | None
    """Group of runs that it belongs to in wandb and trackio; none: WANDB_RUN_GROUP, or no group. (default: none)"""
    log_completions: bool
    """Print the completions of every step with their prompts, rewards and advantages, and send them to the trackers. (default: false)"""
    num_completions_to_print: int | None
    """With log_completions: how many are printed, spread over the step; none: all. (default: none)"""
    log_unique_prompts: bool
    """With log_completions: only one completion of each prompt. (default: false)"""
