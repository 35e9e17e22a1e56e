"""Rank 0's sampling half from real data and a real tokenizer, with a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mgrpo.config import Config
from mgrpo.data.tokenizer import load_tokenizer
from mgrpo.moving import from_values
from mgrpo.rollout.engines.fleet import Fleet
from mgrpo.rollout.engines.roster import Roster
from mgrpo.run.inputs.prompts import make_prompts
from mgrpo.run.inputs.reading import Inputs, read_inputs
from mgrpo.run.produce.production import Production, Started, _samples_per_engine, prepare
from mgrpo.telemetry.progress import StartUp
from tests.scripted_engine import ScriptedEngine
from tests.unit.run.producing import ScriptedRewarder, collect

MODEL = Path(__file__).parents[3] / "examples" / "quickstart" / "model"


@pytest.fixture
def configured(tmp_path: Path) -> Callable[..., Config]:
    """A configuration with so many training and held-out rows; every second one asks for gsm8k, the others for math."""

    def make(train: int, held_out: int = 0, **settings: object) -> Config:
        data: dict[str, object] = {}
        for setting, count in (("dataset_mixer_list", train), ("dataset_mixer_eval_list", held_out)):
            path = tmp_path / f"{setting}.jsonl"
            rows = [
                {"prompt": f"{i}+0=", "ground_truth": str(i), "dataset": ("math", "GSM8K")[i % 2]} for i in range(count)
            ]
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            data[setting] = [str(path), "1.0"] if count else []
        return from_values(
            {
                "model_name_or_path": str(MODEL),
                "dataset_local_cache_dir": str(tmp_path / "cache"),
                "shuffle_dataset": False,
                "num_unique_prompts_rollout": 4,
                "num_samples_per_prompt_rollout": 2,
                **data,
                **settings,
            }
        )

    return make


def checked(config: Config) -> Inputs:
    inputs, problems = read_inputs(config)
    assert inputs is not None and problems == []
    prompts, problems = make_prompts(config, (inputs.train, inputs.held_out), vocab=64, is_sound=True)
    assert prompts is not None and problems == []
    return replace(inputs, prompts=prompts)


def prepared(config: Config, engine: ScriptedEngine | None = None) -> Production:
    inputs = checked(config)
    fleet = Fleet(Roster([engine or ScriptedEngine()], config.engine), seed=1)
    return prepare(config, Started(inputs=inputs, fleet=fleet, rewarder=ScriptedRewarder(lambda index: (0.0, 1.0))))


def test_prompts_of_the_data_are_sampled_and_decoded(configured: Callable[..., Config]) -> None:
    """The engine answers with the prompt's own tokens, so the text shows which row and which tokenizer it was."""
    engine = ScriptedEngine()
    production = prepared(configured(4, 2), engine)
    assert production.producer is not None
    trained = collect(production.producer).groups
    assert [scored.group.prompt.id for scored in trained] == [(0, index) for index in range(4)]
    for index, scored in enumerate(trained):
        assert all(c.text == f"{index}+0=" for c in scored.group.completions)
    evaluation = production.evaluator.evaluate(0)
    assert [scored.group.prompt.ground_truths for scored in evaluation.groups] == [("0",), ("1",)]
    assert list(evaluation.sources) == ["dataset_mixer_eval_list"] * 2
    eos = load_tokenizer(MODEL).eos_token_id
    assert {batch.sampling.stop_token_ids for batch in engine.batches} == {(eos,)}


def test_an_engine_of_several_copies_is_given_samples_for_all_of_them(configured: Callable[..., Config]) -> None:
    """All but one copy would compute for the others, and sample nothing."""
    values = {"vllm_max_num_seqs": 8, "async_steps": 1, "max_staleness": 2, "use_vllm_logprobs": True}
    alone, several = (
        _samples_per_engine(configured(4, **values, vllm_enable_expert_parallel=True, vllm_data_parallel_size=copies))
        for copies in (1, 4)
    )
    assert (alone, several) == (10, 40)


def test_a_start_says_what_it_waits_for(configured: Callable[..., Config]) -> None:
    """Half a minute, or half an hour for a large model, without a line looks like a hang."""
    config = configured(4, vllm_num_engines=2)
    now = iter((0.0, 12.0))
    lines: list[str] = []
    parts = Started(
        inputs=checked(config),
        fleet=Fleet(Roster([ScriptedEngine()], config.engine), seed=1),
        rewarder=ScriptedRewarder(lambda index: (0.0, 1.0)),
        startup=StartUp(began=next(now), clock=lambda: next(now), write=lines.append),
    )
    prepare(config, parts)
    assert lines == [f"[  12 s] waiting for 2 engines with {MODEL}"] and parts.startup.seconds == {"checks": 12.0}


def test_remapped_verifiers_reach_training_and_held_out_prompts(configured: Callable[..., Config]) -> None:
    """An evaluation by another verifier than the training's would measure something else."""
    production = prepared(configured(4, 2, remap_verifier="gsm8k=integer"))
    assert production.producer is not None
    for groups in (collect(production.producer).groups, production.evaluator.evaluate(0).groups):
        asked = [scored.group.prompt.verifiers for scored in groups]
        assert asked == [("math",), ("integer",)] * (len(groups) // 2)


def test_rows_and_template_decide_what_the_teacher_reads(configured: Callable[..., Config]) -> None:
    """With a real tokenizer: the question in the template's place, and in the right teacher's hands."""
    settings = {
        "teacher_model_name_or_path": f"gsm8k:{MODEL},self",
        "teacher_prompt_template": "{prompt}{ground_truth}",
    }
    production = prepared(configured(4, 2, **settings))
    assert production.producer is not None
    trained = collect(production.producer).groups
    assert [scored.group.prompt.teacher for scored in trained] == [1, 0, 1, 0]
    tokenizer = load_tokenizer(MODEL)
    for index, scored in enumerate(trained):
        for (lesson,) in scored.lessons:
            assert tokenizer.decode(lesson.prompt) == f"{index}+0={index}"
    assert [scored.group.prompt.teacher for scored in production.evaluator.evaluate(0).groups] == [-1, -1]


def test_without_training_data_there_is_no_producer(configured: Callable[..., Config]) -> None:
    """`mgrpo eval` needs held-out rows only; a run without them has an evaluator that does nothing."""
    production = prepared(configured(0, 2))
    assert production.producer is None
    assert len(production.evaluator.evaluate(0).groups) == 2
    assert prepared(configured(4)).evaluator.prompts == []


def test_a_template_that_no_stop_token_ends_is_remarked(configured: Callable[..., Config]) -> None:
    """Every completion would have the full length."""
    assert prepared(configured(4)).remarks == []
    (remark,) = prepared(configured(4, chat_template_name="r1_simple_chat_postpend_think")).remarks
    assert remark.startswith("chat_template_name=r1_simple_chat_postpend_think needs --stop_strings")
