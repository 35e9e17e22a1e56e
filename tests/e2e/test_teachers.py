"""Teachers on real vLLM: what they say of given tokens is what the model says, from engines that a run starts and from servers."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch

from mgrpo.config import ConfigError
from mgrpo.data.tokenizer import load_tokenizer, text_of_all_tokens
from mgrpo.moving import from_values
from mgrpo.rollout.start import Engines, TextSample, _connected_teachers, started_engines
from mgrpo.rollout.teachers import Teachers
from mgrpo.types import TeacherScores
from tests.e2e.launching import ROOT
from tests.e2e.vllm_server import MISSING, REASON, TOKEN, Server
from tests.tiny_models import VOCAB, load_hf, save_tiny

K, TEMPERATURE = 5, 1.7
QUICKSTART = ROOT / "examples/quickstart/model"
LENGTHS = ((9, 4), (40, 1), (200, 199), (2600, 30), (33, 32), (64, 8))
"""Tokens of each sequence, and where its completion begins. The longest is more than an engine reads in a step."""


def sequences(lengths: Sequence[tuple[int, int]], vocab: int = VOCAB) -> list[tuple[np.ndarray, int]]:
    rng = np.random.default_rng(0)
    return [(rng.integers(3, vocab, length).astype(np.int32), start) for length, start in lengths]


QUESTIONS = sequences(LENGTHS)


def asked(
    teachers: Teachers, teacher: int, questions: Sequence[tuple[np.ndarray, int]] = QUESTIONS
) -> Future[list[TeacherScores]]:
    answer: Future[list[TeacherScores]] = Future()
    teachers.ask(teacher, questions, answer.set_result)
    return answer


def check(
    scores: Sequence[TeacherScores],
    folder: Path,
    *,
    temperature: float,
    questions: Sequence[tuple[np.ndarray, int]],
    vocab: int = VOCAB,
) -> None:
    """Against transformers' logits, divided by the temperature; a token that the policy does not have is not named."""
    model = load_hf(folder)
    for (tokens, start), found in zip(questions, scores, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor(tokens[None].astype(np.int64))).logits[0].double()
        logprobs = (logits / temperature).log_softmax(-1)[start - 1 : -1]
        own = logprobs.gather(1, torch.tensor(tokens[start:, None].astype(np.int64)))[:, 0]
        np.testing.assert_allclose(found.logprobs, own.numpy(), atol=2e-5)
        values, numbers = (each.numpy().copy() for each in logprobs.topk(K + 1))
        # Tokens that differ by no more than rounding may stand in either order, the last of them in place of the next.
        gaps = np.pad(-np.diff(values), ((0, 0), (1, 0)), constant_values=np.inf)
        is_clear = np.minimum(gaps[:, :-1], gaps[:, 1:]) > 4e-5
        assert is_clear.mean() > 0.98
        likeliest, ids = values[:, :K], numbers[:, :K]
        likeliest[ids >= vocab], ids[ids >= vocab] = np.nan, -1
        assert found.ids is not None and found.likeliest is not None
        np.testing.assert_array_equal(found.ids[is_clear], ids[is_clear])
        np.testing.assert_allclose(found.likeliest[is_clear], likeliest[is_clear], atol=2e-5)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The policy's, and two teachers' of other sizes, one of them with tokens that the policy does not have."""
    folder = tmp_path_factory.mktemp("models")
    shapes = (
        {"layers": 2},
        {"layers": 3, "max_position_embeddings": 4096},
        {"max_position_embeddings": 4096, "vocab_size": VOCAB + 35},
    )
    return [save_tiny(folder, "llama", heads=2, **shape) for shape in shapes]


@pytest.fixture(scope="module")
def engines(models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engines, Path]]:
    output = tmp_path_factory.mktemp("out")
    values = {
        "model_name_or_path": str(models[0]),
        "model_dtype": "float32",
        "max_prompt_token_length": 100,
        "response_length": 2500,
        "teacher_model_name_or_path": [f"math:{models[1]}", f"code:{models[2]}"],
        "teacher_mode": "engine",
        "teacher_temperature": TEMPERATURE,
        "distillation_loss": "forward_kl",
        "distillation_topk": K,
        "engine_heartbeat_timeout": 8,
        "output_dir": str(output),
    }
    with started_engines(from_values(values), num_local_learners=1, on_failure=None) as engines:
        assert engines.teachers is not None
        engines.teachers.wait_ready()
        yield engines, output / "engine_logs"


def process(log: Path) -> int:
    """Of the engine that writes this."""
    return int(re.findall(r"engine started: process (\d+)", log.read_text())[-1])


@pytest.mark.timeout(900)
def test_engines_say_what_the_models_say_also_after_one_is_killed_and_another_hangs(engines, models) -> None:
    """Their answers become gradients: a wrong shift, a temperature that is not applied, or an answer that is lost shows here."""
    (started, logs), teachers = engines, engines[0].teachers
    for teacher in (0, 1):
        check(asked(teachers, teacher).result(120), models[1 + teacher], temperature=TEMPERATURE, questions=QUESTIONS)
    killed, stopped = (process(logs / f"teacher_{name}_0.txt") for name in ("math", "code"))
    os.kill(stopped, signal.SIGSTOP)
    answers = [asked(teachers, teacher) for teacher in (0, 1)]
    os.kill(killed, signal.SIGKILL)
    for teacher, answer in enumerate(answers):
        check(answer.result(240), models[1 + teacher], temperature=TEMPERATURE, questions=QUESTIONS)
    described = [roster.describe()[0] for roster in started.fleet.roster.beside]
    assert [engine["starts"] for engine in described] == [2, 2] and started.fleet.roster.num_deaths == 0
    assert "has died" in described[0]["last_failure"]
    assert "no answer within engine_heartbeat_timeout=8 s" in described[1]["last_failure"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """As anybody starts one."""
    server = Server(QUICKSTART, tmp_path_factory.mktemp("server"), max_model_len=256, is_stock=True)
    try:
        server.wait()
        yield server
    finally:
        server.end()


@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(MISSING), reason=REASON)
def test_a_stock_server_says_what_its_model_says_also_after_it_was_away(server, monkeypatch) -> None:
    """Nothing of mgrpo is in it, and it gives the log-probabilities of given ids; what it had not answered is asked again."""
    monkeypatch.setenv("MGRPO_TEACHER_SERVER_TOKEN", TOKEN)
    vocab = json.loads((QUICKSTART / "config.json").read_text())["vocab_size"]
    questions = sequences([(9, 4), (40, 1), (255, 200), (33, 32), (64, 8), (256, 255)], vocab)
    values = {
        "model_name_or_path": str(QUICKSTART),
        "max_prompt_token_length": 55,
        "response_length": 200,
        "teacher_model_name_or_path": [str(QUICKSTART)],
        "teacher_mode": "server",
        "teacher_server_base_url": [server.url],
        "distillation_loss": "reverse_kl",
        "distillation_topk": K,
        "vllm_mode": "server",
        "engine_heartbeat_timeout": 8,
    }
    config = from_values(values)
    sample = TextSample(*text_of_all_tokens(load_tokenizer(str(QUICKSTART))))
    with _connected_teachers(config, sample) as taught:
        teachers = Teachers(taught, num_likeliest=K, vocab=vocab)
        teachers.wait_ready()
        *whole, long = asked(teachers, 0, questions).result(120)
        check(whole, QUICKSTART, temperature=1.0, questions=questions[:-1], vocab=vocab)
        assert np.isnan(long.logprobs).all() and len(long.logprobs) == 1
        os.killpg(server.process.pid, signal.SIGSTOP)
        answer = asked(teachers, 0, questions[:-1])
        with taught[0].fleet.roster.changed:
            assert taught[0].fleet.roster.changed.wait_for(lambda: taught[0].fleet.roster.num_deaths == 1, 60)
        os.killpg(server.process.pid, signal.SIGCONT)
        check(answer.result(120), QUICKSTART, temperature=1.0, questions=questions[:-1], vocab=vocab)
    other = sample._replace(tokens=[*sample.tokens[:7], 3, *sample.tokens[8:]])
    with (
        pytest.raises(ConfigError, match="where the policy reads id 3 it reads id"),
        _connected_teachers(config, other),
    ):
        pass
    too_many = from_values({**values, "distillation_topk": 21})
    with (
        pytest.raises(ConfigError, match="distillation_topk=21 is above what the server gives"),
        _connected_teachers(too_many),
    ):
        pass
