"""Tools and environments that do what the pool has to withstand, for its workers; each is `this file:name`."""

from __future__ import annotations

import asyncio
import builtins
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mgrpo.environments.environment import Call, Environment, Observation, Tool

_KEPT: list[asyncio.Task[None]] = []
_NOTHING: dict[str, Any] = {"type": "object", "properties": {}}


def echo(text: str) -> str:
    """Say it again.

    Args:
        text: what to say.
    """
    return text


async def rest(seconds: float) -> str:
    """Wait without a thread.

    Args:
        seconds: how long.
    """
    await asyncio.sleep(seconds)
    return "rested"


def sleep(seconds: float) -> str:
    """Wait in a thread.

    Args:
        seconds: how long.
    """
    time.sleep(seconds)
    return "slept"


async def sleep_apart(seconds: float) -> str:
    """Wait in a thread of its own.

    Args:
        seconds: how long.
    """
    await asyncio.to_thread(time.sleep, seconds)
    return "slept"


async def keep_a_thread(seconds: float) -> str:
    """Have a thread that goes on after the call.

    Args:
        seconds: how long.
    """
    _KEPT.append(asyncio.create_task(asyncio.to_thread(time.sleep, seconds)))
    return "kept"


async def block(seconds: float) -> str:
    """Wait in the loop, which then serves nobody.

    Args:
        seconds: how long.
    """
    time.sleep(seconds)
    return "blocked"


async def stay(seconds: float) -> str:
    """Wait, also when cancelled.

    Args:
        seconds: how long.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            await asyncio.sleep(end - time.monotonic())
        except asyncio.CancelledError:
            continue
    return "stayed"


def run(code: str) -> str:
    """Run a statement in the worker.

    Args:
        code: what to run.
    """
    names = {"os": os, "signal": signal, "subprocess": subprocess, "sys": sys, "time": time, "answer": ""}
    exec(code, names)
    return str(names["answer"])


class Counting(Environment):
    """Counts its steps since the reset, and its resets."""

    def __init__(self, folder: str = "", delay_s: float = 0.0) -> None:
        self._folder, self._delay_s = folder, delay_s
        self.resets = self.steps = 0
        self.seed = -1

    async def setup(self) -> None:
        self._log("setup")

    def tools(self) -> Sequence[Tool]:
        return (Tool(name="count", description="Counts.", parameters=_NOTHING),)

    async def reset(self, row: Mapping[str, Any], *, seed: int) -> Observation:
        await asyncio.sleep(self._delay_s)
        self.resets, self.steps, self.seed = self.resets + 1, 0, seed
        return Observation(text=f"{row['question']} {seed}", metrics={"resets": self.resets})

    async def step(self, calls: Sequence[Call]) -> Sequence[Observation]:
        self.steps += len(calls)
        return [
            Observation(text=f"{self.resets} {self.steps}", reward=0.5, metrics={"steps": self.steps}) for _ in calls
        ]

    def reward(self) -> float:
        return self.steps / 4

    def snapshot(self) -> dict[str, Any]:
        return {"steps": self.steps}

    async def close(self) -> None:
        self._log("close")

    def _log(self, word: str) -> None:
        if self._folder:
            with (Path(self._folder) / "log").open("a") as log:
                log.write(f"{word}\n")


class Hostile(Counting):
    """Does what the row's `bad` asks for in the method of the row's `where`; with `once`, a file, only the first time."""

    async def reset(self, row: Mapping[str, Any], *, seed: int) -> Observation:
        self._row = row
        await self._misbehave("reset")
        return await super().reset(row, seed=seed)

    async def step(self, calls: Sequence[Call]) -> Sequence[Observation]:
        await self._misbehave("step")
        return await super().step(calls)

    async def reward(self) -> float:  # type: ignore[override]
        await self._misbehave("reward")
        return super().reward()

    async def close(self) -> None:
        await self._misbehave("close")
        await super().close()

    async def _misbehave(self, where: str) -> None:
        row = getattr(self, "_row", {})
        if row.get("where") != where:
            return
        once = row.get("once")
        if once:
            try:
                Path(once).touch(exist_ok=False)
            except FileExistsError:
                return
        match row["bad"]:
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(3)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hang":
                await asyncio.sleep(1000)
            case "hang in a thread":
                await asyncio.to_thread(time.sleep, 1000)
            case "raise":
                raise ValueError("as asked")
            case "leave":
                sys.exit("bye")
            case "SystemExit" | "KeyboardInterrupt" | "GeneratorExit" as name:
                raise getattr(builtins, name)("as asked")
            case "flood the pipe":
                for pipe in range(3, 64):
                    try:
                        if "pipe" in os.readlink(f"/proc/self/fd/{pipe}"):
                            while True:
                                os.write(pipe, b"x" * (1 << 16))
                    except OSError:
                        continue
            case "forge an answer":
                for pipe in range(3, 64):
                    try:
                        if "pipe" in os.readlink(f"/proc/self/fd/{pipe}"):
                            os.write(pipe, b'{"id": 12345}\n')
                    except OSError:
                        continue


class Unready(Counting):
    """Never set up."""

    async def setup(self) -> None:
        await asyncio.sleep(1000)


class Ending(Hostile):
    """Lets go of what a trajectory left."""

    async def end(self) -> None:
        self._log("end")
        await self._misbehave("end")


class Unreadable(Exception):
    """Cannot be written, nor made a number."""

    def __repr__(self) -> str:
        raise KeyboardInterrupt

    __str__ = __repr__

    def __float__(self) -> float:
        raise KeyboardInterrupt


class Odd(Environment):
    """Answers what is no observation, by the argument of its call."""

    def tools(self) -> Sequence[Tool]:
        kind = {"type": "string", "description": "of the answer"}
        return (Tool(name="odd", description="Odd.", parameters={"type": "object", "properties": {"kind": kind}}),)

    def step(self, calls: Sequence[Call]) -> Sequence[Any]:
        kind = calls[0].arguments["kind"]
        if kind == "unreadable error":
            raise Unreadable
        return {
            "nan": [Observation(reward=float("nan"))],
            "1e300": [Observation(reward=1e300)],
            "text as reward": [Observation(reward="1.0")],  # type: ignore[arg-type]
            "unreadable": [Observation(reward=Unreadable())],  # type: ignore[arg-type]
            "metric": [Observation(metrics={"looks": float("inf")})],
            "endless": itertools.count(),
            "few": [],
            "text": ["text"],
            "none": None,
            "surrogate": [Observation(text="a\ud800b")],
            "long": [Observation(text="ä" * 1000)],
            "stop": [next(iter(()))] if kind == "stop" else [],
        }[kind]
