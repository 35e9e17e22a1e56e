"""The client of judges against a real HTTP server: what is tried again, what is not, how long, how much, and what is counted."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime

import pytest

from mgrpo.config.schema import Reward
from mgrpo.rewards.judges.client import ChatClient, NoVerdict, Usage, _retry_after_s
from mgrpo.rewards.judges.endpoint import Endpoint, find_endpoint, judge_endpoint, problems, rubric_endpoint
from mgrpo.rewards.judges.replies import read_score
from mgrpo.rewards.registry import find
from tests.ports import free_port
from tests.unit.rewards.scripted_judge import Reply, Request, ScriptedJudge, says

SEVEN = says('{"REASONING": "fine", "SCORE": 7}')
VARIABLES = (
    "OPENAI_API_KEY", "OPENAI_BASE_URL", "HOSTED_VLLM_API_BASE", "HOSTED_VLLM_API_KEY", "AZURE_API_BASE", "AZURE_API_KEY",
    "AZURE_API_VERSION", "RUBRIC_JUDGE_MODEL",
)  # fmt: skip


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def read(reply: str) -> float:
    return read_score(reply, top=10, mark="0f3a59c1d27e", answer="the answer")


def client_of(url: str, **settings: object) -> ChatClient:
    settings = {
        "temperature": 0.5,
        "max_tokens": 64,
        "timeout_s": 5.0,
        "max_connections": 8,
        "backoff_s": 0.01,
    } | settings
    endpoint = settings.pop("endpoint", None) or find_endpoint("hosted_vllm/judge", url, setting="llm_judge_model")
    return ChatClient(endpoint, **settings)


def ask(client: ChatClient, *, times: int = 1) -> list[float | Exception]:
    """What `times` questions at once come to, in an event loop of their own."""

    async def run() -> list[float | Exception]:
        try:
            asked = (client.ask(f"question {i}", read) for i in range(times))
            return await asyncio.gather(*asked, return_exceptions=True)
        finally:
            await client.close()

    return asyncio.run(run())


def failure(client: ChatClient) -> str:
    (error,) = ask(client)
    assert isinstance(error, NoVerdict), error
    return str(error)


def test_the_request_is_a_chat_completion_with_the_settings(monkeypatch):
    """A judge at another temperature, or one that may write for ever, is another judge."""
    monkeypatch.setenv("HOSTED_VLLM_API_KEY", "secret-1\n")
    with ScriptedJudge(SEVEN) as judge:
        assert ask(client_of(judge.url)) == [7.0]
    (request,) = judge.requests
    assert request.path == "/v1/chat/completions"
    assert request.headers["authorization"] == "Bearer secret-1"
    assert request.body == {
        "model": "judge",
        "messages": [{"role": "user", "content": "question 0"}],
        "seed": 0,
        "max_tokens": 64,
        "temperature": 0.5,
    }


@pytest.mark.parametrize(
    "bad",
    [
        Reply(status=429, content=b'{"error": {"message": "slow down"}}'),
        Reply(status=500, content=b"oops"),
        Reply(status=503),
        Reply(status=408),
        Reply(content=b"{not json"),
        Reply(content=b"[" * 100_000),
        Reply(content=b"[1]"),
        Reply(content=b'{"choices": []}'),
        Reply(content=b'{"choices": [{"message": null}]}'),
        Reply(content=b'{"error": {"message": "in a gateway"}}'),
        Reply(content=b"\xff\xfe\x00"),
        Reply(headers={"Content-Encoding": "gzip"}, content=b"no gzip"),
        Reply(is_dropped=True),
        says(None),
        says(""),
        says("I would say seven."),
        says('{"REASONING": "cut o', finish_reason="length"),
        says('{"REASONING": "x", "SCORE": 7}', finish_reason="length"),
        says('{"REASONING": "x", "SCORE": 11}'),
    ],
    ids=lambda reply: f"{reply.status} {reply.content[:40]!r}"[:60],
)
def test_what_may_pass_is_asked_three_times_and_then_no_verdict(bad):
    """One bad second of a server must cost one retry, and a bad hour must not become scores of 0."""
    with ScriptedJudge([bad, bad, SEVEN]) as judge:
        assert ask(client_of(judge.url)) == [7.0]
    assert len(judge.requests) == 3
    with ScriptedJudge(bad) as judge:
        assert "in 3 attempts" in failure(client_of(judge.url))
    assert len(judge.requests) == 3


@pytest.mark.parametrize("status", [301, 307, 400, 401, 403, 404, 413, 422])
def test_what_will_not_pass_is_asked_once_and_reported_in_the_servers_words(status):
    """A wrong key or model name asked three times, for thousands of samples, hides the reason behind waiting."""
    body = b'{"error": {"message": "model judge does not exist", "type": "x"}}'
    bad = Reply(status=status, content=body, headers={"Location": "http://127.0.0.1:9/steal"})
    with ScriptedJudge(bad) as judge:
        message = failure(client_of(judge.url))
    assert len(judge.requests) == 1
    assert message == f"judge was not asked: HTTP {status}: model judge does not exist"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"detail": "no such route"}', "no such route"),
        (b'{"error": "plain"}', "plain"),
        (b"<html>nginx</html>", "<html>nginx</html>"),
        (b"[3]", "[3]"),
        (b"", "(nothing)"),
        (b"x" * 10_000, "x" * 300),
    ],
)
def test_every_form_of_error_message_is_shown_shortly(content, words):
    """The log line is all that a user has to go by."""
    with ScriptedJudge(Reply(status=400, content=content)) as judge:
        assert failure(client_of(judge.url)).endswith(f"HTTP 400: {words}")


def test_a_hanging_server_and_one_that_drips_both_run_into_the_time_limit():
    """A limit on each read alone lets a server that sends one byte a second hold a training step for ever."""

    def is_late(slow: Reply) -> None:
        with ScriptedJudge([slow, SEVEN]) as judge:
            begun = time.monotonic()
            assert ask(client_of(judge.url, timeout_s=1.5)) == [7.0]
            assert time.monotonic() - begun < 15

    def is_given_up(slow: Reply) -> None:
        with ScriptedJudge(slow) as judge:
            client = client_of(judge.url, timeout_s=0.2)
            assert "no reply within 0.2 s" in failure(client)
        assert client.usage.requests == 3

    slow = (Reply(wait_s=60), Reply(content=SEVEN.content, drip_s=0.2))
    with ThreadPoolExecutor() as threads:
        for done in [threads.submit(check, reply) for check in (is_late, is_given_up) for reply in slow]:
            done.result()


def test_a_refused_connection_is_no_verdict():
    """The server may start later than the first step, or have died: neither is a wrong answer."""
    assert "ConnectError" in failure(client_of(f"http://127.0.0.1:{free_port()}/v1"))


def test_a_reply_without_end_is_given_up():
    """Gigabytes from a broken server would be read into the learner's memory."""
    with ScriptedJudge(Reply(content=b" " * (9 << 20))) as judge:
        assert "longer than 4,194,304 bytes" in failure(client_of(judge.url))


@pytest.mark.parametrize("status", [200, 302, 400, 503])
def test_no_status_lets_a_reply_be_read_beyond_the_limit(status):
    """An endless error page fills rank 0's memory as well as an endless verdict does."""
    with ScriptedJudge(Reply(status=status, content=b"x" * (64 << 20))) as judge:
        assert ("longer than" if status == 200 else f"HTTP {status}: {'x' * 300}") in failure(client_of(judge.url))
    # The rest is what the sockets of each connection buffer.
    assert judge.num_bytes < len(judge.requests) * (32 << 20)


@pytest.mark.parametrize("encoding", ["gzip", "gzip, identity", "br"])
def test_a_compressed_reply_is_not_read(encoding):
    """A few kilobytes become gigabytes of rank 0's memory, many replies at once."""
    headers = {"Content-Encoding": encoding}
    with ScriptedJudge(Reply(status=404, content=gzip.compress(b"x" * 1000), headers=headers)) as judge:
        message = failure(client_of(judge.url))
    assert message.endswith(f"HTTP 404: (a reply in Content-Encoding {encoding}, where identity was asked for)")
    with ScriptedJudge([Reply(content=gzip.compress(SEVEN.content), headers=headers), SEVEN]) as judge:
        assert ask(client_of(judge.url)) == [7.0]
    assert len(judge.requests) == 2


def test_an_error_of_the_program_is_not_tried_again(monkeypatch):
    """As a judge's failure it would be retried, and then be a missing score without a trace of its cause."""
    monkeypatch.setattr(ChatClient, "_request", lambda *_: {}["model"])
    with ScriptedJudge(SEVEN) as judge:
        client = client_of(judge.url)
        (error,) = ask(client)
    assert isinstance(error, KeyError)
    assert client.usage.requests == 1


def test_attempts_wait_twice_as_long_each_time_and_as_long_as_the_server_says():
    """Without back-off a rate limit is met again at once; without Retry-After, too early."""
    waits: list[tuple[int, float]] = []

    async def sleep(seconds: float) -> None:
        waits.append((len(judge.requests), seconds))

    with ScriptedJudge(Reply(status=500)) as judge:
        failure(client_of(judge.url, backoff_s=1.0, sleep=sleep))
    assert waits == [(1, 1.0), (2, 2.0)]
    waits.clear()
    with ScriptedJudge([Reply(status=429, headers={"Retry-After": "7.5"}), SEVEN]) as judge:
        assert ask(client_of(judge.url, sleep=sleep)) == [7.0]
    assert waits == [(1, 7.5)]


def test_retry_after_is_read_in_both_forms_and_bounded():
    """An hour of Retry-After, or a wrong one, must not stop the run."""
    assert ChatClient.__init__.__kwdefaults__ == {"backoff_s": 1.0, "sleep": asyncio.sleep}
    assert [_retry_after_s(value) for value in ("2", "1.5", "-3", "3600", "inf", "nan", "soon", "")] == [
        2.0, 1.5, 0.0, 30.0, 0.0, 0.0, 0.0, 0.0,
    ]  # fmt: skip
    later = format_datetime(datetime.now(timezone.utc) + timedelta(seconds=10), usegmt=True)
    assert 5 < _retry_after_s(later) <= 10
    assert _retry_after_s(format_datetime(datetime.now() - timedelta(days=1))) == 0.0


def test_each_attempt_has_its_own_seed_and_each_question_the_same_ones():
    """With one seed an unreadable reply comes back word for word; with random ones no verdict can be reproduced."""
    with ScriptedJudge(says("hm")) as judge:
        failure(client_of(judge.url))
        failure(client_of(judge.url))
    assert [request.body["seed"] for request in judge.requests] == [0, 1, 2, 0, 1, 2]


def test_no_more_connections_than_allowed_and_they_are_used_again():
    """A rubric asks dozens of criteria at once; without a limit a step opens thousands of connections."""
    with ScriptedJudge(says('{"SCORE": 3}', wait_s=0.2)) as judge:
        client = client_of(judge.url, max_connections=4, timeout_s=1.8)
        assert ask(client, times=40) == [3.0] * 40, "those that wait for a turn are not yet late"
    assert 1 < judge.most_at_once <= 4
    assert len({request.connection for request in judge.requests}) <= 4


def test_closing_gives_the_connections_back_and_the_client_can_be_used_again():
    """A pool that is never closed leaves sockets behind at the end of every evaluation."""
    import psutil

    with ScriptedJudge(SEVEN) as judge:
        port = int(judge.url.split(":")[2].split("/")[0])
        client = client_of(judge.url)
        assert ask(client) == [7.0]
        mine = [c for c in psutil.Process().net_connections() if c.raddr and c.raddr.port == port]
        assert not mine, mine
        assert ask(client) == [7.0]


def test_tokens_are_summed_over_every_reply():
    """A judge that is asked three times bills three times; a sum over verdicts only is too low."""
    with ScriptedJudge([says("hm"), Reply(status=500), SEVEN]) as judge:
        client = client_of(judge.url)
        assert ask(client) == [7.0]
    assert client.usage == Usage(requests=3, prompt_tokens=200, completion_tokens=20)


@pytest.mark.parametrize(
    "usage", [None, [], {}, {"prompt_tokens": None, "completion_tokens": "9"}, {"prompt_tokens": -5}]
)
def test_strange_usage_counts_nothing(usage):
    """A server that reports no tokens still judges."""
    with ScriptedJudge(says('{"SCORE": 7}', usage=usage)) as judge:
        client = client_of(judge.url)
        assert ask(client) == [7.0]
    assert client.usage == Usage(requests=1)


# Where the judge lives.


def test_each_kind_of_name_finds_its_server(monkeypatch):
    """A judge asked at the wrong server costs money there, or shows it what it should not see."""
    base = "http://judge:8000"
    at = lambda model, url=None: find_endpoint(model, url, setting="llm_judge_model")  # noqa: E731
    assert at("hosted_vllm/Qwen/Q3", base) == Endpoint(base_url=f"{base}/v1", model="Qwen/Q3")
    monkeypatch.setenv("HOSTED_VLLM_API_BASE", f"{base}/v1/")
    assert at("hosted_vllm/m").base_url == f"{base}/v1"
    assert at("hosted_vllm/m", "https://other/api/v2").base_url == "https://other/api/v2"
    assert at("Qwen/Q3", base).model == "Qwen/Q3"
    monkeypatch.setenv("OPENAI_BASE_URL", "https://gateway/x/chat/completions?tenant=3")
    assert (at("org/m").base_url, at("org/m").query) == ("https://gateway/x", {"tenant": "3"})
    monkeypatch.delenv("OPENAI_BASE_URL")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    assert at("openai/gpt-4o") == Endpoint(
        base_url="https://api.openai.com/v1", model="gpt-4o", key="sk-1", is_openai=True
    )
    monkeypatch.setenv("AZURE_API_BASE", "https://me.openai.azure.com/")
    monkeypatch.setenv("AZURE_API_KEY", "az-1")
    assert at("azure/gpt-4o-mini-standard") == Endpoint(
        base_url="https://me.openai.azure.com/openai/deployments/gpt-4o-mini-standard",
        model="gpt-4o-mini-standard",
        key="az-1",
        azure_version="2024-12-01-preview",
        is_openai=True,
    )
    monkeypatch.setenv("AZURE_API_VERSION", "2025-01-01")
    assert at("azure/d").azure_version == "2025-01-01"


@pytest.mark.parametrize("base", ["", "?tenant=3", "/chat/completions?tenant=3"])
def test_the_whole_address_is_the_one_that_was_meant(base):
    """Gateways tell their customers apart by parameters."""
    with ScriptedJudge(SEVEN) as judge:
        endpoint = find_endpoint("m", judge.url + base, setting="x")
        assert ask(client_of(judge.url, endpoint=endpoint)) == [7.0]
    assert judge.requests[0].path == "/v1/chat/completions" + ("?tenant=3" if base else "")


def test_openais_key_is_not_sent_to_a_server_of_ones_own(monkeypatch):
    """hosted_vllm is often plain HTTP across a cluster."""
    for variable in (
        "OPENAI_API_KEY",
        "OPENAI_ADMIN_KEY",
        "AZURE_OPENAI_API_KEY",
        "OPENAI_ORG_ID",
        "OPENAI_PROJECT_ID",
    ):
        monkeypatch.setenv(variable, "secret-of-openai")
    with ScriptedJudge(SEVEN) as judge:
        assert ask(client_of(judge.url)) == [7.0]
    assert "authorization" not in judge.requests[0].headers
    assert "secret-of-openai" not in str(judge.requests[0].headers)


def test_openais_own_models_get_the_parameters_they_know(monkeypatch):
    """Reasoning models refuse max_tokens and every temperature; other servers know nothing but max_tokens."""
    monkeypatch.setenv("AZURE_API_KEY", "k")
    for model, expected in [
        ("azure/gpt-4o", {"temperature": 0.5}),
        ("azure/o3-standard", {}),
        ("azure/gpt-5-mini", {}),
    ]:
        with ScriptedJudge(SEVEN) as judge:
            endpoint = find_endpoint(model, judge.url.removesuffix("/v1"), setting="x")
            assert ask(client_of(judge.url, endpoint=endpoint)) == [7.0]
        body = judge.requests[0].body
        assert {name: body[name] for name in body.keys() - {"model", "messages", "seed"}} == {
            "max_completion_tokens": 64
        } | expected
        assert judge.requests[0].headers["api-key"] == "k"
        name = model.removeprefix("azure/")
        assert judge.requests[0].path == (f"/openai/deployments/{name}/chat/completions?api-version=2024-12-01-preview")


@pytest.mark.parametrize(
    ("settings", "environment", "words"),
    [
        ({}, {}, "llm_judge_model is none"),
        ({"llm_judge_model": "gpt-4o"}, {}, "set OPENAI_API_KEY"),
        ({"llm_judge_model": "azure/d"}, {"AZURE_API_KEY": "k"}, "llm_judge_base_url, or AZURE_API_BASE"),
        ({"llm_judge_model": "azure/d"}, {"AZURE_API_BASE": "https://x"}, "set AZURE_API_KEY"),
        ({"llm_judge_model": "hosted_vllm/m"}, {}, "llm_judge_base_url, or HOSTED_VLLM_API_BASE"),
        ({"llm_judge_model": "Qwen/Q3"}, {"OPENAI_API_KEY": "k"}, "hosted_vllm/Qwen/Q3"),
        ({"llm_judge_model": "m", "llm_judge_base_url": "localhost:8000"}, {}, "llm_judge_base_url='localhost:8000'"),
        ({"llm_judge_model": "m", "llm_judge_base_url": "http://a:pw@host"}, {}, "holds a user name or password"),
        ({"llm_judge_model": "gpt-4o"}, {"OPENAI_API_KEY": "two words"}, "OPENAI_API_KEY in the environment holds"),
        (
            {"llm_judge_model": "hosted_vllm/m", "llm_judge_base_url": "http://h", "llm_judge_max_tokens": 8100},
            {},
            "llm_judge_max_context_length=8192 leaves no room",
        ),
    ],
)
def test_a_judge_that_cannot_be_asked_is_one_clear_problem_before_the_start(monkeypatch, settings, environment, words):
    """Found at the first step, it costs the start of every engine; found never, every sample is without a score."""
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    found = problems(Reward(**settings), ["math", "General-Safety", "general-quality"])
    assert len(found) == 1 and words in found[0]
    assert "pw" not in found[0] and "two words" not in found[0]
    assert find("general-safety").problems(Reward(**settings)) == found
    assert problems(Reward(**settings), ["math", "code"]) == []


def test_rubrics_find_their_judge_in_the_order_of_the_documentation(monkeypatch):
    """A judge other than the one meant scores by another standard, and bills another account."""
    base = {"llm_judge_base_url": "http://judge"}
    assert rubric_endpoint(Reward(**base)).model == "gpt-4.1"
    assert rubric_endpoint(Reward(llm_judge_model="a", **base)).model == "a"
    monkeypatch.setenv("RUBRIC_JUDGE_MODEL", "b")
    assert rubric_endpoint(Reward(llm_judge_model="a", **base)).model == "b"
    assert judge_endpoint(Reward(llm_judge_model="a", **base)).model == "a"
    assert "OPENAI_API_KEY" in problems(Reward(), ["rubric"])[0] and problems(Reward(**base), ["rubric"]) == []
    assert find("rubric").problems(Reward()) == problems(Reward(), ["rubric"])


def test_the_key_is_in_no_message_log_or_representation(monkeypatch, caplog):
    """Logs are shared and kept; a key in them is a key lost."""
    secret = "sk-1234567890abcdef"
    monkeypatch.setenv("OPENAI_API_KEY", secret)
    caplog.set_level(logging.DEBUG)

    def echo(request: Request) -> Reply:
        said = "x" * 284 + request.headers["authorization"]
        return Reply(status=401, content=json.dumps({"error": {"message": said}}).encode())

    with ScriptedJudge(echo) as judge:
        endpoint = find_endpoint("m", judge.url, setting="llm_judge_model")
        message = failure(client_of(judge.url, endpoint=endpoint))
    assert judge.requests[0].headers["authorization"] == f"Bearer {secret}"
    for text in (message, repr(endpoint), caplog.text):
        assert secret[:6] not in text
