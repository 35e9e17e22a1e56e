"""Completions on the page: the same held-out prompts across evaluations, and samples of training step by step."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from mgrpo.telemetry.completions import NOT_PARTS, agent_facts, beginning
from mgrpo.telemetry.recorded import Record, Unread, is_sample, read_records, record_of
from mgrpo.telemetry.report.text import shown, text, visible
from mgrpo.telemetry.samples import TRAIN_SAMPLES, tables
from mgrpo.telemetry.untrusted import plain

MAX_COLUMNS = 4
"""The largest number of evaluations side by side."""
MAX_ANSWERS = 4
"""The largest number of answers to a prompt in one evaluation."""
MAX_TRAIN_RECORDS = 400
MAX_READ_BYTES = 32 * 2**20
"""Bytes that are read of an evaluation's tables, whose records are in the order of the prompts."""
NUM_PLACES, LINES_AT_PLACE, MAX_LINE_BYTES = 16, 4, 2**20
"""The number of evenly spread places in the traces from which records are shown, lines at each, and bytes of a line."""
CHARACTERS = 2000
"""Characters of each text that are shown."""
MAX_BRANCHES, MAX_MESSAGES, MAX_DEPTH = 24, 40, 4
"""Branches of a trajectory and messages of a branch that are shown, and steps to the right at most."""
MAX_TOKENS = 60_000
"""The largest number of tokens of a page that have colours."""
HEADINGS = {
    "Rose most": 4,
    "Fell most": 3,
    "Lowest reward": 3,
    "Highest reward": 2,
    "At random": 4,
}
"""Kinds of held-out prompts, and how many of each are shown."""
ENDS = {
    "stop": "ended by itself",
    "length": "cut off",
    "max_calls": "ended with a call that was one too many",
    "done": "ended by the environment",
    "error": "lost by the environment",
    "abort": "aborted",
}
"""Finish reasons of completions and ends of trajectories, in words."""


@dataclass(slots=True)
class Gallery:
    """The samples of a page, and the tokens of those that have them."""

    tokens: dict[str, list[Any]] = field(default_factory=dict)
    """The pieces of text of a sample, and the log-probability of each, by the sample's id."""
    room: int = MAX_TOKENS
    unread: Unread = field(default_factory=Unread)
    """Lines of the files of samples that could not be read, by file."""
    _numbers: Iterator[int] = field(default_factory=count)

    def sample(self, record: Record) -> str:
        """A completion with all facts of its record."""
        number = f"s{next(self._numbers)}"
        completion = record.get("completion")
        pieces, logprobs = record.get("tokens"), record.get("logprobs")
        if isinstance(pieces, list) and isinstance(logprobs, list) and len(pieces) == len(logprobs):
            if not isinstance(completion, str):
                completion = "".join(map(str, pieces))
            if len(pieces) <= self.room and len(completion) <= CHARACTERS * 4:
                self.room -= len(pieces)
                self.tokens[number] = [
                    [visible(str(piece)) for piece in pieces],
                    [round(value, 3) if isinstance(value, (int, float)) else None for value in logprobs],
                ]
        reward, correct = record.get("reward"), record.get("correct")
        ended_by = _ended_by(record)
        known = [("ground truth", truths)] if (truths := record.get("ground_truth")) else []
        known += list((record.get("columns") or {}).items())
        labels = [f"{name}: {value if isinstance(value, str) else _json(value)}" for name, value in known]
        kind = {True: "correct", False: "wrong"}.get(correct, "") if isinstance(correct, bool) else _kind(record)
        return (
            f"<article class='sample {kind}' id='{number}' data-kind='{kind}' data-end='{text(ended_by)}'"
            f" data-reward='{text(shown(reward)) if isinstance(reward, (int, float)) else ''}'>"
            f"<p class='facts'><b>{f'reward {text(shown(reward))}' if reward is not None else 'no score'}</b> {text('; '.join(_facts(record, ended_by)))}</p>"
            f"{_written(record, completion or '')}{_left(record)}"
            + "".join(f"<p class='facts'>{text(label, limit=CHARACTERS)}</p>" for label in labels)
            + "</article>"
        )

    def side_by_side(self, columns: Mapping[str, Mapping[Any, list[Record]]], chosen: Mapping[str, list[Any]]) -> str:
        """Held-out prompts, each with its answers in every column.

        Args:
            columns: the records of each prompt, by the heading of the column.
            chosen: prompts by the heading under which they are shown.
        """
        parts = []
        for heading, prompts in chosen.items():
            parts += [f"<h4>{text(heading)}</h4>"] if prompts else []
            for prompt in prompts:
                first = next(records[prompt][0] for records in columns.values() if records.get(prompt))
                truths = first.get("ground_truth")
                truth = (
                    f"<p class='facts'>{text(f'ground truth: {_json(truths)}', limit=CHARACTERS)}</p>" if truths else ""
                )
                cells = "".join(
                    self._column(name, records[prompt]) for name, records in columns.items() if records.get(prompt)
                )
                parts.append(
                    f"<section class='prompt'><pre class='asked'>{text(first.get('prompt', ''), limit=CHARACTERS)}</pre>"
                    f"{truth}<div class='columns'>{cells}</div></section>"
                )
        return "".join(parts)

    def _column(self, name: str, records: Sequence[Record]) -> str:
        first, *others = [record | {"ground_truth": None} for record in records[:MAX_ANSWERS]]
        rewards = [r for record in records if isinstance(r := record.get("reward"), (int, float))]
        mean = (
            f"mean reward {shown(sum(rewards) / len(rewards))} over {len(records)} answers"
            if len(records) > 1 and rewards
            else ""
        )
        more = "".join(map(self.sample, others))
        return (
            f"<div class='column'><p class='when'><b>{text(name)}</b> {text(mean)}</p>{self.sample(first)}"
            + (f"<details><summary>{len(others)} more answers</summary>{more}</details>" if others else "")
            + "</div>"
        )


def held_out_samples(folder: Path, gallery: Gallery) -> str:
    """The same prompts in the first, the last and some evaluations between them."""
    evaluations = tables(folder)
    if not evaluations:
        return ""
    steps = spread(list(evaluations), MAX_COLUMNS)
    columns = {_after(step): by_prompt(evaluations[step], gallery.unread) for step in steps}
    first, last = next(iter(columns.values())), list(columns.values())[-1]
    shown_in = f" after steps {', '.join(map(str, steps))}" if len(steps) > 1 else ""
    return (
        f"<h3 id='held-out'>Held-out prompts</h3><p class='note'>The same prompts in {len(steps)} of {len(evaluations)} "
        f"evaluations{shown_in}. rollouts/eval_step_N.jsonl has all of them.</p>"
        + gallery.side_by_side(columns, choose_prompts(mean_rewards(first), mean_rewards(last)))
    )


def _after(step: int) -> str:
    return f"after step {step}" if step else "before training"


def by_prompt(paths: Iterable[Path], unread: Unread) -> dict[Any, list[Record]]:
    """The records of an evaluation by prompt; only the first `MAX_READ_BYTES` or so of a large one."""
    found: dict[Any, list[Record]] = {}
    left = MAX_READ_BYTES
    for path in paths:
        for record in read_records([path], is_sample, unread):
            found.setdefault(record.get("prompt_idx"), []).append(record)
            left -= len(str(record.get("completion"))) + len(str(record.get("prompt"))) + 400
            if left < 0:
                return found
    return found


def mean_rewards(records: Mapping[Any, Sequence[Record]]) -> dict[Any, float]:
    """The mean reward of each prompt that has any."""
    rewards = {
        prompt: [r for record in answers if isinstance(r := record.get("reward"), (int, float))]
        for prompt, answers in records.items()
    }
    return {prompt: sum(found) / len(found) for prompt, found in rewards.items() if found}


def choose_prompts(first: Mapping[Any, float], last: Mapping[Any, float]) -> dict[str, list[Any]]:
    """Prompts that are worth reading, each once, by the reason: those that changed most, the extremes, and a few at random.

    Args:
        first, last: rewards by prompt in the first and the last evaluation, which may be the same.
    """
    changes = {prompt: last[prompt] - first[prompt] for prompt in last if prompt in first}
    has_spread = len(set(last.values())) > 1
    orders = {
        "Rose most": sorted((p for p in changes if changes[p] > 0), key=lambda p: -changes[p]),
        "Fell most": sorted((p for p in changes if changes[p] < 0), key=lambda p: changes[p]),
        "Lowest reward": sorted(last, key=lambda p: last[p]) if has_spread else [],
        "Highest reward": sorted(last, key=lambda p: -last[p]) if has_spread else [],
        "At random": random.Random(0).sample(list(last), len(last)),
    }
    taken: set[Any] = set()
    chosen = {}
    for heading, order in orders.items():
        chosen[heading] = [prompt for prompt in order if prompt not in taken][: HEADINGS[heading]]
        taken |= set(chosen[heading])
    return chosen


def train_samples(path: Path, gallery: Gallery) -> str:
    """Completions of one prompt for each of some steps, the newest step first."""
    records = list(read_records([path], is_sample, gallery.unread)) if path.is_file() else []
    note = f"Of one prompt a step. rollouts/{TRAIN_SAMPLES} has these completions."
    return _by_step("training", "Training samples", note, records[-MAX_TRAIN_RECORDS:], gallery)


def traces(folder: Path, gallery: Gallery) -> str:
    """Some of the completions that `save_traces` has kept, spread over the whole run."""
    shards = sorted(folder.glob("*_rollouts_[0-9]*.jsonl")) if folder.is_dir() else []
    readable = [r for r in _spread_records(shards, gallery.unread) if "tokens" in r or "completion" in r]
    note = (
        f"From {NUM_PLACES} places of the completions that save_traces keeps; {folder.name}/*_rollouts_*.jsonl has all."
    )
    return _by_step("traces", "Traces", note, readable, gallery)


def _spread_records(shards: Sequence[Path], unread: Unread) -> Iterator[Record]:
    """The records of a few lines from evenly spread places in large files."""
    sizes = [path.stat().st_size for path in shards]
    for place in range(NUM_PLACES):
        position = sum(sizes) * place // NUM_PLACES
        for path, size in zip(shards, sizes, strict=True):
            if position < size:
                with path.open("rb") as file:
                    if position:
                        file.seek(position - 1)
                        file.readline(MAX_LINE_BYTES)
                    for _ in range(LINES_AT_PLACE):
                        line = file.readline(MAX_LINE_BYTES)
                        try:
                            yield record_of(line, is_sample)
                        except ValueError:
                            unread[path.name] += line.endswith(b"\n")
                break
            position -= size


def _by_step(name: str, heading: str, note: str, records: Iterable[Record], gallery: Gallery) -> str:
    groups: dict[Any, dict[str, list[Record]]] = {}
    for record in records:
        groups.setdefault(record.get("step"), {}).setdefault(_prompt(record), []).append(record)
    if not groups:
        return ""
    parts = [f"<h3 id='{name}'>{heading}</h3><p class='note'>{text(note)}</p>"]
    for number, (step, prompts) in enumerate(reversed(groups.items())):
        shown_prompts = "".join(
            f"<section class='prompt'><pre class='asked'>{text(prompt, limit=CHARACTERS)}</pre>"
            f"<div class='columns'>{''.join(map(gallery.sample, answers))}</div></section>"
            for prompt, answers in prompts.items()
        )
        how_many = sum(map(len, prompts.values()))
        parts.append(
            f"<details class='step' id='{name}-{text(step)}'{' open' if not number else ''}><summary>step {text(step)} "
            f"<span class='note'>{how_many} {'completion' if how_many == 1 else 'completions'}</span></summary>"
            f"{shown_prompts}</details>"
        )
    return "".join(parts)


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of the items, with the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def _prompt(record: Record) -> str:
    prompt = record.get("prompt")
    return prompt if isinstance(prompt, str) else f"prompt {record.get('prompt_id', record.get('prompt_idx'))}"


def _kind(record: Record) -> str:
    """Kind of a training record by the scores of its verifiers: "correct", "wrong", "unscored", or "" if unknown."""
    if record.get("reward") is None:
        return "unscored"
    scores = record.get("scores")
    if not isinstance(scores, dict) or not (record.get("verifiers") or record.get("dataset")):
        return ""
    known = [value for value in scores.values() if isinstance(value, (int, float))]
    return "" if not known else "correct" if min(known) >= 1 else "wrong"


def _facts(record: Record, ended_by: str) -> list[str]:
    advantage = record.get("advantage")
    scores = record.get("scores")
    parts = {n: value for n, value in scores.items() if n not in NOT_PARTS} if isinstance(scores, dict) else {}
    several = parts if len(parts) > 1 else {}
    tokens = record.get("num_tokens")
    return [
        *([f"advantage {shown(advantage)}"] if advantage is not None else []),
        *([f"{shown(tokens)} tokens"] if tokens is not None else []),
        *([ENDS.get(ended_by, "end unknown")] if ended_by != "stop" else []),
        *_turns(record),
        *agent_facts((record.get("trajectory") or {}).get("agent") or {}),
        *(f"{name} {shown(value)}" for name, value in several.items()),
    ]


def _ended_by(record: Record) -> str:
    return (record.get("trajectory") or record).get("ended_by") or str(record.get("finish_reason") or "")


def _turns(record: Record) -> list[str]:
    """The number of turns of a trajectory, and the tools that they called."""
    turns = (record.get("trajectory") or {}).get("turns")
    if not turns:
        return []
    calls = [f"{call['name']}{' (failed)' if call['failed'] else ''}" for turn in turns for call in turn["calls"]]
    return [f"{len(turns)} {'turn' if len(turns) == 1 else 'turns'}, called {', '.join(calls) or 'nothing'}"]


def _written(record: Record, completion: str) -> str:
    """The text of a completion; with branches, the messages of each, and the whole text folded up."""
    whole = f"<pre class='written'>{text(completion, limit=CHARACTERS) or '<i>nothing</i>'}</pre>"
    branches = (record.get("trajectory") or {}).get("branches") or []
    if not any(branch.get("messages") for branch in branches):
        return whole
    parts, depths = [], list[int]()
    for number, branch in enumerate(branches):
        parent = branch.get("parent")
        depths.append(depths[parent] + 1 if parent is not None and 0 <= parent < number else 0)
        parts.append(
            f"<section class='branch d{min(depths[-1], MAX_DEPTH)}'><p class='facts'>{text(beginning(number, branch))}</p>"
            f"{_said(branch)}</section>"
            if number < MAX_BRANCHES
            else ""
        )
    more = len(branches) - MAX_BRANCHES
    hidden = f"<p class='note'>{more} more branches are in its record.</p>" if more > 0 else ""
    folded = f"<details><summary>tokens of all branches, one after the other</summary>{whole}</details>"
    return f"<div class='tree'>{''.join(parts)}{hidden}</div>{folded}"


def _said(branch: Record) -> str:
    """The messages of a branch; the last ones of the model, one for each turn, were sampled in it."""
    messages = branch.get("messages") or []
    of_model = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
    num_turns = branch.get("num_turns", 0)
    sampled = set(of_model[-num_turns:] if num_turns > 0 else ())
    some = [*range(len(messages))]
    if len(some) > MAX_MESSAGES:
        some = [*some[: MAX_MESSAGES // 2], *some[-MAX_MESSAGES // 2 :]]
    parts = []
    for before, place in zip([-1, *some], some, strict=False):
        parts += [f"<p class='note'>{place - before - 1} more messages</p>"] * (place > before + 1)
        parts.append(_message(messages[place], is_sampled=place in sampled))
    return "".join(parts)


def _message(message: Record, *, is_sampled: bool) -> str:
    role = str(message.get("role") or "")
    content = message.get("content")
    thought = message.get("reasoning_content")
    calls = message.get("tool_calls")
    lines = [
        *([f"<pre class='thought'>{text(thought, limit=CHARACTERS)}</pre>"] if thought else []),
        *([f"<pre>{text(_json(content), limit=CHARACTERS)}</pre>"] if content else []),
        *(
            f"<pre class='call'>{text(_call(call), limit=CHARACTERS)}</pre>"
            for call in (calls if isinstance(calls, list) else ())[:MAX_MESSAGES]
        ),
    ]
    named = f"{role} {message['name']}" if isinstance(message.get("name"), str) else role
    heading = named if is_sampled or role != "assistant" else f"{named}, not sampled here"
    return (
        f"<div class='said{' sampled' if is_sampled else ''}'><p class='facts'>{text(heading)}</p>"
        f"{''.join(lines) or '<pre><i>nothing</i></pre>'}</div>"
    )


def _call(call: object) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return _json(call)
    arguments = function.get("arguments")
    return f"{function.get('name')}({arguments if isinstance(arguments, str) else _json(arguments)})"


def _left(record: Record) -> str:
    """The end of an agent's output, folded up unless it failed."""
    agent = (record.get("trajectory") or {}).get("agent") or {}
    output = (agent.get("output") or "").strip()
    if not output:
        return ""
    is_open = "" if agent.get("ended") == "ended" else " open"
    tail = f"... {output[-CHARACTERS:]}" if len(output) > CHARACTERS else output
    return f"<details{is_open}><summary>printed by the agent</summary><pre>{text(tail)}</pre></details>"


def _json(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        return value[0]
    return json.dumps(plain(value), ensure_ascii=False)
