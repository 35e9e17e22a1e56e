"""Completions of a run as JSONL: all of each evaluation, some from training, and on request all from training.

Rank 0 owns these files. As with metrics, a run never adds to another run's files: those are renamed first. A run that
continues from a checkpoint removes the samples of later steps, which it repeats. A file has up to `SHARD_LINES` lines.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mgrpo.telemetry.files import StepLines, lines_until, move_aside, write_whole
from mgrpo.telemetry.recorded import Record
from mgrpo.telemetry.trackers.sinks import Cell, Table, utf8
from mgrpo.telemetry.untrusted import finite, plain, text_of
from mgrpo.types import Branch, Completion, Prompt, Score, ScoredGroup, TrajectoryRecord, Turn

SHARD_LINES = 10_000
TRAIN_SAMPLES = "train_samples.jsonl"
NUM_SHOWN, NUM_SHOWN_STEPS = 8, 20
"""Completions of a training step that are kept for a reader, and the approximate number of such steps."""
COLUMN_CHARACTERS = 2000
"""Most characters of each of a row's own columns."""
_LABEL_COLUMNS = {"messages", "prompt", "dataset", "ground_truth"}
"""Columns that are in a record under another name."""
Pieces = Callable[[Sequence[int]], list[str]]
"""Function from tokens to the text of each."""

_TABLE = re.compile(r"eval_step_([0-9]+)(?:-([0-9]+))?\.jsonl")


class EvaluationTables:
    """One table per evaluation: `eval_step_{N}.jsonl` in `folder`, `eval_step_{N}-{i}.jsonl` from the second shard on.

    Args:
        resumed_after: the step after which this run continues the run that wrote these tables; None: a new run.
    """

    def __init__(self, folder: str | Path, *, resumed_after: int | None = None) -> None:
        self.folder = Path(folder)
        earlier = tables(self.folder)
        if resumed_after is None:
            move_aside([path for paths in earlier.values() for path in paths])
            return
        for step, paths in earlier.items():
            for path in paths if step > resumed_after else ():
                path.unlink()

    def write(self, step: int, groups: Sequence[ScoredGroup], correct: Sequence[Sequence[bool]] | None) -> None:
        """Write the evaluation after `step`; each file appears complete or not at all.

        Args:
            correct: one flag per completion of each group; None: correctness is undefined.
        """
        lines = (json.dumps(record, default=str) + "\n" for record in evaluation_records(step, groups, correct))
        written = set()
        for number in itertools.count():
            shard = list(itertools.islice(lines, SHARD_LINES))
            if number and not shard:
                break
            path = self.folder / (f"eval_step_{step}-{number}.jsonl" if number else f"eval_step_{step}.jsonl")
            write_whole(path, "".join(shard))
            written.add(path)
        for path in set(tables(self.folder)[step]) - written:
            path.unlink()


class TrainSamples:
    """A few completions of training for a reader: `train_samples.jsonl` in `folder`.

    One prompt in each of these steps: the first, the last, and about `NUM_SHOWN_STEPS` between them.

    Args:
        pieces: the text of single tokens, written with their logprobs; None: neither is written.
        resumed_after: see `EvaluationTables`; lines of later steps are removed.
    """

    def __init__(
        self, folder: str | Path, total_steps: int, *, pieces: Pieces | None = None, resumed_after: int | None = None
    ) -> None:
        self.total_steps, self.pieces = total_steps, pieces
        self.lines = StepLines(Path(folder) / TRAIN_SAMPLES, resumed_after)

    def write(
        self,
        step: int,
        groups: Sequence[ScoredGroup],
        dropped: Sequence[ScoredGroup],
        advantages: Sequence[float],
    ) -> list[Record]:
        """Add a training step if its completions are kept, and return the records that were added. See `Traces.write`."""
        is_due = step in (1, self.total_steps) or step % max(1, self.total_steps // NUM_SHOWN_STEPS) == 0
        if not is_due or not (groups or dropped):
            return []
        records = list(train_records(step, groups, dropped, advantages, self.pieces))
        self.lines.write(records)
        return records


class Traces:
    """Every completion of training: `{run_name}_rollouts_{shard}.jsonl` in `folder`, which is Open Instruct's name.

    Args:
        pieces: the text of single tokens; None: not written.
        resumed_after: see `EvaluationTables`; lines of later steps are removed.
    """

    def __init__(
        self, folder: str | Path, run_name: str, *, pieces: Pieces | None = None, resumed_after: int | None = None
    ) -> None:
        self.folder, self.run_name, self.pieces = Path(folder), run_name, pieces
        self.folder.mkdir(parents=True, exist_ok=True)
        shards = self._shards()
        self.shard = self.num_lines = 0
        """The shard being filled, and the number of its lines."""
        if resumed_after is None:
            move_aside(shards)
            return
        for number in reversed(range(len(shards))):
            kept = lines_until(shards[number], step=resumed_after)
            if kept:
                write_whole(shards[number], "".join(kept))
                self.shard, self.num_lines = number, len(kept)
                break
            shards[number].unlink()

    def write(
        self,
        step: int,
        groups: Sequence[ScoredGroup],
        dropped: Sequence[ScoredGroup],
        advantages: Sequence[float],
    ) -> None:
        """Add a training step; its lines are on disk on return.

        Args:
            dropped: groups that were sampled but not trained on; they have no advantage.
            advantages: one per completion of `groups`, in order.
        """
        records = trace_records(step, groups, dropped, advantages, self.pieces)
        lines = (json.dumps(record, default=str) + "\n" for record in records)
        while True:
            with self._path(self.shard).open("a", encoding="utf-8") as file:
                added = list(itertools.islice(lines, SHARD_LINES - self.num_lines))
                file.writelines(added)
            self.num_lines += len(added)
            if self.num_lines < SHARD_LINES:
                break
            self.shard, self.num_lines = self.shard + 1, 0

    def _path(self, shard: int) -> Path:
        return self.folder / f"{self.run_name}_rollouts_{shard:06d}.jsonl"

    def _shards(self) -> list[Path]:
        return list(itertools.takewhile(Path.exists, map(self._path, itertools.count())))


def evaluation_records(
    step: int, groups: Sequence[ScoredGroup], correct: Sequence[Sequence[bool]] | None
) -> Iterator[Record]:
    """One record per completion, prompts in their order."""
    for number, scored in enumerate(groups):
        for sample, (completion, score) in enumerate(_pairs(scored)):
            prompt = scored.group.prompt
            yield {
                "step": step,
                "prompt_idx": prompt.id[1],
                "sample_idx": sample,
                **_readable(prompt, completion, score),
                "correct": None if correct is None else bool(correct[number][sample]),
            }


def train_records(
    step: int,
    groups: Sequence[ScoredGroup],
    dropped: Sequence[ScoredGroup],
    advantages: Sequence[float],
    pieces: Pieces | None = None,
) -> Iterator[Record]:
    """Records of the group whose rewards differ most: its best and its worst completions, in their order."""
    sampled = [*groups, *dropped]
    spreads = [_spread(group.rewards) for group in sampled]
    number = spreads.index(max(spreads))
    scored = sampled[number]
    first = sum(len(group.scores) for group in groups[:number])
    order = sorted(range(len(scored.scores)), key=lambda index: scored.rewards[index])
    for index in sorted({*order[: NUM_SHOWN // 2], *order[-NUM_SHOWN // 2 :]}):
        prompt, completion = scored.group.prompt, scored.group.completions[index]
        yield {
            "step": step,
            "prompt_idx": prompt.id[1],
            "sample_idx": index,
            **_readable(prompt, completion, scored.scores[index]),
            "advantage": finite(advantages[first + index]) if number < len(groups) else None,
            **({**_pieces(completion, pieces), "logprobs": _logprobs(completion, digits=4)} if pieces else {}),
        }


def trace_records(
    step: int,
    groups: Sequence[ScoredGroup],
    dropped: Sequence[ScoredGroup],
    advantages: Sequence[float],
    pieces: Pieces | None = None,
) -> Iterator[Record]:
    """One record per completion under Open Instruct's names; indices count within the step, `prompt_id` within the run.

    Log-probabilities are rounded to seven decimals, which is finer than float32 resolves from 1 on, and null for tokens that
    were not sampled; `tokens` has the text of each token. A trajectory's `response_mask` marks the tokens that were sampled.
    Its `branches` list the tokens, from `start` to `end`, that were sampled after `prompt_tokens` and not after the tokens
    before them; the messages of each are in `trajectory`.
    """
    of_samples = iter(advantages)
    samples = itertools.count()
    for number, scored in enumerate([*groups, *dropped]):
        prompt = scored.group.prompt
        for completion, score in _pairs(scored):
            yield {
                "step": step,
                "sample_idx": next(samples),
                "prompt_idx": number,
                "prompt_id": f"{prompt.id[0]}_{prompt.id[1]}",
                "prompt": prompt.text,
                "completion": completion.text,
                "prompt_tokens": prompt.tokens.tolist(),
                "response_tokens": completion.tokens.tolist(),
                "reward": finite(score.reward),
                "scores": {name: finite(value) for name, value in score.parts.items()},
                "advantage": finite(next(of_samples)) if number < len(groups) else None,
                "finish_reason": completion.finish_reason,
                **_labels(prompt, "dataset"),
                "request_info": None,
                **_pieces(completion, pieces),
                "logprobs": _logprobs(completion, digits=7),
                "policy_version": _version(completion),
                **_masks(completion),
                **_trajectory(completion),
                **({"extras": _extras(score)} if score.extras else {}),
            }


def _pieces(completion: Completion, pieces: Pieces | None) -> Record:
    return {"tokens": pieces(completion.tokens.tolist())} if pieces else {}


def _logprobs(completion: Completion, *, digits: int) -> list[float | None]:
    """The engine's log-probability of each token; null for tokens that were not sampled."""
    pairs = zip(completion.logprobs.tolist(), completion.loss_mask.tolist(), strict=True)
    return [finite(round(value, digits)) if is_sampled else None for value, is_sampled in pairs]


def _masks(completion: Completion) -> Record:
    """`response_mask` and `branches` of a trajectory; empty for a completion of a single turn."""
    if completion.trajectory is None:
        return {}
    branches = [
        {"start": branch.start, "end": branch.end, "prompt_tokens": branch.prompt_tokens.tolist()}
        for branch in completion.trajectory.branches
    ]
    return {"response_mask": completion.loss_mask.tolist(), **({"branches": branches} if branches else {})}


def _trajectory(completion: Completion) -> dict[str, Any]:
    """The entry `trajectory`: its calls, the answers to them, and its ending; empty for a completion of a single turn."""
    record = completion.trajectory
    if record is None:
        return {}
    found = {
        "ended_by": record.ended_by,
        "turns": [_turn(turn) for turn in record.turns],
        "messages": plain(record.messages),
        "scored_text": record.scored_text,
        "reward": None if record.reward is None else finite(record.reward),
        "metrics": plain(record.metrics),
        **({"branches": branch_records(completion)} if record.branches else {}),
        **({"agent": plain(asdict(record.agent))} if record.agent else {}),
    }
    return {"trajectory": found}


def branch_records(completion: Completion) -> list[Record]:
    """The branches of a trajectory for a reader: parent, context and messages of each.

    `parent` is a branch and `after` a turn of the trajectory, both counted from 0, null for a branch without a parent; `rewritten`:
    the context is nevertheless not the parent's tokens up to that turn.
    """
    record = completion.trajectory
    if record is None:
        return []
    return [
        {
            "parent": branch.parent if branch.parent >= 0 else None,
            "after": branch.after if branch.after >= 0 else None,
            "rewritten": _is_rewritten(completion, record, branch),
            "context_tokens": len(branch.prompt_tokens),
            "num_turns": sum(branch.start <= turn.start < branch.end for turn in record.turns),
            "messages": plain(branch.messages),
        }
        for branch in record.branches
    ]


def _is_rewritten(completion: Completion, record: TrajectoryRecord, branch: Branch) -> bool:
    if branch.parent < 0 or branch.after < 0:
        return False
    before = record.branches[branch.parent]
    repeated = completion.tokens[before.start : record.turns[branch.after].end]
    whole = np.concatenate([before.prompt_tokens, repeated])
    return not np.array_equal(branch.prompt_tokens[: len(whole)], whole)


def _turn(turn: Turn) -> dict[str, Any]:
    calls = zip(turn.calls, turn.failed, turn.seconds, strict=False)
    return {
        "num_tokens": turn.end - turn.start,
        "calls": [
            {"name": name, "failed": bool(failed), "seconds": finite(seconds)} for name, failed, seconds in calls
        ],
        "unreadable_calls": turn.num_unreadable,
        "unknown_calls": turn.num_unknown,
        "reward": finite(turn.reward),
    }


def as_table(name: str, records: Sequence[Record]) -> Table:
    """Records for a reader as a table; values that are neither text nor numbers become JSON."""
    columns = tuple(dict.fromkeys(key for record in records for key in record if key not in ("tokens", "logprobs")))
    rows = tuple(tuple(_cell(record.get(key)) for key in columns) for record in records)
    return Table(name=name, columns=columns, rows=rows)


def _cell(value: object) -> Cell:
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return value
    return utf8(value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False))


def tables(folder: Path) -> dict[int, list[Path]]:
    """The files of each evaluation in `folder` by step; steps and shards are in order."""
    found: dict[int, list[tuple[int, Path]]] = {}
    for path in folder.glob("eval_step_*.jsonl"):
        named = _TABLE.fullmatch(path.name)
        if named:
            found.setdefault(int(named[1]), []).append((int(named[2] or 0), path))
    return {step: [path for _, path in sorted(shards)] for step, shards in sorted(found.items())}


def _spread(rewards: np.ndarray) -> float:
    known = rewards[~np.isnan(rewards)]
    return float(np.ptp(known)) if known.size else -1.0


def _readable(prompt: Prompt, completion: Completion, score: Score) -> Record:
    """One completion for a human reader."""
    columns = {name: _shortened(plain(value)) for name, value in prompt.columns.items() if name not in _LABEL_COLUMNS}
    return {
        "prompt": prompt.text,
        "completion": completion.text,
        **_labels(prompt, "verifiers"),
        **({"columns": columns} if columns else {}),
        "scores": {name: finite(value) for name, value in score.parts.items() if name != "correct"},
        "reward": finite(score.reward),
        "finish_reason": completion.finish_reason,
        "num_tokens": completion.num_sampled,
        "policy_version": _version(completion),
        **_trajectory(completion),
        **({"extras": _extras(score)} if score.extras else {}),
    }


def _shortened(value: object) -> object:
    """The value, or the beginning of a long text: a row may contain a whole book."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return value if len(text) <= COLUMN_CHARACTERS else f"{text[:COLUMN_CHARACTERS]} ..."


def _pairs(scored: ScoredGroup) -> Iterator[tuple[Completion, Score]]:
    return zip(scored.group.completions, scored.scores, strict=True)


def _labels(prompt: Prompt, name: str) -> Record:
    """Verifiers and their ground truths, one each; ground truths that JSON cannot hold are written as text."""
    truths = list(prompt.ground_truths)
    try:
        json.dumps(truths, allow_nan=False)
    except (TypeError, ValueError):
        truths = [str(truth) for truth in truths]
    return {name: list(prompt.verifiers), "ground_truth": truths}


def _extras(score: Score) -> Record:
    """The extras of the user's functions as strict JSON: none of their values may end the run."""
    return {text_of(name): plain(value) for name, value in score.extras.items()}


def _version(completion: Completion) -> int | None:
    """Version of the weights that sampled the first token; None for weights that an engine loaded itself."""
    first = int(completion.policy_versions[0]) if len(completion.policy_versions) else -1
    return first if first >= 0 else None
