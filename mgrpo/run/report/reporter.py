"""Rank 0's reports: metrics, samples, progress and the report page. Other ranks have a no-op twin."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgrpo.checkpoint.folder import abandon, lies_in
from mgrpo.checkpoint.space import free_bytes, words
from mgrpo.config import Config, to_yaml
from mgrpo.config.derived import state_root
from mgrpo.run.inputs.continuing import Continued
from mgrpo.run.report.best import BestExport
from mgrpo.run.report.listener import RunListener
from mgrpo.run.report.lost_time import LostTime
from mgrpo.run.report.step_metrics import Clock, step_metrics
from mgrpo.run.report.trackers import new_run_id, opened
from mgrpo.run.report.upload import Uploads
from mgrpo.telemetry.alerts import AlertWatch
from mgrpo.telemetry.completions import completions_table, printed, some_of
from mgrpo.telemetry.files import StepLines, move_aside
from mgrpo.telemetry.metrics.evaluation import correctness, evaluation_metrics
from mgrpo.telemetry.metrics.writer import MetricsWriter
from mgrpo.telemetry.progress import Progress
from mgrpo.telemetry.report import write_report
from mgrpo.telemetry.samples import EvaluationTables, Pieces, Traces, TrainSamples, as_table, evaluation_records
from mgrpo.telemetry.state import EngineStates, write_status
from mgrpo.telemetry.versions import version_line
from mgrpo.types import RewardScale

if TYPE_CHECKING:
    from mgrpo.run.records import Batch, Evaluation, Learned, Rollouts
    from mgrpo.run.report.throughput import Throughput

_log = logging.getLogger(__name__)

REPORT_EVERY_S = 60.0
"""Greatest age of report.html between evaluations, in seconds."""
SHOWN_OF_EVALUATION = 64
"""Completions of an evaluation that are sent to trackers; the folder has all."""
UPLOAD_S, LAST_UPLOAD_S = 60.0, 2.0
"""Seconds for trackers to send remaining data: at the end of a run, and after a stop or failure."""


class Reporter:
    """Writes a run's files in `output_dir` and prints its progress."""

    def __init__(
        self,
        config: Config,
        *,
        scale: RewardScale | None,
        throughput: Throughput | None = None,
        continued: Continued | None = None,
        pieces: Pieces | None = None,
        engines: Callable[[], list[dict[str, Any]]] = list,
        listener: RunListener | None = None,
        start: Mapping[str, float] | None = None,
    ) -> None:
        """Open the files. Files of an earlier run are moved aside, so create it only once the run has started well.

        Args:
            scale: scale of the rewards; None: functions score.
            throughput: computes the learners' throughput; None for an evaluation alone.
            continued: the state that the run continues.
            pieces: the text of single tokens; None: not written.
            engines: returns the states of the run's engines.
            listener: callbacks of the run.
            start: seconds of the start's phases, complete after the first step.
        """
        self.start = {} if start is None else start
        self.config, self.scale, self.throughput = config, scale, throughput
        self.listener, self.pieces = listener or RunListener(), pieces
        self.output_dir = Path(config.experiment.output_dir)
        self.output_dir.mkdir(parents=True, exist_ok=True)
        root = state_root(config)
        # The files of another run's state are not continued.
        is_own = continued is not None and lies_in(continued.path, root)
        after, saved = (continued.step, continued.state["reporter"]) if continued and is_own else (None, {})
        self.continues, self.own_exports = after is not None, set[Path]()
        self.writer = MetricsWriter(self.output_dir, resumed_after=after, num_lines=saved.get("num_lines", 0))
        self.progress = Progress(config.num_training_steps, highest=scale.max_possible_score if scale else 0.0)
        self._settings = settings = f"# {version_line()}\n{to_yaml(config)}"
        (self.output_dir / "config.yaml").write_text(settings)
        self.run_id = saved.get("run_id") or new_run_id()
        """The run's name with its trackers."""
        self.writer.sinks += opened(
            config,
            run_id=self.run_id,
            settings=settings,
            resumed_after=after,
            say=self.say,
            warn=self.progress.warn,
        )
        rollouts, steps = self.output_dir / "rollouts", config.num_training_steps
        self.tables = EvaluationTables(rollouts, resumed_after=after)
        self.traces: Traces | None = None
        if config.rollout.save_traces:
            place, name = config.rollout.rollouts_save_path or rollouts, config.experiment.run_name
            self.traces = Traces(place, name, pieces=pieces, resumed_after=after)
        self.rubrics: StepLines | None = None
        if folder := config.reward.cache_evolving_rubric_data_dir:
            self.rubrics = StepLines(Path(folder) / "evolving_rubrics.jsonl", after)
        self.describe_engines = engines
        self.engine_states = EngineStates(self.output_dir, resumed_after=after)
        self.best = BestExport(self.output_dir / "hf", config.checkpoint, resumed=saved.get("best"))
        self.samples = TrainSamples(rollouts, steps, pieces=pieces, resumed_after=after)
        self.uploads = Uploads(config)
        self.lost_time = LostTime(saved.get("lost_time"))
        abandon(root, after=-1 if after is None else after)
        self.watch = AlertWatch(config.num_training_steps)
        self.report_due = time.monotonic() + REPORT_EVERY_S
        """Time of the report's next update between evaluations."""
        self._failure = ""
        self._has_ended = False
        write_status(self.output_dir, "running")

    @property
    def tracked(self) -> tuple[str, ...]:
        """Lines with the trackers' addresses."""
        return tuple(sink.where for sink in self.writer.sinks if sink.where)

    @property
    def failure(self) -> str:
        """Reason why a file could not be written, after which the run should save its state and end; "": none."""
        return self._failure

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Keep the reason of a failed write, instead of ending the run with unsaved steps."""
        try:
            yield
        except OSError as err:
            room = f"{words(free_bytes(self.output_dir))} are free there"
            self._failure = self._failure or f"{self.output_dir} cannot be written to: {err.strerror or err}, {room}"

    @property
    def wants_end(self) -> bool:
        """True if the listener ends the run after the present step."""
        return self.listener.wants_end

    def say(self, text: str) -> None:
        """Print a line."""
        self.progress.say(text)

    def begin(self, done: int) -> None:
        """Report that training begins, after the `done` steps of the state that the run continues."""
        self.lost_time.begin()
        self.listener.begin(self.config, done=done)

    def saved(self, seconds: float) -> None:
        """Record a saved state, which blocked training for `seconds`."""
        self.lost_time.saved(seconds)

    def step(self, batch: Batch, learned: Learned, *, step: int, version: int, sync_bytes: int, clock: Clock) -> None:
        """Write the metrics of training step `step`, described in docs/metrics.md, and its samples.

        Args:
            version: version of the weights after the step.
            clock: has the splits "wait" (for the batch), "train", "drain" (of the engines) and "sync".
        """
        rollouts = batch.rollouts
        assert rollouts is not None
        metrics = step_metrics(
            self.config,
            batch,
            learned,
            step=step,
            version=version,
            sync_bytes=sync_bytes,
            clock=clock,
            scale=self.scale,
            throughput=self.throughput,
        )
        metrics |= {f"time/start/{phase}": seconds for phase, seconds in self.start.items()}
        self.start = {}
        lost = self.lost_time.step(sum(clock.seconds.values()))
        if self.config.checkpoint.saves_states or lost["time/lost"]:
            metrics |= lost
        advantages = [sample.advantage for sample in batch.samples if not sample.continues]
        with self._writing():
            self._check_folder(step)
            self.writer.write(step, metrics)
            records = self.samples.write(step, rollouts.groups, rollouts.dropped, advantages)
            self.writer.table(step, as_table("samples", records))
            self.engine_states.write(step, self.describe_engines())
            if self.traces:
                self.traces.write(step, rollouts.groups, rollouts.dropped, advantages)
            if self.rubrics:
                self.rubrics.write({"step": step, **record} for record in rollouts.rubrics)
            self._completions(step, rollouts, advantages)
        scalars = {name: value for name, value in metrics.items() if not isinstance(value, list)}
        self.progress.update(step, scalars)
        for warning in self.watch.after(step, metrics):
            self.progress.warn(warning)
        if time.monotonic() >= self.report_due:
            self.write_report()
        self.listener.step(step, metrics, rollouts)

    def _check_folder(self, step: int) -> None:
        """Begin new files, with a warning, if those of the run were deleted or replaced."""
        if self.writer.reopen_if_gone():
            (self.output_dir / "config.yaml").write_text(self._settings)
            write_status(self.output_dir, "running")
            self.progress.warn(
                f"{self.writer.path} was deleted or replaced during the run: metrics and samples before step {step} are no longer in "
                f"{self.output_dir}, and new files begin there. Trackers have all metrics; leave the folder of a run alone."
            )

    def _completions(self, step: int, rollouts: Rollouts, advantages: Sequence[float]) -> None:
        """Show the step's completions, with `log_completions`."""
        own = self.config.tracking
        if not own.log_completions:
            return
        table = completions_table(rollouts.groups, rollouts.dropped, advantages, unique_prompts=own.log_unique_prompts)
        self.writer.table(step, table)
        shown = some_of(table, own.num_completions_to_print)
        if shown.rows:
            self.progress.show(lambda width: printed(shown, title=f"step {step}", width=width))

    def evaluation(
        self,
        evaluation: Evaluation | None,
        *,
        step: int,
        policy_version: int | None,
        when: str = "",
        before: Mapping[str, float] | None = None,
    ) -> dict[str, float]:
        """Write the metrics and samples of the evaluation after training step `step`, print and return the metrics.

        Args:
            policy_version: None: the model is not in training.
            when: time of the evaluation in words, for the printed line; "": no line.
            before: metrics of the evaluation before training, to compare with.
        """
        assert evaluation is not None
        metrics = evaluation_metrics(
            evaluation.groups, scale=self.scale, sources=evaluation.sources, generate_s=evaluation.generate_s
        )
        metrics |= evaluation.reward_metrics
        version = {} if policy_version is None else {"policy_version": policy_version}
        times = {"time/eval": evaluation.generate_s, "time/unix": time.time()}
        with self._writing():
            self._check_folder(step)
            self.writer.write(step, {**version, **metrics, **times})
            correct = correctness(evaluation.groups, self.scale)
            self.tables.write(step, evaluation.groups, correct)
            records = islice(evaluation_records(step, evaluation.groups, correct), SHOWN_OF_EVALUATION)
            self.writer.table(step, as_table("eval/samples", list(records)))
        if policy_version is None:
            self._say_finished()
        self.write_report()
        if when:
            self.progress.evaluation(metrics, when=when, seconds=evaluation.total_s, before=before)
        self.best.evaluate(step, metrics)
        self.listener.evaluation(step, metrics, evaluation)
        return metrics

    def make_way(self, folder: Path) -> None:
        """Free the path of an export: rename an earlier run's, delete one of this run or of the run that it continues."""
        if self.continues or folder in self.own_exports:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            move_aside([folder])
        self.own_exports.add(folder)

    def exported(self, step: int) -> None:
        """Record the written export of training step `step`; its evaluation, if due, comes first."""
        folder = self.output_dir / "hf" / f"step_{step}"
        with self._writing():
            self.best.export(step)
        if step < self.config.num_training_steps:
            self.uploads.saved(folder, step)
        self.listener.exported(step, folder, self.best.best)

    @property
    def best_step(self) -> int | None:
        """Step of the best export; None: no export yet, or no `load_best_model_at_end`."""
        return self.best.best.step if self.best.best else None

    def write_report(self) -> None:
        """Update report.html; a failed report must not end the run."""
        began = time.monotonic()
        try:
            write_report(self.output_dir)
        except Exception as err:
            _log.warning("no report: %s: %s", type(err).__name__, err)
        took = time.monotonic() - began
        # A report reads all metrics so far: a long run must not spend its time on that.
        self.report_due = began + max(REPORT_EVERY_S, 100 * took)

    def finish(self, *, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Close the files and print a summary at the end of the run."""
        with self._writing():
            for when, values in (("before", before), ("after", after)):
                self.writer.summary({f"{when}/{name}": value for name, value in values.items()})
            self.writer.close(wait_s=UPLOAD_S)
        self._say_finished()
        self.progress.finish(before=before or None, after=after or None)
        if self.best.best:
            self.say(f"best export: {self.best.best}")
        elif self.config.checkpoint.load_best_model_at_end:
            self.say(f"no export is the best one: {self.config.checkpoint.best_metric} was never a number")

    def _say_finished(self) -> None:
        with self._writing():
            write_status(self.output_dir, "finished")
        self._has_ended = True

    def state_dict(self) -> dict[str, Any]:
        """In JSON: number of lines written, best export, the run's id, and lost time."""
        return {
            "num_lines": self.writer.num_lines,
            "best": self.best.state_dict(),
            "run_id": self.run_id,
            "lost_time": self.lost_time.state_dict(),
        }

    def close(self, cause: str = "") -> None:
        """Close the files with a last report, however the run ended, and release the terminal.

        Args:
            cause: reason of the run's failure; "": finished or stopped.
        """
        self.progress.close()
        with self._writing():
            # First, because a process that is to end may not have the time to wait for its trackers.
            if not self._has_ended:
                write_status(self.output_dir, "failed" if cause else "stopped", cause)
            self.writer.close(wait_s=LAST_UPLOAD_S)
        self.write_report()


class SilentReporter:
    """The other ranks' reporter: the same calls, without effect."""

    pieces: Pieces | None = None

    @property
    def tracked(self) -> tuple[str, ...]:
        """Empty: rank 0 has the trackers."""
        return ()

    @property
    def failure(self) -> str:
        """Empty: nothing is written."""
        return ""

    @property
    def wants_end(self) -> bool:
        """Always False: rank 0 has the listener."""
        return False

    def say(self, text: str) -> None:
        """No-op."""

    def begin(self, done: int) -> None:
        """No-op."""

    def saved(self, seconds: float) -> None:
        """No-op."""

    def step(self, batch: Batch, learned: Learned, *, step: int, version: int, sync_bytes: int, clock: Clock) -> None:
        """No-op."""

    def evaluation(
        self,
        evaluation: Evaluation | None,
        *,
        step: int,
        policy_version: int | None,
        when: str = "",
        before: Mapping[str, float] | None = None,
    ) -> dict[str, float]:
        """No metrics."""
        return {}

    def make_way(self, folder: Path) -> None:
        """No-op: rank 0 writes."""

    def exported(self, step: int) -> None:
        """No-op."""

    @property
    def best_step(self) -> int | None:
        """Always None: rank 0 has it."""
        return None

    def finish(self, *, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """No-op."""

    def state_dict(self) -> dict[str, Any]:
        """Empty: rank 0 has it."""
        return {}

    def close(self, cause: str = "") -> None:
        """No-op."""
