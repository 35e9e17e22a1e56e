"""One node of a run: its ranks, its part of Ray, and its end, which ends the run.

Node 0 leads: it decides when the others start something, and its exit code is that of all. A failed node reports to node 0, which
gives its rank 0 a few seconds to end cleanly.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mgrpo.config import ConfigError
from mgrpo.config.load import SWITCHES
from mgrpo.config.schema import Config
from mgrpo.config.validate import problems
from mgrpo.moving import parse
from mgrpo.processes.background import announced
from mgrpo.processes.lifetime import adopt_orphans
from mgrpo.rollout.start import RayNode, serving_gpus
from mgrpo.run.nodes.job import NodeJob, about, gpu_problems, share_of
from mgrpo.run.nodes.meeting import Event, Guest, Meeting, MeetingError, Message, differences
from mgrpo.run.nodes.packages import package_notes
from mgrpo.run.nodes.place import Place
from mgrpo.run.ranks.local_ranks import GRACE_S, POLL_S, Ranks

TOKEN = "RAY_AUTH_TOKEN"
"""Variable with Ray's token. Set on all nodes, it also authenticates the nodes; otherwise node 0 makes one and sends it."""
QUIET_CODES = (2, 128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes after which engine logs are not kept."""
END_S = 20.0
"""Seconds that node 0 waits for the others to end."""
CAUSE_S = 1.5
"""Seconds that node 0 waits for another node's report of why its own ranks have failed."""
START_S = 180.0
"""Seconds for the others to start Ray."""


class _Agent:
    """Base of both kinds of nodes."""

    def __init__(self, place: Place, job: NodeJob) -> None:
        self.place, self.job = place, job
        self.gpus = serving_gpus()
        self.ranks = Ranks()
        self.ray: RayNode | None = None
        self.output_dir = ""
        self.events: queue.SimpleQueue[Event]
        self.signals: list[int] = []
        """Signals that this process received while the ranks run."""

    def run(self) -> int:
        """Run this node's part; returns the run's exit code."""
        # `ray start` leaves its daemons to this process, which then gets their exit status.
        adopt_orphans()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _leave)
        code = 1
        try:
            code = self._run()
        except ConfigError:
            code = 2
            raise
        except SystemExit as err:
            code = int(err.code or 0)
            raise
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            self._close(code)
        return code

    def _run(self) -> int:
        raise NotImplementedError

    def _close(self, code: int) -> None:
        self.ranks.kill()
        if self.ray is None:
            return
        if code not in (0, *QUIET_CODES):
            said = self.ray.keep_logs(Path(self.output_dir) / "engine_logs" / f"node_{self.place.rank}")
            if said:
                _report(f"node {self.place.rank} ({socket.gethostname()}): {said.removeprefix('; ')}")
        self.ray.close()

    def _start_ray(self, message: Message) -> None:
        share = share_of(
            self.place.rank,
            nodes=self.place.nodes,
            learner_nodes=self.job.learner_nodes,
            ranks_a_node=message["ranks_a_node"],
            gpus=self.gpus,
            num_cpus=len(os.sched_getaffinity(0)),
            shares_gpus=message["shares_gpus"],
        )
        self.output_dir = message["output_dir"]
        is_head = self.place.rank == 0
        if share.is_empty and not is_head:
            return
        self.ray = RayNode(
            address=message["address"],
            head=message["head"],
            is_head=is_head,
            gpus=share.gpus,
            num_cpus=share.num_cpus,
            token=message["token"] or os.environ[TOKEN],
            learners=self.place.rank if message["shares_gpus"] else None,
        )
        self.ray.watch(lambda reason: self.events.put((self.place.rank, {"ended": 1, "cause": reason})))

    def _start_ranks(self, ranks_a_node: int, meeting: tuple[str, int], words: Sequence[str], **more: Any) -> None:
        first = self.place.rank * ranks_a_node
        # From here on the ranks handle signals.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: self.signals.append(number))
        self.ranks.start(
            range(first, first + ranks_a_node),
            words,
            world_size=ranks_a_node * self.job.learner_nodes,
            meeting=meeting,
            **more,
        )

    def _next_event(self) -> Event | None:
        """The next event; None: none within `POLL_S`."""
        _reap_orphans(self._own_children())
        try:
            return self.events.get(timeout=POLL_S)
        except queue.Empty:
            return None

    def _own_children(self) -> set[int]:
        ray = self.ray.processes if self.ray is not None else ()
        return {*(process.pid for process in self.ranks.processes), *ray}


class Leader(_Agent):
    """Node 0."""

    meeting: Meeting | None = None
    first_failure = 0
    """Exit code of the first other node that failed."""
    has_cause = False
    """True once a node has reported a cause; ranks report their failures themselves."""

    def _run(self) -> int:
        secret = os.environ.get(TOKEN) or None
        own = about(self.place.head, job=self.job, num_gpus=len(self.gpus))
        self.meeting = Meeting(self.place, own, secret=secret)
        self.events = self.meeting.events
        with announced("other nodes to come", f"--timeout {self.job.timeout_s:g} s"):
            self.meeting.wait(self.job.timeout_s)
        config, ranks_a_node = self._checked()
        address = os.environ.get("VLLM_HOST_IP") or self.meeting.address
        token = secret or secrets.token_hex(32)
        plan = {
            "head": f"{address}:{_free_port(self.place.port + 1)}",
            "token": None if secret else token,
            "ranks_a_node": ranks_a_node,
            "shares_gpus": config.engine.shares_gpus,
            "output_dir": config.experiment.output_dir,
        }
        self._start_ray({**plan, "address": address})
        self.meeting.say({"ray": plan})
        self._wait_for_ray()
        words = [*self.job.words, "--ray_address", str(plan["head"])]
        with socket.create_server((address, 0), backlog=1024) as listener:
            meeting = listener.getsockname()
            self.meeting.say({"ranks": meeting, "words": words, "ranks_a_node": ranks_a_node})
            environment = {"RAY_AUTH_MODE": "token", TOKEN: token}
            self._start_ranks(ranks_a_node, meeting, words, listener=listener, environment=environment)
        return self._watch()

    def _checked(self) -> tuple[Config, int]:
        """The configuration and the number of ranks on a node; ConfigError unless all nodes can run them."""
        assert self.meeting is not None
        ranks_a_node = self.job.ranks_a_node or len(self.gpus)
        found = differences(self.meeting.about)
        if not ranks_a_node:
            found.append(
                "--nproc-per-node is missing: expected the number of learners on each node, which has no GPUs to count"
            )
        words = [word for word in self.job.words if "--" + word[2:].replace("-", "_") not in SWITCHES]
        world_size = ranks_a_node * self.job.learner_nodes or 1
        config = parse(words, prog="mgrpo train", world_size=world_size, defer=True)
        found += problems(config, world_size=world_size)
        if config.engine.ray_address is not None:
            found.append(
                f"ray_address={config.engine.ray_address}: mgrpo launch starts Ray itself; leave ray_address out"
            )
        if config.engine.vllm_mode == "server":
            found.append(
                "vllm_mode=server: mgrpo launch starts Ray and engines; start the learners with torchrun instead"
            )
        found += gpu_problems(config, self.job, ranks_a_node, self.meeting.about)
        if found:
            raise ConfigError(found)
        for note in package_notes(self.meeting.about):
            _report(note)
        return config, ranks_a_node

    def _wait_for_ray(self) -> None:
        assert self.meeting is not None
        deadline, waiting = time.monotonic() + START_S, set(range(1, self.place.nodes))
        while waiting:
            rank, message = self._next_event() or (0, {})
            if message is None:
                raise MeetingError(f"{self.meeting.name(rank)} has gone while Ray was starting")
            if "cause" in message:
                raise MeetingError(f"{self.meeting.name(rank)}: {message['cause']}")
            if "signal" in message:
                sys.exit(128 + message["signal"])
            if "ready" in message:
                waiting.remove(rank)
            if time.monotonic() > deadline:
                late = ", ".join(map(self.meeting.name, sorted(waiting)))
                raise MeetingError(f"{late} has not joined Ray within {START_S:g} s")

    def _watch(self) -> int:
        """Wait until the ranks of all nodes have ended, or those of this one after a failure; returns the exit code."""
        num_passed, running = 0, set(range(1, self.job.learner_nodes))
        while (code := self.ranks.poll()) is None or (code == 0 and running and not self.first_failure):
            if code == 0:
                self.ranks.end_within(GRACE_S)
                if time.monotonic() > self.ranks.deadline:
                    break
            event = self._next_event()
            asked = event[1].get("signal") if event is not None and event[1] is not None else None
            # Schedulers send a signal to every node at once: only a second one to this node counts as a second.
            if asked is not None and not num_passed:
                self.ranks.pass_on(asked)
            while len(self.signals) > num_passed:
                if num_passed or self.ranks.signalled is None:
                    self.ranks.pass_on(self.signals[num_passed])
                num_passed += 1
            if event is not None and asked is None:
                self._hear(*event, running)
        if code not in (0, *QUIET_CODES):
            self._wait_for_cause(running)
        was_killed = code == 128 + signal.SIGKILL
        return self.first_failure if self.first_failure and (was_killed or not code) else code or 0

    def _wait_for_cause(self, running: set[int]) -> None:
        """Wait `CAUSE_S` for the report of a node: an engine's death ends rank 0 before it arrives."""
        deadline = time.monotonic() + CAUSE_S
        while not self.has_cause and time.monotonic() < deadline:
            if (event := self._next_event()) is not None:
                self._hear(*event, running)

    def _hear(self, rank: int, message: Message | None, running: set[int]) -> None:
        assert self.meeting is not None
        running.discard(rank)
        if message is None:
            message = {"ended": 1, "cause": "has gone: its launcher was killed, or the machine is not reachable"}
        # Rank 0 starts the engines of other nodes elsewhere, if it can.
        trains = rank < self.job.learner_nodes
        if message.get("cause"):
            self.has_cause = True
            _report(f"{self.meeting.name(rank)}: {message['cause']}{'' if trains else '; only its engines are lost'}")
        if message.get("ended") and trains:
            self.first_failure = self.first_failure or message["ended"]
            self.ranks.end_within(GRACE_S)

    def _close(self, code: int) -> None:
        if self.meeting is not None:
            self.meeting.say({"end": code})
        super()._close(code)
        if self.meeting is not None:
            self._wait_for_the_others()
            self.meeting.close()

    def _wait_for_the_others(self) -> None:
        """Wait until the others have ended: a scheduler may kill them when this node ends."""
        assert self.meeting is not None
        deadline = time.monotonic() + END_S
        while self.meeting.connected and time.monotonic() < deadline:
            time.sleep(POLL_S)


class Follower(_Agent):
    """Any other node."""

    guest: Guest | None = None

    def _run(self) -> int:
        with announced(f"node 0 at {self.place.head}:{self.place.port}", f"--timeout {self.job.timeout_s:g} s"):
            self.guest = Guest(
                self.place,
                lambda address: about(address, job=self.job, num_gpus=len(self.gpus)),
                secret=os.environ.get(TOKEN) or None,
                timeout_s=self.job.timeout_s,
            )
        self.events = self.guest.events
        num_passed, has_ranks = 0, False
        while True:
            if (event := self._next_event()) is not None:
                rank, message = event
                if message is None:
                    raise MeetingError("node 0 has gone: its launcher was killed, or the machine is not reachable")
                if rank == self.place.rank:
                    self.guest.say(message)
                elif "end" in message:
                    return self._finish(message["end"])
                elif "problems" in message:
                    raise ConfigError(message["problems"])
                elif "ray" in message:
                    self._join_ray(message["ray"])
                elif "ranks" in message and self.place.rank < self.job.learner_nodes:
                    meeting, has_ranks = tuple(message["ranks"]), True
                    self._start_ranks(message["ranks_a_node"], meeting, message["words"], listener=None)
            if has_ranks and (code := self.ranks.poll()) is not None:
                has_ranks = False
                self.guest.say({"ended": code})
            if len(self.signals) > num_passed:
                num_passed += 1
                if num_passed > 1:
                    return 128 + self.signals[0]
                self.guest.say({"signal": self.signals[0]})

    def _join_ray(self, plan: Message) -> None:
        assert self.guest is not None
        try:
            self._start_ray({**plan, "address": self.guest.address})
        except RuntimeError as err:
            self.guest.say({"ended": 1, "cause": str(err)})
            return
        # From here on node 0's ranks handle signals.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: self.signals.append(number))
        self.guest.say({"ready": True})

    def _finish(self, code: int) -> int:
        """End this node's ranks after node 0's end; returns the exit code."""
        self.ranks.end_within(GRACE_S)
        while code == 0 and self.ranks.poll() is None:
            time.sleep(POLL_S)
        return code

    def _close(self, code: int) -> None:
        super()._close(code)
        if self.guest is not None:
            self.guest.close()


def _leave(number: int, frame: object) -> None:
    """Signal handler before the ranks start."""
    sys.exit(128 + number)


def _report(cause: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"mgrpo: {cause}\n")
    sys.stderr.flush()


def _free_port(first: int) -> int:
    """The first free port on all addresses, for Ray; not an ephemeral one, which a connection could take before Ray listens."""
    for port in range(first, first + 100):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise RuntimeError(
        f"node 0 has no free port between {first} and {first + 99} for Ray; choose others with --head HOST:PORT"
    )


def _reap_orphans(spared: set[int]) -> None:
    """Reap adopted processes that have ended."""
    try:
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in spared:
                return
            os.waitpid(ended.si_pid, 0)
    except ChildProcessError:
        return
