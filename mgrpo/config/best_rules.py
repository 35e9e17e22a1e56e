"""Rules of `load_best_model_at_end`: exports that are evaluated, and a metric that evaluations have."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from mgrpo.config.rules import Rule
from mgrpo.config.schema import Config

FIXED = ("scores", "no_score_rate", "sequence_lengths", "sequence_lengths_min", "sequence_lengths_max", "stop_rate")
ACCURACY = ("pass_at_1",)
BY_NAME = ("by_source", "by_verifier", "custom", "env", "objective", "rewards", "tools", "turns", "val")
"""Metrics of what the rows, the rewards and the environments are called; the first evaluation shows which there are."""


def held_out_problems(config: Config) -> Iterator[str]:
    """Whether there are evaluations to compare, where the caller passes no held-out data."""
    if config.checkpoint.load_best_model_at_end and not config.data.dataset_mixer_eval_list:
        yield (
            "load_best_model_at_end=true compares evaluations, and dataset_mixer_eval_list is empty; name held-out data: "
            "--dataset_mixer_eval_list PATH 1.0"
        )


def _exports(config: Config) -> Iterator[str]:
    if not config.checkpoint.load_best_model_at_end:
        return
    save, evaluate = config.checkpoint.save_freq, config.experiment.local_eval_every
    if save <= 0 or evaluate <= 0:
        yield (
            "load_best_model_at_end=true compares the exports of a run by their evaluations, which needs save_freq and "
            f"local_eval_every above 0, got {save} and {evaluate}"
        )
    elif save % evaluate:
        yield (
            f"load_best_model_at_end=true needs an evaluation of every export, but save_freq={save} is not a multiple of "
            f"local_eval_every={evaluate}; use save_freq={-(-save // evaluate) * evaluate}, or local_eval_every={save}"
        )


def _metric(config: Config) -> Iterator[str]:
    name, n = config.checkpoint.metric_for_best_model, config.rollout.eval_pass_at_k
    unbiased = [f"pass_at_{1 << power}_unbiased" for power in range(n.bit_length())]
    known = [f"eval/{own}" for own in dict.fromkeys((*FIXED, *ACCURACY, f"pass_at_{n}", *unbiased))]
    kind, _, rest = name.removeprefix("eval/").partition("/")
    if not config.checkpoint.load_best_model_at_end or name in known:
        return
    if not (name.startswith("eval/") and kind in BY_NAME and rest):
        near = difflib.get_close_matches(f"eval/{name.removeprefix('eval/').removeprefix('eval_')}", known, n=3)
        yield (
            f"metric_for_best_model={name} is no metric of an evaluation; use {' or '.join(near or ['eval/scores', 'eval/pass_at_1'])}, "
            "or another of docs/metrics.md that begins with eval/"
        )


BEST_RULES: tuple[Rule, ...] = (
    (("load_best_model_at_end", "save_freq", "local_eval_every"), _exports),
    (("load_best_model_at_end", "metric_for_best_model", "eval_pass_at_k"), _metric),
)
"""Each rule with the fields that must be sound before it is checked."""
