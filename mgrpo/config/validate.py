"""Whether a configuration can run: every problem in one list, each a sentence that says how to fix it.

Changes nothing and never raises, whatever the fields hold. Ranges are at the fields, rules in the modules of their sections, and
those of the model in `model_rules`; a rule is judged where all that it reads is sound, see `rules`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mgrpo.config import (
    adapter,
    agent,
    algorithm,
    checkpoint,
    data,
    distillation,
    engine,
    experiment,
    hub,
    loss,
    model,
    optimizer,
    parallel,
    reward,
    rollout,
    tools,
    tracking,
)
from mgrpo.config.annotations import Needs, Rule
from mgrpo.config.fields import flat, in_python, problem_of, settings, shown
from mgrpo.config.model_rules import LEARNER_RULES, MODEL_RULES, longest_sequence
from mgrpo.config.rules import Reading
from mgrpo.config.schema import Config
from mgrpo.layout import Layout

RULES: tuple[Rule, ...] = (
    *experiment.RULES,
    *model.RULES,
    *data.RULES,
    *rollout.RULES,
    *engine.RULES,
    *parallel.RULES,
    *engine.COLOCATION,
    *optimizer.RULES,
    *experiment.PROFILED_STEPS,
    *algorithm.RULES,
    *checkpoint.RULES,
    *rollout.SAMPLING,
    *loss.RULES,
    *algorithm.GROUPS,
    *distillation.RULES,
    *reward.RULES,
    *data.TOKENIZER,
    *rollout.COMPLETIONS,
    *tools.RULES,
    *agent.RULES,
    *adapter.RULES,
    *checkpoint.BEST_MODEL,
    *hub.RULES,
    *tracking.RULES,
    *data.TRAINING_DATA,
    *checkpoint.HELD_OUT_DATA,
    *reward.SOURCES,
    *algorithm.REWARD_FUNCTIONS,
    *parallel.LAYOUT,
    *parallel.LEARNERS,
)
"""In the order in which a user reads their sentences."""
WARNINGS: tuple[Rule, ...] = (
    *data.WARNINGS,
    *rollout.WARNINGS,
    *loss.WARNINGS,
    *distillation.WARNINGS,
    *tools.WARNINGS,
    *agent.WARNINGS,
)
LATER_WARNINGS: tuple[Rule, ...] = (
    *parallel.LAYOUT_WARNINGS,
    *optimizer.RATE_WARNINGS,
    *parallel.EXPERT_WARNINGS,
    *adapter.WARNINGS,
    *optimizer.WARM_UP_WARNINGS,
)
"""Those after the settings that have no effect."""


def problems(
    config: Config,
    *,
    world_size: int,
    hf_config: Mapping[str, Any] | None = None,
    has_dataset: bool = False,
    has_eval_dataset: bool = False,
    num_reward_funcs: int = 0,
) -> list[str]:
    """Everything that prevents this run, one sentence each; problems found while reading come first.

    Args:
        world_size: learner ranks, torchrun's WORLD_SIZE.
        hf_config: the model's config.json; without it the model is not checked.
        has_dataset: the caller passes training data, so `dataset_mixer_list` may be empty.
        has_eval_dataset: the caller passes held-out data.
        num_reward_funcs: reward functions that the caller passes in place of reward_funcs.
    """
    by_field = {name: problem_of(settings()[name], value) for name, value in flat(config).items()}
    unsound = _unsound(config)
    if "reward_funcs" not in unsound:
        num_reward_funcs = num_reward_funcs or len(config.reward.reward_funcs)
    facts = {
        "world_size": world_size,
        "hf_config": hf_config,
        "has_dataset": has_dataset,
        "has_eval_dataset": has_eval_dataset,
        "num_reward_funcs": num_reward_funcs,
    }
    reading = Reading(config, unsound, facts)
    found = [*filter(None, by_field.values()), *reading.find(*RULES)]
    if not unsound and not reading.find(*parallel.LAYOUT):
        found += reading.find(_derived)
    if hf_config is not None and reading.has("layout", "max_model_length", "vllm_tensor_parallel_size"):
        found += reading.find(*MODEL_RULES, *distillation.MODEL)
    if hf_config is not None and reading.has("layout"):
        found += reading.find(*adapter.MODEL)
    sentences = [*config.provenance.problems, *(_with_alias(sentence, config) for sentence in found)]
    return [*map(in_python, sentences)] if config.provenance.is_python else sentences


def held_problems(config: Config, *, world_size: int, hf_config: Mapping[str, Any]) -> list[str]:
    """Why learners cannot hold a teacher of this config.json beside the policy, one sentence each."""
    reading = Reading(config, _unsound(config), {"world_size": world_size, "hf_config": hf_config})
    return reading.find(*LEARNER_RULES) if reading.has("layout") and not reading.find(*parallel.LAYOUT) else []


def _unsound(config: Config) -> frozenset[str]:
    """Settings whose value cannot be judged further, or not read at all."""
    by_field = (name for name, value in flat(config).items() if problem_of(settings()[name], value))
    return config.provenance.unsound | frozenset(by_field)


def _derived(config: Config, layout: Layout) -> Iterator[str]:
    """Values that were given although they follow from others, and a batch that leaves ranks idle."""
    expected, world_size = config.provenance.expected, layout.world_size
    if expected.get("world_size", world_size) != world_size and not config.parallel.num_learners_per_node:
        yield (
            f"world_size={expected['world_size']} is what batch and layout were computed for, but {world_size} learner "
            f"rank{' was' if world_size == 1 else 's were'} started; start {expected['world_size']} "
            f"(--nproc-per-node {expected['world_size']}), or leave world_size out"
        )
    nodes = len(config.parallel.num_learners_per_node)
    if nodes and expected.get("num_nodes", nodes) not in (1, nodes):
        yield f"num_nodes={expected['num_nodes']} differs from the {nodes} entries of num_learners_per_node; leave it out"
    highest = config.reward.max_possible_score
    if expected.get("max_possible_score", highest) != highest:
        yield f"max_possible_score={expected['max_possible_score']} follows from other settings and is {highest}; leave it out"
    if expected.get("vllm_max_model_length", config.max_model_length) < config.max_model_length:
        yield (
            f"vllm_max_model_length={expected['vllm_max_model_length']} is less than "
            f"{longest_sequence(config)} = {config.max_model_length}; leave it out"
        )
    if config.batch_size < layout.data:
        yield (
            f"{config.batch_size} completions per step (num_unique_prompts_rollout x num_samples_per_prompt_rollout) leave "
            f"some of {layout.data} data-parallel ranks without any; sample at least one for each"
        )


def _with_alias(sentence: str, config: Config) -> str:
    """Adds the alias by which the user gave the field that the sentence begins with."""
    name = sentence.partition("=")[0]
    source = config.provenance.sources.get(name, "")
    return f"{sentence} ({name} was given as {source.split()[1]})" if source.startswith("alias ") else sentence


def too_few_prompts(config: Config, num_prompts: int) -> list[str]:
    """A sentence where `num_prompts` training rows do not fill a step."""
    wanted = config.rollout.num_unique_prompts_rollout
    if num_prompts >= wanted:
        return []
    count = "1 prompt" if num_prompts == 1 else f"{num_prompts} prompts"
    return [
        f"dataset_mixer_list has {count}, but a step takes num_unique_prompts_rollout={wanted} different "
        "ones; give more rows or lower it"
    ]


def warnings(
    config: Config, *, world_size: int, hf_config: Mapping[str, Any] | None = None, num_reward_funcs: int = 0
) -> list[str]:
    """Everything that is probably not intended in a sound configuration, one sentence each. Call it after `problems` has found none."""
    preset_rate = config.provenance.defaults.get("learning_rate", settings()["learning_rate"].default)
    facts = {"world_size": world_size, "hf_config": hf_config, "preset_rate": preset_rate}
    reading = Reading(config, facts=facts)
    return [
        *reading.find(*WARNINGS),
        *_idle(reading),
        *_replaced(config, num_reward_funcs),
        *reading.find(*LATER_WARNINGS),
    ]


def _given(config: Config) -> dict[str, object]:
    """The settings that a user gave a value other than the default."""
    sources = config.provenance.sources
    return {
        name: value
        for name, value in flat(config).items()
        if not sources.get(name, "preset").startswith("preset") and value != settings()[name].default
    }


def _idle(reading: Reading) -> Iterator[str]:
    """Settings that were given without what they need."""
    by_need: dict[Needs, list[str]] = {}
    for name, value in _given(reading.config).items():
        for need in settings()[name].needs:
            by_need.setdefault(need, []).append(f"{name}={shown(value)}")
    for need, given in by_need.items():
        if not reading.holds(need):
            yield f"{', '.join(given)} has no effect without {need.condition}"


def _replaced(config: Config, num_reward_funcs: int) -> Iterator[str]:
    """Reward settings that were given and that reward functions do without."""
    used = reward.USED_BY_FUNCTIONS if num_reward_funcs else (*reward.USED_BY_FUNCTIONS, "reward_funcs")
    replaced = sorted(name for name in _given(config) if settings()[name].section == "reward" and name not in used)
    if (num_reward_funcs or config.reward.reward_funcs) and replaced:
        functions = "the functions passed to mgrpo.train" if num_reward_funcs else "reward_funcs"
        yield f"{', '.join(replaced)} has no effect: rewards come from {functions} alone"
