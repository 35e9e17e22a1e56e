"""The real client of OpenAI against the endpoint in a process of its own: ids, branches and errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import openai
import pytest

from tests.unit.environments.endpoint.served import ADD, ASKED, Served

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("tokenizer"))
    yield served
    served.close()


@pytest.fixture(autouse=True)
def _at_once(served: Served) -> Iterator[None]:
    yield
    served.delay_s, served.error = 0.0, None


def client_of(session: Mapping[str, Any], **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{session['base_url']}/v1", api_key=session["api_key"], **{"max_retries": 0, **options}
    )


def plain(message: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in message.model_dump(exclude_none=True).items()
        if name in ("role", "content", "tool_calls")
    }


async def streamed(client: openai.AsyncOpenAI, **fields: Any) -> dict[str, Any]:
    text, calls = "", {}
    async for chunk in await client.chat.completions.create(stream=True, **fields):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                calls[call.index] = call.model_dump(exclude={"index"})
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls.values())} if calls else {})}


async def count(
    client: openai.AsyncOpenAI,
    messages: list[dict],
    *,
    stream: bool = False,
    rewritten: Callable[[dict], dict] = lambda message: message,
) -> list[dict]:
    """An agent's loop: the conversation once the model calls no tool any more."""
    while True:
        asked = {"model": "policy", "messages": messages, "tools": [ADD]}
        if stream:
            said = await streamed(client, **asked)
        else:
            said = plain((await client.chat.completions.create(**asked)).choices[0].message)
        messages = [*messages, rewritten(said)]
        if not said.get("tool_calls"):
            return messages
        for call in said["tool_calls"]:
            found = json.loads(call["function"]["arguments"])["x"] + 1
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(found)})


def in_its_own_way(message: dict) -> dict:
    """JSON with other spacing and order, content in parts."""
    message = json.loads(json.dumps(message))
    for call in message.get("tool_calls", []):
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=1)
    message["content"] = [{"type": "text", "text": message["content"]}] if message.get("content") else None
    return message


def check_told(served: Served, session: Mapping[str, Any], end: Mapping[str, Any]) -> None:
    """What is told of turns is what the engine made, in order."""
    made = served.made_in(session)
    assert [turn["number"] for turn in end["turns"]] == sorted(made)
    for turn in end["turns"]:
        text = served.tokenizer.decode(made[turn["number"]].tokens, skip_special_tokens=False)
        assert text.startswith(turn["message"]["content"])


@pytest.mark.parametrize("how", ["plain", "streamed", "rewritten"])
def test_a_tool_loop_is_one_branch_whatever_the_client_makes_of_its_history(served: Served, how: str) -> None:
    """Each further root would be a context that is paid for again, and its trained tokens would follow other ones than were
    sampled."""
    session = served.open()
    rewritten = in_its_own_way if how == "rewritten" else lambda message: message
    asyncio.run(count(client_of(session), ASKED, stream=how == "streamed", rewritten=rewritten))
    end = served.end(session)
    made = served.made_in(session)
    assert len(made) == 5
    [(context, tokens, mask)] = served.branches(session, end)
    assert context + tokens == made[4].context + made[4].tokens
    assert sum(mask) == sum(len(turn.tokens) for turn in made.values()) < len(mask)
    again = served.tokenizer(served.tokenizer.decode(made[4].context))["input_ids"]
    assert again != made[4].context, "ids that are encoded again would have been noticed"
    assert [turn["delivered"] for turn in end["turns"]] == [True] * 5
    assert [turn["calls"] for turn in end["turns"]] == [["add"]] * 4 + [[]]
    assert [root["number"] for root in end["roots"]] == [0] and end["roots"][0]["messages"] == ASKED
    assert [message["role"] for message in end["added"]["1"]] == ["tool"]
    assert end["counts"]["rendered_again"] == 0 and end["first_difference"] is None
    check_told(served, session, end)


def test_a_compacted_history_is_a_branch_of_its_own_and_what_was_said_before_is_still_trained(served: Served) -> None:
    """Agents replace their history by a summary; the turns before it earned the reward as well."""
    session = served.open()
    system = ASKED[0]

    async def compact() -> None:
        client = client_of(session)
        await count(client, [system, {"role": "user", "content": "count to 2"}])
        await count(client, [system, {"role": "user", "content": "Summary: at 2. Now count to 2"}])

    asyncio.run(compact())
    end = served.end(session)
    branches = served.branches(session, end)
    assert [sum(mask) for _, _, mask in branches] == [
        sum(len(turn.tokens) for number, turn in served.made_in(session).items() if number // 3 == branch)
        for branch in (0, 1)
    ]
    assert end["counts"]["rendered_again"] == 1
    assert end["counts"]["context_repeated"] == len(branches[1][0])
    assert end["first_difference"].startswith('its message 1 is {"role": "user", "content": "Summary')


def test_parallel_sub_agents_share_their_trunk_and_each_token_is_trained_once(served: Served) -> None:
    """Forks from one turn at the same time, and an agent with another system prompt."""
    session = served.open()
    served.delay_s = 0.05

    async def fork() -> list[dict]:
        client = client_of(session)
        trunk = await count(client, [ASKED[0], {"role": "user", "content": "count to 2"}])
        other = [{"role": "system", "content": "A third agent."}, {"role": "user", "content": "count to 1"}]
        asked = [[*trunk, {"role": "user", "content": f"{name}: count to 3"}] for name in ("one", "two")]
        await asyncio.gather(*(count(client, each) for each in (*asked, other)))
        return trunk

    asyncio.run(fork())
    end = served.end(session)
    branches, made = served.branches(session, end), served.made_in(session)
    assert len(branches) == 3 and end["counts"]["rendered_again"] == 1
    assert sum(sum(mask) for *_, mask in branches) == sum(len(turn.tokens) for turn in made.values())
    trunk = made[2].context + made[2].tokens
    assert sum(context[: len(trunk)] == trunk for context, *_ in branches) == 1


def test_equal_calls_at_once_are_as_many_samples(served: Served) -> None:
    """An agent that draws the best of n must not get one answer n times."""
    session = served.open()
    served.delay_s = 0.05

    async def draw() -> None:
        client = client_of(session)
        asked = {"model": "policy", "messages": ASKED, "tools": [ADD]}
        await asyncio.gather(*(client.chat.completions.create(**asked) for _ in range(10)))

    asyncio.run(draw())
    end = served.end(session)
    assert len(served.made_in(session)) == 10
    assert [turn["delivered"] for turn in end["turns"]] == [True] * 10 and end["counts"]["retries"] == 0


def test_an_edited_history_is_rendered_and_what_the_client_made_up_is_not_trained(served: Served) -> None:
    session = served.open()

    async def edit() -> None:
        client = client_of(session)
        messages = await count(client, [ASKED[0], {"role": "user", "content": "count to 1"}])
        messages[-1] = {"role": "assistant", "content": "I never said this"}
        await count(client, [*messages, {"role": "user", "content": "count to 0"}])

    asyncio.run(edit())
    end = served.end(session)
    branches = served.branches(session, end)
    assert len(branches) == 2
    assert "I never said this" in served.tokenizer.decode(branches[1][0])
    assert "I never said this" not in served.tokenizer.decode(
        [i for *_, ids, mask in branches for i, m in zip(ids, mask, strict=True) if m]
    )
    assert "was not sampled here" in end["first_difference"]


def test_log_probabilities_are_those_of_the_sampled_tokens(served: Served) -> None:
    session = served.open()

    async def ask(stream: bool) -> list[Any]:
        fields = {"model": "policy", "messages": ASKED, "logprobs": True}
        client = client_of(session)
        if not stream:
            return (await client.chat.completions.create(**fields)).choices[0].logprobs.content
        chunks = [chunk async for chunk in await client.chat.completions.create(stream=True, **fields)]
        return [
            entry
            for chunk in chunks
            for choice in chunk.choices
            if choice.logprobs
            for entry in choice.logprobs.content
        ]

    found = [asyncio.run(ask(stream)) for stream in (False, True)]
    for number, entries in enumerate(found):
        made = served.made_in(session)[number]
        assert [entry.logprob for entry in entries] == pytest.approx(made.logprobs, abs=1e-7)
        assert "".join(entry.token for entry in entries) == served.tokenizer.decode(made.tokens)
        assert bytes(entries[0].bytes) == entries[0].token.encode()
    served.end(session)


def test_a_stop_string_ends_the_text_and_the_ids_stay_whole(served: Served) -> None:
    """smolagents and the like send them; what is trained is what was sampled, and the history goes on from it."""
    session = served.open()

    async def ask() -> tuple[Any, Any]:
        client = client_of(session)
        asked = [{"role": "user", "content": "count to 0"}]
        first = await client.chat.completions.create(model="policy", messages=asked, stop=["ne 0", "never"])
        said = plain(first.choices[0].message)
        again = [*asked, said, {"role": "user", "content": "and?"}]
        return first, await client.chat.completions.create(model="policy", messages=again)

    first, _ = asyncio.run(ask())
    made = served.made_in(session)
    assert first.choices[0].message.content == "do" and first.choices[0].finish_reason == "stop"
    assert served.tokenizer.decode(made[0].tokens) == "done 0"
    assert made[1].context[: len(made[0].context) + len(made[0].tokens)] == made[0].context + made[0].tokens
    served.end(session)


def test_usage_is_counted_in_both_ways_of_answering(served: Served) -> None:
    session = served.open()

    async def ask() -> list[Any]:
        client = client_of(session)
        fields = {"model": "gpt-x", "messages": ASKED, "max_tokens": 5}
        whole = await client.chat.completions.create(**fields)
        assert whole.model == "gpt-x" and whole.choices[0].finish_reason == "length"
        options = {"include_usage": True}
        chunks = [
            chunk async for chunk in await client.chat.completions.create(stream=True, stream_options=options, **fields)
        ]
        assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-2].choices[0].finish_reason == "length"
        return [whole.usage, chunks[-1].usage]

    for number, usage in enumerate(asyncio.run(ask())):
        made = served.made_in(session)[number]
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(made.context), 5)
    assert served.end(session)["counts"]["other_model"] == 2


def test_settings_of_sampling_are_the_runs_and_others_are_counted(served: Served) -> None:
    """Frameworks send a temperature by themselves; obeyed, it would make every ratio wrong."""
    session = served.open()

    async def ask(**fields: Any) -> None:
        await client_of(session).chat.completions.create(model="policy", messages=ASKED, **fields)

    for fields in (
        {"temperature": 0},
        {"temperature": 0.7},
        {"top_p": 1},
        {"top_p": 0.9, "seed": 1},
        {"presence_penalty": 0},
    ):
        asyncio.run(ask(**fields))
    asyncio.run(ask(extra_body={"top_k": -1, "min_p": 0}))
    with pytest.raises(openai.BadRequestError, match="temperature"):
        asyncio.run(ask(temperature="hot"))  # type: ignore[arg-type]
    assert served.end(session)["counts"]["overridden"] == {"temperature": 1, "top_p": 1, "seed": 1}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "tools": [ADD]}, "tool_choice"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs"),
        ({"extra_body": {"guided_regex": "a"}}, "guided_regex"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ],
)
def test_what_would_change_the_distribution_is_refused_in_the_clients_words(
    served: Served, fields: Any, param: str
) -> None:
    session = served.open()
    create = client_of(session, max_retries=2).chat.completions.create
    with pytest.raises(openai.BadRequestError) as refused:
        asyncio.run(create(**{"model": "policy", "messages": ASKED, **fields}))
    assert refused.value.param == param and refused.value.type == "invalid_request_error"
    assert sum(served.end(session)["counts"]["refused"].values()) == 1, "it is not sent again"


def test_a_full_context_says_what_frameworks_look_for(served: Served) -> None:
    """They compact their history when they read it; in a stream as well, before anything of it was sent."""
    session = served.open(max_model_length=60)
    asked = {"model": "policy", "messages": [{"role": "user", "content": "x" * 500}]}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="maximum context length is 60 tokens") as refused:
            asyncio.run(client_of(session).chat.completions.create(stream=stream, **asked))
        assert refused.value.code == "context_length_exceeded"
    assert served.end(session)["counts"]["refused"] == {"context_length_exceeded": 2}
    assert not served.made_in(session)


def test_keys_open_their_own_session_only(served: Served) -> None:
    one, two = served.open(), served.open()
    wrong = [{**one, "api_key": key} for key in ("wrong", two["api_key"], one["reward_key"], "k\u00e9y", "x" * 5000)]
    for session in wrong:
        with pytest.raises((openai.AuthenticationError, UnicodeEncodeError)):
            asyncio.run(client_of(session, max_retries=2).chat.completions.create(model="policy", messages=ASKED))
    assert not served.made_in(one)
    served.end(one)
    with pytest.raises(openai.AuthenticationError):
        asyncio.run(client_of(one).chat.completions.create(model="policy", messages=ASKED))
    served.end(two)


def test_the_model_is_listed(served: Served) -> None:
    session = served.open(max_model_length=1234)

    async def listed() -> tuple[Any, Any]:
        client = client_of(session)
        return (await client.models.list()).data, await client.models.retrieve("policy")

    models, one = asyncio.run(listed())
    assert [model.id for model in models] == ["policy"] == [one.id] and models[0].max_model_len == 1234
    served.end(session)
