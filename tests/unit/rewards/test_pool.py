"""Limits of the verifier processes: whatever a completion does to its verifier, the others are scored."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mgrpo.config.schema import Reward
from mgrpo.rewards import registry, verify
from mgrpo.rewards.verifier import Item, check_score
from mgrpo.rewards.worker_pool import VerifierPool
from tests.processes import processes_with
from tests.unit.rewards.items import item

GOOD = item("integer", "5", 5)
BAD_VERIFIERS = """
import ctypes, os, signal, subprocess, sys, time
from mgrpo.rewards.verifier import Answer, Verifier


class Hang(Verifier):
    name = "hang"

    def score(self, answer: Answer) -> float:
        while True:
            pass


class SleepDeaf(Verifier):
    name = "sleep_deaf"

    def score(self, answer: Answer) -> float:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)


class Crash(Verifier):
    name = "crash"

    def score(self, answer: Answer) -> float:
        ctypes.string_at(0)


class EatMemory(Verifier):
    name = "eat_memory"

    def score(self, answer: Answer) -> float:
        return float(len(bytearray(2**30)))


class Chatter(Verifier):
    name = "chatter"

    def score(self, answer: Answer) -> float:
        print('{"id": 0, "score": 77}')
        os.write(1, b"noise\\n" * 100)
        sys.stdout.flush()
        assert sys.stdin.read() == ""
        return 1.0


class Leave(Verifier):
    name = "leave"

    def score(self, answer: Answer) -> float:
        sys.exit("bye")


class Nan(Verifier):
    name = "nan"

    def score(self, answer: Answer) -> float:
        return float("nan")


class LeaveProcesses(Verifier):
    name = "leave_processes"

    def score(self, answer: Answer) -> float:
        # A daemon: its parent ends at once, in a session of its own.
        subprocess.run(["setsid", "--fork", "sleep", "4711"])
        subprocess.Popen(["sleep", "4711"])
        return 1.0


class ForkForEver(Verifier):
    name = "fork_for_ever"

    def score(self, answer: Answer) -> float:
        for _ in range(20):
            if os.fork() == 0:
                os.setsid()
                for _ in range(3):
                    os.fork()
                time.sleep(4711)
        time.sleep(4711)


class UseProcess(Verifier):
    name = "use_process"

    def score(self, answer: Answer) -> float:
        return float(subprocess.run(["echo", "1"], capture_output=True).stdout)


class NeedsLibrary(Verifier):
    name = "needs_library"

    def score(self, answer: Answer) -> float:
        return 1.0

    def warm_up(self) -> None:
        import no_such_library


class SlowProcess(Verifier):
    name = "slow_process"

    def score(self, answer: Answer) -> float:
        return float(subprocess.run(["sleep", "0.02"]).returncode == 0)


class Sees(Verifier):
    name = "sees"

    def score(self, answer: Answer) -> float:
        return float(answer.completion in os.environ)


class Weigh(Verifier):
    name = "weigh"

    def score(self, answer: Answer) -> float:
        return self.settings.weight_by_verifier["integer"]
"""
SETTINGS = Reward(verifier_modules=("bad_verifiers",), verifier_weights=("integer=2",))
SMALL = dataclasses.replace(SETTINGS, verifier_memory_mb=600)


@pytest.fixture(scope="module")
def bad_verifiers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Verifiers that misbehave, as a module of the user's own; its folder, which workers carry in their environment."""
    folder = tmp_path_factory.mktemp("verifiers")
    (folder / "bad_verifiers.py").write_text(BAD_VERIFIERS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        patch.syspath_prepend(str(folder))
        patch.setattr(registry, "_added", {})
        registry.add_modules(SETTINGS.verifier_modules)
        yield str(folder)
        del sys.modules["bad_verifiers"]


@pytest.fixture(scope="module")
def shared(bad_verifiers: str) -> Iterator[VerifierPool]:
    with VerifierPool(1, timeout_s=10, settings=SMALL) as pool:
        yield pool


@pytest.fixture
def healthy(shared: VerifierPool) -> VerifierPool:
    """A pool with its one worker, for tests that need no limits of their own."""
    shared.errors.clear()
    shared.start()
    return shared


def _around(bad: Item) -> list[Item]:
    return [GOOD] * 40 + [bad] + [GOOD] * 40


@pytest.mark.parametrize(
    ("name", "num_workers"),
    [("hang", 1), ("hang", 2), ("sleep_deaf", 1), ("crash", 1), ("eat_memory", 1), ("leave", 1), ("nan", 1)],
)
def test_one_bad_item_costs_only_its_own_score(bad_verifiers: str, name: str, num_workers: int) -> None:
    """A verifier that hangs, dies or fails would otherwise stop the run or take a whole step's rewards along."""
    with VerifierPool(num_workers, timeout_s=0.5, settings=SMALL) as pool:
        scores = pool.verify_many(_around(item(name, "x", 1)))
        assert math.isnan(scores[40])
        assert scores[:40] + scores[41:] == [1.0] * 80
        assert pool.errors == {name: 1}
        assert pool.verify_many([GOOD]) == [1.0]


@pytest.mark.parametrize("name", ["leave", "nan", "eat_memory"])
def test_a_failing_verifier_does_not_cost_its_worker(healthy: VerifierPool, name: str) -> None:
    """Replacing the process on every exception would cost its imports each time."""
    before = healthy.pids
    assert math.isnan(healthy.verify_many([item(name, "x", 1)])[0])
    assert healthy.pids == before


@pytest.mark.parametrize("name", ["leave_processes", "fork_for_ever"])
def test_processes_that_a_verifier_leaves_behind_are_ended(bad_verifiers: str, name: str) -> None:
    """Each of a step's thousands of calls could otherwise leave its daemons on the machine, sessions of their own or not."""
    before = processes_with(bad_verifiers)
    with VerifierPool(1, timeout_s=1.5, settings=SETTINGS) as pool:
        scores = pool.verify_many([GOOD, item(name, "x", 1), GOOD])
        assert math.isnan(scores[1]) and scores[0] == scores[2] == 1.0
        assert processes_with(bad_verifiers) - before == set(pool.pids)


def test_a_verifier_may_use_a_program_that_ends(healthy: VerifierPool) -> None:
    """Proof checkers are programs of their own."""
    assert healthy.verify_many([item("use_process", "x", 1)]) == [1.0]
    assert healthy.verify_many([item("slow_process", "x", 1)] * 30) == [1.0] * 30


def test_a_verifier_that_cannot_be_loaded_is_named_and_costs_the_others_nothing(healthy: VerifierPool) -> None:
    """A missing package is no property of the answers; and the pool goes on for who does not need it."""
    assert healthy.verify_many([GOOD]) == [1.0]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"needs_library cannot be loaded .*: .*no_such_library"):
            healthy.verify_many([GOOD, item("needs_library", "x", 1)])
    assert healthy.verify_many([GOOD]) == [1.0]


def test_closing_ends_whoever_waits_for_a_score(bad_verifiers: str) -> None:
    """SIGTERM during a batch of answers that hang: the run must end within its grace."""
    pool = VerifierPool(1, timeout_s=60, settings=SETTINGS)
    heard: list[BaseException] = []

    def ask() -> None:
        try:
            pool.verify_many([item("hang", "x", 1)] * 5)
        except RuntimeError as err:
            heard.append(err)

    assert pool.verify_many([GOOD]) == [1.0]
    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.5)
    pool.close()
    thread.join(10)
    assert not thread.is_alive() and "closed" in str(heard[0])
    assert pool.verify_many([GOOD]) == [1.0]
    pool.close()


def test_a_worker_sees_little_of_the_environment_and_no_key(
    bad_verifiers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reads untrusted text must have nothing to give away, however the next service names its key."""
    hidden = (
        "OPENAI_API_KEY", "GITHUB_PAT", "DATABASE_URL", "SLACK_WEBHOOK", "HTTP_PROXY_AUTH", "HTTPS_PROXY", "WANDB_API_KEY",
        "AWS_SESSION", "HF_TOKEN", "RAY_AUTH_TOKEN", "PYTHON_DEPLOY_PASS", "SSH_AUTH_SOCK", "MYSQL_PWD", "XPATH", "path",
    )  # fmt: skip
    visible = ("PATH", "HOME", "LC_ALL", "TMPDIR", "PYTHONPATH", "OMP_NUM_THREADS", "NLTK_DATA", "MGRPO_VERIFIER_DATA")
    for name in hidden + visible[2:4] + visible[6:]:
        monkeypatch.setenv(name, "/tmp")
    with VerifierPool(1, timeout_s=10, settings=SETTINGS) as pool:
        assert pool.verify_many([item("sees", name, 1) for name in hidden]) == [0.0] * len(hidden)
        assert pool.verify_many([item("sees", name, 1) for name in visible]) == [1.0] * len(visible)


def test_a_verifier_reads_the_settings_as_the_run_has_them(healthy: VerifierPool) -> None:
    """JSON has no tuples: a verifier would fail on settings that work everywhere else."""
    assert healthy.verify_many([item("weigh", "x", 1)]) == [2.0]


def test_what_a_verifier_prints_does_not_reach_the_protocol(healthy: VerifierPool) -> None:
    """A library that prints would otherwise hand out scores of its own, or block on the pipe."""
    assert healthy.verify_many(_around(item("chatter", "x", 1))) == [1.0] * 81
    assert not healthy.errors


def test_killing_the_worker_in_mid_batch_costs_one_score(bad_verifiers: str) -> None:
    """The kernel may kill a verifier for memory at any time; the step must go on."""
    with VerifierPool(1, timeout_s=60, settings=SETTINGS) as pool:
        assert pool.verify_many([GOOD]) == [1.0]
        first = pool.pids[0]
        threading.Timer(0.5, os.kill, (first, signal.SIGKILL)).start()
        began = time.monotonic()
        scores = pool.verify_many(_around(item("hang", "x", 1)))
        assert time.monotonic() - began < 20
        assert math.isnan(scores[40]) and scores[:40] + scores[41:] == [1.0] * 80
        assert pool.pids[0] != first


def test_a_worker_killed_between_steps_costs_nothing() -> None:
    """No item was being scored, so none may lose its reward."""
    with VerifierPool(1, timeout_s=10) as pool:
        assert pool.verify_many([GOOD]) == [1.0]
        os.kill(pool.pids[0], signal.SIGKILL)
        time.sleep(0.2)
        assert pool.verify_many([GOOD] * 3) == [1.0] * 3
        assert not pool.errors


def test_adversarial_mathematics_never_blocks_longer_than_the_limit() -> None:
    """Models do write such answers; a verifier without a hard limit hangs the run on the first of them."""
    hostile = [
        "A" * 200_000,
        r"\boxed{" + "A" * 200_000 + "}",
        "1" * 20_000,
        r"\boxed{" + "{" * 50_000 + "1" + "}" * 50_000 + "}",
        r"\boxed{" + "{" * 150 + "1" + "}" * 149 + "}",
        "$" + "{" * 800 + "}" * 100 + "$",
        r"\boxed{" * 30_000,
        r"\boxed{9**9**9}",
        r"\boxed{9^{9^{9}}}",
        "the answer is 9**9**9**9",
        "</think>" * 20_000,
        "\x00\ud800" * 1000,
    ]
    timeout_s = 1.0
    with VerifierPool(1, timeout_s=timeout_s, verifiers=["math"]) as pool:
        good = item("math", r"\boxed{\frac{1}{2}}", "0.5")
        assert pool.verify_many([good]) == [1.0]
        began = time.monotonic()
        slow = 0
        for text in hostile:
            began = time.monotonic()
            scores = pool.verify_many([good, item("math", text, "7"), good])
            # The limit itself, and the start of a new worker for the last item.
            assert time.monotonic() - began < timeout_s + 8, text[:30]
            slow += math.isnan(scores[1])
            assert scores[0] == scores[2] == 1.0, text[:30]
            assert scores[1] != 1.0, text[:30]
        assert pool.errors["math"] == slow


def test_a_label_the_verifier_cannot_read_is_no_score(healthy: VerifierPool) -> None:
    """Scored 0 it would enter the group's baseline as wrong answers."""
    scores = healthy.verify_many([GOOD, item("integer", "5", "five"), GOOD])
    assert math.isnan(scores[1]) and scores[0] == scores[2] == 1.0
    assert healthy.errors == {"integer": 1}


def test_long_texts_pass_in_both_directions_without_deadlock() -> None:
    """Pipes hold 64 KiB: two sides that both wait to write would stop the run for ever."""
    with VerifierPool(2, timeout_s=20) as pool:
        items = [item("integer", " " * 300_000 + "5", 5), item("integer", "5" * 300_000, "x" * 300_000)] * 20
        scores = pool.verify_many(items)
        assert scores[::2] == [1.0] * 20
        assert all(math.isnan(score) for score in scores[1::2])


def test_a_worker_that_hangs_does_not_block_whoever_writes_to_it(bad_verifiers: str) -> None:
    """Behind a verifier that hangs its pipe fills up: a write that waits for it would wait past the limit, for ever."""
    with VerifierPool(1, timeout_s=0.5, settings=SETTINGS) as pool:
        scores = pool.verify_many([item("hang", "x", 1)] + [item("integer", " " * 100_000 + "5", 5)] * 8)
        assert math.isnan(scores[0]) and scores[1:] == [1.0] * 8


def test_scores_keep_the_order_of_the_items_with_any_number_of_workers() -> None:
    """A score beside the wrong completion trains the opposite of what was meant."""
    items = [item("integer", str(index), index if index % 3 else index + 1) for index in range(500)]
    expected = [float(index % 3 != 0) for index in range(500)]
    for num_workers in (1, 3):
        with VerifierPool(num_workers, timeout_s=10) as pool:
            assert pool.verify_many(items) == expected
            assert pool.verify_many([]) == []


def test_threads_may_share_a_pool(healthy: VerifierPool) -> None:
    """Training and evaluation score through one pool."""
    results: dict[int, list[float]] = {}

    def score(number: int) -> None:
        results[number] = healthy.verify_many([item("integer", str(number), index) for index in range(8)])

    threads = [threading.Thread(target=score, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [float(number == index) for index in range(8)] for number in range(8)}


def test_the_thread_that_started_the_pool_may_end() -> None:
    """The kernel ends a child with the thread that forked it: workers must not belong to a passing thread."""
    pool = VerifierPool(1, timeout_s=10)
    starter = threading.Thread(target=pool.verify_many, args=([GOOD],))
    starter.start()
    starter.join()
    time.sleep(0.2)
    before = pool.pids
    assert pool.verify_many([GOOD]) == [1.0]
    assert pool.pids == before
    pool.close()


def test_workers_end_with_the_pool() -> None:
    """A run that leaves processes behind fills the machine."""
    pool = VerifierPool(2, timeout_s=10)
    pool.start()
    pids = pool.pids
    pool.close()
    assert len(pids) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert pool.verify_many([GOOD]) == [1.0]
    pool.close()


def test_a_busy_worker_ends_with_its_killed_parent(bad_verifiers: str) -> None:
    """kill -9 of the trainer must not leave a verifier that computes for ever."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        pool = VerifierPool(1, timeout_s=60, settings=SETTINGS)
        pool.verify_many([GOOD])
        os.write(sending, str(pool.pids[0]).encode())
        pool.verify_many([item("hang", "x", 1)])
        os._exit(1)
    worker = int(os.read(receiving, 100))
    time.sleep(0.3)
    assert _runs(worker)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    deadline = time.monotonic() + 5
    while _runs(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(worker)
    os.close(receiving)
    os.close(sending)


def _runs(pid: int) -> bool:
    try:
        return "worker" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


def test_a_forked_process_gets_workers_of_its_own() -> None:
    """Two processes on one pipe would read each other's scores."""
    with VerifierPool(1, timeout_s=10) as pool:
        assert pool.verify_many([GOOD]) == [1.0]
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            parents = pool.pids
            good = pool.verify_many([GOOD, item("integer", "6", 5)]) == [1.0, 0.0] and pool.pids != parents
            pool.close()
            os._exit(0 if good else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert pool.verify_many([GOOD]) == [1.0]


def test_a_worker_that_cannot_start_is_an_error_and_not_a_loop() -> None:
    """Too small a memory limit must end the run with its reason instead of scoring nothing for ever."""
    pool = VerifierPool(1, timeout_s=10, verifiers=["math"], settings=Reward(verifier_memory_mb=20))
    with pytest.raises(RuntimeError, match="memory limit 20 MiB"):
        pool.verify_many([GOOD])
    pool.close()


def test_an_unknown_verifier_is_refused_before_anything_is_sent() -> None:
    """It is the configuration that is wrong, not a completion."""
    pool = VerifierPool(1, timeout_s=10)
    with pytest.raises(ValueError, match="did you mean integer"):
        pool.verify_many([item("integr", "5", 5)])
    with pytest.raises(ValueError, match="did you mean gsm8k"):
        VerifierPool(1, timeout_s=10, verifiers=["gsm8"])
    assert pool.pids == []


def test_verify_scores_one_completion() -> None:
    """The public door to a verifier, limits applied."""
    assert verify("integer", "5", 5) == 1.0
    assert verify("math", r"\boxed{0.5}", r"\frac{1}{2}", query="What is a half?") == 1.0
    assert math.isnan(verify("integer", "5", "five"))


def test_a_step_of_256_integers_takes_milliseconds() -> None:
    """Scoring sits between generation and training: a slow round trip is idle hardware. Usual: 3 ms; wide for busy machines."""
    with VerifierPool(1, timeout_s=10, verifiers=["integer"]) as pool:
        items = [item("integer", str(index), index) for index in range(256)]
        pool.verify_many(items)
        took = []
        for _ in range(20):
            began = time.perf_counter()
            pool.verify_many(items)
            took.append(time.perf_counter() - began)
        assert min(took) < 1.0


def test_a_score_beyond_float32_is_no_score() -> None:
    """A verifier of the user's that returns 1e300 would make the whole batch infinite."""
    for score in 1e300, -1e39, float("inf"), float("nan"):
        with pytest.raises(ValueError, match="the score is"):
            check_score(score)
    check_score(-3.4e38)
