"""An agent that is a command: any program that reads its model's address from environment variables.

It runs in a separate box, which ends with the trajectory, together with its processes and files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from mgrpo.environments.boxes.box import MIB, Bounds, Box, Done
from mgrpo.environments.boxes.opening import check_box, open_box
from mgrpo.environments.launch.copied_files import Files, files_of_command, files_of_folder
from mgrpo.environments.launch.results import OwnWord, ResultError, Unjudged, result_in, reward_of_status
from mgrpo.environments.offered.agent import CHECK_S, ENDING_S, MOST_OUTPUT_CHARS, Agent, Endpoint, Outcome, masked

_TASK, _RESULT = "task.json", "result.json"
_PYTHON = re.compile(r"python[0-9.]*")
_checked: set[tuple[str, Bounds]] = set()
"""Kinds of boxes that this process has checked."""


class CommandAgent(Agent):
    """The command, for one trajectory at a time."""

    name = "agent"
    ending_s = ENDING_S

    def __init__(
        self,
        *,
        command: str,
        check: str | None = None,
        box: str = "local",
        image: str | None = None,
        network: bool = False,
        files: str | None = None,
        env: Sequence[str] = (),
        max_processes: int = 256,
        memory_mb: int = 4096,
        disk_mb: int = 1024,
        cpus: float | None = None,
        sets_reward: bool = True,
    ) -> None:
        """The settings `agent_*`, see `config.agent`; a relative path in a command names a file of the current folder.

        Raises:
            ValueError: a file or a variable is missing.
        """
        self._words, self._check = _words("agent", command), None if check is None else _words("agent_check", check)
        self._files = Files({}) if files is None else files_of_folder(files)
        self._check_files = self._files
        if self._check is not None:
            self._check_files |= files_of_command(self._check, self._files)
            self.remarks = check_remarks(check or "", self._check, self._check_files)
        self._files |= files_of_command(self._words, self._files)
        self._where = box
        self._has_own_word = sets_reward and check is None
        self._own = _variables(env)
        absolute = {
            word for word in (*self._words, *(self._check or ())) if os.path.isabs(word) and os.path.exists(word)
        }
        self._bounds = Bounds(
            image=image,
            network=network,
            # With an image these are paths in it.
            readable=() if image is not None else tuple(sorted(absolute)),
            memory_bytes=memory_mb * MIB,
            disk_bytes=disk_mb * MIB,
            max_processes=max_processes,
            cpus=cpus,
            output_bytes=8 * MOST_OUTPUT_CHARS,
        )
        self._box: Box | None = None

    async def setup(self) -> None:
        """Check that such boxes can be opened; ValueError if not."""
        if (kind := (self._where, self._bounds)) not in _checked:
            await check_box(*kind)
            _checked.add(kind)

    async def reset(self, row: Mapping[str, Any], *, seed: int) -> None:
        await self.end()
        self.row, self.seed = row, seed
        bounds = self._bounds
        if (image := row.get("image")) and isinstance(image, str) and self._takes_images:
            bounds = dataclasses.replace(bounds, image=image, readable=())
        self._box = await open_box(self._where, bounds)
        await self._files.put_into(self._box)

    @property
    def _takes_images(self) -> bool:
        """True if a row's column `image` names a container image; in a local box it would be a folder of this machine."""
        return self._where not in ("local", "none")

    async def run(self, endpoint: Endpoint, *, truth: Mapping[str, Any], limit_s: float) -> Outcome:
        """See `Agent.run`.

        Raises:
            BoxLost, Unjudged: there is no score.
        """
        assert self._box is not None, "a reset comes first"
        hidden = [*self._own.values(), endpoint.api_key, endpoint.reward_key or ""]
        task = await _Task.put_into(self._box, f"{self._box.folder}/.mgrpo", self.row)
        process = await self._box.start(
            self._words, env={**await self._addresses(endpoint), **self._own, **task.variables}
        )
        done = await process.wait(limit_s)
        # No process of the agent may change the files under a check.
        await self._box.end_processes()
        output = _shown(done, hidden)
        if done.timed_out:
            return Outcome(ended="late", status=done.status, output=output)
        word = OwnWord()
        if self._has_own_word:
            try:
                word = await result_in(self._box, task.result)
            except ResultError as err:
                return Outcome(ended="crashed", status=done.status, output=_joined(output, str(err)))
        if done.status == 0 and self._check is not None:
            try:
                word = await self._verdict(truth)
            except ResultError as err:
                return Outcome(ended="crashed", status=done.status, output=_joined(output, str(err)))
        return Outcome(
            ended="crashed" if done.status else "ended",
            status=done.status,
            output=output,
            reward=word.reward,
            metrics=word.metrics,
        )

    async def end(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            await box.close()

    async def close(self) -> None:
        await self.end()

    async def _verdict(self, truth: Mapping[str, Any]) -> OwnWord:
        """Judge the agent's files, from a separate folder: a check that started in the agent's folder, its home as well,
        would import the agent's modules.

        Raises:
            ResultError: the check's files cannot be written.
            BoxLost: the box has ended.
            Unjudged: the check did not run to its end, or wrote an invalid result.
        """
        box = self._box
        assert box is not None and self._check is not None
        try:
            # A box of a user's own kind may be older than this.
            place = f"{getattr(box, 'scratch', '/tmp')}/mgrpo-check-{secrets.token_hex(8)}"
            home = f"{place}/.mgrpo"
            task = await _Task.put_into(box, home, {**self.row, **truth})
            await self._check_files.put_into(box, place)
        except OSError as err:
            raise ResultError(f"the files of agent_check cannot be written: {err.strerror or err}") from err
        own = {"HOME": home, "TMPDIR": home, "PYTHONNOUSERSITE": "1", "MGRPO_WORK": box.folder}
        done = await box.exec(self._check, env={**self._own, **own, **task.variables}, cwd=place, timeout_s=CHECK_S)
        await box.end_processes()
        how = f"took more than {CHECK_S:g} s" if done.timed_out else f"ended with the status {done.status}"
        try:
            found = await result_in(box, task.result)
        except ResultError as err:
            raise Unjudged(f"agent_check {how}, and {err}") from err
        if found.reward is not None:
            return found
        if done.timed_out or (reward := reward_of_status(done.status)) is None:
            raise Unjudged(f"agent_check {how} and wrote no reward: {_shown(done, [*self._own.values()])[-1000:]}")
        return dataclasses.replace(found, reward=reward)

    async def _addresses(self, endpoint: Endpoint) -> dict[str, str]:
        assert self._box is not None
        url = await self._box.url_for(endpoint.base_url)
        found = {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": endpoint.api_key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": endpoint.api_key,
        }
        if self._has_own_word and endpoint.reward_key is not None:
            found["MGRPO_REWARD_KEY"] = endpoint.reward_key
        return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """A command's task file, and the file for its result."""

    result: str
    variables: Mapping[str, str]

    @classmethod
    async def put_into(cls, box: Box, home: str, row: Mapping[str, Any]) -> _Task:
        await box.put(f"{home}/{_TASK}", json.dumps(row, ensure_ascii=False, indent=1).encode(errors="replace"))
        return cls(
            result=f"{home}/{_RESULT}",
            variables={"MGRPO_TASK": f"{home}/{_TASK}", "MGRPO_RESULT": f"{home}/{_RESULT}"},
        )


def _words(name: str, command: str) -> list[str]:
    words = shlex.split(command)
    if not words:
        raise ValueError(f"{name}={command!r} is no command")
    return words


def check_remarks(command: str, words: Sequence[str], files: Files) -> tuple[str, ...]:
    """Warnings about a check that the agent could control, or that does not find the agent's files."""
    found = []
    if _is_open_python(words):
        found.append(
            f"agent_check={command!r} runs python without -I, which takes modules from folders that a program may have written "
            "to; write python -I, and have a check of several files add its own folder to sys.path"
        )
    texts = [command.encode(), *(file.data for file in files.by_path.values())]
    if not any(map(os.path.isabs, words)) and not any(b"MGRPO_WORK" in text for text in texts):
        found.append(
            f"agent_check={command!r} starts in a folder of its own, and neither it nor its files name MGRPO_WORK, the variable "
            "with the agent's folder; relative paths do not lead there"
        )
    return tuple(found)


def _is_open_python(words: Sequence[str]) -> bool:
    """True if a word is a Python interpreter without -I, also inside a shell's command."""
    for place, word in enumerate(words):
        if _PYTHON.fullmatch(os.path.basename(word)):
            flags = itertools.takewhile(lambda each: each.startswith("-"), words[place + 1 :])
            if not any("I" in flag for flag in flags if not flag.startswith(("--", "-W", "-X"))):
                return True
        elif any(each.isspace() for each in word):
            with contextlib.suppress(ValueError):
                if _is_open_python(shlex.split(word)):
                    return True
    return False


def _variables(names: Sequence[str]) -> dict[str, str]:
    if missing := [name for name in names if name not in os.environ]:
        raise ValueError(f"agent_env names {', '.join(missing)}, which the run's environment does not have; export it")
    return {name: os.environ[name] for name in names}


def _shown(done: Done, hidden: Sequence[str]) -> str:
    """The last part of the output, without keys."""
    text = (done.stdout + done.stderr).decode(errors="replace")
    return masked(text, hidden)[-MOST_OUTPUT_CHARS:]


def _joined(output: str, why: str) -> str:
    return f"{output.rstrip()}\n{why}".strip()
