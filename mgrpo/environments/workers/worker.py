"""The program that holds environments: `python -m mgrpo.environments.workers.worker`, asked in JSON lines by `link`.

Every question has a number "id", which its answer repeats; answers come in any order. What is asked, and answered:

    load    instance, specs, limits, limit_s  ->  description: the first environment is built and set up
    reset   instance, row, seed, trajectory   ->  opening, metrics, active, acts: a new instance is built and set up before
    step    instance, calls                   ->  observations, seconds, timed_out
    resume  instance, answer                  ->  wish, or returned and metrics: a program goes on
    ending  instance                          ->  reward, snapshot
    end     instance, limit_s                 ->  the trajectory has let go of everything
    close   instance, limit_s                 ->  what still goes on in it is cancelled
    stuck                                     ->  stuck: the instances of which something goes on that cannot be ended

An answer may be {"error": text, "timed_out": bool} instead; that about an instance says whether it "is_stuck".
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from typing import BinaryIO

from mgrpo.environments.environment import Call
from mgrpo.environments.offered.catalog import Spec
from mgrpo.environments.workers.limits import WorkerLimits
from mgrpo.environments.workers.resident import Failed, Late, Resident, said
from mgrpo.environments.workers.threads import OWNER, OwnedThreads
from mgrpo.processes.guarded import go_on_guarded
from mgrpo.processes.json_lines import Message, take_standard_streams

_MAX_QUESTION_BYTES = 1 << 30


def main() -> None:
    go_on_guarded()
    questions, answers = take_standard_streams()
    asyncio.run(_Worker(answers).serve(questions))


class _Worker:
    def __init__(self, answers: int) -> None:
        self._answers = answers
        self._threads = OwnedThreads()
        self._specs: Sequence[Spec] = ()
        self._limits = WorkerLimits()
        self._residents: dict[int, Resident] = {}

    async def serve(self, questions: BinaryIO) -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(self._threads)
        reader = asyncio.StreamReader(limit=_MAX_QUESTION_BYTES)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), questions)
        tasks = set()
        while line := await reader.readline():
            task = asyncio.create_task(self._serve(json.loads(line)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        # An orderly end would wait for threads that hang.
        os._exit(0)

    async def _serve(self, question: Message) -> None:
        OWNER.set(question.get("instance", -1))
        try:
            answer = await self._answer(question)
        except Failed as err:
            answer = {"error": str(err), "timed_out": isinstance(err, Late)}
        except Exception as err:
            answer = {"error": said(err), "timed_out": False}
        if (resident := self._residents.get(question.get("instance", -1))) is not None:
            answer["is_stuck"] = resident.is_stuck
        data = json.dumps(answer | {"id": question["id"]}).encode() + b"\n"
        while data:
            data = data[os.write(self._answers, data) :]

    async def _answer(self, question: Message) -> Message:
        match question["ask"]:
            case "load":
                self._specs = [Spec.from_json(spec) for spec in question["specs"]]
                self._limits = WorkerLimits(**question["limits"])
                description = await self._resident(question).description(question["limit_s"])
                return {"description": description.to_json()}
            case "reset":
                resident = self._resident(question)
                return await resident.reset(question["row"], seed=question["seed"], trajectory=question["trajectory"])
            case "step":
                return await self._resident(question).step([Call(**call) for call in question["calls"]])
            case "resume":
                return await self._resident(question).resume(question["answer"])
            case "ending":
                return await self._resident(question).ending()
            case "end":
                return await self._resident(question).end(question["limit_s"])
            case "close":
                return await self._close(question["instance"], question["limit_s"])
            case "stuck":
                return {"stuck": [number for number, resident in self._residents.items() if resident.is_stuck]}
        raise AssertionError(question["ask"])

    def _resident(self, question: Message) -> Resident:
        number = question["instance"]
        if number not in self._residents:
            self._residents[number] = Resident(number, self._specs, self._limits, self._threads)
        return self._residents[number]

    async def _close(self, number: int, limit_s: float) -> Message:
        resident = self._residents[number]
        try:
            await resident.close(limit_s)
        finally:
            # A stuck one is asked about later.
            if not resident.is_stuck:
                del self._residents[number]
        return {}


if __name__ == "__main__":
    main()
