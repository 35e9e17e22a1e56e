"""A run of the program docker or podman, with the last part of its outputs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence

from mgrpo.environments.boxes.box import BoxError, Done
from mgrpo.environments.boxes.captured import Captured, in_memory

_GRACE_S = 0.2


class ContainerCommand:
    """One run of the command line's program."""

    def __init__(self, process: asyncio.subprocess.Process, outputs: Sequence[Captured]) -> None:
        self.process, self._outputs = process, outputs

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes | int = b"",
        is_one: bool = False,
        max_bytes: int,
        mark: bytes = b"",
    ) -> ContainerCommand:
        """`mark`: see `Captured`; for the first output."""
        pipes = [os.pipe() for _ in range(1 if is_one else 2)]
        with contextlib.ExitStack() as given:
            for _, theirs in pipes:
                given.callback(os.close, theirs)
            if isinstance(stdin, bytes):
                stdin = in_memory(stdin)
                given.callback(os.close, stdin)
            try:
                process = await asyncio.create_subprocess_exec(
                    *argv,
                    stdin=stdin,
                    stdout=pipes[0][1],
                    stderr=pipes[-1][1],
                    env={**os.environ, **(env or {})},
                    start_new_session=True,
                )
            except BaseException:
                for ours, _ in pipes:
                    os.close(ours)
                raise
        marks = [mark, b""]
        return cls(
            process, [Captured(ours, max_bytes, mark=each) for (ours, _), each in zip(pipes, marks, strict=False)]
        )

    @classmethod
    async def run(cls, argv: Sequence[str], *, limit_s: float | None) -> Done:
        """Run to the end; BoxError after the limit."""
        command = await cls.start(argv, max_bytes=2**16)
        try:
            return await command.wait(limit_s)
        except TimeoutError:
            raise BoxError(
                f"{' '.join(argv[:2])} did not end within {limit_s:g} s; see whether the daemon answers: {argv[0]} ps"
            ) from None
        finally:
            await command.end(0.0)

    @property
    def said(self) -> bytes:
        return self._outputs[0].kept

    @property
    def has_begun(self) -> bool:
        """True once its mark has been read: the rest is the output of the command in the container."""
        return self._outputs[0].is_marked

    async def wait(self, limit_s: float | None) -> Done:
        """Wait for its end; TimeoutError after the limit, without ending it."""
        async with asyncio.timeout(limit_s):
            status = await self.process.wait()
        texts = await asyncio.gather(*(output.finish(_GRACE_S) for output in self._outputs))
        truncated = any(output.truncated for output in self._outputs)
        # A shell's number for a signal.
        status = 128 - status if 128 < status < 128 + signal.NSIG else status
        return Done(status=status, stdout=texts[0], stderr=(*texts, b"")[1], truncated=truncated)

    async def end(self, grace_s: float) -> None:
        """Kill it unless it ends in this time."""
        try:
            async with asyncio.timeout(grace_s):
                await self.process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()
        for output in self._outputs:
            output.close()
