"""What follows from the number of training prompts: the length of a run, and what is due after a pass over them or a share of it."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import ceil

from mgrpo.config.fields import build, flat, shown
from mgrpo.config.schema import Config

COUNTED = ("total_episodes", "save_freq", "local_eval_every")
"""Settings that may follow from it, all of them whole numbers."""


def counted(config: Config, num_prompts: int) -> Config:
    """`config` with `total_episodes` in place of `num_train_epochs`, and with steps in place of `provenance.due`.

    Args:
        num_prompts: training prompts, without those that are left out because they are too long.
    """
    passes, own = config.experiment.num_train_epochs, config.provenance
    prompts, samples = config.rollout.num_unique_prompts_rollout, config.rollout.num_samples_per_prompt_rollout
    values: dict[str, object] = {}
    notes, sources = list(own.notes), dict(own.sources)
    if passes is not None:
        # By the digits that were written: 0.29 x 100 is 29, and 28.999999999999996 as a float.
        episodes = int(Fraction(str(passes)) * num_prompts) * samples
        steps = episodes // (prompts * samples)
        values |= {"num_train_epochs": None, "total_episodes": episodes}
        sources["total_episodes"] = f"alias num_train_epochs ({sources.pop('num_train_epochs', 'default')})"
        notes.append(
            f"num_train_epochs={shown(passes)} -> total_episodes ({episodes}): {shown(passes)} x {num_prompts} prompts x "
            f"{samples} samples, {steps} {'step' if steps == 1 else 'steps'}"
        )
    steps = int(str(values.get("total_episodes", config.experiment.total_episodes))) // (prompts * samples)
    for name, share in sorted(own.due.items()):
        values[name] = max(num_prompts // prompts if share is None else ceil(Fraction(str(share)) * steps), 1)
        unit = f"a pass over {num_prompts} prompts" if share is None else f"{shown(share)} of {steps}"
        notes.append(f"{name} is {values[name]}, the steps of {unit}")
    provenance = replace(own, notes=tuple(notes), sources=sources, due={})
    return build(flat(config) | values, provenance)


def same_counts(config: Config, counts: list[int]) -> Config:
    """`config` with `counts_of` another rank's, which has counted the prompts."""
    return build(flat(config) | {"num_train_epochs": None} | dict(zip(COUNTED, counts, strict=True)), config.provenance)


def counts_of(config: Config) -> list[int]:
    """The values of `COUNTED`."""
    return [int(str(flat(config)[name])) for name in COUNTED]
