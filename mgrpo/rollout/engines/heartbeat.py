"""Heartbeats of the engines, which detect those that died while idle or that hang."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

from mgrpo.rollout.engine import Engine
from mgrpo.rollout.engines.members import LOADED, State
from mgrpo.rollout.engines.roster import Roster, say

LONGEST_BEAT_S = 5.0


class Heartbeat:
    """Pings every engine that has loaded its model, at intervals."""

    def __init__(self, roster: Roster, *, patience_s: float) -> None:
        """
        Args:
            patience_s: seconds of silence after which an engine is dead.
        """
        self.roster, self.patience_s = roster, patience_s
        self.beat_s = min(LONGEST_BEAT_S, patience_s / 6)
        self.asked: dict[int, Engine] = {}
        """Engines with an unanswered ping."""
        self._closed = threading.Event()

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def close(self) -> None:
        """Stop pinging."""
        self._closed.set()

    def beat(self, seconds: float) -> None:
        """Ping engines, and report silent ones, `seconds` after the last beat."""
        roster = self.roster
        with roster.lock:
            suspects, late = roster.members.pass_time(seconds)
            listening = roster.members.numbers(lambda member: member.state in LOADED and not member.is_in_transfer)
            silent = [(number, roster.engines[number], self._silence(number)) for number in late]
            ask = [
                (number, roster.engines[number])
                for number in listening
                if number not in late and self.asked.get(number) is not roster.engines[number]
            ]
            self.asked.update(ask)
        for number in suspects:
            say(f"{roster.named(number)} has not answered for {self.patience_s / 2:g} s and is given no more groups")
        for number, engine, reason in silent:
            roster.lost(number, engine, reason)
        for number, engine in ask:
            self._ask(number, engine)

    def _silence(self, number: int) -> str:
        members = self.roster.members
        if members[number].state is State.STARTING:
            return f"it has not started within engine_start_timeout={members.start_s:g} s"
        return f"no answer within engine_heartbeat_timeout={self.patience_s:g} s"

    def _ask(self, number: int, engine: Engine) -> None:
        def answered(answer: Future[None]) -> None:
            with self.roster.lock:
                if self.asked.get(number) is engine:
                    del self.asked[number]
                is_back = answer.exception() is None and self._is_back(number, engine)
            if (err := answer.exception()) is not None:
                self.roster.lost(number, engine, f"could not answer: {err}")
            elif is_back:
                say(f"{self.roster.named(number)} answers again")
                self.roster.tell_serving(number)

        engine.ping().add_done_callback(answered)

    def _is_back(self, number: int, engine: Engine) -> bool:
        is_back = self.roster.engines[number] is engine and self.roster.members.heard(number)
        self.roster.changed.notify_all()
        return is_back

    def _run(self) -> None:
        before = time.monotonic()
        while not self._closed.wait(self.beat_s):
            now = time.monotonic()
            # Time in which this process was stopped does not count as the engines' silence.
            self.beat(min(now - before, 2 * self.beat_s))
            before = now
