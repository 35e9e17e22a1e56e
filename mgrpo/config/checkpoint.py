"""Settings of exports and training states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mgrpo.config.annotations import FINITE, OPEN_INSTRUCT, TRL, Range


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    save_freq: Annotated[int, FINITE, OPEN_INSTRUCT] = 200
    """Steps between exports of the model in Hugging Face format; 0 or less: none before the end."""
    save_final: bool = True
    """Export the trained model at the end."""
    load_best_model_at_end: Annotated[bool, TRL] = False
    """Know which export had the best evaluation: hf/best leads to it, and the run's end names it as the model. Every export must be
    evaluated: save_freq a multiple of local_eval_every."""
    metric_for_best_model: Annotated[str, TRL] = "eval/scores"
    """The metric of an evaluation that load_best_model_at_end compares; the earlier of equal ones is the best."""
    greater_is_better: Annotated[bool, TRL] = True
    """Whether the greatest value of metric_for_best_model is the best one; false: the least."""
    checkpoint_state_freq: Annotated[int, FINITE, OPEN_INSTRUCT] = -1
    """Steps between checkpoints of the training state, which a run can resume from in any layout; 0 or less: none."""
    checkpoint_state_dir: Annotated[str | None, OPEN_INSTRUCT] = None
    """Folder of the training states, or a URL such as s3://bucket/run; none: output_dir/checkpoints."""
    gs_checkpoint_state_dir: Annotated[str | None, OPEN_INSTRUCT] = None
    """URL of the training states on Google Cloud Storage, gs://bucket/run; overrides checkpoint_state_dir."""
    keep_last_n_checkpoints: Annotated[int, Range(low=-1), OPEN_INSTRUCT] = 3
    """Number of newest training states to keep; -1: all."""
    checkpoint_async: bool = False
    """Write training states in the background, from a copy in host memory: 12 bytes a weight on all ranks together, until they
    are written."""
    resume: str = "auto"
    """auto: continue from the newest complete state of this run, if there is one, and refuse to start when that is damaged;
    intact: continue from the newest one that is not damaged; never: start afresh; or the path of a state,
    .../checkpoints/step_N."""
