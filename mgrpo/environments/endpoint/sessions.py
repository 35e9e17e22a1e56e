"""All open sessions of one endpoint, each with its keys, from its beginning to its end."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mgrpo.environments.endpoint.calls import Calls
from mgrpo.environments.endpoint.exchange import Held
from mgrpo.environments.endpoint.messages import Fault
from mgrpo.environments.endpoint.session import EndpointLimits, LongReader, Session, TrajectoryBounds
from mgrpo.environments.endpoint.wishes import Wishes
from mgrpo.environments.loop.program_language import ProgramLanguage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenSession:
    """An open session with its calls and keys."""

    session: Session
    calls: Calls
    api_key: str
    reward_key: str
    """Key for setting its reward."""
    task_key: str
    """Key of the worker that plays the task; the agent does not receive it."""
    held: Held
    """Bytes of the bodies of its open calls."""

    def close(self, why: str) -> None:
        """Refuse further turns, and cancel those that are being sampled."""
        self.session.close(why)
        self.calls.cancel()


class Sessions:
    """The sessions that have not been ended. Belongs to one event loop."""

    def __init__(
        self,
        language: ProgramLanguage,
        wishes: Wishes,
        *,
        reader: LongReader,
        number: int,
        url: str,
        limits: EndpointLimits,
    ) -> None:
        """
        Args:
            language: language of chats without tools.
            number: number of this endpoint, with which its sessions' names begin.
            url: address of this endpoint for agents.
        """
        self._language, self._wishes, self._reader = language, wishes, reader
        self.held = Held()
        """Bytes of the bodies of all open calls."""
        self._number, self._url, self.limits = number, url, limits
        self._open: dict[str, OpenSession] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._nobody = secrets.token_urlsafe(24)
        self._said: set[str] = set()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, bounds: TrajectoryBounds, *, begins: bool = True) -> dict[str, str]:
        """A new session: its name, its address and its keys.

        Args:
            begins: True to start its time at once; False: at `begin`.
        """
        name = f"{self._number}-{secrets.token_hex(8)}"
        session = Session(
            name,
            self._language,
            self._wishes,
            bounds=bounds,
            limits=self.limits,
            reader=self._reader,
            say=self._say,
        )
        opened = self._open[name] = OpenSession(
            session=session,
            calls=Calls(session),
            api_key=secrets.token_urlsafe(24),
            reward_key=secrets.token_urlsafe(24),
            task_key=secrets.token_urlsafe(24),
            held=Held(self.limits.open_body_bytes, within=self.held),
        )
        if begins:
            self.begin(name)
        return {
            "session": name,
            "base_url": f"{self._url}/s/{name}",
            "api_key": opened.api_key,
            "reward_key": opened.reward_key,
            "task_key": opened.task_key,
        }

    def begin(self, name: str) -> None:
        """Start the time of a session, unless it has ended."""
        if (opened := self._open.get(name)) is not None and (limit_s := opened.session.bounds.deadline_s) is not None:
            self._timers[name] = asyncio.get_running_loop().call_later(limit_s, opened.close, "late")

    def lose(self, name: str, why: str) -> None:
        """Mark a session as lost: no worker serves it."""
        if (opened := self._open.get(name)) is not None:
            opened.close(why)

    def find(self, name: str, key: str, *, also_others: bool = False, must_reward: bool = False) -> OpenSession:
        """The session with this name, if the key is valid for it.

        Args:
            also_others: True to accept the keys of rewards and of the worker as well.
            must_reward: True to accept the key of rewards alone.
        Raises:
            Fault: 421, the session is another endpoint's; else 401, equal for a wrong key and for a session that has ended or
                never existed.
        """
        number = name.partition("-")[0]
        if number.isdecimal() and number != str(self._number):
            raise Fault(
                421,
                "invalid_request_error",
                f"This is endpoint {self._number}, and the session is one of endpoint {number:.20}: a balancer in front of several must "
                f"send paths that begin with /s/{number:.20}- to that one.",
                "wrong_endpoint",
            )
        opened = self._open.get(name)
        keys = (opened.api_key, opened.reward_key, opened.task_key) if opened else (self._nobody,) * 3
        # All are compared in any case, so that time reveals nothing.
        is_own, is_reward, is_worker = (is_same(key, each) for each in keys)
        fits = (is_own and not must_reward, is_reward and (also_others or must_reward), is_worker and also_others)
        if opened is None or not any(fits):
            if opened is not None:
                opened.session.counts.refused["401"] += 1
            raise Fault(
                401,
                "authentication_error",
                "No session has this address and this key; its trajectory may have ended.",
                "invalid_api_key",
            )
        return opened

    async def wait(self, name: str) -> dict[str, Any]:
        """Wait until a session is over; "status": "ended", "late", "lost" or "gone"; "left": the agent's report if it ended."""
        session = self._open[name].session
        await session.ended.wait()
        status = session.why_over or "ended"
        return {"status": status, "left": dict(session.left) if status == "ended" else {}}

    async def end(self, name: str) -> dict[str, Any]:
        """Cancel a session's calls and forget it; returns its report."""
        opened = self._open.pop(name)
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()
        opened.close("ended")
        # Cancelled tasks end in the next round of the loop, in which clients get their answers as well.
        await asyncio.sleep(0)
        return opened.session.report()

    def _say(self, key: str, text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            sys.stderr.write(f"mgrpo: {text}\n")


def is_same(given: str, key: str) -> bool:
    """Compare a client's key with this one in constant time."""
    return hmac.compare_digest(given.encode(errors="replace"), key.encode())


def bounds_of(question: Mapping[str, Any]) -> TrajectoryBounds:
    """The bounds in a request `open`."""
    return TrajectoryBounds(
        max_tokens=question["max_tokens"],
        max_model_length=question["max_model_length"],
        per_turn_max_tokens=question.get("per_turn_max_tokens"),
        deadline_s=question.get("deadline_s"),
        sampling=question.get("sampling") or {},
    )
