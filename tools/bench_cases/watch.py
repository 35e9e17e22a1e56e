"""Memory and processor time of a process with its descendants, while it runs."""

from __future__ import annotations

import bisect
import threading
import time
from pathlib import Path

import psutil


class Watch(threading.Thread):
    """Peaks in MiB of the proportional set sizes, and of their anonymous part; CPU seconds by time.

    Args:
        memory_every: samples of processor time for one of memory, which costs more.
    """

    def __init__(self, pid: int, *, every_s: float = 0.2, memory_every: int = 10) -> None:
        super().__init__(daemon=True)
        self.pid, self.every_s, self.memory_every = pid, every_s, memory_every
        self.peak_mb = self.peak_anonymous_mb = 0.0
        self.samples: list[tuple[float, float, float]] = []
        """(unix time, CPU seconds of the family, CPU seconds of the machine)"""
        self.used: dict[tuple[int, float], float] = {}
        self.start()

    def run(self) -> None:
        while psutil.pid_exists(self.pid):
            self._sample()
            time.sleep(self.every_s)

    def _sample(self) -> None:
        if len(self.samples) % self.memory_every == 0:
            pss, anonymous = memory(self.pid)
            self.peak_mb, self.peak_anonymous_mb = max(self.peak_mb, pss), max(self.peak_anonymous_mb, anonymous)
        for process in family(self.pid):
            try:
                times = process.cpu_times()
                self.used[process.pid, process.create_time()] = times.user + times.system
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        whole = psutil.cpu_times()
        busy = sum(whole) - whole.idle - whole.iowait - getattr(whole, "guest", 0)
        self.samples.append((time.time(), sum(self.used.values()), busy))

    def between(self, begin: float, end: float) -> tuple[float, float]:
        """CPU seconds of the family, and of everything else, between two unix times."""
        times = [sample[0] for sample in self.samples]
        first, last = (self.samples[min(bisect.bisect(times, moment), len(times) - 1)] for moment in (begin, end))
        own = last[1] - first[1]
        return own, max(last[2] - first[2] - own, 0.0)


def family(pid: int) -> list[psutil.Process]:
    """A process and its descendants."""
    try:
        return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def memory(pid: int) -> tuple[float, float]:
    """Proportional set size of a family, and its anonymous part, in MiB."""
    totals = {"Pss:": 0, "Pss_Anon:": 0}
    for process in family(pid):
        try:
            for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
                name, *value = line.split()
                if name in totals:
                    totals[name] += int(value[0])
        except OSError:
            continue
    return totals["Pss:"] / 1024, totals["Pss_Anon:"] / 1024


def cpu_s(process: psutil.Process, *, with_children: bool = False) -> float:
    """Processor seconds so far, of those children too that still run."""
    own = [process, *(process.children(recursive=True) if with_children else ())]
    return sum(times.user + times.system for times in (each.cpu_times() for each in own))
