"""Evaluations by the real program: those of a run, of its export alone, and engines that end at a text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mgrpo.rollout.engine import FINISH_REASONS, UNSYNCED, Sampling
from mgrpo.rollout.requests import prompt_seeds
from mgrpo.telemetry.recorded import read_records
from mgrpo.telemetry.samples import tables
from mgrpo.types import Prompt
from tests.e2e.launching import ROOT, Run
from tests.e2e.lone_engine import lone_engine
from tests.sampling import prompt_batch, sampled

STEPS, BATCH = 2, 256
TRAINING = ["--warm_up_steps", "0", "--tensor_model_parallel_size", "1"]
MIXTURE = [
    "--dataset_mixer_eval_list",
    "examples/quickstart/heldout.jsonl",
    "40",
    "examples/quickstart/train.jsonl",
    "20",
]
EVALUATED = 60
SAMPLED = [
    *MIXTURE,
    "--eval_pass_at_k",
    "4",
    "--eval_temperature",
    "0.8",
    "--eval_top_p",
    "0.95",
    "--eval_response_length",
    "8",
]
GREEDY = [*MIXTURE, "--eval_pass_at_k", "1", "--eval_temperature", "0"]
STOPPED = [*MIXTURE, "--eval_pass_at_k", "4", "--stop_strings", "4", "2"]


def train(folder: Path, flags: Sequence[str], *, steps: int = STEPS) -> Path:
    """The folder of a finished run."""
    run = Run(folder, [*TRAINING, "--total_episodes", str(steps * BATCH), *flags], ranks=1)
    try:
        assert run.wait(250) == 0, run.text()[-3000:]
    finally:
        run.end()
    return run.output_dir


def evaluate(out: Path, model: Path, flags: Sequence[str]) -> tuple[Path, str]:
    """`mgrpo eval`: the folder it wrote, and what it printed."""
    command = [sys.executable, "-m", "mgrpo.cli", "eval", "--config", "examples/configs/quickstart.yaml"]
    words = ["--model_name_or_path", str(model), "--output_dir", str(out), *flags]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run([*command, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return out / "eval" / model.name, done.stdout


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def evaluated(line: dict) -> dict[str, float]:
    """What an evaluation measured, clock readings apart."""
    return {name: value for name, value in line.items() if name.startswith("eval/")}


def samples(out: Path, step: int) -> list[dict]:
    """The table of one evaluation; which weights sampled is the run's to know."""
    return [record | {"policy_version": None} for record in read_records(tables(out / "rollouts")[step])]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(tmp_path_factory.mktemp("run"), [*SAMPLED, "--local_eval_every", "1", "--save_traces", "true"])


def assert_the_same(out: Path, flags: Sequence[str]) -> None:
    """`mgrpo eval` of the run's export says what the run said."""
    alone, printed = evaluate(out, out / "hf" / f"step_{STEPS}", flags)
    (line,) = lines(alone)
    expected = evaluated(lines(out)[-1])
    assert evaluated(line) == expected and expected["eval/pass_at_1"] > 0.2
    assert "eval/by_source/heldout/pass_at_1" in expected
    assert samples(alone, STEPS) == samples(out, STEPS)
    assert f"{expected['eval/pass_at_1']:.4g}" in printed and str(alone) in printed
    assert (alone / "report.html").is_file()


def test_an_export_evaluates_to_the_numbers_of_its_run(trained):
    """Numbers of a paper come from the export; a curve that ends elsewhere is not that model's. Every sample is compared."""
    before = {path: path.stat().st_mtime_ns for path in trained.iterdir() if path.is_file()}
    assert_the_same(trained, SAMPLED)
    assert {path: path.stat().st_mtime_ns for path in trained.iterdir() if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.parametrize("flags", [GREEDY, STOPPED], ids=["greedy", "stop strings"])
def test_an_export_evaluates_to_the_numbers_of_its_run_however_it_is_sampled(tmp_path, flags):
    """Greedy, and with a seed for each prompt."""
    assert_the_same(train(tmp_path, flags), flags)


def test_every_evaluation_has_a_table_that_agrees_with_its_metrics(trained):
    """Before training, after each step, and after training: what was measured can be looked up, sample by sample."""
    found = tables(trained / "rollouts")
    measured = {line["step"]: line for line in lines(trained) if evaluated(line)}
    assert list(found) == list(measured) == [0, 1, 2]
    for step, paths in found.items():
        records = list(read_records(paths))
        assert [(r["prompt_idx"], r["sample_idx"]) for r in records] == [
            (prompt, sample) for prompt in range(EVALUATED) for sample in range(4)
        ]
        assert {r["policy_version"] for r in records} == {step}
        assert np.mean([r["correct"] for r in records]) == pytest.approx(measured[step]["eval/pass_at_1"])
        assert np.mean([r["reward"] for r in records]) == pytest.approx(measured[step]["eval/scores"])
        assert np.mean([r["num_tokens"] for r in records]) == pytest.approx(measured[step]["eval/sequence_lengths"])
    page = (trained / "report.html").read_text()
    assert "<b>before training</b>" in page and "<b>after step 2</b>" in page and "<polyline" in page


def test_traces_hold_what_training_sampled(trained):
    """Each completion of each step once, with the reward that the metrics average and the tokens that were trained on."""
    (path,) = (trained / "rollouts").glob("quickstart__1_rollouts_*.jsonl")
    records = list(read_records([path]))
    assert [(r["step"], r["sample_idx"]) for r in records] == [(s, i) for s in (1, 2) for i in range(BATCH)]
    for line in lines(trained):
        if "reward" in line:
            own = [r for r in records if r["step"] == line["step"]]
            assert np.mean([r["reward"] for r in own]) == pytest.approx(line["reward"])
            assert sum(r["advantage"] is not None for r in own) == 8 * line["batch/total_prompts"]
            assert all(len(r["logprobs"]) == len(r["response_tokens"]) for r in own)
            assert {r["policy_version"] for r in own} == {line["step"] - 1}


@pytest.mark.slow
def test_evaluations_change_nothing_in_training(trained, tmp_path):
    """Whoever evaluates more often would train another model."""
    without = train(tmp_path, ["--dataset_mixer_eval_list", ""])
    steps = [
        [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines(out) if "reward" in line]
        for out in (trained, without)
    ]
    assert steps[0] == steps[1] and len(steps[0]) == STEPS


@pytest.mark.slow
def test_a_resumed_run_has_the_samples_of_one_that_never_died(tmp_path):
    """Lines twice, or missing, for steps that were done again."""
    flags = [*SAMPLED, "--local_eval_every", "1", "--save_traces", "true", "--checkpoint_state_freq", "2"]
    folders = tmp_path / "whole", tmp_path / "died"
    for folder in folders:
        folder.mkdir()
    whole = train(folders[0], flags, steps=4)
    dying = Run(
        folders[1],
        [*TRAINING, "--total_episodes", str(4 * BATCH), *flags],
        ranks=1,
        program=("tests/e2e/faulty.py", "kill after the line", "4"),
    )
    try:
        assert dying.wait(250) != 0
    finally:
        dying.end()
    assert 3 in tables(dying.output_dir / "rollouts")
    again = train(folders[1], flags, steps=4)
    contents = [{path.name: path.read_text() for path in (out / "rollouts").iterdir()} for out in (whole, again)]
    assert contents[0] == contents[1]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """One engine that knows its tokenizer; no learner, so that it is never sent weights."""
    values = {
        "model_name_or_path": str(ROOT / "examples/quickstart/model"),
        "model_dtype": "float32",
        "max_prompt_token_length": 40,
        "response_length": 8,
        "stop_strings": ["1"],
        "output_dir": str(tmp_path_factory.mktemp("engine")),
    }
    with lone_engine(values) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def tokenizer():
    from mgrpo.data.tokenizer import load_tokenizer

    return load_tokenizer(ROOT / "examples/quickstart/model")


def prompts(tokenizer) -> list[Prompt]:
    texts = [f"{a}+{b}=" for a in range(3, 19, 3) for b in range(4, 20, 4)]
    return [
        Prompt(
            id=(0, number),
            tokens=np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32),
            text=text,
            verifiers=(),
            ground_truths=(),
        )
        for number, text in enumerate(texts)
    ]


def sample(fleet, asked: Sequence[Prompt], *, seeded: bool = True, **settings) -> list[tuple[list[int], str]]:
    """Tokens and end of each completion."""
    sampling = Sampling(**{"num_samples": 4, "max_tokens": 8, "temperature": 1.0, "stop_token_ids": (1,), **settings})
    seeds = prompt_seeds(1, asked, 0) if seeded else None
    fleet.reseed(-1)
    (engine,) = fleet.engines
    answer = sampled(engine, prompt_batch([prompt.tokens for prompt in asked], sampling, seeds=seeds))
    assert set(answer["policy_versions"].tolist()) == {UNSYNCED}
    cuts = answer["cu_seqlens"]
    return [
        (answer["tokens"][a:b].tolist(), FINISH_REASONS[reason])
        for a, b, reason in zip(cuts[:-1], cuts[1:], answer["finish_reasons"].tolist(), strict=True)
    ]


def test_a_completion_ends_with_the_first_stop_string(fleet, tokenizer):
    """Tokens stay as they were sampled: training on tokens that were made of a cut text is training on another policy."""
    asked = prompts(tokenizer)
    plain, stopped = sample(fleet, asked), sample(fleet, asked, stop_strings=("1",))
    assert any("1" in tokenizer.decode(tokens) for tokens, _ in plain)
    for (whole, reason), (tokens, own_reason) in zip(plain, stopped, strict=True):
        ends = [n for n in range(1, len(whole) + 1) if "1" in tokenizer.decode(whole[:n])]
        assert tokens == (whole[: ends[0]] if ends else whole)
        assert own_reason == ("stop" if ends else reason)


def test_stop_strings_of_several_tokens_and_special_ones(fleet, tokenizer):
    """ "</answer>" is seldom one token; "<|im_end|>" is one that a decoder leaves out."""
    asked = prompts(tokenizer)
    plain = sample(fleet, asked, stop_token_ids=(), stop_strings=("never",))
    special = tokenizer.decode([1])
    assert special and not tokenizer.decode([1], skip_special_tokens=True)
    for text in ("21", special):
        stopped = sample(fleet, asked, stop_token_ids=(), stop_strings=(text, "never"))
        found = [text in tokenizer.decode(tokens) for tokens, _ in plain]
        assert any(found)
        assert [reason == "stop" for _, reason in stopped] == found
        assert [tokenizer.decode(tokens).endswith(text) for tokens, _ in stopped] == found


def test_a_prompts_samples_do_not_depend_on_its_neighbours(fleet, tokenizer):
    """A row that ended leaves the batch a moment late; with one stream for all, that moment would choose the samples."""
    asked = prompts(tokenizer)
    whole = sample(fleet, asked, stop_strings=("1",))
    assert sample(fleet, asked, stop_strings=("1",)) == whole
    backwards = sample(fleet, asked[::-1], stop_strings=("1",))
    assert [backwards[4 * n : 4 * n + 4] for n in reversed(range(len(asked)))] == [
        whole[4 * n : 4 * n + 4] for n in range(len(asked))
    ]
    assert sample(fleet, asked[5:7], stop_strings=("1",)) == whole[20:28]


def test_seeded_prompts_beyond_one_batch_of_tokens_are_read_whole(fleet, tokenizer):
    """A prompt that is cut at the end of a batch would have its generator moved back, which ends an engine on a CPU."""
    short = prompts(tokenizer)
    asked = [replace(prompt, tokens=np.resize(prompt.tokens, 39), id=(1, prompt.id[1])) for prompt in short * 2]
    assert 4 * 39 * len(asked) > 4096
    samples = sample(fleet, asked, stop_strings=("1",))
    assert len(samples) == 4 * len(asked)
    assert samples[: 4 * len(short)] == samples[4 * len(short) :]


def test_an_engine_without_learners_samples_a_stream_of_its_own(fleet, tokenizer):
    """It loads its model by itself, and is seeded without ever being sent weights."""
    asked = prompts(tokenizer)
    first = sample(fleet, asked, seeded=False)
    assert sample(fleet, asked, seeded=False) == first
    assert sample(fleet, asked) != first


def test_top_p_of_almost_nothing_is_greedy(fleet, tokenizer):
    """The likeliest token alone is left."""
    asked = prompts(tokenizer)
    greedy = sample(fleet, asked, num_samples=1, temperature=0.0)
    assert sample(fleet, asked, num_samples=1, top_p=1e-6) == greedy
    assert sample(fleet, asked, num_samples=1) != greedy
