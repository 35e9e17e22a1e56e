"""The authoritative record of one agent's trajectory: each turn's context and its sampled tokens. Pure.

The tree becomes branches, laid end to end: each sampled token is in one of them, the first that reaches it, and in the context of
later ones. All branches together weigh as one trajectory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mgrpo.environments.loop.trajectory import Sampled, Trajectory

_Message = Mapping[str, Any]


@dataclass(slots=True, kw_only=True, eq=False)
class _Turn:
    number: int
    parent: _Turn | None
    added: np.ndarray
    """`[len]` int32: after the parent's last id; the whole context without a parent, or where it is written afresh."""
    is_afresh: bool
    length: int
    """Tokens of the context."""
    sampled: Sampled | None = None

    @property
    def end(self) -> int:
        assert self.sampled is not None
        return self.length + len(self.sampled.tokens)


class RecordedTree:
    """All turns of one trajectory."""

    def __init__(self) -> None:
        self._turns: dict[int, _Turn] = {}

    @property
    def num_tokens(self) -> int:
        """Sampled tokens and tokens between turns, without contexts that were rendered anew."""
        bridges = sum(len(turn.added) for turn in self._turns.values() if not turn.is_afresh)
        return bridges + sum(len(turn.sampled.tokens) for turn in self._turns.values() if turn.sampled)

    @property
    def num_turns(self) -> int:
        """Turns that were sampled."""
        return sum(turn.sampled is not None for turn in self._turns.values())

    def ask(self, number: int, parent: int | None, added: Sequence[int], rewrites: bool = False) -> np.ndarray:
        """Record a turn and return its context, `[len]` int32.

        Args:
            number: number of the new turn.
            parent: number of the turn that it continues.
            added: the ids after the parent's last one; the whole context without a parent, or if it `rewrites` the parent's.
        Raises:
            ValueError: the parent has not been sampled, or the turn is recorded already.
        """
        before = None if parent is None else self._turns.get(parent)
        if number in self._turns or (parent is not None and (before is None or before.sampled is None)):
            raise ValueError(
                f"turn {number} cannot follow turn {parent}: the one is known already, or the other is not"
            )
        if not added and before is None:
            raise ValueError(f"turn {number} has no context")
        is_afresh = before is None or rewrites
        length = len(added) + (0 if is_afresh or before is None else before.end)
        turn = _Turn(number=number, parent=before, added=np.array(added, np.int32), is_afresh=is_afresh, length=length)
        self._turns[number] = turn
        return _context(turn)

    def sampled(self, number: int, sampled: Sampled) -> None:
        """Record the tokens of a turn that was asked for."""
        self._turns[number].sampled = sampled

    def failed(self, number: int) -> None:
        """Forget a turn that could not be sampled."""
        del self._turns[number]

    def trajectory(self, end: Mapping[str, Any], *, prompt: np.ndarray | None = None) -> Trajectory:
        """The trajectory, once the agent has ended; without parts if it has read no turn. Its last turn is the last that was read.

        Args:
            end: the endpoint's answer to `end`: of each turn whether it was delivered, its message and calls; of roots their
                messages, and of the other turns the messages before them.
            prompt: `[len]` int32, of the row.
        """
        told = {turn["number"]: turn for turn in end["turns"]}
        before = {root["number"]: root["messages"] for root in end.get("roots", ())}
        before |= {int(number): messages for number, messages in end.get("added", {}).items()}
        kept = self._kept({number for number, turn in told.items() if turn["delivered"]})
        nexts = _nexts(kept)
        first = kept[0] if kept else None
        is_prompt = first is not None and prompt is not None and np.array_equal(first.added, prompt)
        found = Trajectory(context=_context(first) if first else _none(), has_own_context=not is_prompt)
        found.num_opening = len(before.get(first.number, ())) if first else 0
        branch_of: dict[int, int] = {}
        place_of: dict[int, int] = {}
        for turn in kept:
            if turn.number in branch_of:
                continue
            members = [turn]
            while (following := nexts.get(members[-1].number)) is not None:
                members.append(following)
            messages = [
                [*map(_plain, before.get(one.number, ())), _plain(told[one.number]["message"])] for one in members
            ]
            found.begin_branch(
                prompt if prompt is not None and is_prompt and turn is first else _context(turn),
                parent=-1 if turn.parent is None else branch_of[turn.parent.number],
                after=-1 if turn.parent is None else place_of[turn.parent.number],
                messages=[message for part in messages for message in part],
            )
            branch = len(found.branches)
            for place, (one, own) in enumerate(zip(members, messages, strict=True)):
                branch_of[one.number], place_of[one.number] = branch, len(found.turns)
                assert one.sampled is not None
                if place and len(one.added):
                    found.add_bridge(one.added.tolist())
                found.add_sampled(one.sampled)
                found.messages += own if one.parent is not None else own[-1:]
                _note(found, told[one.number])
        found.ended_by = "error"
        if kept:
            number = max(one.number for one in kept if told[one.number]["delivered"])
            sampled, last = self._turns[number].sampled, told[number]
            assert sampled is not None
            found.ended_by = "stop" if sampled.finish_reason == "stop" else "length"
            found.last_content = last["message"].get("content") or ""
            found.is_calling = bool(last.get("calls") or last.get("num_unreadable"))
        return found

    def _kept(self, delivered: set[int]) -> list[_Turn]:
        """The turns that were read or that lead to one that was, in order; without alternative samples of one request that led
        nowhere."""
        known = {number: turn for number, turn in sorted(self._turns.items()) if turn.sampled is not None}
        read = _with_parents(known[number] for number in sorted(delivered & known.keys()))
        parents = {turn.parent.number for turn in read.values() if turn.parent is not None}
        taken = {_request(turn) for number, turn in read.items() if number in parents}
        last = max(delivered & read.keys(), default=None)
        return [
            turn
            for number, turn in sorted(read.items())
            if number in parents or number == last or _request(turn) not in taken
        ]


def _with_parents(turns: Iterable[_Turn]) -> dict[int, _Turn]:
    found: dict[int, _Turn] = {}
    for turn in turns:
        one: _Turn | None = turn
        while one is not None and one.number not in found:
            found[one.number] = one
            one = one.parent
    return found


def _nexts(kept: Sequence[_Turn]) -> dict[int, _Turn]:
    """The next turn of the same branch, by the turn before it: the first whose context begins with that one's tokens."""
    nexts: dict[int, _Turn] = {}
    for turn in kept:
        if turn.parent is not None and not turn.is_afresh:
            nexts.setdefault(turn.parent.number, turn)
    return nexts


def _request(turn: _Turn) -> tuple[int, bytes]:
    """Key of a turn's context: equal for turns that were sampled after the same tokens."""
    return (-1 if turn.parent is None else turn.parent.number), turn.added.tobytes()


def _context(turn: _Turn) -> np.ndarray:
    parts: list[np.ndarray] = []
    one = turn
    while not one.is_afresh:
        assert one.parent is not None and one.parent.sampled is not None
        parts += [one.added, one.parent.sampled.tokens]
        one = one.parent
    return np.concatenate([one.added, *reversed(parts)]).astype(np.int32)


def _none() -> np.ndarray:
    return np.zeros(0, np.int32)


def _note(trajectory: Trajectory, told: Mapping[str, Any]) -> None:
    """Record the calls of the last turn in it."""
    unreadable = int(told.get("num_unreadable", 0))
    calls = (*told.get("calls", ()), *[""] * unreadable)
    trajectory.num_calls += len(calls)
    trajectory.num_calling_turns += bool(calls)
    trajectory.turns[-1] = replace(
        trajectory.turns[-1],
        calls=calls,
        failed=tuple(not name for name in calls),
        seconds=(0.0,) * len(calls),
        num_unreadable=unreadable,
    )


def _plain(message: _Message) -> _Message:
    """A message as trajectories have them, with calls whose arguments are objects."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_call(call) for call in calls]} if calls else message


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(text := function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(text)}}
    except (ValueError, RecursionError):
        return call
