"""The distillation section: its teachers, and one sentence for each mistake."""

from __future__ import annotations

import pytest

from mgrpo.config import ConfigError
from mgrpo.config.distillation import SELF, Distillation
from mgrpo.config.validate import problems, warnings
from mgrpo.moving import from_values


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text("{}")
    return str(folder)


def found_in(model, values, *, vocab=0):
    base = {"model_name_or_path": model, "dataset_mixer_list": ["a", "1.0"], "output_dir": f"{model}/out"}
    try:
        config = from_values(base | values)
    except ConfigError as err:
        return list(err.problems)
    return problems(config, world_size=1, hf_config={"vocab_size": vocab} if vocab else None)


HINT = {"teacher_prompt_template": "{prompt} A right answer: {answer}"}
SERVER = {"teacher_mode": "server", "teacher_server_base_url": ["http://127.0.0.1:8000"]}
MISTAKES = [
    ({"distillation_only": True}, "distillation_only=true learns from a teacher alone, and there is none"),
    (
        {"teacher": "M", "distillation_only": True, "advantage_normalization_type": "package.module:f"},
        "distillation_only=true makes every advantage 0, so that advantage_normalization_type=package.module:f has no effect",
    ),
    ({"teacher": "M", "distillation_coef": 0}, "distillation_coef=0 learns nothing from the teacher, which would be"),
    (
        {"teacher": "M", "distillation_coef": 0, "distillation_only": True},
        "distillation_coef=0 learns nothing from the teacher, and from nothing else either",
    ),
    ({"teacher": "M", "distillation_coef": -1}, "distillation_coef=-1.0 must be at least 0"),
    ({"teacher": "no/such/folder"}, "teacher_model_name_or_path=no/such/folder"),
    ({"teacher": "/no/such"}, "teacher_model_name_or_path=/no/such"),
    ({"teacher": "math:"}, "teacher_model_name_or_path=math:: math has no model; write math:MODEL"),
    ({"teacher": "math:M,math:M"}, "names math twice; give each its own rows: math:MODEL1 code:MODEL2"),
    ({"teacher": ["M", "M"]}, "names two models for the same rows"),
    ({"teacher": SELF}, "teacher_model_name_or_path=self knows no more than the policy that it is"),
    ({"teacher": SELF, "teacher_mode": "engine", **HINT}, "self is the policy itself, which learners ask; got teacher"),
    ({"teacher": SELF, **SERVER, **HINT}, "got teacher_mode=server, use learner"),
    (
        {"teacher": SELF, "teacher_update_rate": 0.1, "use_peft": True},
        "teacher_update_rate=0.1 keeps an average of all weights, and use_peft=true trains none of them; use 1",
    ),
    ({"teacher": SELF, "teacher_update_rate": 0}, "teacher_update_rate=0.0 must be in (0, 1]"),
    ({"teacher": "M", "teacher_mode": "elsewhere"}, "teacher_mode must be one of learner, engine, server, got"),
    ({"teacher": "M", "teacher_mode": "server"}, "teacher_mode=server needs teacher_server_base_url, the addresses"),
    (
        {"teacher": "M", "teacher_server_base_url": ["http://a:1"]},
        "is used with teacher_mode=server, but it is learner",
    ),
    (
        {"teacher": "M", "teacher_mode": "server", "teacher_server_base_url": ["http://a:1", "http://a:1/"]},
        "teacher_server_base_url=http://a:1 http://a:1/ names a server twice",
    ),
    (
        {"teacher": "M", "teacher_mode": "server", "teacher_server_base_url": ["a:1"]},
        "teacher_server_base_url=a:1 is not an address of a server; write http://HOST:PORT",
    ),
    (
        {"teacher": "M", **SERVER, "vllm_mode": "server", "vllm_server_base_url": ["http://127.0.0.1:8000/"]},
        "is also in vllm_server_base_url, where the policy's weights are sent",
    ),
    (
        {"teacher": "M", **SERVER, "teacher_temperature": 0.5},
        "teacher_temperature=0.5 cannot be asked of teacher_mode=server",
    ),
    ({"teacher": "M", "teacher_temperature": 0}, "teacher_temperature=0.0 must be above 0"),
    ({"teacher": "M", "teacher_mode": "engine", "top_k": 20}, "and top_k=20 makes the policy's those of the tokens"),
    (
        {"teacher": "M", **SERVER, "top_k": 20, "top_p": 0.9},
        "teacher_mode=server gives log-probabilities over the whole",
    ),
    ({"teacher": "M", "active_sampling": True}, "active_sampling=true replaces groups that have nothing to learn from"),
    (
        {"teacher": "M", "replay_buffer_size": 8, "use_rho_correction": True},
        "replay_buffer_size=8 replaces groups that have nothing to learn from, and with a teacher every group has",
    ),
    (
        {"teacher": "M", "distillation_loss": "kl"},
        "distillation_loss must be one of sampled, forward_kl, reverse_kl, jsd",
    ),
    ({"teacher": "M", "distillation_loss": "jsd", "distillation_topk": 0}, "distillation_topk=0 must be at least 1"),
    ({"teacher": "M", "distillation_loss": "jsd", "distillation_topk": 51}, "is more than the 50 tokens of the model"),
    ({"teacher": "M", "teacher_mode": "engine", "teacher_num_engines": 0}, "teacher_num_engines=0 must be at least 1"),
    (
        {"teacher": "M", "teacher_mode": "engine", "teacher_tensor_parallel_size": 0},
        "teacher_tensor_parallel_size=0 must be at least 1",
    ),
    (
        {"teacher": "M", "teacher_mode": "engine", "teacher_gpu_memory_utilization": 1.5},
        "teacher_gpu_memory_utilization=1.5 must be in (0, 1]",
    ),
    (
        {"teacher": "M", "teacher_prompt_template": "{answer}"},
        "has no {prompt}, and the teacher would not see the question",
    ),
    (
        {"teacher": "M", "teacher_prompt_template": "{prompt}"},
        "adds nothing that the policy does not see; add {answer}",
    ),
    ({"teacher": "M", "teacher_prompt_template": "{prompt"}, "cannot be read (expected '}' before end of string)"),
    ({"teacher": "M", "teacher_prompt_template": "{prompt} {0}"}, "{0} is not the name of a column; write {prompt}"),
    ({"teacher": "M", "teacher_prompt_template": "{prompt.x}"}, "{prompt.x} is not the name of a column"),
    (
        {"teacher": "M", "teacher_prompt_template": "{prompt} {answer!r:>9}"},
        "{answer!r:>9} is not the name of a column",
    ),
    (
        {"teacher": "M", "teacher_prompt_template": "{prompt} {feedback}"},
        "shows feedback, which reward functions, tools",
    ),
    (
        {"teacher": SELF, **HINT, "num_samples_per_prompt_rollout": 1},
        "shows another answer of the group, but num_samples_per_prompt_rollout=1; sample at least 2",
    ),
]


def written(values, model):
    """`teacher` written out, M as the folder of the model."""
    values = dict(values)
    if "teacher" in values:
        given = values.pop("teacher")
        own = [given] if isinstance(given, str) else given
        values["teacher_model_name_or_path"] = [text.replace("M", model) for text in own]
    return values


@pytest.mark.parametrize(("values", "said"), MISTAKES, ids=[said[:60] for _, said in MISTAKES])
def test_a_mistake_has_one_sentence(model, values, said):
    found = found_in(model, written(values, model), vocab=50)
    assert len(found) == 1, found
    assert said in found[0]


@pytest.mark.parametrize(
    "values",
    [
        {"teacher": "M"},
        {"teacher": "M", "distillation_only": True, "num_samples_per_prompt_rollout": 1},
        {"teacher": "math:M,code:M"},
        {"teacher": ["M", "code:M"], "teacher_mode": "engine", "teacher_temperature": 0.7},
        {"teacher": "big", **SERVER},
        {"teacher": SELF, **HINT},
        {"teacher": SELF, "teacher_update_rate": 0.01},
        {"teacher": SELF, **HINT, "use_peft": True},
        {"teacher": "M", "top_k": 20, "distillation_loss": "jsd"},
        {"teacher": "M", "teacher_prompt_template": "{prompt} {{as JSON}} {solution}"},
    ],
)
def test_what_can_work_is_not_refused(model, values):
    assert found_in(model, written(values, model), vocab=50) == []


def test_teachers_are_read_in_their_order():
    own = Distillation(teacher_model_name_or_path=("math:a/b,code:c", "d"))
    assert [tuple(teacher) for teacher in own.teachers] == [("math", "a/b"), ("code", "c"), ("", "d")]
    assert own.distills
    assert not Distillation().distills


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"teacher": "big", "distillation_topk": 4},
            "distillation_topk=4 has no effect without a distillation_loss other than sampled",
        ),
        ({"teacher": "M"}, "is the model that is trained: its teacher holds it where it begins, as beta does"),
        (
            {"teacher": "big", "teacher_update_rate": 0.5},
            "teacher_update_rate=0.5 has no effect without the teacher self",
        ),
    ],
)
def test_what_is_probably_not_meant_is_said(model, values, said):
    base = {"model_name_or_path": model, "dataset_mixer_list": ["a", "1.0"]}
    found = warnings(from_values(base | written(values, model)), world_size=1)
    assert any(said in sentence for sentence in found), found
