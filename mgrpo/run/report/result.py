"""The outcome of a run and of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from shlex import quote


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """The outcome of a run."""

    output_dir: Path
    """The folder with everything that the run has written."""
    steps: int
    """Training steps done, including those before a resume."""
    before: dict[str, float]
    """Metrics of the evaluation before training; empty without held-out data, and on ranks other than 0."""
    after: dict[str, float]
    """Metrics of the evaluation after training."""
    exported: Path | None
    """The folder of the trained model in Hugging Face format; None with save_final=false."""
    best: Path | None = None
    """The folder of the export with the best evaluation, with `load_best_model_at_end`."""
    has_trained: bool = True
    """True if any step had a gradient, or the run had no step to do."""
    tracked: tuple[str, ...] = ()
    """Lines with the addresses of its trackers."""

    def where(self, *, has_held_out: bool) -> list[str]:
        """Lines with the places of all files, and the command that evaluates the trained model.

        Args:
            has_held_out: True if the run's own config.yaml names held-out prompts.
        """
        out = self.output_dir
        lines = [
            f"report   {out / 'report.html'}",
            f"metrics  {out / 'metrics.jsonl'}",
            f"samples  {out / 'rollouts'}",
            *self.tracked,
        ]
        model = self.best or self.exported
        if model is None:
            return lines
        last = [f"last     {self.exported}"] if self.exported not in (None, model) else []
        held_out = "" if has_held_out else " --dataset_mixer_eval_list HELDOUT.jsonl 1.0"
        command = f"mgrpo eval --config {quote(f'{out}/config.yaml')} --model_name_or_path {quote(str(model))}"
        return [*lines, f"model    {model}", *last, f"evaluate it again: {command}{held_out}"]


class NothingTrained(RuntimeError):
    """None of a run's steps changed the weights."""

    def __init__(self, result: TrainResult) -> None:
        super().__init__(
            f"nothing was trained: none of {result.steps} steps changed the weights; the warnings above and "
            f"{result.output_dir}/report.html say why"
        )
        self.result = result
        """The outcome of the run."""


def step_of(export: Path) -> int:
    """Number of training steps before an export."""
    return int(export.name.removeprefix("step_"))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """The outcome of `mgrpo eval`."""

    output_dir: Path
    """The folder with metrics.jsonl, rollouts/ and report.html."""
    metrics: dict[str, float]
    """Values by metric; docs/metrics.md explains the names, which begin with `eval/`."""
