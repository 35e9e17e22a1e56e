"""Verifiers that ask servers: many at once, no score where one fails, and an end whenever it is asked for."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import ClassVar

import pytest

from mgrpo.config.schema import Reward
from mgrpo.rewards import registry, verify
from mgrpo.rewards.remote_endpoint import RemoteScorer
from mgrpo.rewards.scorer import Scorer
from mgrpo.rewards.verifier import Answer, RemoteVerifier
from tests.unit.rewards.items import item


class Slow(RemoteVerifier):
    """Waits as long as the label says, and counts."""

    name = "slow"
    limit_s = 2.0
    now = most = 0
    loops: ClassVar[set] = set()

    async def score(self, answer: Answer) -> float:
        Slow.loops.add(asyncio.get_running_loop())
        Slow.now += 1
        Slow.most = max(Slow.most, Slow.now)
        try:
            await asyncio.sleep(float(answer.ground_truth))
        finally:
            Slow.now -= 1
        return 1.0


class Quits(RemoteVerifier):
    name = "quits"

    async def score(self, answer: Answer) -> float:
        raise SystemExit("bye")


@pytest.fixture
def scorer(monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteScorer]:
    monkeypatch.setattr(registry, "_added", {"slow": Slow, "quits": Quits})
    Slow.now = Slow.most = 0
    Slow.loops = set()
    scorer = RemoteScorer(Reward(remote_verifier_concurrency=4))
    yield scorer
    scorer.close()


def test_calls_run_at_once_up_to_the_limit(scorer: RemoteScorer) -> None:
    """Judged one after the other, a step of 256 completions takes minutes; all at once, the server refuses them."""
    assert scorer.verify_many([item("Slow", "x", 0.05)] * 12) == [1.0] * 12
    assert Slow.most == 4


def test_a_call_that_hangs_or_quits_costs_its_own_score(scorer: RemoteScorer) -> None:
    """One bad answer of a server must not stop the run."""
    scores = scorer.verify_many(
        [item("slow", "x", 0), item("slow", "x", 600), item("quits", "x", 0), item("slow", "x", 0)]
    )
    assert [math.isnan(score) for score in scores] == [False, True, True, False]
    assert scorer.errors == {"slow": 1, "quits": 1}


def test_closing_ends_whoever_waits(scorer: RemoteScorer, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM while a judge thinks: the run must end within its grace, and not when the judge has answered."""
    heard: list[BaseException] = []
    monkeypatch.setattr(Slow, "limit_s", 600.0)

    def ask() -> None:
        try:
            scorer.verify_many([item("slow", "x", 600)] * 8)
        except RuntimeError as err:
            heard.append(err)

    thread = threading.Thread(target=ask)
    thread.start()
    while not Slow.now:
        time.sleep(0.01)
    scorer.close()
    thread.join(60)
    assert not thread.is_alive()
    assert "closed" in str(heard[0])
    scorer.close()
    assert scorer.verify_many([item("slow", "x", 0)]) == [1.0]


def test_threads_share_one_loop(scorer: RemoteScorer) -> None:
    """Connections belong to the loop that they were opened in."""
    threads = [threading.Thread(target=scorer.verify_many, args=([item("slow", "x", 0.01)],)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(Slow.loops) == 1


def test_a_forked_process_asks_for_itself(scorer: RemoteScorer) -> None:
    """The parent's thread does not exist in the child: waiting for it never ends."""
    assert scorer.verify_many([item("slow", "x", 0)]) == [1.0]
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        good = scorer.verify_many([item("slow", "x", 0)]) == [1.0]
        scorer.close()
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert scorer.verify_many([item("slow", "x", 0)]) == [1.0]


def test_local_and_remote_scores_keep_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """A score beside the wrong completion trains the opposite of what was meant."""
    monkeypatch.setattr(registry, "_added", {"slow": Slow})
    scorer = Scorer(Reward(), ["integer", "slow"])
    try:
        items = [item("integer", "5", 5), item("slow", "x", 0.01), item("integer", "6", 5), item("slow", "x", "nan?")]
        scores = scorer.verify_many(items)
        assert scores[:3] == [1.0, 1.0, 0.0] and math.isnan(scores[3])
        assert scorer.errors == {"slow": 1}
    finally:
        scorer.close()


@pytest.mark.parametrize(
    ("arguments", "settings", "error", "words"),
    [
        (("integer", None, 5), {}, TypeError, "completion=None must be text"),
        (("integer", b"5", 5), {}, TypeError, "must be text, not bytes"),
        (("integer", "5", {1, 2}), {}, TypeError, "must be a JSON value"),
        (("integr", "5", 5), {}, ValueError, "did you mean integer"),
        (("integer", "5", 5), {"timeout": 5}, TypeError, "no setting timeout"),
        (("integer", "5", 5), {"verifier_timeout": "abc"}, ValueError, "verifier_timeout must be a number"),
        (("integer", "5", 5), {"max_length_verifier_max_length": 0}, ValueError, "must be at least 1"),
    ],
)
def test_a_callers_mistake_is_no_score_of_nan(arguments: tuple, settings: dict, error: type, words: str) -> None:
    """NaN says that the answer could not be judged; a wrong call says nothing of the answer."""
    with pytest.raises(error, match=words):
        verify(*arguments, **settings)


def test_labels_may_come_from_numpy() -> None:
    """Columns of tables are numpy's."""
    import numpy as np

    assert verify("integer", "5", np.int64(5)) == 1.0
    assert verify("string_f1", "whale", np.array(["a whale", "b"])) == 1.0
    assert verify("up_to_max_length", "x", 5, completion_ids=np.arange(3)) == 1.0
    assert verify("up_to_max_length", "x", 5, num_tokens=np.int64(3)) == 1.0
