"""Teachers in every layout, against transformers' own model: what one says of tokens, and the gradient of what it teaches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mgrpo import algo
from mgrpo.config.loss import LossConfig
from mgrpo.types import TeacherScores, TrainSample
from tests.ranks import cases, distillation_cases
from tests.ranks.outcomes import LIMITS, global_norm, gradient_differences, joined
from tests.tiny_models import load_hf, save_tiny, saved_gradients

SAMPLES = cases.random_samples(seed=0, groups_of_turns=2)
LAYOUTS = {
    "one": (1, {}),
    "tp2+sp": (2, {"tensor": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline": 2}),
    "cp2": (2, {"context": 2}),
    "dp2": (2, {}),
}
SETTINGS = {
    "one": (1, {}),
    "tp2+sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
    "dp2, ZeRO-3": (2, {"zero_stage": 3}),
}
K, TEMPERATURE, TEACHER_TEMPERATURE, COEF = 4, 0.8, 1.3, 0.5
SIGNALS: dict[str, dict[str, Any]] = {
    "sampled": {"distillation_loss": "sampled"},
    "forward_kl": {"distillation_loss": "forward_kl", "distillation_topk": K},
    "reverse_kl": {"distillation_loss": "reverse_kl", "distillation_topk": K, "logits_chunk": 17},
    "jsd, sets": {
        "distillation_loss": "jsd",
        "distillation_topk": K,
        "logits_chunk": 17,
    },
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The student, and its teacher."""
    folder = tmp_path_factory.mktemp("models")
    return save_tiny(folder, "qwen2"), save_tiny(folder, "llama", tied=True)


def logits_of(model: torch.nn.Module, sample: TrainSample) -> torch.Tensor:
    """Logits `[tokens, vocab]` in float64, -inf outside of the kept sets; unpacked and unpadded."""
    tokens = torch.from_numpy(np.concatenate((sample.prompt_tokens, sample.tokens))).long()
    logits = model(tokens[None]).logits[0, len(sample.prompt_tokens) - 1 : -1].double()
    if sample.kept is None:
        return logits
    is_kept = torch.zeros_like(logits, dtype=torch.bool)
    sets = np.split(sample.kept.ids, sample.kept.offsets[1:-1])
    for row, token, kept in zip(is_kept, sample.tokens, sets, strict=True):
        row[[token, *kept]] = True
    return logits.masked_fill(~is_kept, -torch.inf)


def taught_by(model: torch.nn.Module, sample: TrainSample) -> TeacherScores:
    """What the model says of all tokens of a response; -1 and NaN where a set has fewer."""
    with torch.no_grad():
        every = torch.log_softmax(logits_of(model, sample) / TEACHER_TEMPERATURE, -1)
    likeliest, ids = every.topk(K)
    is_token = likeliest > -torch.inf
    return TeacherScores(
        logprobs=every[torch.arange(len(every)), torch.from_numpy(sample.tokens).long()].float().numpy(),
        ids=ids.where(is_token, -1).int().numpy(),
        likeliest=likeliest.where(is_token, torch.nan).float().numpy(),
    )


@pytest.mark.parametrize(("logits_chunk", "is_cut"), [(0, True), (17, False)], ids=["sets", "chunks"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_teacher_names_the_likeliest_tokens(run_ranks, models, layout, logits_chunk, is_cut):
    """Tokens of one shard, of the student's temperature, or beside another row would teach another distribution."""
    world_size, axes = LAYOUTS[layout]
    samples = cases.with_sets(SAMPLES) if is_cut else SAMPLES
    arguments = {"model_dir": str(models[1]), "layout": axes, "samples": samples, "logits_chunk": logits_chunk}
    ranks = run_ranks(
        world_size, distillation_cases.scores, num_likeliest=K, temperature=TEACHER_TEMPERATURE, **arguments
    )
    found = {number: scores for rank in ranks for number, scores in rank.items()}
    assert sorted(found) == list(range(len(samples)))
    model = load_hf(models[1])
    for number, sample in enumerate(samples):
        got, want = found[number], taught_by(model, sample).part(sample.is_predicted)
        np.testing.assert_array_equal(got.ids, want.ids)
        np.testing.assert_allclose(got.logprobs, want.logprobs, atol=LIMITS["logprob"])
        np.testing.assert_allclose(got.likeliest, want.likeliest, atol=LIMITS["logprob"])


def taught_samples(samples: list[TrainSample], teacher: torch.nn.Module, *, num_likeliest: int) -> list[TrainSample]:
    """The samples as they reach a learner: of two teachers, some of none; some tokens are missing, of which rank 0 knew half."""
    random = np.random.default_rng(5)

    def one(number: int, sample: TrainSample) -> TrainSample:
        scores = taught_by(teacher, sample)
        missing = random.random(len(sample.tokens)) < 0.2
        is_known = ~missing & sample.is_predicted
        none = number % 4 == 3
        return replace(
            sample,
            teacher=-1 if none else number % 2,
            loss_mask=sample.loss_mask & (none or is_known | (number % 2 == 0)),
            taught=None
            if none
            else TeacherScores(
                logprobs=np.where(is_known, scores.logprobs, np.nan).astype(np.float32),
                ids=np.where(is_known[:, None], scores.ids, -1).astype(np.int32) if num_likeliest else None,
                likeliest=np.where(is_known[:, None], scores.likeliest, np.nan).astype(np.float32)
                if num_likeliest
                else None,
            ),
        )

    return [one(number, sample) for number, sample in enumerate(samples)]


def coarse(row: torch.Tensor, chosen: list[int]) -> torch.Tensor:
    """Probabilities of the chosen tokens that are possible, and of all others together."""
    is_other = torch.ones(len(row), dtype=torch.bool)
    is_other[chosen] = False
    return torch.cat((row[chosen], row[is_other].sum()[None]))


def divergence(teacher: torch.Tensor, student: torch.Tensor, name: str) -> torch.Tensor:
    """Of probabilities, 0 log 0 being 0."""

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        is_some = a > 0
        return (a[is_some] * (a[is_some] / b[is_some]).log()).sum()

    mixture = (teacher + student) / 2
    return {
        "forward_kl": lambda: kl(teacher, student),
        "reverse_kl": lambda: kl(student, teacher),
        "jsd": lambda: (kl(teacher, mixture) + kl(student, mixture)) / 2,
    }[name]()


def oracle(student, teacher, samples: list[TrainSample], signal: dict[str, Any]) -> dict[str, Any]:
    """The gradients and the mean divergence, from whole distributions of each sample alone."""
    name = signal["distillation_loss"]
    config = LossConfig(beta=0.0)
    denominator = sum(int(sample.loss_mask.sum()) for sample in samples)
    total, values = 0.0, []
    for sample in samples:
        logits = logits_of(student, sample)
        tokens, old = torch.from_numpy(sample.tokens).long(), torch.from_numpy(sample.rollout_logprobs).double()
        logprobs = torch.log_softmax(logits / TEMPERATURE, -1).gather(1, tokens[:, None])[:, 0]
        advantages, mask = torch.full_like(old, sample.advantage), torch.from_numpy(sample.loss_mask).clone()
        if sample.taught is not None:
            with torch.no_grad():
                exact = torch.log_softmax(logits_of(teacher, sample) / TEACHER_TEMPERATURE, -1)
            is_known = torch.from_numpy(np.isfinite(sample.taught.logprobs))
            mask &= is_known
            gap = exact.gather(1, tokens[:, None])[:, 0] - old
            if name == "sampled":
                advantages = torch.where(is_known, advantages + COEF * gap, advantages)
                values += (-gap[mask]).tolist()
            for place in mask.nonzero()[:, 0].tolist() if name != "sampled" else ():
                ids = exact[place].topk(K)
                chosen = sorted({int(tokens[place]), *ids.indices[ids.values > -torch.inf].tolist()})
                q = torch.softmax(logits[place] / TEMPERATURE, -1)
                value = divergence(coarse(exact[place].exp(), chosen), coarse(q, chosen), name)
                total = total + COEF * value / denominator
                values.append(value.item())
        span = torch.tensor([0, len(old)], dtype=torch.int32)
        total = (
            total
            + algo.policy_loss(
                logprobs, old, advantages, mask, span, config=config, denominator=float(denominator)
            ).loss
        )
    total.backward()
    return {"gradients": {n: g.numpy() for n, g in saved_gradients(student).items()}, "kl": float(np.mean(values))}


@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.parametrize("layout", SETTINGS)
def test_what_a_teacher_teaches_does_not_depend_on_the_layout(run_ranks, models, layout, name):
    """Beside the wrong row, of one shard, or counted per rank, a teacher's word is noise that looks like learning."""
    (world_size, axes), signal = SETTINGS[layout], SIGNALS[name]
    settings = {
        "model_name_or_path": str(models[0]),
        "model_dtype": "float32",
        "beta": 0.0,
        "use_vllm_logprobs": True,  # ratios far from 1
        "temperature": TEMPERATURE,
        "pack_length": 64,
        "sequence_parallel": False,
        "max_grad_norm": 0.0,
        "teacher_model_name_or_path": ["math:A", "code:B"],
        "teacher_mode": "server",  # they have answered already
        "teacher_server_base_url": ["http://127.0.0.1:1"],
        "distillation_coef": COEF,
        **signal,
        **axes,
    }
    teacher = load_hf(models[1])
    num_likeliest = K if signal["distillation_loss"] != "sampled" else 0
    samples = taught_samples(
        cases.with_sets(SAMPLES) if "sets" in name else SAMPLES, teacher, num_likeliest=num_likeliest
    )
    ranks = run_ranks(world_size, distillation_cases.step, settings=settings, samples=samples)
    expected = oracle(load_hf(models[0]), teacher, samples, signal)
    found = joined(ranks, "gradients", {name: grad.shape for name, grad in expected["gradients"].items()})
    of_tensors, of_rows, tensor = gradient_differences(found, expected["gradients"])
    assert of_tensors <= LIMITS["gradient"] and of_rows <= LIMITS["row"], (of_tensors, of_rows, tensor)
    for rank in ranks:
        assert rank["grad_norm"] == pytest.approx(global_norm(expected["gradients"]), rel=LIMITS["norm"])
        assert rank["metrics"]["distillation/kl"] == pytest.approx(expected["kl"], rel=1e-6)
        assert 0.05 < rank["metrics"]["distillation/missing"] < 0.5
        assert {f"distillation/{teacher}/kl" for teacher in ("math", "code")} <= rank["metrics"].keys()
