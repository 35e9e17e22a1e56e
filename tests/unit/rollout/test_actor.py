"""What the engine's actor makes of vLLM's answers."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from mgrpo.rollout.engine import Completions, RefusedError
from mgrpo.rollout.vllm.actor import Copies, EngineActor, _group
from mgrpo.rollout.vllm.calls import joined


def completion(tokens: list[int], logprobs: list[float], reason: str = "stop") -> SimpleNamespace:
    """As vLLM's `CompletionOutput` is, with `FlatLogprobs`."""
    flat = SimpleNamespace(token_ids=tokens[: len(logprobs)], logprobs=logprobs)
    return SimpleNamespace(token_ids=tokens, logprobs=flat, finish_reason=reason, weight_versions=None)


def group(number: int, completions: list[SimpleNamespace]) -> Completions:
    """What becomes of vLLM's last output of a request."""
    for index, each in enumerate(completions):
        each.index = index

    async def get() -> SimpleNamespace:
        return SimpleNamespace(finished=True, outputs=completions[::-1])

    return asyncio.run(_group(number, SimpleNamespace(get=get)))


def test_logprobs_lie_beside_their_tokens():
    """A shift by one position would be trained on as an off-policy sample."""
    first = [completion([7, 8], [-0.5, -1.5]), completion([], [])]
    answer = joined([group(3, first), group(1, [completion([9], [-2.0], "length")])])
    assert answer["numbers"].tolist() == [3, 1] and answer["sizes"].tolist() == [2, 1]
    assert answer["tokens"].tolist() == [7, 8, 9] and answer["cu_seqlens"].tolist() == [0, 2, 2, 3]
    assert answer["logprobs"].tolist() == [-0.5, -1.5, -2.0] and answer["logprobs"].dtype == np.float32
    assert answer["finish_reasons"].tolist() == [0, 0, 1]


def test_a_token_without_a_logprob_is_an_error():
    """Those of all later completions would move to other tokens."""
    with pytest.raises(AssertionError, match="one per position"):
        group(0, [completion([7, 8], [-0.5]), completion([9], [-2.0])])


def test_calls_take_effect_in_their_order():
    """Ray starts an actor's calls in any order: prompts queued after the engine has begun to sample change the batch."""
    began = []

    class Actor(EngineActor):
        async def note(self, number: int) -> int:
            began.append(number)
            await asyncio.sleep(0)
            return number

    async def in_wrong_order() -> list[int]:
        actor = Actor()
        return await asyncio.gather(*(actor.call(turn, "note", turn) for turn in (3, 1, 0, 2)))

    assert asyncio.run(in_wrong_order()) == [3, 1, 0, 2] and began == [0, 1, 2, 3]


def test_a_call_that_fails_does_not_hold_up_the_next():
    """The engine could not even be asked to end."""

    class Actor(EngineActor):
        async def fail(self) -> None:
            raise RuntimeError("no memory")

        async def go_on(self) -> str:
            return "done"

    async def both() -> list[object]:
        actor = Actor()
        return await asyncio.gather(actor.call(0, "fail"), actor.call(1, "go_on"), return_exceptions=True)

    failed, done = asyncio.run(both())
    assert isinstance(failed, RuntimeError) and done == "done"


@pytest.mark.parametrize("missing", ["model", "tokenizer"])
def test_a_node_without_the_model_is_named(tmp_path, missing):
    """vLLM says that the path is no valid name on the Hub, and not on which of the nodes."""
    args = {"model": str(tmp_path), "tokenizer": str(tmp_path), missing: str(tmp_path / "elsewhere")}
    with pytest.raises(FileNotFoundError, match=f"elsewhere is not a folder on {socket.gethostname()}, where"):
        asyncio.run(EngineActor().start(args))


def test_an_engine_that_is_told_to_sample_begins_before_it_is_told_to_pause():
    """It may wait for prompts that are being queued; paused meanwhile, it would take over weights and then sample beside that."""
    order = []

    class Actor(EngineActor):
        async def resume(self) -> None:
            await asyncio.sleep(0.01)
            order.append("resumed")

        async def pause(self, how: str) -> None:
            order.append("paused")

    async def both() -> None:
        actor = Actor()
        await asyncio.gather(actor.call(0, "resume"), actor.call(1, "pause", "drain"))

    asyncio.run(both())
    assert order == ["resumed", "paused"]


def test_a_group_stays_with_the_copy_that_has_its_prompt_in_the_cache():
    """On another one its prompt and its earlier turns would be read again."""

    async def play() -> None:
        copies = Copies(2)
        assert [copies.take(salt, samples) for salt, samples in ((7, 8), (8, 2), (9, 2), (10, 2))] == [0, 1, 1, 1]
        # The group's next turn, although the other copy has less to do.
        assert copies.take(7, 1) == 0
        assert copies.samples == [9, 6]

        async def group() -> Completions:
            return {}

        await copies.until_done(0, 8, group())
        assert copies.samples == [1, 6] and copies.take(11, 1) == 0
        copies.forget()
        assert copies.take(8, 1) == 0

    asyncio.run(play())


def test_samples_of_a_failed_group_count_no_more():
    """The copy would be given fewer groups for ever."""

    async def play() -> None:
        copies = Copies(2)

        async def group() -> Completions:
            raise RuntimeError("no memory")

        copy = copies.take(0, 4)
        with pytest.raises(RuntimeError, match="no memory"):
            await copies.until_done(copy, 4, group())
        assert copies.samples == [0, 0]
        assert Copies(1).take(0, 4) is None

    asyncio.run(play())


def test_an_engine_whose_coordinator_or_part_has_died_is_dead():
    """vLLM looks at the cores of its own node alone: copies without a request would wait for ever for those with one."""
    actor = EngineActor()
    alive = SimpleNamespace(is_alive=lambda: True)
    resources = SimpleNamespace(coordinator=SimpleNamespace(proc=alive))
    actor.engine = SimpleNamespace(errored=False, engine_core=SimpleNamespace(resources=resources))
    actor.copies = Copies(2)
    assert actor._death() is None
    resources.coordinator.proc = SimpleNamespace(is_alive=lambda: False)
    assert "coordinates the engine's copies" in str(actor._death())
    actor.lost = RuntimeError("a part of the engine")
    assert actor._death() is actor.lost


def test_a_request_that_vllm_ends_with_an_error_is_refused():
    """A grammar that is not compiled: without tokens, it would be trained on as an answer that is empty."""
    with pytest.raises(RefusedError, match="ended the request with an error"):
        group(0, [completion([], [], "error"), completion([7], [-0.5])])


def test_a_request_that_the_core_cannot_take_over_is_ended_alone(monkeypatch, capsys):
    """The core's thread would have ended, and with it the engine."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "CRITICAL")
    local_core = pytest.importorskip("mgrpo.rollout.vllm.local_core")
    added = []

    class Core:
        scheduler = SimpleNamespace(has_requests=lambda: False)

        def preprocess_add_request(self, request):
            if request.request_id == "1":
                raise ValueError("no such grammar")
            return request.request_id, 0

        def add_request(self, request, wave):
            added.append(request)

    core = object.__new__(local_core.LocalCore)
    vars(core).update(core=Core(), added=deque(SimpleNamespace(request_id=str(n)) for n in range(3)), failed=[])
    outputs = core._do(core._step)
    assert added == ["0", "2"] and outputs.finished_requests == {"1"}
    assert [(each.request_id, str(each.finish_reason)) for each in outputs.outputs] == [("1", "error")]
    assert "no such grammar" in capsys.readouterr().err
    assert core._do(core._step) is None
