"""Sampling masks in vLLM's own types, of whose sampler nothing runs here: it needs a GPU. They take seconds to import."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mgrpo.moving import from_values
from mgrpo.rollout.engine import PromptBatch
from mgrpo.rollout.requests import evaluation_sampling, training_sampling
from mgrpo.rollout.vllm.actor import EngineActor, _group
from mgrpo.rollout.vllm.calls import joined, sampling_settings
from mgrpo.rollout.vllm.engine_arguments import engine_args
from mgrpo.types import KeptTokens
from tests.builders import sets_of

pytestmark = pytest.mark.slow
VALUES = {"model_name_or_path": "m", "top_k": 512, "top_p": 0.95}
VOCAB, WIDTH = 700, 80


@pytest.fixture(scope="module", autouse=True)
def vllm() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_LOGGING_LEVEL", "CRITICAL")
        yield pytest.importorskip("vllm.outputs")


def on_host(logits: np.ndarray) -> Any:
    """What the sampler's kernel leaves of logits `[requests, VOCAB]`, all cut ones -inf."""
    import torch
    from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors

    is_kept = np.isfinite(logits)
    ids = np.full((len(logits), WIDTH), -7, np.int32)
    for row, own in zip(ids, is_kept, strict=True):
        found = np.flatnonzero(own)[:WIDTH]
        row[: len(found)] = found
    bits = np.packbits(is_kept, axis=1, bitorder="little")
    parts = (torch.from_numpy(part) for part in (ids, bits, is_kept.sum(axis=1)))
    return SamplingMaskTensors(*parts, vocab_size=VOCAB)


def completion(index: int, tokens: list[int], chunks: list[Any] | None) -> Any:
    """As vLLM's output processor makes it when a request has finished.

    Args:
        chunks: of each step of the engine, `SamplingMaskLists` of this request.
    """
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, SamplingMask

    logprobs = FlatLogprobs()
    for place, token in enumerate(tokens):
        logprobs.append_fast([token], [-1.0 - place], itertools.count(1), [None])
    mask = None if chunks is None else SamplingMask([sets for chunk in chunks for sets in chunk.to_nested_list()])
    return CompletionOutput(index, "", tokens, None, logprobs, finish_reason="stop", sampling_mask=mask)


def answer(*completions: Any, has_masks: bool = True) -> Any:
    """What the actor makes of a request."""
    from vllm.outputs import RequestOutput

    output = RequestOutput("7", None, [1], None, list(completions)[::-1], finished=True)

    async def get() -> Any:
        return output

    return joined([asyncio.run(_group(7, SimpleNamespace(get=get), has_masks=has_masks))])


def sets(arrays: Any) -> list[list[int]]:
    return sets_of(KeptTokens.of_sizes(arrays["kept_ids"], arrays["kept_sizes"]))


@pytest.mark.parametrize("seed", range(5))
def test_sets_are_those_of_logits_that_were_cut(seed):
    """Against the logits themselves; some rows are wider than vLLM's lists, and come from its bits instead."""
    rng = np.random.default_rng(seed)
    steps, requests = 6, 3
    logits = np.where(
        rng.random((steps, requests, VOCAB)) < rng.choice([0.005, 0.1, 0.3], (steps, requests, 1)), 1.0, -np.inf
    )
    tokens = rng.integers(VOCAB, size=(requests, steps))
    np.put_along_axis(logits, tokens.T[..., None], 1.0, axis=2)
    masks = [on_host(step).tolists() for step in logits]
    group = [
        completion(request, tokens[request].tolist(), [step.slice_request(request, 1) for step in masks])
        for request in range(requests)
    ]
    arrays = answer(*group)
    expected = [np.flatnonzero(np.isfinite(row)).tolist() for row in logits.transpose(1, 0, 2).reshape(-1, VOCAB)]
    assert max(map(len, expected)) > WIDTH > min(map(len, expected))
    assert sets(arrays) == expected and arrays["tokens"].tolist() == tokens.ravel().tolist()
    assert arrays["logprobs"].tolist() == [-1.0 - place for _ in range(requests) for place in range(steps)]


def test_several_tokens_of_a_step_have_a_set_each():
    from vllm.v1.outputs import SamplingMaskLists

    chunks = [
        SamplingMaskLists(np.array([4, 9], np.int32)),
        SamplingMaskLists(np.array([5, 6, 1, 2], np.int32), np.array([0, 1, 4])),
    ]
    assert sets(answer(completion(0, [9, 5, 2], chunks))) == [[4, 9], [5], [6, 1, 2]]


def test_without_masks_no_token_has_a_set():
    """They are then not trained, and counted; sets of other completions stay where they are."""
    from vllm.v1.outputs import SamplingMaskLists

    chunk = SamplingMaskLists(np.array([3, 8], np.int32))
    whole, cases = completion(1, [8, 3], [chunk, chunk]), (None, [chunk], [chunk] * 3)
    for chunks in cases:
        assert sets(answer(completion(0, [8, 3], chunks), whole)) == [[], [], [3, 8], [3, 8]]
    assert sets(answer(completion(0, [], None), whole)) == [[3, 8], [3, 8]], "aborted before its first token"
    assert "kept_ids" not in answer(whole, has_masks=False), "an evaluation's"


class FinishedEngine:
    """Answers every request at once, with the masks that engines with them return for every token."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def add_request(self, name: str, prompt: Any, params: Any) -> Any:
        from vllm.outputs import RequestOutput
        from vllm.v1.outputs import SamplingMaskLists

        self.asked.append(params)
        whole = completion(0, [8], [SamplingMaskLists(np.array([3, 8], np.int32))])

        async def get() -> Any:
            return RequestOutput(name, None, [1], None, [whole], finished=True)

        return SimpleNamespace(request_id=name, get=get)


@pytest.mark.parametrize("top_k", [512, 0])
def test_an_engines_actor_reads_masks_of_training_alone(tmp_path, monkeypatch, top_k):
    from vllm.v1.engine.async_llm import AsyncLLM

    (tmp_path / "config.json").write_text("{}")
    config = from_values({"model_name_or_path": str(tmp_path), "top_k": top_k, "num_samples_per_prompt_rollout": 2})
    engine = FinishedEngine()
    monkeypatch.setattr(AsyncLLM, "from_engine_args", lambda args: engine)
    monkeypatch.setattr(EngineActor, "pause", lambda self, how: asyncio.sleep(0))

    async def collected() -> list[Any]:
        actor = EngineActor()
        await actor.start(engine_args(config, on_gpu=True))
        for number, sampling in enumerate((training_sampling, evaluation_sampling)):
            batch = PromptBatch(
                numbers=np.array([number]),
                tokens=np.array([1], np.int32),
                cu_seqlens=np.array([0, 1]),
                sampling=sampling(config.rollout, [1]),
            )
            await actor._add(batch, [[1]])
            await asyncio.gather(*actor.collecting)
        return actor.finished

    trained, evaluated = asyncio.run(collected())
    assert [params.top_k for params in engine.asked] == [top_k, top_k]
    assert trained.get("kept_ids", np.zeros(0)).tolist() == ([3, 8] if top_k else []) and "kept_ids" not in evaluated


def test_vllm_takes_the_arguments_that_engines_with_masks_are_given():
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    args = engine_args(from_values(VALUES), on_gpu=True)
    assert args.keys() <= {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    model = {"return_sampling_mask": False, "is_diffusion": False, "logits_processors": None, "logprobs_mode": "raw"}
    for has_v2 in (True, False):
        config: Any = SimpleNamespace(
            model_config=SimpleNamespace(**{name: args.get(name, value) for name, value in model.items()}),
            use_v2_model_runner=has_v2,
            speculative_config=None,
        )
        if has_v2:
            VllmConfig._verify_sampling_replay_config(config)
        else:
            with pytest.raises(ValueError, match="Model Runner V2"):
                VllmConfig._verify_sampling_replay_config(config)


def test_vllm_takes_the_requests_that_engines_with_masks_are_given():
    """It refuses those without a top_k, or with a temperature of 0, and takes the smallest one for one above it."""
    from vllm import SamplingParams

    rollout = from_values(VALUES | {"eval_temperature": 1e-6}).rollout
    for sampling in (training_sampling, evaluation_sampling):
        params = SamplingParams(**sampling_settings(sampling(rollout, [1])))
        assert (params.top_k, params.logprobs) == (512, 0) and params.temperature > 0
    assert SamplingParams(temperature=0, top_k=512).top_k == 0
