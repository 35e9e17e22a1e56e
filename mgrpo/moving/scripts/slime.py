"""slime's commands: flags of Megatron and its own, and the joint meaning of several of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mgrpo.config.schema import Config
from mgrpo.moving.command_words import words
from mgrpo.moving.scripts.command_config import Given, Read, clip_bounds, config_of, precision_of_moments
from mgrpo.moving.scripts.command_line import arguments_in, unknown_value
from mgrpo.moving.scripts.shell_lexer import UNKNOWN, known, line_of
from mgrpo.moving.scripts.verl import SCHEDULES

VERIFIERS = {
    "math": "math",
    "dapo": "math",
    "deepscaler": "math",
    "f1": "string_f1",
    "ifbench": "ifeval",
}
"""The verifier here for a rm_type."""
ESTIMATORS: dict[str, dict[str, str]] = {
    "grpo": {},
    "gspo": {"ratio_level": "sequence"},
    "cispo": {"policy_loss": "cispo"},
    "reinforce_plus_plus": {"advantage_normalization_type": "reinforce_plus_plus"},
    "reinforce_plus_plus_baseline": {"advantage_normalization_type": "reinforce_plus_plus_baseline"},
}
"""The settings of each advantage_estimator."""
ARCHITECTURE = "${MODEL_ARGS[@]}"
"""The list that its scripts take from a file of the model's architecture, which is read from config.json here."""
MOST_PROMPT_TOKENS = 2048
"""slime limits prompts only on request; a run here needs a limit."""


def read(settings: str | Path | Sequence[str] | Mapping[str, object], fields: Mapping[str, object]) -> Config:
    """Config of a command line or script, its words, or a mapping of names; `fields` on top.

    Raises:
        ConfigError: everything in them that cannot be done here.
    """
    return config_of("slime", texts_of(settings), fields, combine=combine)


def texts_of(settings: str | Path | Sequence[str] | Mapping[str, object]) -> Read:
    """The text of each name, with underscores; of a name given twice the last one."""
    if isinstance(settings, Mapping):
        return Read(
            {
                str(name).replace("-", "_"): tuple(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
                for name, value in settings.items()
                if value is not None
            }
        )
    read = Read()
    found: dict[str, list[str]] = {}
    name = ""
    for word in arguments_in(settings, trainer="train", is_flag=lambda word: word.startswith("--")):
        if known(word) == ARCHITECTURE:
            continue
        if word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = [text] if equals else []
            read.lines[name] = line_of(word)
        elif name:
            found[name].append(word)
        elif UNKNOWN in word:
            read.problems.append(unknown_value(known(word), word))
        else:
            read.problems.append(f"{word} stands before every flag; slime's arguments begin with --")
    read.texts |= {
        name: "true" if not texts else texts[0] if len(texts) == 1 else tuple(texts) for name, texts in found.items()
    }
    return read


def combine(given: Given) -> None:
    """Set the values that several names decide together, and refuse names that contradict each other."""
    _gpus(given)
    _batch(given)
    _loss(given)
    _teacher(given)
    precision_of_moments(given, "use_precision_aware_optimizer")
    values = given.values
    values["save_freq"] = -1
    values["resume"] = "auto" if given.has("load") or given.has("save") else "never"
    if given.is_on("use_wandb"):
        given.trackers(["wandb"], project="wandb_project")
        values |= {
            "wandb_entity": given.text("wandb_team") or None,
            "wandb_group_name": given.text("wandb_group") or None,
        }
    values.setdefault("checkpoint_state_freq", -1)
    if given.whole("checkpoint_state_freq", -1) < 1:
        values.pop("checkpoint_state_dir", None)
    schedule = given.choice("lr_decay_style", SCHEDULES)
    is_warmed = {"warm_up_steps", "warmup_ratio"} & values.keys()
    values["lr_scheduler_type"] = "constant" if schedule == SCHEDULES["constant"] and not is_warmed else schedule
    if schedule != SCHEDULES["constant"]:
        values["min_lr"] = given.number("min_lr")
        if given.has("lr_decay_iters"):
            given.refuse(
                words("slime")["lr_decay_iters"], given.text("lr_decay_iters"), "the schedule is as long as the run"
            )
    if not {"max_prompt_token_length"} & (values.keys() | given.fields.keys()):
        values["max_prompt_token_length"] = MOST_PROMPT_TOKENS
        given.notes.append(
            f"max_prompt_token_length is {MOST_PROMPT_TOKENS}: slime has no limit, and a run here needs one"
        )
    if given.has("rm_type"):
        kind = given.text("rm_type")
        verifier = VERIFIERS.get(kind)
        if verifier is None and "reward_funcs" not in given.fields:
            given.problems.append(
                f"rm_type={kind} is refused{given.at('rm_type')}: no verifier is of that name; give reward_funcs, or name a verifier of docs/rewards.md "
                "in each row's column dataset"
            )
        elif verifier:
            given.notes.append(
                f'rm_type={kind}: give each row the column "dataset": "{verifier}", which names its verifier'
            )


def _gpus(given: Given) -> None:
    values = given.values
    nodes, gpus = given.count("actor_num_nodes"), given.count("actor_num_gpus_per_node")
    tensor = given.count("rollout_num_gpus_per_engine")
    if nodes is None or gpus is None or tensor is None:
        return
    shares = given.is_on("colocate")
    values |= {"num_learners_per_node": [gpus] * nodes, "vllm_mode": "colocate" if shares else "ray"}
    if shares:
        values["vllm_enable_sleep_mode"] = True
    asked = given.count("rollout_num_gpus")
    if shares and asked not in (None, nodes * gpus):
        given.problems.append(
            f"rollout_num_gpus={asked} is refused{given.at('rollout_num_gpus')}: with colocate engines have all {nodes * gpus} GPUs"
        )
    num = nodes * gpus if shares else asked
    if num is None:
        given.problems.append("rollout_num_gpus is not given: how many GPUs serve engines? give it, or --colocate")
        return
    whole = "actor_num_nodes x actor_num_gpus_per_node" if shares else "rollout_num_gpus"
    values["vllm_num_engines"] = given.part(whole, "rollout_num_gpus_per_engine", num, tensor)


def _batch(given: Given) -> None:
    values = given.values
    prompts, samples = given.count("rollout_batch_size"), given.count("n_samples_per_prompt")
    if prompts is None or samples is None:
        given.problems.append("rollout_batch_size is not given: the prompts of a step")
        return
    whole = given.count("global_batch_size")
    if given.has("num_steps_per_rollout"):
        steps = values["num_mini_batches"] = given.count("num_steps_per_rollout")
        if whole and steps and whole != prompts * samples // steps:
            given.problems.append(
                f"global_batch_size={whole} differs from {prompts * samples} completions / num_steps_per_rollout={steps}"
                f"{given.at('global_batch_size')}; give one of them"
            )
    else:
        values["num_mini_batches"] = given.part(
            "rollout_batch_size x n_samples_per_prompt", "global_batch_size", prompts * samples, whole
        )
    if not given.has("num_rollout") and not given.has("num_epoch"):
        given.problems.append("neither num_rollout nor num_epoch is given: the length of the run")
    if not given.has("global_batch_size") and not given.has("num_steps_per_rollout"):
        given.problems.append(
            "neither global_batch_size nor num_steps_per_rollout is given: the optimizer steps of a batch"
        )
    if not given.has("rollout_max_response_len") and "response_length" not in given.fields:
        given.problems.append("rollout_max_response_len is not given: slime has no limit, and a run here needs one")
    if steps := given.count("num_rollout"):
        values["total_episodes"] = steps * prompts * samples
        values.pop("num_train_epochs", None)
    ranks = given.whole("context_parallel_size", 1)
    longest = given.whole("max_prompt_token_length", MOST_PROMPT_TOKENS) + given.whole("response_length", 0)
    if (context := given.count("rollout_max_context_len")) and context < longest:
        given.refuse(
            words("slime")["rollout_max_context_len"],
            str(context),
            f"prompt and response have limits of their own, {longest} tokens together",
        )
    values["pack_length"] = max(longest, (given.count("max_tokens_per_gpu") or 0) * ranks)
    if over := given.count("over_sampling_batch_size"):
        if over < prompts:
            given.problems.append(
                f"over_sampling_batch_size={over} must be at least rollout_batch_size={prompts}{given.at('over_sampling_batch_size')}"
            )
        values["active_sampling_oversample"] = max(over / prompts - 1, 0.0)
    if given.has("dynamic_sampling_filter_path"):
        values["active_sampling"] = True
        if not given.text("dynamic_sampling_filter_path").endswith("check_reward_nonzero_std"):
            path = given.text("dynamic_sampling_filter_path")
            given.problems.append(
                f"dynamic_sampling_filter_path={path} is refused{given.at('dynamic_sampling_filter_path')}: groups are filtered by their rewards alone"
            )


def _loss(given: Given) -> None:
    values = given.values
    values["beta"] = given.text("kl_loss_coef") if given.is_on("use_kl_loss") else 0.0
    losses = given.choice("advantage_estimator", ESTIMATORS)
    _advantages(given, is_by_batch=isinstance(losses, dict) and "advantage_normalization_type" in losses)
    values |= losses if isinstance(losses, dict) else {}
    if values.get("policy_loss") == "cispo":
        values.pop("dual_clip", None)
    clip_bounds(given, "eps_clip", "eps_clip_high" if given.has("eps_clip_high") else "eps_clip")
    is_by_token = given.is_on("calculate_per_token_loss")
    values["aggregation"] = "token" if is_by_token else "seq_mean"
    if given.number("entropy_coef") and not is_by_token:
        given.refuse_entropy(words("slime")["entropy_coef"], "calculate_per_token_loss off")
    if values.get("ratio_level") == "sequence" and given.is_on("use_kl_loss") and given.is_on("use_unbiased_kl"):
        given.refuse(
            words("slime")["use_unbiased_kl"],
            given.text("use_unbiased_kl"),
            "with advantage_estimator=gspo the KL term is multiplied by the ratio of each token there, and here by the sequence's",
        )
    values["filter_zero_std_samples"] = values.get("active_sampling", False)
    if given.is_on("use_tis"):
        values["rho_clamp_upper_bound"], values["rho_clamp_lower_bound"] = (
            given.text("tis_clip"),
            given.text("tis_clip_low"),
        )


def _teacher(given: Given) -> None:
    values = given.values
    if not given.is_on("use_opd"):
        given.leave_out(["opd_type", "opd_kl_coef", "opd_teacher_load"], "use_opd is off")
        for name in ("distillation_coef", "teacher_model_name_or_path"):
            values.pop(name, None)
    elif given.text("opd_type") == "megatron":
        values["teacher_mode"] = "learner"
    else:
        word = words("slime")["opd_type"]
        given.refuse(word, given.text("opd_type") or "nothing", word.sentence)


def _advantages(given: Given, *, is_by_batch: bool) -> None:
    """Set the normalisation of advantages; over the batch slime divides by sqrt(variance + 1e-8).

    Args:
        is_by_batch: True for an estimator that slime runs with normalize_advantages only.
    """
    values, word = given.values, words("slime")["normalize_advantages"]
    centered, whitened = given.is_on("disable_grpo_std_normalization"), given.is_on("normalize_advantages")
    values["advantage_normalization_type"] = "centered" if centered else "standard"
    values["advantage_std"] = "sample" if whitened else "verl"
    if is_by_batch and not whitened:
        estimator = given.text("advantage_estimator")
        given.problems.append(
            f"advantage_estimator={estimator} needs normalize_advantages, as in slime; add it{given.at('advantage_estimator')}"
        )
    elif whitened and centered:
        values["advantage_normalization_type"] = "reinforce_plus_plus_baseline"
    elif whitened and not is_by_batch:
        given.refuse(
            word,
            given.text(word.name),
            "rewards that were divided by the deviation of their group are not normalised again over the batch; add "
            "disable_grpo_std_normalization, which makes it reinforce_plus_plus_baseline",
        )
