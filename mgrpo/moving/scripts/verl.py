"""verl's commands: words a.b.c=value, as Hydra reads them, or its YAML files; and the joint meaning of several of its names."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from mgrpo.config.errors import ConfigError
from mgrpo.config.schema import Config
from mgrpo.moving.command_words import find, words
from mgrpo.moving.scripts.command_config import Given, Read, Text, config_of, precision_of_moments
from mgrpo.moving.scripts.command_line import YAML, arguments_in, file_of, unknown_value
from mgrpo.moving.scripts.shell_lexer import UNKNOWN, known, line_of
from mgrpo.moving.scripts.verl_loss import ACTOR, set_loss

ROLLOUT, MODEL = "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
TEMPLATE_KWARGS = "data.apply_chat_template_kwargs"
STRATEGIES: dict[str, str] = {"": "fsdp", "null": "fsdp", "fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"}
SCHEDULES: dict[str, str] = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


def read(settings: str | Path | Sequence[str] | Mapping[str, object], fields: Mapping[str, object]) -> Config:
    """Config of a command line or script, its words, a YAML file or a mapping, nested or with dots in its names; `fields` on top.

    Raises:
        ConfigError: everything in them that cannot be done here.
    """
    read = texts_of(settings)
    _resolve_references(read)
    _join_template_kwargs(read)
    return config_of("verl", read, fields, combine=combine)


def texts_of(settings: str | Path | Sequence[str] | Mapping[str, object]) -> Read:
    """The text of each name."""
    read, file = Read(), file_of(settings)
    if isinstance(settings, Mapping):
        read.texts = _flat(settings)
    elif file is not None and file.suffix in YAML:
        try:
            root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        except (OSError, ValueError, yaml.YAMLError) as err:
            raise ConfigError([f"cannot read the YAML file {settings}: {err}"]) from None
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError([f"the YAML file {settings} must hold `name: value` lines"])
        _read_node(root, "", read)
    else:
        given = arguments_in(settings, trainer="main_", is_flag=lambda word: "=" in word or word.startswith("-"))
        _read_words(given, read)
    return read


def _read_words(given: Sequence[str], read: Read) -> None:
    """Overrides as Hydra reads them, and the name of the file that they override."""
    rest = iter(given)
    for word in rest:
        name, equals, text = word.partition("=")
        at = f" (line {line_of(word)})" if line_of(word) else ""
        if UNKNOWN in name:
            read.problems.append(unknown_value(known(word), word))
        elif name in ("--config-name", "--config-path", "-cn", "-cp"):
            value = text if equals else next(rest, "")
            if name in ("--config-name", "-cn"):
                _read_base(value, at, read)
            elif value.strip("./") != "config":
                read.problems.append(
                    f"{name}={known(value)} is refused{at}: files in other folders are not read; give their values"
                )
        elif name.startswith("-"):
            read.problems.append(f"{word} is refused{at}: of Hydra's options only --config-name is read")
        elif name.startswith("~") or not equals:
            read.problems.append(f"{word} is refused{at}: only name=value is read; leave it out")
        else:
            name = name.lstrip("+")
            try:
                values = _flat({name: _value(text)})
            except ValueError as err:
                read.problems.append(f"{name}={text} is refused{at}: {err}")
                continue
            read.texts |= values
            read.lines |= dict.fromkeys(values, line_of(word))


def _read_base(name: str, at: str, read: Read) -> None:
    """The file with the defaults, of which verl's own are known."""
    base = name.removesuffix(".yaml")
    if base == "ppo_megatron_trainer":
        read.texts.setdefault(f"{ACTOR}strategy", "megatron")
    elif base != "ppo_trainer":
        read.problems.append(
            f"the file {known(name)} is refused{at}: only ppo_trainer and ppo_megatron_trainer are known; give the values that it holds"
        )


def _read_node(node: yaml.MappingNode, prefix: str, read: Read) -> None:
    """The texts in a file, nested or with dots in its names."""
    for key, value in node.value:
        name, line = f"{prefix}{key.value}", key.start_mark.line + 1
        if key.value == "_target_":
            continue
        if name == "defaults" and isinstance(value, yaml.SequenceNode):
            for item in value.value:
                at = f" (line {item.start_mark.line + 1})"
                if item.value != "_self_":
                    _read_base(item.value if isinstance(item, yaml.ScalarNode) else "of a group", at, read)
            continue
        read.lines[name] = line
        if isinstance(value, yaml.MappingNode):
            _read_node(value, f"{name}.", read)
        elif isinstance(value, yaml.SequenceNode):
            if all(isinstance(item, yaml.ScalarNode) for item in value.value):
                read.texts[name] = tuple(str(item.value) for item in value.value)
            elif not _is_idle(name):
                read.problems.append(f"{name} is refused (line {line}): it is a list of lists or mappings")
        else:
            read.texts[name] = "null" if value.tag == "tag:yaml.org,2002:null" else str(value.value)


def _is_idle(name: str) -> bool:
    word = find("verl", name)
    return word is not None and word.status == "no effect"


REFERENCE = re.compile(r"\$\{(?:oc\.(?P<how>select|env):)?(?P<name>[\w.]+)(?:,(?P<default>[^{}]*))?\}")
DEEPEST = 8
"""Depth of references within the targets of references."""


def _resolve_references(read: Read) -> None:
    """Texts in place of references to other names; a value that is missing (`???`) counts as not given."""
    for name, text in list(read.texts.items()):
        if text == "???":
            del read.texts[name]
        elif isinstance(text, str) and "${" in text and UNKNOWN not in text:
            try:
                read.texts[name] = _resolved(text, name, read.texts, DEEPEST)
            except LookupError:
                del read.texts[name]
                if not _is_idle(name):
                    at = f" (line {read.lines[name]})" if read.lines.get(name) else ""
                    read.problems.append(
                        f"{name}={text} is refused{at}: it leads to no value that is given; write it out"
                    )


def _resolved(text: str, name: str, texts: Mapping[str, Text], depth: int) -> Text:
    def value(found: re.Match[str]) -> Text:
        if found["how"] == "env":
            default = found["default"]
            return os.environ[found["name"]] if default is None else os.environ.get(found["name"], default)
        target = found["name"]
        if target.startswith("."):
            up = len(target) - len(target.lstrip("."))
            target = ".".join([*name.split(".")[:-up], target.lstrip(".")])
        own = texts.get(target)
        if own is None and found["how"] == "select":
            own = "null" if found["default"] is None else found["default"].strip(" \"'")
        if own is None and target in words("verl") and words("verl")[target].default:
            own = words("verl")[target].default
        if own is None or not depth:
            raise LookupError
        return _resolved(own, target, texts, depth - 1) if isinstance(own, str) and "${" in own else own

    if whole := REFERENCE.fullmatch(text):
        return value(whole)
    parts = REFERENCE.sub(lambda found: str(value(found)), text)
    if "${" in parts:
        raise LookupError
    return parts


def _join_template_kwargs(read: Read) -> None:
    """The variables of the chat template, which are separate names there, as one JSON object."""
    prefix = f"{TEMPLATE_KWARGS}."
    variables: dict[str, object] = {}
    for name in [name for name in read.texts if name.startswith(prefix)]:
        text = read.texts.pop(name)
        if UNKNOWN in "".join(text):
            read.problems.append(unknown_value(f"{name}={known(''.join(text))}", "".join(text)))
        else:
            variables[name.removeprefix(prefix)] = yaml.safe_load(text) if isinstance(text, str) else list(text)
    if variables:
        read.texts[TEMPLATE_KWARGS] = json.dumps(variables)


def _value(text: str) -> object:
    """A value as Hydra writes it: text, or a list or a mapping of texts.

    Raises:
        ValueError: several values to choose from, or a form that is not read.
    """
    if UNKNOWN in text:
        return text
    if text[:1] not in ("[", "{", "'", '"'):
        if "," in re.sub(r"\$\{[^}]*\}", "", text) or re.fullmatch(r"[a-z]+\(.*\)", text):
            raise ValueError("it is a choice of Hydra's between values; give one, a list in brackets")
        return text
    try:
        value = yaml.load(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError:
        raise ValueError("its brackets or quotes cannot be read") from None
    if any(":" in key and not under for key, under in _pairs(value)):
        raise ValueError("write a blank behind each colon")
    return value


def _pairs(tree: object) -> Iterator[tuple[str, object]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield str(key), value
            yield from _pairs(value)


def _flat(tree: Mapping[str, object], prefix: str = "") -> dict[str, Text]:
    found: dict[str, Text] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= _flat(value, f"{name}.")
        elif isinstance(value, (list, tuple)):
            found[name] = tuple(map(str, value))
        elif key not in ("_target_", "defaults"):
            found[name] = "null" if value is None else str(value)
    return found


def combine(given: Given) -> None:
    """Set the values that several names decide together, and refuse names that contradict each other."""
    _gpus(given)
    _batch(given)
    set_loss(given)
    _optimizer(given)
    precision_of_moments(given, f"{ACTOR}optim.override_optimizer_config.use_precision_aware_optimizer")
    _data(given)
    values = given.values
    if ranks := given.count(f"{MODEL}lora_rank", least=0) or given.count(f"{MODEL}lora.rank", least=0):
        alpha = f"{MODEL}lora.alpha" if given.has(f"{MODEL}lora.alpha") else f"{MODEL}lora_alpha"
        # Megatron-FSDP shards no adapters.
        values |= {"zero_stage": 1, "use_peft": True, "lora_r": ranks, "lora_alpha": given.text(alpha)}
        values["lora_target_modules"] = given.texts.get(f"{MODEL}target_modules", "all-linear")
    greedy = not given.is_on(f"{ROLLOUT}val_kwargs.do_sample")
    values["eval_temperature"] = "0" if greedy else given.text(f"{ROLLOUT}val_kwargs.temperature")
    resume = given.choice("trainer.resume_mode", {"auto": "auto", "disable": "never", "resume_path": "path"})
    if resume == "path" and not given.has("trainer.resume_from_path"):
        given.problems.append(
            f"trainer.resume_mode=resume_path needs trainer.resume_from_path{given.at('trainer.resume_mode')}"
        )
    values["resume"] = given.text("trainer.resume_from_path") if resume == "path" else resume
    values["save_freq"] = -1
    if "trainer.logger" not in given.texts and "report_to" not in given.fields:
        given.notes.append(
            "trainer.logger is not given: wandb, which verl then also writes to, is left out; report_to adds it"
        )
    given.trackers(given.text("trainer.logger").split(), project="trainer.project_name")


def _gpus(given: Given) -> None:
    """Learners and engines share all GPUs."""
    values = given.values
    gpus, nodes = given.count("trainer.n_gpus_per_node"), given.count("trainer.nnodes")
    sizes = f"{ROLLOUT}tensor_model_parallel_size", f"{ROLLOUT}data_parallel_size"
    tensor, copies = map(given.count, sizes)
    if gpus is None or nodes is None or tensor is None or copies is None:
        return
    values |= {"num_learners_per_node": [gpus] * nodes, "vllm_mode": "colocate"}
    values |= {"vllm_tensor_parallel_size": tensor, "vllm_data_parallel_size": copies}
    workers = " x ".join(sizes if copies > 1 else sizes[:1])
    expert = given.count(f"{ROLLOUT}expert_parallel_size") or 1
    values["vllm_enable_expert_parallel"] = expert > 1
    if expert not in (1, tensor * copies):
        given.refuse(
            words("verl")[f"{ROLLOUT}expert_parallel_size"],
            str(expert),
            f"an engine's {workers}={tensor * copies} workers share out the experts; give 1 or {tensor * copies}",
        )
    values["vllm_enable_sleep_mode"] = given.is_on(f"{ROLLOUT}free_cache_engine")
    values["vllm_num_engines"] = given.part("trainer.n_gpus_per_node x nnodes", workers, gpus * nodes, tensor * copies)
    strategy = given.choice(f"{ACTOR}strategy", STRATEGIES)
    is_megatron = strategy == "megatron" or any(".actor.megatron." in name for name in given.texts)
    values["zero_stage"] = 1 if is_megatron else 3
    if not is_megatron and f"{MODEL}enable_gradient_checkpointing" not in given.texts:
        values["recompute_granularity"] = "full"
    size = given.count(f"{ACTOR}fsdp_config.fsdp_size", least=-1)
    if size and size > 1:
        values["fsdp_shard_degree"] = size
    if (ulysses := given.count(f"{ACTOR}ulysses_sequence_parallel_size")) and ulysses > 1:
        values |= {"context_parallel_size": ulysses, "cp_comm_type": "a2a"}


def _batch(given: Given) -> None:
    values = given.values
    prompts, samples = given.count("data.train_batch_size"), given.count(f"{ROLLOUT}n")
    values["num_mini_batches"] = given.part(
        "data.train_batch_size", f"{ACTOR}ppo_mini_batch_size", prompts, given.count(f"{ACTOR}ppo_mini_batch_size")
    )
    longest = (given.count("data.max_prompt_length") or 0) + (given.count("data.max_response_length") or 0)
    ranks = given.whole("context_parallel_size", 1)
    tokens = given.count(f"{ACTOR}ppo_max_token_len_per_gpu") if given.is_on(f"{ACTOR}use_dynamic_bsz") else None
    values["pack_length"] = max(longest, (tokens or 0) * ranks)
    steps = given.count("trainer.total_training_steps")
    if steps is not None and prompts and samples:
        values["total_episodes"] = steps * prompts * samples
    else:
        values["num_train_epochs"] = given.text("trainer.total_epochs")


def _optimizer(given: Given) -> None:
    names = [f"{ACTOR}optim.{name}" for name in ("lr_scheduler_type", "warmup_style", "lr_decay_style")]
    schedule = next((name for name in names if given.has(name)), None)
    given.values["lr_scheduler_type"] = given.choice(schedule, SCHEDULES) if schedule else SCHEDULES["constant"]
    if (
        not {"warm_up_steps", "warmup_ratio"} & given.values.keys()
        and given.values["lr_scheduler_type"] == SCHEDULES["constant"]
    ):
        given.values["lr_scheduler_type"] = "constant"
    if schedule and given.values["lr_scheduler_type"] in ("linear", "cosine"):
        share, peak = given.number(f"{ACTOR}optim.min_lr_ratio"), given.number(f"{ACTOR}optim.lr")
        given.values["min_lr"] = share * peak if share and peak else given.number(f"{ACTOR}optim.min_lr")


def _data(given: Given) -> None:
    policies = {"error": "error", "left": "truncate_left"}
    policy = given.choice("data.truncation", policies)
    given.values["overlong_prompt_policy"] = "filter" if given.is_on("data.filter_overlong_prompts") else policy
    for name, whole in (("prompt_length", "data.max_prompt_length"), ("response_length", "data.max_response_length")):
        if given.has(f"{ROLLOUT}{name}") and given.text(f"{ROLLOUT}{name}") != given.text(whole):
            given.refuse(
                words("verl")[f"{ROLLOUT}{name}"],
                given.text(f"{ROLLOUT}{name}"),
                f"{whole} is {given.text(whole)}, the limit",
            )
