"""Judges through vLLM's own OpenAI server, on a random model that writes nonsense byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from mgrpo.config.schema import Reward
from mgrpo.rewards.judges.client import NoVerdict
from mgrpo.rewards.judges.prompt_context import token_counter
from mgrpo.rewards.registry import find
from mgrpo.rewards.verifier import Answer
from tests.e2e.vllm_server import ON_A_CPU
from tests.ports import free_port
from tests.unit.rewards.scripted_judge import Reply, Request, ScriptedJudge

NEEDED = (
    "jmespath", "lmformatenforcer", "model_hosting_container_standards", "prometheus_fastapi_instrumentator", "uvicorn",
    "vllm", "watchfiles",
)  # fmt: skip
MISSING = [module for module in NEEDED if importlib.util.find_spec(module) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING),
    reason=f"vLLM's OpenAI server needs {', '.join(MISSING)}: pip install --no-deps -r requirements/judge.txt",
)
CONTEXT = 8192
REPLY_TOKENS = 192
VERDICT = {
    "type": "object",
    "properties": {
        "REASONING": {"type": "string", "maxLength": 20},
        "SCORE": {"enum": list(range(1, 11))},
    },
    "required": ["REASONING", "SCORE"],
    "additionalProperties": False,
}
VERDICTS = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": VERDICT}}
ANSWER = Answer(completion="<think>draft</think>It is {4}.", ground_truth="", prompt="user: What is 2 + 2?")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Address and model of a server that is ready."""
    folder = tmp_path_factory.mktemp("judge")
    model = save_byte_model(folder / "model")
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "float32", "--max-model-len", str(CONTEXT), "--max-num-seqs", "8",
        "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20), "--disable-log-stats", "--api-key", "secret-1",
        # On a CPU, vLLM 0.32 dies of a seeded prompt that it reads in several parts.
        "--no-enable-chunked-prefill", "--max-num-batched-tokens", str(CONTEXT),
    ]  # fmt: skip
    log = (folder / "log.txt").open("w")
    process = subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | ON_A_CPU, start_new_session=True
    )
    try:
        wait_until_ready(f"http://127.0.0.1:{port}/health", process, folder / "log.txt")
        yield f"http://127.0.0.1:{port}/v1", model
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(30)
        finally:
            # Its engine is a process of the same group, and outlives a server that was killed.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            log.close()


def save_byte_model(folder: Path) -> Path:
    """A random Qwen2 whose tokens are bytes: it can write any JSON, and left to itself writes none."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={"<eos>": 0} | {byte: i for i, byte in enumerate(alphabet, 1)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def wait_until_ready(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended:\n{log.read_text(errors='replace')[-4000:]}"
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.3)
    raise AssertionError(f"the server is not ready:\n{log.read_text(errors='replace')[-4000:]}")


def judge(
    url: str, model: Path, answer: Answer, *, name: str = "general-quality"
) -> tuple[float | Exception, dict[str, float]]:
    """The score or the failure of one question, and the verifier's metrics."""
    verifier = find(name)(
        Reward(
            llm_judge_model=f"hosted_vllm/{model}",
            llm_judge_base_url=url,
            llm_judge_max_tokens=REPLY_TOKENS,
            llm_judge_max_context_length=CONTEXT,
        )
    )
    verifier.client.backoff_s = 0.01

    async def run() -> float | Exception:
        try:
            return await verifier.score(answer)
        except Exception as err:
            return err
        finally:
            await verifier.close()

    return asyncio.run(run()), verifier.metrics()


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTED_VLLM_API_KEY", "secret-1")


@contextlib.contextmanager
def gateway(url: str, **extra: object) -> Iterator[tuple[ScriptedJudge, list[dict]]]:
    """A server between, which adds `extra` to every request; the replies that came through it."""
    replies: list[dict] = []

    def forward(request: Request) -> Reply:
        headers = {"Content-Type": "application/json", "Authorization": request.headers["authorization"]}
        outgoing = urllib.request.Request(f"{url}/chat/completions", json.dumps(request.body | extra).encode(), headers)
        try:
            with urllib.request.urlopen(outgoing, timeout=60) as response:
                content = response.read()
        except urllib.error.HTTPError as err:
            return Reply(status=err.code, content=err.read())
        replies.append(json.loads(content))
        return Reply(content=content)

    with ScriptedJudge(forward) as judge:
        yield judge, replies


def total(replies: list[dict], count: str) -> int:
    return sum(reply["usage"][count] for reply in replies)


def test_nonsense_from_a_real_server_is_asked_again_counted_and_no_score(server):
    """A judge that cannot judge must not hand out zeros, and what it wrote is paid for."""
    url, model = server
    with gateway(url) as (between, replies):
        outcome, metrics = judge(between.url, model, ANSWER)
    assert isinstance(outcome, NoVerdict) and "3 attempts" in str(outcome), outcome
    texts = [reply["choices"][0]["message"]["content"] for reply in replies]
    assert len(set(texts)) == 3, "each attempt has its own seed"
    assert metrics == {
        "requests": 3,
        "prompt_tokens": total(replies, "prompt_tokens"),
        "completion_tokens": total(replies, "completion_tokens"),
    }
    assert metrics["prompt_tokens"] > 3 * 500 and metrics["completion_tokens"] > 3


def test_a_structured_reply_of_a_real_server_is_a_score(server):
    """The whole way of a verdict, as a server writes it and not as a test imagines it."""
    url, model = server
    with gateway(url, response_format=VERDICTS) as (between, replies):
        score, _ = judge(between.url, model, ANSWER)
        written = json.loads(replies[-1]["choices"][0]["message"]["content"], strict=False)
        again, _ = judge(between.url, model, ANSWER)
    assert score == written["SCORE"] / 10
    assert again == score, "the same question has the same seeds, and so the same verdict"
    assert "It is {4}." in between.prompts[0] and "draft" not in between.prompts[0]


def test_a_long_answer_is_cut_to_what_the_server_takes(server):
    """The server refuses a prompt that is one token too long; the count must be the server's own."""
    url, model = server
    long = Answer(completion="word " * 5000, ground_truth="", prompt="user: " + "Go on. " * 3000)
    with gateway(url, response_format=VERDICTS) as (between, replies):
        score, _ = judge(between.url, model, long)
    assert isinstance(score, float), score
    counted = token_counter(str(model))(between.prompts[0])
    assert replies[0]["usage"]["prompt_tokens"] == counted
    assert 0.95 * (CONTEXT - REPLY_TOKENS) < counted <= CONTEXT - REPLY_TOKENS


def test_the_servers_own_words_reach_the_user(server, monkeypatch):
    """A wrong name or key is the commonest mistake; vLLM says which it is."""
    url, model = server
    outcome, metrics = judge(url, Path("no-such-model"), ANSWER)
    assert "HTTP 404" in str(outcome) and "no-such-model" in str(outcome) and metrics["requests"] == 1
    monkeypatch.setenv("HOSTED_VLLM_API_KEY", "secret-2")
    outcome, metrics = judge(url, model, ANSWER)
    assert "HTTP 401" in str(outcome) and metrics["requests"] == 1
