"""Teachers on the learners' layout, of another size, with other prompts, several of them, the policy among them."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.ranks import cases, run_cases, teacher_cases
from tests.ranks.outcomes import LIMITS
from tests.ranks.test_learning import AS_ONE_RANK, SETTINGS, measured
from tests.tiny_models import VOCAB, load_hf, save_tiny

TEMPERATURE = 1.3
TOPK = 3
BIG, SMALL, ITSELF, NONE = 0, 1, 2, -1
TENSOR = {"tensor_model_parallel_size": 2}
LAYOUTS = {
    "tp2+sp": TENSOR | {"sequence_parallel": True},
    "tp2+chunked": TENSOR | {"logits_chunk": 24},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "dp2+zero3": {"zero_stage": 3},
}


def with_teachers(samples):
    """By group another teacher: some read what the policy reads, some a prompt of the group's or of each sample's own."""
    rng = np.random.default_rng(3)
    whose = [BIG, SMALL, ITSELF, NONE, BIG, SMALL, ITSELF]
    shared = {group: rng.integers(3, VOCAB, 9).astype(np.int32) for group in (1, 5)}

    def prompt(group):
        return shared.get(group) if group in shared else rng.integers(3, VOCAB, rng.integers(2, 12)).astype(np.int32)

    return [
        replace(
            sample,
            teacher=whose[sample.group],
            teacher_prompt=prompt(sample.group) if sample.group in (1, 4, 5, 6) else None,
        )
        for sample in samples
    ]


SAMPLES = with_teachers(cases.random_samples(seed=0, groups_of_turns=2))


OWN = [replace(sample, teacher=min(sample.teacher, 0)) for sample in SAMPLES]
"""The same for a single teacher."""
AVERAGE = {"teacher_model_name_or_path": ["self"], "teacher_update_rate": 0.3, "distillation_loss": "sampled"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models"), "qwen2")


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """A wider and deeper one of another family, with a larger vocabulary that is padded otherwise; and a smaller one."""
    folder = tmp_path_factory.mktemp("teachers")
    big = save_tiny(
        folder, "qwen3", layers=6, heads=8, kv_heads=4, hidden_size=96, intermediate_size=128, vocab_size=140
    )
    return big, save_tiny(folder, "llama", layers=2, tied=True)


@pytest.fixture(scope="module")
def settings(teachers):
    names = [f"math:{teachers[BIG]}", f"code:{teachers[SMALL]}", "self"]
    return SETTINGS | {
        "beta": 0.0,
        "teacher_model_name_or_path": names,
        "teacher_temperature": TEMPERATURE,
        "distillation_loss": "reverse_kl",
        "distillation_topk": TOPK,
    }


def oracle(folder, sample):
    """Log-probabilities of the sampled tokens, and of the likeliest with their ids, by a forward pass of the sample alone."""
    prompt = sample.prompt_tokens if sample.teacher_prompt is None else sample.teacher_prompt
    ids = torch.from_numpy(np.concatenate((prompt, sample.tokens))).long()[None]
    with torch.no_grad():
        # Beyond the policy's vocabulary there is only padding.
        logits = load_hf(folder)(ids).logits[0, len(prompt) - 1 : -1, :VOCAB].double() / TEMPERATURE
    if sample.kept is not None:
        is_kept = torch.zeros_like(logits, dtype=torch.bool)
        sets = np.split(sample.kept.ids, sample.kept.offsets[1:-1])
        for row, token, kept in zip(is_kept, sample.tokens, sets, strict=True):
            row[[token, *kept]] = True
        logits = logits.masked_fill(~is_kept, -torch.inf)
    every = torch.log_softmax(logits, -1)[torch.from_numpy(np.flatnonzero(sample.is_predicted))]
    tokens = torch.from_numpy(sample.tokens[sample.is_predicted]).long()
    likeliest, best = every.topk(TOPK)
    return every.gather(1, tokens[:, None])[:, 0].numpy(), best.numpy(), likeliest.numpy()


def check(ranks, samples, folders):
    found = {}
    for rank in ranks:
        found |= rank["samples"]
    assert sorted(found) == list(range(len(samples)))
    for number, sample in enumerate(samples):
        logprobs, ids, likeliest = found[number]
        if sample.teacher == NONE:
            assert np.isnan(logprobs).all() and np.isnan(likeliest).all() and (ids == -1).all()
            continue
        expected, best, values = oracle(folders[sample.teacher], sample)
        np.testing.assert_allclose(logprobs, expected, atol=LIMITS["logprob"])
        is_there = np.isfinite(values)  # a set may have fewer
        np.testing.assert_allclose(likeliest[is_there], values[is_there], atol=LIMITS["logprob"])
        np.testing.assert_array_equal(ids[is_there], best[is_there])


@pytest.fixture(scope="module")
def truth(run_ranks, model, settings, tmp_path_factory):
    """A step of one rank."""
    folder = tmp_path_factory.mktemp("truth")
    arguments = {"settings": settings, "samples": SAMPLES, "folder": str(folder)}
    return run_ranks(1, teacher_cases.taught, model_dir=str(model), **arguments), folder / "after"


def test_each_token_is_taught_by_its_own_teacher(model, teachers, truth):
    """A prompt of a neighbour, another's probabilities or weights after the first update would be other numbers."""
    (rank,), after = truth
    check([rank], SAMPLES, {BIG: teachers[BIG], SMALL: teachers[SMALL], ITSELF: model})
    # One for each teacher of a mini-batch: while they score, the others must not think that this rank hangs.
    assert rank["beats"] == 4
    start = dict(load_hf(model).named_parameters())
    assert all((own - start[name]).abs().max() > 1e-4 for name, own in load_hf(after).named_parameters())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_taught_and_learned_does_not_depend_on_the_layout(
    run_ranks, model, teachers, settings, truth, tmp_path, layout
):
    """A model cut by another's shape, or log-probabilities that reach some of the ranks only, would show here."""
    arguments = {"settings": settings | LAYOUTS[layout], "samples": SAMPLES, "folder": str(tmp_path)}
    ranks = run_ranks(2, teacher_cases.taught, model_dir=str(model), **arguments)
    check(ranks, SAMPLES, {BIG: teachers[BIG], SMALL: teachers[SMALL], ITSELF: model})
    (expected,), after = truth
    for rank in ranks:
        assert rank["metrics"] == pytest.approx(expected["metrics"], **AS_ONE_RANK)
    for (name, a), b in zip(load_hf(tmp_path / "after").named_parameters(), load_hf(after).parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0, msg=name)


def test_a_teacher_is_asked_about_the_tokens_that_were_left_to_sample(run_ranks, model, teachers, settings, tmp_path):
    """Over its whole vocabulary it would blame the policy for what it was not allowed to sample."""
    samples = cases.with_sets(SAMPLES)
    arguments = {"settings": settings | TENSOR, "samples": samples, "folder": str(tmp_path)}
    ranks = run_ranks(2, teacher_cases.taught, model_dir=str(model), **arguments)
    check(ranks, samples, {BIG: teachers[BIG], SMALL: teachers[SMALL], ITSELF: model})


def test_a_policy_with_adapters_teaches_with_them(run_ranks, model, teachers, settings, tmp_path):
    """Without them it would teach what it was at the start; a model beside it has none."""
    adapters = {"use_peft": True, "lora_r": 3, "lora_alpha": 6}
    arguments = {"settings": settings | adapters, "samples": SAMPLES, "folder": str(tmp_path), "steps_before": 2}
    ranks = run_ranks(1, teacher_cases.taught, model_dir=str(model), **arguments)
    check(ranks, SAMPLES, {BIG: teachers[BIG], SMALL: teachers[SMALL], ITSELF: tmp_path / "before"})


def test_the_average_follows_the_policy_after_every_step(run_ranks, model, settings):
    """One that moved at the start of a step, or with every mini-batch, is another average."""
    arguments = {"settings": settings | AVERAGE | LAYOUTS["dp2+zero3"], "samples": OWN, "steps": 3}
    for rank in run_ranks(2, teacher_cases.averaged, model_dir=str(model), **arguments):
        assert rank["error"] < 1e-6
        assert rank["distance"] > 1e-4


@pytest.fixture(scope="module")
def saved(run_ranks, model, settings, tmp_path_factory):
    """Three steps, saved after the second: results, the state and the model."""
    out = tmp_path_factory.mktemp("saved")
    own = settings | AVERAGE | TENSOR | {"output_dir": str(out)}
    arguments = {"model_dir": str(model), "groups": OWN, "steps": 3, "save_after": 2, "folder": str(out / "hf")}
    results = run_ranks(2, run_cases.learn, settings=own, **arguments)
    return results, str(out / "checkpoints" / "step_2"), load_hf(out / "hf")


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_run_that_is_taught_by_an_average_goes_on(run_ranks, model, settings, saved, tmp_path, layout):
    """To the bit in the same layout; an average that began again with the model, or went through bfloat16, would teach otherwise."""
    whole, checkpoint, trained = saved
    own = settings | AVERAGE | {"output_dir": str(tmp_path), "resume": checkpoint}
    own |= TENSOR if layout == "tp2" else {"pipeline_model_parallel_size": 2}
    arguments = {"model_dir": str(model), "groups": OWN, "steps": 3, "folder": str(tmp_path / "hf")}
    rest = run_ranks(2, run_cases.learn, settings=own, resume_from=checkpoint, **arguments)
    assert whole[0]["state"]["masters"]
    if layout == "tp2":
        assert rest == whole
    else:
        assert measured(rest[0]) == pytest.approx(measured(whole[0]), **AS_ONE_RANK)
    for (name, a), b in zip(load_hf(tmp_path / "hf").named_parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=0 if layout == "tp2" else 1e-6, rtol=0, msg=name)


def test_teachers_give_up_their_memory_while_engines_have_the_device(run_ranks, model, teachers, settings):
    """A teacher that stays takes the memory that engines were promised."""
    models = {"teacher_model_name_or_path": [str(teachers[SMALL]), "self:self"], "teacher_update_rate": 0.3}
    arguments = {"settings": settings | LAYOUTS["dp2+zero3"] | models, "samples": OWN}
    for rank in run_ranks(2, teacher_cases.asleep, model_dir=str(model), **arguments):
        assert rank["left"] == 0
        assert rank["before"] == rank["after"] and len(set(rank["before"])) > 20


def test_a_teacher_whose_weights_are_not_finite_is_refused(run_ranks, model, teachers, settings, tmp_path):
    """Every one of its tokens would be left out, which only a metric would tell."""
    broken = shutil.copytree(teachers[SMALL], tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][-1, 0] = float("nan")  # only the second stage has it
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    own = settings | {"teacher_model_name_or_path": [str(broken)], "pipeline_model_parallel_size": 2}
    errors = run_ranks(2, teacher_cases.refused, model_dir=str(model), settings=own)
    assert len(errors) == 2
    assert all(f"teacher_model_name_or_path={broken}: {name} is not finite" in error for error in errors)
