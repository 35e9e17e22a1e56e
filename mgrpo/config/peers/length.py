"""How long a run is, in the units of other trainers: optimizer steps and passes over the data."""

from __future__ import annotations

from mgrpo.config.fields import shown
from mgrpo.config.peers import open_instruct
from mgrpo.config.resolution import PRESET, Resolution


def apply(r: Resolution) -> None:
    """Both, of which a number of steps counts more, as in TRL."""
    max_steps(r)
    passes(r)


def max_steps(r: Resolution) -> None:
    """TRL counts optimizer steps; in Open Instruct the same name limits the calls of tools."""
    steps, has_tools = r.peer("max_steps"), bool(r.value("tools"))
    if steps is None:
        return
    if has_tools and r.has_trl_names and not r.has_trl_defaults:
        r.problems.append(
            f"max_steps={steps} beside tools and names of TRL could be either: max_tool_calls={steps} limits the calls of a "
            f"completion (Open Instruct's meaning), total_episodes the run (TRL's: {steps} optimizer steps); give one of them"
        )
    elif r.has_trl_names:
        if steps > 0:
            batch_size = r.value("num_unique_prompts_rollout") * r.value("num_samples_per_prompt_rollout")
            r.put("total_episodes", training_steps(r, steps) * batch_size, "max_steps")
    else:
        open_instruct.max_steps(r)


def passes(r: Resolution) -> None:
    """A number of passes, unless completions or steps are given at a place of higher rank."""
    epochs, episodes = (r.given.get(name) for name in ("num_train_epochs", "total_episodes"))
    if epochs is None or epochs.value is None or episodes is None:
        return
    by = f"{episodes.via or 'total_episodes'} ({episodes.origin})"
    if episodes.rank > epochs.rank or "max_steps" in episodes.via:
        r.given.pop("num_train_epochs")
        if epochs.rank > PRESET:
            r.notes.append(f"num_train_epochs={shown(epochs.value)} has no effect: {by} overrides it")
    elif epochs.rank > episodes.rank:
        r.given.pop("total_episodes")
        r.notes.append(f"{by} has no effect: num_train_epochs={shown(epochs.value)} ({epochs.origin}) overrides it")
    else:
        r.problems.append(
            f"num_train_epochs={shown(epochs.value)} and {by} both say how long the run is; keep one of them"
        )


def training_steps(r: Resolution, optimizer_steps: int) -> int:
    """Training steps with this many optimizer steps, rounded up; 0 and less, which turn something off, are kept."""
    if optimizer_steps <= 0:
        return optimizer_steps
    if optimizer_steps % r.optimizer_steps_per_step:
        r.notes.append(
            f"{optimizer_steps} optimizer steps are not a whole number of training steps of {r.optimizer_steps_per_step} each; "
            "rounded up"
        )
    return -(-optimizer_steps // r.optimizer_steps_per_step)
