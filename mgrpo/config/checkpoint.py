"""The checkpoint section: exports, the best of them, and training states."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from mgrpo.config.annotations import FINITE, NOT_NEGATIVE, OPEN_INSTRUCT, TRL, Needs, Range, Rule

EVALUATED = ("scores", "no_score_rate", "sequence_lengths", "sequence_lengths_min", "sequence_lengths_max", "stop_rate")
ACCURACY = ("pass_at_1",)
BY_NAME = ("agents", "by_source", "by_verifier", "custom", "env", "objective", "rewards", "tools", "turns", "val")
"""Metrics that are named after rows, rewards and environments; the first evaluation shows which exist."""

MTBF_GPU_S = 54 * 86400 * 16384 / 419
"""Seconds of one GPU between failures that end a run: 419 unexpected interruptions of 16,384 GPUs in 54 days (The Llama 3 Herd
of Models, section 3.3.4)."""
MANY_GPUS = 64
"""A run on as many saves its state without being asked: one of 64 fails within a day with a chance of 3 %."""
SAVE_COST_S = 10.0
"""Seconds for which a save delays training, where nothing better is known."""


def mtbf_s(num_gpus: int) -> float:
    """Mean seconds between the failures of a run on `num_gpus` GPUs, of which each ends it."""
    return MTBF_GPU_S / num_gpus


def best_interval_s(save_s: float, mtbf_s: float) -> float:
    """Seconds between saves that lose the least time, sqrt(2 x save_s x mtbf_s) (Young 1974, Daly 2006, first order).

    Args:
        save_s: seconds for which a save delays training.
    """
    return math.sqrt(2 * save_s * mtbf_s)


def lost_share(interval_s: float, *, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Expected share of a run's time that saves, repeated work and restarts take, to first order.

    Args:
        interval_s: between the moments at which states are taken that outlive a failure.
        save_s: as for `best_interval_s`.
        restart_s: from a failure to the first step that goes on.
    """
    return min(1.0, save_s / interval_s + (interval_s / 2 + restart_s) / mtbf_s)


def _saves(checkpoint_state_freq: int, save_every_minutes: float | None) -> bool:
    return checkpoint_state_freq > 0 or bool(save_every_minutes)


STATES = Needs("checkpoint_state_freq or save_every_minutes above 0", _saves)
BEST = Needs("load_best_model_at_end=true", lambda load_best_model_at_end: load_best_model_at_end)
SEVERAL_EXPORTS = Needs(
    "a save_freq below the steps of the run: there is one export",
    lambda save_freq, num_training_steps: save_freq < num_training_steps,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    save_freq: Annotated[int, FINITE, OPEN_INSTRUCT] = 200
    """Steps between exports of the model in Hugging Face format; 0 or less: none before the end."""
    save_final: bool = True
    """Export the trained model at the end."""
    load_best_model_at_end: Annotated[bool, TRL, SEVERAL_EXPORTS] = False
    """Keep track of the export with the best evaluation: hf/best leads to it, and the run's end names it as the model. Every export must be
    evaluated: save_freq a multiple of local_eval_every."""
    metric_for_best_model: Annotated[str, TRL, BEST] = "eval/scores"
    """The metric of an evaluation whose greatest value load_best_model_at_end takes for the best, or after a minus sign, as in
    -eval/sequence_lengths, whose least; the earlier of equal ones is the best."""
    checkpoint_state_freq: Annotated[int, FINITE, OPEN_INSTRUCT] = -1
    """Steps between checkpoints of the training state, which a run can resume from in any layout; 0 or less: none."""
    save_every_minutes: Annotated[float | None, NOT_NEGATIVE] = None
    """Minutes after which the next training step ends with a checkpoint of the training state, beside those of
    checkpoint_state_freq; 0: none by time. Without either, a run on 64 GPUs or more saves as often as its size asks for
    (docs/checkpoints.md), and others do not."""
    checkpoint_state_dir: Annotated[str | None, OPEN_INSTRUCT] = None
    """Folder of the training states, or a URL such as s3://bucket/run or gs://bucket/run; none: output_dir/checkpoints."""
    keep_last_n_checkpoints: Annotated[int, Range(low=-1), OPEN_INSTRUCT, STATES] = 3
    """Number of newest training states to keep; -1: all."""
    checkpoint_async: Annotated[bool, STATES] = False
    """Write training states in the background, from a copy in host memory: 12 bytes a weight on all ranks together, page-locked and
    kept for the next one on GPUs, elsewhere until they are written."""
    checkpoint_local_dir: str | None = None
    """Folder on a disk of each node, $VARIABLES included: states that are due by time stay there and on the disk of another node, those of
    checkpoint_state_freq go to storage as well. A run goes on from the newest of both that is complete."""
    resume: str = "auto"
    """auto: continue from the newest complete state of this run, if there is one, and refuse to start when that is damaged;
    intact: continue from the newest one that is not damaged; never: start afresh; or the path of a state,
    .../checkpoints/step_N."""

    @property
    def saves_states(self) -> bool:
        """Whether training states are saved while the run goes on."""
        return _saves(self.checkpoint_state_freq, self.save_every_minutes)

    @property
    def best_metric(self) -> str:
        """The name in `metric_for_best_model`."""
        return self.metric_for_best_model.removeprefix("-")

    @property
    def greater_is_better(self) -> bool:
        """True if the greatest value of the metric is the best; false: the least."""
        return not self.metric_for_best_model.startswith("-")


def _states(
    checkpoint_state_freq: int,
    save_every_minutes: float | None,
    checkpoint_state_dir: str | None,
    keep_last_n_checkpoints: int,
) -> Iterator[str]:
    if checkpoint_state_dir == "":
        yield "checkpoint_state_dir is empty; name a folder or leave it out"
    elif checkpoint_state_dir and not _saves(checkpoint_state_freq, save_every_minutes):
        yield (
            f"checkpoint_state_dir={checkpoint_state_dir} needs checkpoint_state_freq above 0, got {checkpoint_state_freq}, or "
            "save_every_minutes; or leave it out"
        )
    if keep_last_n_checkpoints == 0:
        yield "keep_last_n_checkpoints=0 would keep no state; give 1 or more, -1 for all, or checkpoint_state_freq=-1 and save_every_minutes=0"


def _local_states(
    checkpoint_local_dir: str | None, save_every_minutes: float | None, checkpoint_state_freq: int
) -> Iterator[str]:
    if checkpoint_local_dir is None:
        return
    if not checkpoint_local_dir:
        yield "checkpoint_local_dir is empty; name a folder or leave it out"
    elif "$" in (place := os.path.expandvars(checkpoint_local_dir)):
        yield f"checkpoint_local_dir={checkpoint_local_dir} names a variable that is not set here: {place}"
    if not save_every_minutes or checkpoint_state_freq <= 0:
        yield (
            f"checkpoint_local_dir={checkpoint_local_dir} needs save_every_minutes above 0, for states on the nodes' disks, and "
            f"checkpoint_state_freq above 0, for those on storage that outlive several nodes; got {save_every_minutes} and "
            f"{checkpoint_state_freq}"
        )


def _resume(resume: str, total_episodes: int, num_train_epochs: float | None, batch_size: int) -> Iterator[str]:
    if resume in ("auto", "intact", "never"):
        return
    step = re.search(r"(?:^|/)step_([0-9]{1,18})/*$", resume)
    if not step:
        yield f"resume={resume} must be auto, intact, never, or the path of a training state, .../checkpoints/step_N"
    elif "://" not in resume and not os.path.isdir(resume):
        yield f"resume={resume} is not a folder; check the path (it is used as given, ~ is not expanded)"
    elif num_train_epochs is None and int(step[1]) > total_episodes // batch_size:
        yield (
            f"resume={resume} is step {int(step[1])}, but the run has {total_episodes // batch_size} training steps; "
            "raise total_episodes"
        )


def _evaluated_exports(load_best_model_at_end: bool, save_freq: int, local_eval_every: int) -> Iterator[str]:
    if not load_best_model_at_end:
        return
    if save_freq <= 0 or local_eval_every <= 0:
        yield (
            "load_best_model_at_end=true compares the exports of a run by their evaluations, which needs save_freq and "
            f"local_eval_every above 0, got {save_freq} and {local_eval_every}"
        )
    elif save_freq % local_eval_every:
        least = -(-save_freq // local_eval_every) * local_eval_every
        yield (
            f"load_best_model_at_end=true needs an evaluation of every export, but save_freq={save_freq} is not a multiple of "
            f"local_eval_every={local_eval_every}; use save_freq={least}, or local_eval_every={save_freq}"
        )


def _known_metric(
    load_best_model_at_end: bool, metric_for_best_model: str, best_metric: str, eval_pass_at_k: int
) -> Iterator[str]:
    name, sign = best_metric, metric_for_best_model.removesuffix(best_metric)
    unbiased = [f"pass_at_{1 << power}_unbiased" for power in range(eval_pass_at_k.bit_length())]
    known = [f"eval/{own}" for own in dict.fromkeys((*EVALUATED, *ACCURACY, f"pass_at_{eval_pass_at_k}", *unbiased))]
    kind, _, rest = name.removeprefix("eval/").partition("/")
    if not load_best_model_at_end or name in known:
        return
    if not (name.startswith("eval/") and kind in BY_NAME and rest):
        near = difflib.get_close_matches(f"eval/{name.removeprefix('eval/').removeprefix('eval_')}", known, n=3)
        advice = " or ".join(sign + own for own in near or ["eval/scores", "eval/pass_at_1"])
        yield (
            f"metric_for_best_model={metric_for_best_model} is no metric of an evaluation; use {advice}, "
            "or another of docs/metrics.md that begins with eval/"
        )


def _held_out_data(
    load_best_model_at_end: bool, dataset_mixer_eval_list: tuple[str, ...], has_eval_dataset: bool
) -> Iterator[str]:
    if load_best_model_at_end and not dataset_mixer_eval_list and not has_eval_dataset:
        yield (
            "load_best_model_at_end=true compares evaluations, and dataset_mixer_eval_list is empty; name held-out data: "
            "--dataset_mixer_eval_list PATH 1.0"
        )


RULES: tuple[Rule, ...] = (_states, _local_states, _resume)
BEST_MODEL: tuple[Rule, ...] = (_evaluated_exports, _known_metric)
HELD_OUT_DATA: tuple[Rule, ...] = (_held_out_data,)
