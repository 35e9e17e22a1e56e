"""A teacher's server: what it must say before a run begins, and answers that are not about the question."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import pytest

from mgrpo.config import ConfigError
from mgrpo.moving import from_values
from mgrpo.rollout import start
from mgrpo.rollout.engine import Completions, Sampling, WrongAnswerError
from mgrpo.rollout.vllm.server import server_calls
from mgrpo.rollout.vllm.server.http_engine import HttpEngine
from mgrpo.rollout.vllm.server.server_calls import ServerError
from mgrpo.rollout.vllm.server.server_facts import TextSample
from mgrpo.rollout.vllm.server.teacher_server import TeacherServer, read_teacher_answer
from tests.sampling import prompt_batch
from tests.unit.rollout.test_http_engine import MODEL, Scripted

K = 2
VOCAB = json.loads((MODEL / "config.json").read_text())["vocab_size"]
COMPLETIONS, MODELS = "/v1/completions", "/v1/models"
NAN = "Out of range float values are not JSON compliant"
"""What vLLM says instead of an answer that would hold a value that is not a number."""
TOKENS = [5, 6, 7, 8]
"""Of a question about the tokens from the second one on."""


def candidates(**logprobs: float | None) -> dict[str, Any]:
    """A place of an answer as a server in good order gives it: `t5=-1.0` is a token."""
    return {name[1:]: {"logprob": value, "rank": 1, "decoded_token": "?"} for name, value in logprobs.items()}


GOOD = [
    None,
    candidates(t6=-3.0, t1=-0.5, t2=-1.5),
    candidates(t7=-0.25, t3=-2.5),
    candidates(t8=-9999.0, t4=-0.125),
]


def answer(found: object = GOOD, **more: object) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "", "prompt_logprobs": found}], **more}


def models(*names: str, longest: int = 257) -> dict[str, Any]:
    return {"data": [{"id": name, "max_model_len": longest} for name in names]}


def config_of(*urls: str, **values: object):
    own = {
        "model_name_or_path": str(MODEL),
        "max_prompt_token_length": 56,
        "response_length": 200,
        "teacher_model_name_or_path": ["BIG"],
        "teacher_mode": "server",
        "teacher_server_base_url": list(urls),
        "distillation_loss": "forward_kl",
        "distillation_topk": K,
        "vllm_server_timeout": 0.1,
    }
    return from_values({**own, **values})


@pytest.fixture
def server(monkeypatch) -> Iterator[Scripted]:
    monkeypatch.setattr(server_calls, "RETRY_S", 0.01)
    server = Scripted()
    trial = [None, candidates(**{f"t{VOCAB - 1}": -1.0, "t3": -2.0})]
    server.answers |= {MODELS: (200, models("small", "BIG")), COMPLETIONS: (200, answer(trial))}
    yield server
    server.close()


def failure(server: Scripted, **values: object) -> str:
    """Of the start."""
    engine = HttpEngine(server.url, config_of(server.url, **values), make=TeacherServer)
    try:
        with pytest.raises(ServerError) as failed:
            engine.ready.result(10)
    finally:
        engine.close()
    (problem,) = failed.value.problems
    assert problem.startswith(f"teacher_server_base_url={server.url}: ")
    return problem.partition(": ")[2]


def refused(text: str) -> dict[str, Any]:
    return {"error": {"message": text, "type": "BadRequestError", "code": 400}}


@pytest.mark.parametrize(
    ("path", "said", "sentence"),
    [
        (MODELS, (200, models("small")), "the server's model is small, and teacher_model_name_or_path names BIG; start it with"),
        (MODELS, (200, models("BIG", longest=256)), "the server's max_model_len is 256, expected at least 257, max_prompt"),
        (MODELS, (404, None), "the server has no /v1/models; it is not a vLLM server"),
        (MODELS, (200, {"data": [{"id": "BIG"}]}), "/v1/models: the answer is {'data'"),
        (MODELS, (401, refused("no")), "the server refuses the request (HTTP 401: no); set MGRPO_TEACHER_SERVER_TOKEN in"),
        (
            COMPLETIONS,
            (400, refused("Requested prompt logprobs of 2, which is greater than max allowed: 1")),
            "distillation_topk=2 is above what the server gives (Requested prompt logprobs of 2, which is greater than",
        ),
        (COMPLETIONS, (400, refused(f"Token id {VOCAB - 1} is out of vocabulary")), f"the server's model cannot read token {VOCAB - 1}, the policy's last"),
        (COMPLETIONS, (400, refused(NAN)), f"the server's model gives log-probabilities that are no numbers ({NAN}); look at its"),
        (COMPLETIONS, (200, answer()), "the answer to a question has log-probabilities of 4 tokens instead of 2"),
    ],
)  # fmt: skip
def test_a_server_that_cannot_teach_is_refused_before_anything_starts(server, path, said, sentence) -> None:
    """In the middle of a run it would be found with the first group."""
    server.answers[path] = said
    assert failure(server).startswith(sentence)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ((200, {"tokens": [3, 4, 5]}), None),
        ((400, refused("there is no tokenizer")), None),
        (
            (200, {"tokens": [3, 9, 5]}),
            "where the policy reads id 4 it reads id 9 (token 1 of a text of all tokens), so its",
        ),
        ((200, {"tokens": [3, 4]}), "where the policy reads id 5 it reads nothing (token 2 of"),
        ((200, {"count": 3}), "/tokenize: the answer cannot be read: Object missing required field `tokens`"),
    ],
)
def test_a_server_with_another_tokenizer_is_refused_with_the_first_id_that_differs(server, said, sentence) -> None:
    """The same ids would be another text there. A server without a tokenizer needs none: it is given ids."""
    server.answers["/tokenize"] = said
    make = partial(TeacherServer, sample=TextSample("a b c", [3, 4, 5]))
    engine = HttpEngine(server.url, config_of(server.url), make=make)
    failed = engine.ready.exception(10)
    engine.close()
    assert (failed is None) if sentence is None else sentence in str(failed)


def test_each_teacher_has_the_servers_of_its_model_and_one_without_is_refused(server, monkeypatch) -> None:
    """Two names of one model share its servers; the policy's engines are others."""
    monkeypatch.setattr(start, "Cluster", None)
    config = config_of(server.url, teacher_model_name_or_path=["math:BIG", "code:BIG"])
    with start._connected_teachers(config) as (math, code):
        assert math is code and math.most_tokens == 256 and math.fleet.roster.owner == "the teacher math"
    config = config_of(server.url, teacher_model_name_or_path=["math:BIG", "code:OTHER"])
    missing = r"teacher_model_name_or_path=OTHER: no server of .* has it; they have BIG at"
    with pytest.raises(ConfigError, match=missing), start._connected_teachers(config):
        pass


def asked(server: Scripted, said: tuple[int, object]) -> Future[Completions]:
    """What becomes of a question."""
    engine = HttpEngine(server.url, config_of(server.url), make=TeacherServer)
    engine.ready.result(10)
    server.answers[COMPLETIONS] = said
    sampling = Sampling(num_samples=1, max_tokens=1, temperature=0, stop_token_ids=(), prompt_logprobs=K)
    engine.submit(prompt_batch([np.array(TOKENS)], sampling, first=7, starts=np.array([1]))).result(10)
    found = engine.poll()
    found.exception(10)
    engine.close()
    return found


def test_a_question_is_answered_with_the_tokens_own_and_the_likeliest(server) -> None:
    """vLLM puts the token among the likeliest if it is one of them, and writes minus infinity as a number."""
    found = asked(server, (200, answer())).result()
    assert found["numbers"].tolist() == [7] and found["prompt_sizes"].tolist() == [3]
    np.testing.assert_array_equal(found["prompt_logprobs"], np.array([-3, -0.25, np.nan], np.float32))
    assert found["prompt_ids"].tolist() == [[1, 2], [7, 3], [4, 8]]
    expected = np.array([[-0.5, -1.5], [-0.25, -2.5], [-0.125, np.nan]], np.float32)
    np.testing.assert_array_equal(found["prompt_likeliest"], expected)


def test_values_that_are_no_numbers_are_missing(server) -> None:
    """A server cannot write them, and refuses the question; asked again it would refuse it again."""
    found = asked(server, (400, refused(NAN))).result()
    assert np.isnan(found["prompt_logprobs"]).tolist() == [True] * 3 and (found["prompt_ids"] == -1).all()


def changed(change: Callable[[list[Any]], object]) -> bytes:
    found = json.loads(json.dumps(GOOD))
    change(found)
    return json.dumps(answer(found)).encode()


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (json.dumps(answer(None)).encode(), "has log-probabilities of 0 tokens instead of 4"),
        (json.dumps({"choices": []}).encode(), "has log-probabilities of 0 tokens instead of 4"),
        (changed(lambda found: found.pop()), "has log-probabilities of 3 tokens instead of 4"),
        (changed(lambda found: found.insert(1, found.pop())), "has no log-probability of token 6 at place 1"),
        (changed(lambda found: found[1].update(candidates(t9=-4.0))), "has 4 candidates at place 1, asked for 2 and"),
        (changed(lambda found: found[2].update({"-3": {"logprob": -1.0}})), "has the token -3"),
        (changed(lambda found: found[2].update(candidates(t3=0.5))), "has a log-probability of 0.5"),
        (
            changed(lambda found: found[2].update(candidates(t3=-0.5))),
            "has probabilities at place 2 that add up to 1.39",
        ),
    ],
)
def test_an_answer_that_is_not_about_the_question_gives_the_server_up(said, sentence) -> None:
    """A proxy that mixes answers up, a server with raw logits: nothing is learned from it, and it is not asked again."""
    with pytest.raises(WrongAnswerError) as refused:
        read_teacher_answer(said, TOKENS, 1, K)
    assert str(refused.value) == f"the answer to a question {sentence}{str(refused.value).partition(sentence)[2]}"


def test_a_place_without_an_answer_is_missing() -> None:
    """Not every place needs one: the others are learned from."""
    own, ids, likeliest = read_teacher_answer(changed(lambda found: found.__setitem__(2, None)), TOKENS, 1, K)
    np.testing.assert_array_equal(own, [-3, np.nan, np.nan])
    assert ids[1].tolist() == [-1, -1] and np.isnan(likeliest[1]).all()


@pytest.mark.parametrize(
    ("status", "is_final", "sentence"), [(404, True, "it refuses a question"), (503, False, "HTTP 503"), (500, False, "HTTP 500")]
)  # fmt: skip
def test_a_question_that_is_never_answered_is_told_from_one_that_is_not_answered_now(
    server, status, is_final, sentence
) -> None:
    """The first is not asked again and again for hours; the second is when the server is back."""
    failed = asked(server, (status, refused("so"))).exception()
    assert failed is not None and sentence in str(failed)
    assert isinstance(failed, WrongAnswerError) == is_final


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_question_that_a_server_refuses_for_itself_leaves_the_server_to_others(server, status) -> None:
    """Every other server of the teacher would refuse it as well."""
    found = asked(server, (status, refused("too long"))).result(10)
    assert found["numbers"].tolist() == [] and len(found["refused"]) == 1
    assert found["refusals"].tolist() == [f"server {server.url}: HTTP {status}: too long"]


def test_a_server_that_comes_back_must_be_of_the_same_model(server, monkeypatch) -> None:
    """Somebody may have started another one at its address."""
    monkeypatch.setattr(server_calls, "RETURN_S", 0.01)
    config = config_of(server.url, teacher_model_name_or_path=["math:BIG", "code:small"])
    before = HttpEngine(server.url, config, make=TeacherServer)
    before.ready.result(10)
    for said, sentence in ((models("small"), "the server's model is small, and"), (models("BIG"), None)):
        server.answers[MODELS] = (200, said)
        again = HttpEngine(server.url, config, before=before, make=TeacherServer)
        failed = again.ready.exception(10)
        assert (failed is None) if sentence is None else sentence in str(failed)
        again.close()
    before.close()
