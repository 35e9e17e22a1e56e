"""Calls that are repeated, left, cancelled or cut off: one turn for one request of the agent, and none that nobody read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from tests.unit.environments.endpoint.served import ADD, ASKED, Served
from tests.unit.environments.endpoint.test_chat_client import client_of, count

pytest.importorskip("transformers")
ASK = {"model": "policy", "messages": ASKED, "tools": [ADD]}
PATIENCE_S = 60.0
IMPATIENT = openai.Timeout(PATIENCE_S, read=0.5)
"""Of a client that does not wait for its turn."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("tokenizer"), retry_s=1.5, comment_s=0.5, max_open_calls=8)
    yield served
    served.close()


@pytest.fixture(autouse=True)
def _at_once(served: Served) -> Iterator[None]:
    yield
    served.delay_s, served.error = 0.0, None


def wait_until(is_true: Callable[[], Any]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_client_that_waited_too_long_and_asks_again_gets_the_same_turn(served: Served) -> None:
    """The turn would be sampled twice, and the first one's tokens be paid for and lost."""
    session = served.open()
    served.delay_s = 1.2
    client = client_of(session, timeout=IMPATIENT, max_retries=9)
    asyncio.run(client.chat.completions.create(**ASK))
    end = served.end(session)
    assert len(served.made_in(session)) == 1 and [turn["delivered"] for turn in end["turns"]] == [True]
    assert end["counts"]["retries"] >= 1 and end["counts"]["abandoned"] == 0


def test_a_retry_gets_the_answer_that_was_lost_and_the_agent_goes_on_from_it(served: Served) -> None:
    """The first client is gone when its turn is there; a sampled turn without a reader would be in no branch."""
    session = served.open()
    served.delay_s = 1.0

    async def lose() -> None:
        with pytest.raises(openai.APITimeoutError):
            await client_of(session, timeout=IMPATIENT).chat.completions.create(**ASK)
        await asyncio.to_thread(wait_until, lambda: served.made_in(session))
        served.delay_s = 0.0
        await client_of(session).chat.completions.create(extra_headers={"x-stainless-retry-count": "1"}, **ASK)
        await count(client_of(session), ASKED)

    asyncio.run(lose())
    end = served.end(session)
    # The agent's own call is a sample of its own: it does not say that it is a retry.
    assert [turn["delivered"] for turn in end["turns"]] == [True] * 6
    assert end["counts"]["retries"] == 1 and end["counts"]["undelivered"] == 0


def test_a_call_with_the_key_of_an_earlier_one_is_that_call(served: Served) -> None:
    session = served.open()

    async def ask(key: str) -> str:
        headers = {"Idempotency-Key": key}
        return (await client_of(session).chat.completions.create(extra_headers=headers, **ASK)).id

    assert asyncio.run(ask("a")) == asyncio.run(ask("a")) != asyncio.run(ask("b"))
    assert len(served.made_in(session)) == 2
    served.end(session)


def test_a_call_whose_client_has_gone_is_cancelled_at_the_engine(served: Served) -> None:
    """A dead agent's turns would take the engine's time until they end by themselves."""
    session = served.open()
    served.delay_s = 60.0

    async def leave() -> None:
        with pytest.raises(openai.APITimeoutError):
            await client_of(session, timeout=IMPATIENT).chat.completions.create(**ASK)

    asyncio.run(leave())
    wait_until(lambda: (session["session"], 0) in served.cancelled)
    end = served.end(session)
    assert end["turns"] == [] and end["counts"]["abandoned"] == 1


def test_a_turn_that_nobody_read_is_not_delivered(served: Served) -> None:
    session = served.open()
    served.delay_s = 1.0

    async def leave() -> None:
        with pytest.raises(openai.APITimeoutError):
            await client_of(session, timeout=IMPATIENT).chat.completions.create(**ASK)

    asyncio.run(leave())
    wait_until(lambda: served.made_in(session))
    # The turn is told to the endpoint before this question.
    end = served.end(session)
    assert [turn["delivered"] for turn in end["turns"]] in ([False], [])
    assert served.branches(session, end)[0][1] == []


def test_the_end_of_a_session_cancels_its_calls_at_once(served: Served) -> None:
    """Their clients are told that the trajectory is over, and the engine samples nothing more for it."""
    session = served.open()
    served.delay_s = 60.0

    async def end_meanwhile() -> tuple[list[Any], dict[str, Any]]:
        client = client_of(session, max_retries=2)
        calls = [asyncio.create_task(client.chat.completions.create(stream=bool(n % 2), **ASK)) for n in range(5)]
        await asyncio.to_thread(wait_until, lambda: sum(w["session"] == session["session"] for w in served.taken) == 5)
        end = await asyncio.to_thread(served.end, session)
        return await asyncio.gather(*calls, return_exceptions=True), end

    found, end = asyncio.run(end_meanwhile())
    assert [(type(each), each.code) for each in found] == [(openai.BadRequestError, "trajectory_over")] * 5
    assert end["turns"] == []
    wait_until(lambda: sum(name == session["session"] for name, _ in served.cancelled) == 5)


def test_a_deadline_ends_what_is_open_and_what_comes_later(served: Served) -> None:
    session = served.open(deadline_s=2.0)
    served.delay_s = 60.0
    for _ in range(2):
        with pytest.raises(openai.BadRequestError) as refused:
            asyncio.run(client_of(session, max_retries=2).chat.completions.create(**ASK))
        assert refused.value.code == "trajectory_over"
    assert served.ask("wait", session=session["session"])["status"] == "late"
    asked = [wish["number"] for wish in served.taken if wish["session"] == session["session"]]
    wait_until(lambda: {(session["session"], number) for number in asked} <= set(served.cancelled))
    served.end(session)


@pytest.mark.parametrize("is_over", [False, True])
def test_an_engine_that_fails_settles_every_open_call(served: Served, is_over: bool) -> None:
    """Clients wait for ten minutes otherwise. They may try again, unless the run is over."""
    session = served.open()
    served.delay_s, served.error = 0.2, {"error": "the engine has died", "is_over": is_over}

    async def ask() -> list[Any]:
        client = client_of(session, max_retries=1)
        calls = [client.chat.completions.create(stream=bool(n % 2), **ASK) for n in range(4)]
        return await asyncio.gather(*calls, return_exceptions=True)

    found = asyncio.run(ask())
    assert [each.status_code for each in found] == [503] * 4
    asked = sum(wish["session"] == session["session"] for wish in served.taken)
    assert asked == (4 if is_over else 8)
    served.error = None
    assert served.end(session)["turns"] == []


def test_a_stream_whose_turn_fails_after_it_has_begun_ends_with_the_error(served: Served) -> None:
    session = served.open()
    served.delay_s, served.error = 0.8, {"error": "the engine has died"}

    async def ask() -> None:
        async for _ in await client_of(session).chat.completions.create(stream=True, **ASK):
            pass

    with pytest.raises(openai.APIError, match="the engine has died"):
        asyncio.run(ask())
    served.end(session)


def test_a_stream_shows_signs_of_life_while_its_turn_is_sampled(served: Served) -> None:
    """A client's time limit for reading is often shorter than a turn."""
    session = served.open()
    served.delay_s = 2.5

    async def ask() -> int:
        client = client_of(session, timeout=openai.Timeout(PATIENCE_S, read=1.5))
        return len([chunk async for chunk in await client.chat.completions.create(stream=True, **ASK)])

    assert asyncio.run(ask()) >= 3
    assert [turn["delivered"] for turn in served.end(session)["turns"]] == [True]


def test_more_open_calls_than_there_may_be_wait_for_others(served: Served) -> None:
    session = served.open()
    served.delay_s = 0.3

    async def ask(num: int, retries: int) -> list[Any]:
        client = client_of(session, max_retries=retries)
        return await asyncio.gather(
            *(client.chat.completions.create(**ASK) for _ in range(num)), return_exceptions=True
        )

    refused = [each for each in asyncio.run(ask(12, 0)) if isinstance(each, Exception)]
    assert [type(each) for each in refused] == [openai.RateLimitError] * 4
    found = asyncio.run(ask(12, 9))
    assert len({each.id for each in found}) == 12, "a retry of a call that was refused is a sample of its own"
    served.end(session)


def test_tokens_of_all_branches_together_stay_within_the_trajectorys(served: Served) -> None:
    """Calls at the same time may each use what is left; what was sampled over it is given to nobody."""
    session = served.open(max_tokens=120)

    async def ask() -> list[Any]:
        client = client_of(session, max_retries=0)
        served.delay_s = 0.1
        return await asyncio.gather(*(client.chat.completions.create(**ASK) for _ in range(6)), return_exceptions=True)

    found = asyncio.run(ask())
    assert {each.code for each in found if isinstance(each, Exception)} == {"trajectory_over"}
    end = served.end(session)
    made = served.made_in(session)
    delivered = sum(len(made[turn["number"]].tokens) for turn in end["turns"] if turn["delivered"])
    assert 0 < delivered <= 120 < sum(len(turn.tokens) for turn in made.values())


def test_a_turn_has_no_more_tokens_than_anything_allows(served: Served) -> None:
    session = served.open(max_tokens=1000, per_turn_max_tokens=50, max_model_length=20_000)
    for fields in ({}, {"max_tokens": 7}, {"max_completion_tokens": 900}):
        asyncio.run(client_of(session).chat.completions.create(**{**ASK, **fields}))
    found = [wish["max_tokens"] for wish in served.taken if wish["session"] == session["session"]]
    assert found == [50, 7, 50]
    served.end(session)
