"""Choice of the state that a run continues from, and checks that this configuration, model and data can continue it.

Seed, data, model and kind of optimizer must be the state's. Everything else may change and is listed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mgrpo.checkpoint.folder import is_near, resumable, split_path
from mgrpo.checkpoint.manifest import DamagedCheckpoint
from mgrpo.checkpoint.stored import Stored
from mgrpo.config import Config
from mgrpo.config.algorithm import STANDARD_DEVIATIONS
from mgrpo.config.annotations import NO_ENTRIES
from mgrpo.config.derived import state_root
from mgrpo.config.fields import flat, settings, shown
from mgrpo.config.loss import DIVERGENCE
from mgrpo.config.tools import ACQUIRE_TIMEOUT_S, PYTHON, SEARCH, settings_of
from mgrpo.models.adapters import LoraShape
from mgrpo.models.peft import target_names
from mgrpo.models.shape import ModelShape

PLACES = ("output_dir", "dataset_local_cache_dir")
"""Settings outside the checkpoint section that name folders."""
AFRESH = "or start afresh with --resume never"
STD_NAMES = {numbers: name for name, numbers in STANDARD_DEVIATIONS.items()}
"""`advantage_std` by the settings advantage_ddof and advantage_eps of earlier versions."""
CONSTANTS: Mapping[str, object] = {
    "active_sampling_max_rounds": 10,
    "code_sandbox_memory_mb": 1024,
    "distillation_clip": None,
    "distillation_jsd_beta": 0.5,
    "env_acquire_timeout": ACQUIRE_TIMEOUT_S,
    "reshuffle_mini_batches": False,
    "sampling_conflict": "override",
    "turn_discount": 1.0,
    "turn_scheduling": "auto",
    "untaken_turns": "drop",
}
"""Settings of earlier versions that are constants now, those that change what is trained."""


class _Saved(Protocol):
    """A state on storage, open or only described."""

    @property
    def path(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def state(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """The training state that a run continues: found once, at its start, and passed to everything that continues from it."""

    path: str
    """Path or URL."""
    step: int
    state: Mapping[str, Any]
    """The trainer's own state in its present form, see `Trainer.state_dict`."""
    passed_over: tuple[str, ...] = ()
    """Newer states that are damaged, one sentence each."""

    @classmethod
    def of(cls, saved: _Saved, passed_over: Sequence[str] = ()) -> Continued:
        """The record of a state on storage."""
        return cls(
            path=str(saved.path), step=saved.step, state=present_form(saved.state), passed_over=tuple(passed_over)
        )


def present_form(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A trainer's state with the keys "source" and "reporter"; earlier versions have both under "head"."""
    if "head" not in state:
        return state
    source = dict(state["head"])
    reporter = {name: source.pop(name) for name in ("num_lines", "best", "run_id") if name in source}
    others = {name: value for name, value in state.items() if name != "head"}
    return {**others, "source": source, "reporter": reporter}


def find_state(config: Config) -> Continued | None:
    """The state to continue, judged by its manifest and the sizes of its files; None: the run starts afresh.

    Damaged states are skipped for earlier ones with resume=intact, and if they are on the nodes' disks.

    Raises:
        ValueError: the state does not exist, is damaged or of another version, and there is no earlier one to use.
    """
    choice = config.checkpoint.resume
    if choice == "never":
        return None
    paths = resumable(state_root(config)) if choice in ("auto", "intact") else [choice]
    passed_over: list[str] = []
    for path in paths:
        try:
            stored = Stored(*split_path(path))
            if is_near(path):
                # The ranks check later which of its tensors the nodes still have.
                stored.check_size(stored.manifest.state)
            else:
                stored.check_sizes()
            return Continued.of(stored, passed_over)
        except DamagedCheckpoint as err:
            if path == paths[-1] or not (choice == "intact" or is_near(path)):
                raise
            why = "tensors on the nodes" if is_near(path) else "resume=intact"
            passed_over.append(f"{err.reason}; it is passed over ({why})")
    return None


def look_for_state(config: Config) -> tuple[Continued | None, str]:
    """The state of `find_state`, or its problem."""
    try:
        return find_state(config), ""
    except (ValueError, OSError) as err:
        return None, str(err)
    except Exception as err:  # every driver of remote storage raises its own errors
        return None, f"resume={config.checkpoint.resume}: no state can be looked for: {err!r}"


def resume_problems(
    config: Config,
    continued: Continued,
    *,
    shape: ModelShape | None,
    data: Sequence[Mapping[str, Any]] | None,
    base: str | None = None,
) -> Iterator[str]:
    """The reasons why this configuration cannot continue the state, one sentence each.

    Args:
        shape: the shape of the configuration's model; None: unreadable.
        data: `Mixture.content` of the training data; None: unreadable.
        base: `fingerprint` of the model's weights, which a run with adapters does not change; None: not compared.
    """
    state, path = continued.state, continued.path
    order = state["source"]["sampler"]
    if order["seed"] != config.experiment.seed:
        yield (
            f"seed={config.experiment.seed}, but {path} was saved with seed={order['seed']}, from which the order of the data "
            f"and all random numbers follow; set seed={order['seed']}, {AFRESH}"
        )
    if order.get("shuffle", True) != config.data.shuffle_dataset:
        was = shown(order.get("shuffle", True))
        yield f"shuffle_dataset={shown(config.data.shuffle_dataset)}, but {path} was saved with {was}; set {was}, {AFRESH}"
    if shape is not None and ModelShape.from_dict(state["model"]) != shape:
        yield (
            f"{path} is of another model than {config.model.model_name_or_path}; it was saved from "
            f"{state['model_name_or_path']}: name that one, {AFRESH}"
        )
    yield from _adapter_problems(config, continued, shape=shape, base=base)
    if data is not None and "data" in state["source"]:
        yield from _data_problems(path, state["source"]["data"], data)
    for name in ("use_precision_aware_optimizer", "optimizer_cpu_offload"):
        if getattr(config.parallel, name):
            yield f"{name}=true cannot continue a training state yet, here {path}; turn it off, {AFRESH}"
    if (
        config.has_length
        and continued.step > config.num_training_steps
        and config.checkpoint.resume in ("auto", "intact")
    ):
        yield (
            f"{path} is step {continued.step}, but the run has {config.num_training_steps} training steps; raise "
            f"total_episodes, {AFRESH}"
        )


def saved_adapters(continued: Continued) -> dict[str, Any] | None:
    """The state's record of its adapters and of their model; None: all weights were trained."""
    return continued.state.get("learner", {}).get("adapters")


def adapter_record(lora: LoraShape, shape: ModelShape) -> dict[str, Any]:
    """The adapters' settings by name, in JSON."""
    return {
        "lora_r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.use_rslora,
        "lora_target_modules": sorted(lora.targets or target_names(shape)),
    }


def _adapter_problems(
    config: Config, continued: Continued, *, shape: ModelShape | None, base: str | None
) -> Iterator[str]:
    """Problems if the state does not hold the run's adapters, of the same model."""
    saved, lora, path = saved_adapters(continued), config.adapter.lora, continued.path
    if saved is None and lora is None:
        return
    if saved is None:
        yield f"use_peft=true, but {path} was saved by a run that trained all weights; set use_peft=false, {AFRESH}"
    elif lora is None:
        yield f"use_peft=false, but {path} holds adapters, not the model; set use_peft=true, {AFRESH}"
    elif shape is not None:
        for name, value in adapter_record(lora, shape).items():
            was = saved["settings"][name]
            if was != value:
                yield f"{name}={_shown(value)}, but {path} was saved with {_shown(was)}; set {name} {_shown(was)}, {AFRESH}"
        if base is not None and base != saved["base"]:
            yield (
                f"{path} holds adapters of other weights than those in model_name_or_path={config.model.model_name_or_path}; it was saved from "
                f"{continued.state['model_name_or_path']}: name that one as it was, {AFRESH}"
            )


def changes(config: Config, continued: Continued) -> Iterator[str]:
    """Notes on settings that differ from the state's, and on a run without steps left."""
    before = _renamed(continued.state.get("config", {}))
    now = json.loads(json.dumps(flat(config)))
    changed = [
        f"{name} {_shown(before[name])} -> {_shown(value)}"
        for name, value in now.items()
        if name in before
        and before[name] != value
        and settings()[name].section not in ("checkpoint", "tracking")
        and name not in PLACES
    ]
    changed += [
        f"{name} {_shown(before[name])} -> {_shown(value)} (no longer a setting)"
        for name, value in _fixed(config).items()
        if before.get(name) not in (None, value)
    ]
    if changed:
        yield f"{continued.path} was saved with other settings: {', '.join(changed)}"
    if config.has_length and continued.step == config.num_training_steps:
        yield (
            f"{continued.path} is the last of the run's {continued.step} steps, so nothing is left to train; to go on raise "
            f"total_episodes, {AFRESH}"
        )


def _renamed(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a state, those that other settings have replaced by the present names and values."""
    found = dict(saved)
    if "advantage_ddof" in found:
        ddof, eps = found["advantage_ddof"], found.get("advantage_eps", 1e-8)
        found["advantage_std"] = STD_NAMES.get((ddof, eps), f"with ddof {ddof} and eps {eps:g}")
    if found.get("rho_mask_tv_divergence"):
        found["rho_mask_level"] = DIVERGENCE
    if found.get("moe_token_dispatcher_type") == "flex":
        found["moe_token_dispatcher_type"] = found["moe_flex_dispatcher_backend"]
    for name, entries in (("code_tool_api_endpoint", PYTHON), ("search_api_endpoint", SEARCH)):
        if found.get(name) is not None and (tools := found["tools"]):
            found["tool_configs"] = [
                json.dumps(settings_of(tool, text) | {"endpoint": found[name]}) if tool in entries else text
                for tool, text in zip(tools, found["tool_configs"] or [NO_ENTRIES] * len(tools), strict=True)
            ]
    return found


def _fixed(config: Config) -> dict[str, object]:
    """Present values of the settings that have been retired."""
    return {
        **CONSTANTS,
        "distillation_temperature": config.rollout.temperature,
        "env_reset_timeout": config.tools.reset_timeout_s,
        "rubric_judge_model": os.environ.get("RUBRIC_JUDGE_MODEL"),
        "rubric_generation_model": os.environ.get("RUBRIC_GENERATION_MODEL"),
    }


def _data_problems(path: str, before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Problems if the rows are not the state's; their files' names may differ."""
    if [(line["rows"], line["taken"]) for line in before] != [(line["rows"], line["taken"]) for line in now]:
        yield (
            f"the training data are {_lines(now)}, but {path} was saved with {_lines(before)}; give the data that the run "
            f"began with, {AFRESH}"
        )
        return
    for old, new in zip(before, now, strict=True):
        if old["digest"] and new["digest"] and old["digest"] != new["digest"]:
            yield (
                f"{new['source']} holds other rows than when {path} was saved; give the data that the run began with, "
                f"{AFRESH}"
            )


def _lines(data: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{line['taken']} of {line['rows']} rows of {line['source']}" for line in data)


def _shown(value: object) -> str:
    return shown(tuple(value) if isinstance(value, list) else value)
