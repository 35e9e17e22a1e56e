"""Limits of processes that end a run without a reason: they are named before anything is started."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable

import pytest

from mgrpo.rollout.process_limits import OPEN_FILES, limit_problems, raise_open_files

IS_ROOT = os.geteuid() == 0


def within(*limits: tuple[int, tuple[int, int]], find: Callable[[], object]) -> object:
    """The result of `find` in a process of an ordinary user under these limits."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            if IS_ROOT:  # whose threads are not limited: go on as a user who has no other process
                os.setgroups([])
                os.setresuid(*(60000 + os.getpid() % 5000,) * 3)
            for kind, limit in limits:
                resource.setrlimit(kind, limit)
            found = find()
        except BaseException as err:
            found = repr(err)
        os.write(writing, json.dumps(found).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as stream:
        text = stream.read()
    assert os.waitpid(child, 0)[1] == 0
    return json.loads(text)


def problems() -> list[str]:
    return list(limit_problems(num_learners=1, starts_ray=True))


@pytest.mark.parametrize(
    ("kind", "limit", "words"),
    [
        (resource.RLIMIT_NOFILE, 64, ("`ulimit -n` is 64 open files", "needs 256", "`ulimit -n 65536`")),
        (resource.RLIMIT_AS, 3 << 30, ("`ulimit -v` is 3145728 kB", "`ulimit -v unlimited`")),
        (resource.RLIMIT_FSIZE, 1 << 20, ("`ulimit -f` is 1024 kB", "`ulimit -f unlimited`")),
        (resource.RLIMIT_NPROC, 40, ("only ", "more threads can be started", "needs about", "ulimit -u", "pids.max")),
    ],
)
def test_a_limit_that_is_too_low_is_named_with_what_is_needed(kind, limit, words):
    """Ray says "the current node timed out during startup" after a minute, and gloo prints a line of its C++."""
    # With little address space no more than so many threads start, which is named as well.
    problem = within((kind, (limit, limit)), find=problems)[0]
    assert [word for word in words if word not in problem] == []


@pytest.mark.skipif(not IS_ROOT, reason="this user's other processes start threads meanwhile")
def test_the_number_of_threads_that_are_left_is_counted_and_not_guessed():
    """Other processes of the user count as well, and control groups that nobody sees."""

    def left() -> int:
        (problem,) = problems()
        return int(problem.split()[1])

    few, more = (within((resource.RLIMIT_NPROC, (limit, limit)), find=left) for limit in (40, 60))
    assert more - few == 20, (few, more)


def test_no_limit_is_a_problem_where_there_is_none():
    assert within(find=problems) == []


@pytest.mark.parametrize("hard", [OPEN_FILES, 20000])
def test_a_low_limit_of_open_files_is_raised_as_far_as_the_system_allows(hard):
    """A shell's default of 1024 is for programs that call select."""

    def raised() -> list[object]:
        found = problems()
        raise_open_files()
        return [found, *resource.getrlimit(resource.RLIMIT_NOFILE)]

    assert within((resource.RLIMIT_NOFILE, (64, hard)), find=raised) == [[], hard, hard]
