"""Which state a run continues, and what must be as it was when the state was saved."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from mgrpo.config.fields import flat
from mgrpo.data.mixture import open_data
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.moving import from_values
from mgrpo.run.inputs.continuing import Continued, adapter_record, changes, find_state, present_form, resume_problems
from mgrpo.run.report.reporter import Reporter
from tests.unit.checkpoint.states import make_values, save
from tests.unit.run.producing import producer

MODEL = str(Path(__file__).parents[3] / "examples/quickstart/model")


@pytest.fixture(scope="module")
def shape():
    return shape_of(read_hf_config(MODEL))


def config(folder, **settings):
    """Ten steps on `rows.jsonl`."""
    values = {"total_episodes": 640, "dataset_mixer_list": (str(folder / "rows.jsonl"), "1.0")}
    return from_values({"output_dir": str(folder / "out"), "model_name_or_path": MODEL, **values, **settings})


def write_rows(folder, *answers):
    rows = [json.dumps({"prompt": "1+1=", "ground_truth": n, "dataset": "integer"}) for n in answers]
    (folder / "rows.jsonl").write_text("\n".join(rows))


def content(config):
    return open_data(config.data)[0].content


def save_state(run, shape, step, **changed):
    """A state as the trainer writes it."""
    sampler = {"num_prompts": 3, "seed": 1, "shuffle": True, "epoch": 0, "position": 0, "excluded": []}
    state = {
        "step": step,
        "config": flat(run),
        "model": asdict(shape),
        "model_name_or_path": MODEL,
        "source": {"sampler": sampler, "data": content(run)},
        "reporter": {"num_lines": step},
    }
    save(Path(run.experiment.output_dir) / "checkpoints", step, make_values(step), state=state | changed)


@pytest.fixture
def folder(tmp_path, shape):
    """A run of three rows with states of steps 2 and 4."""
    write_rows(tmp_path, 1, 2, 3)
    for step in (2, 4):
        save_state(config(tmp_path), shape, step)
    return tmp_path


def found(folder, shape, **settings):
    """Problems and changes of a run that continues."""
    own = config(folder, **settings)
    continued = find_state(own)
    return list(resume_problems(own, continued, shape=shape, data=content(own))), list(changes(own, continued))


def test_the_same_run_goes_on_without_a_word(folder, shape):
    """Also when its rows have moved, or it stands elsewhere."""
    assert found(folder, shape) == ([], [])
    (folder / "rows.jsonl").rename(folder / "moved.jsonl")
    problems, changed = found(folder, shape, dataset_mixer_list=(str(folder / "moved.jsonl"), "1.0"), resume="auto")
    assert problems == [] and "dataset_mixer_list" in changed[0]


def test_a_run_that_is_over_says_that_nothing_is_left_to_train(folder, shape):
    """Else a user who has changed the learning rate sees a good end after no step."""
    problems, remarks = found(folder, shape, total_episodes=5 * 64)
    assert problems == [] and not any("nothing is left" in remark for remark in remarks)
    problems, remarks = found(folder, shape, total_episodes=4 * 64, learning_rate=0.5)
    assert problems == [] and "learning_rate" in remarks[0]
    assert remarks[1].endswith(
        "/step_4 is the last of the run's 4 steps, so nothing is left to train; to go on raise total_episodes, or start afresh with --resume never"
    )


def test_what_would_be_another_run_is_refused(folder, shape):
    """It was noticed after the engines had started, as a traceback, or not at all: rows that changed in their file."""
    (seed,), _ = found(folder, shape, seed=7)
    assert seed.startswith("seed=7, but ") and "/step_4 was saved with seed=1" in seed
    assert seed.endswith("set seed=1, or start afresh with --resume never")
    (order,), _ = found(folder, shape, shuffle_dataset=False)
    assert "shuffle_dataset=false, but " in order
    (steps,), _ = found(folder, shape, total_episodes=3 * 64)
    assert "step_4 is step 4, but the run has 3 training steps; raise total_episodes" in steps
    (offload,), _ = found(folder, shape, optimizer_cpu_offload=True)
    assert offload.startswith("optimizer_cpu_offload=true cannot continue a training state yet")
    other = replace(shape, ffn=512)
    (model,), _ = found(folder, other)
    assert "is of another model than" in model and f"it was saved from {MODEL}" in model
    write_rows(folder, 1, 2, 4)
    (rows,), _ = found(folder, shape)
    assert "rows.jsonl holds other rows than when " in rows
    write_rows(folder, 1, 2)
    (number,), _ = found(folder, shape)
    assert f"the training data are 2 of 2 rows of {folder}/rows.jsonl, but " in number
    assert "was saved with 3 of 3 rows" in number


ADAPTERS = {"use_peft": True, "lora_r": 8, "learning_rate": 2e-3, "seed": 1}


def test_adapters_go_on_only_as_they_were_trained_on_the_model_that_they_were_trained_on(tmp_path, shape):
    """The state has no weights of the model: adapters of another shape, or beside other weights, are another policy."""
    write_rows(tmp_path, 1, 2, 3)
    run = config(tmp_path, **ADAPTERS)
    record = {"settings": adapter_record(run.adapter.lora, shape), "base": "a" * 64}
    save_state(run, shape, 2, learner={"adapters": json.loads(json.dumps(record))})
    assert found(tmp_path, shape, **ADAPTERS) == ([], [])
    everything = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert found(tmp_path, shape, **ADAPTERS, lora_target_modules=everything)[0] == []
    (full,), _ = found(tmp_path, shape)
    assert (
        full.startswith("use_peft=false, but ") and "/step_2 holds adapters, not the model; set use_peft=true" in full
    )
    for changed, words in (
        ({"lora_r": 4}, "lora_r=4, but {}/step_2 was saved with 8; set lora_r 8, or start afresh"),
        ({"lora_alpha": 16}, "lora_alpha=16, but {}/step_2 was saved with 32; set lora_alpha 32"),
        ({"use_rslora": True}, "use_rslora=true, but {}/step_2 was saved with false"),
        (
            {"lora_target_modules": ["o_proj"]},
            "lora_target_modules=o_proj, but {}/step_2 was saved with down_proj gate",
        ),
    ):
        (problem,), _ = found(tmp_path, shape, **ADAPTERS | changed)
        assert problem.startswith(words.format(tmp_path / "out/checkpoints"))
    own = config(tmp_path, **ADAPTERS)
    (base,) = resume_problems(own, find_state(own), shape=shape, data=None, base="b" * 64)
    assert f"adapters of other weights than those in model_name_or_path={MODEL}; it was saved from {MODEL}" in base


def test_a_state_of_all_weights_is_not_continued_with_adapters(folder, shape):
    """Its weights are no longer those of the model's folder."""
    (problem,), _ = found(folder, shape, use_peft=True)
    assert problem.startswith("use_peft=true, but ") and "saved by a run that trained all weights" in problem


def test_settings_that_changed_are_listed(folder, shape):
    """A learning rate that was changed on purpose is welcome; one that was changed by mistake is seen."""
    settings = {"learning_rate": 1e-5, "num_unique_prompts_rollout": 8, "reward_weights": "2", "total_episodes": 320}
    problems, changed = found(folder, shape, **settings, checkpoint_state_freq=1, resume="auto", report_to="none")
    assert problems == []
    (sentence,) = changed
    assert sentence.endswith(
        "step_4 was saved with other settings: total_episodes 640 -> 320, num_unique_prompts_rollout 16 -> 8, "
        "reward_weights nothing -> 2.0, learning_rate 2e-05 -> 1e-05"
    )


EARLIER = {
    "advantage_ddof": 0, "advantage_eps": 1e-8, "rho_mask_tv_divergence": False, "moe_flex_dispatcher_backend": "deepep",
    "code_tool_api_endpoint": None, "search_api_endpoint": None, "reshuffle_mini_batches": False, "turn_discount": 1.0,
    "distillation_clip": None, "distillation_temperature": None, "distillation_jsd_beta": 0.5, "active_sampling_max_rounds": 10,
    "env_reset_timeout": 60.0, "env_acquire_timeout": 60.0, "turn_scheduling": "auto", "sampling_conflict": "override",
    "untaken_turns": "drop", "rubric_judge_model": None, "rubric_generation_model": None, "code_sandbox_memory_mb": 1024,
    "profile_ranks": [0], "overlap_grad_reduce": True,
}  # fmt: skip
"""Settings that earlier versions saved, at their defaults then."""
NOW = {
    "advantage_std": "verl", "use_rho_correction": True, "rho_mask_level": "divergence", "rho_mask_upper_bound": 0.1,
    "moe_token_dispatcher_type": "hybridep", "tools": ["python", "search"],
    "tool_configs": ['{"timeout": 3, "endpoint": "http://a"}', '{"index": "b"}'],
}  # fmt: skip


def changed_since(folder, earlier, **settings):
    """The notes of a run that continues a state with settings of an earlier version."""
    own = config(folder, **settings)
    saved = flat(own) | EARLIER | earlier
    del saved["advantage_std"]
    return list(changes(own, Continued(path="step_2", step=2, state={"config": json.loads(json.dumps(saved))})))


def test_settings_of_earlier_versions_that_mean_the_same_have_not_changed(tmp_path, monkeypatch):
    """A note on what is as it was makes the next one unread."""
    monkeypatch.setenv("RUBRIC_JUDGE_MODEL", "judge")
    assert changed_since(tmp_path, {}) == []
    for std, ddof, eps in (("sample", 1, 1e-8), ("verl", 1, 1e-6), ("trl", 1, 1e-4)):
        assert changed_since(tmp_path, {"advantage_ddof": ddof, "advantage_eps": eps}, advantage_std=std) == []
    earlier = {
        "advantage_ddof": 1, "advantage_eps": 1e-6, "rho_mask_tv_divergence": True, "rho_mask_level": "token",
        "moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep",
        "code_tool_api_endpoint": "http://a", "tool_configs": ['{"timeout": 3}', '{"index": "b"}'],
        "rubric_judge_model": "judge", "distillation_temperature": 1.0, "profile_ranks": [0, 1], "overlap_grad_reduce": False,
    }  # fmt: skip
    assert changed_since(tmp_path, earlier, **NOW) == []
    program = {"rollout_func": "a:b", "tool_configs": ['{"n": 1}']}
    assert changed_since(tmp_path, {"code_tool_api_endpoint": "http://a"}, **program) == []


def test_settings_of_earlier_versions_that_the_run_does_not_keep_are_listed(tmp_path, monkeypatch):
    """The run goes on otherwise than it began, and its user has changed nothing."""
    monkeypatch.delenv("RUBRIC_JUDGE_MODEL", raising=False)
    earlier = {
        "advantage_ddof": 1, "advantage_eps": 1e-6, "rho_mask_tv_divergence": True, "reshuffle_mini_batches": True,
        "turn_discount": 0.5, "distillation_clip": 1.0, "distillation_temperature": 2.0, "distillation_jsd_beta": 0.1,
        "active_sampling_max_rounds": 3, "env_reset_timeout": 600.0, "untaken_turns": "train", "rubric_judge_model": "judge",
    }  # fmt: skip
    (sentence,) = changed_since(tmp_path, earlier)
    gone = {
        "active_sampling_max_rounds 3 -> 10", "distillation_clip 1 -> none", "distillation_jsd_beta 0.1 -> 0.5",
        "distillation_temperature 2 -> 1", "env_reset_timeout 600 -> 60", "reshuffle_mini_batches true -> false",
        "rubric_judge_model judge -> none", "turn_discount 0.5 -> 1", "untaken_turns train -> drop",
    }  # fmt: skip
    assert set(sentence.removeprefix("step_2 was saved with other settings: ").split(", ")) == {
        "advantage_std verl -> population",
        "rho_mask_level divergence -> token",
        *(f"{each} (no longer a setting)" for each in gone),
    }
    (sentence,) = changed_since(tmp_path, {"advantage_eps": 1e-5})
    assert sentence.endswith("advantage_std with ddof 0 and eps 1e-05 -> population")


def test_states_without_the_newer_entries_go_on(folder, shape):
    """They were saved before settings and data were kept in them."""
    source = {name: value for name, value in find_state(config(folder)).state["source"].items() if name != "data"}
    save_state(config(folder), shape, 6, source=source, config={})
    write_rows(folder, 5, 6, 7)
    assert found(folder, shape, learning_rate=1.0) == ([], [])


def test_a_damaged_state_is_passed_over_only_when_that_was_asked_for(folder, shape):
    """A restart by night should go on; whoever did not ask for it should know that steps are lost."""
    checkpoints = folder / "out" / "checkpoints"
    (checkpoints / "step_4" / "state-run-4.json").write_text("{}")
    with pytest.raises(ValueError, match=r"step_4 is damaged: state-run-4\.json is truncated.*--resume intact"):
        find_state(config(folder))
    continued = find_state(config(folder, resume="intact"))
    assert continued.step == 2 and continued.path == str(checkpoints / "step_2")
    (remark,) = continued.passed_over
    assert "step_4 is damaged: " in remark and "passed over" in remark
    (checkpoints / "step_2" / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match=r"step_2 is damaged"):
        find_state(config(folder, resume="intact"))
    for name in ("step_2", "step_4"):
        (checkpoints / name / "manifest.json").unlink()
    for choice in ("auto", "intact", "never"):
        assert find_state(config(folder, resume=choice)) is None


WITH_HEAD = json.loads((Path(__file__).parent / "states" / "with_head.json").read_text())
"""The state of a run of an earlier version after step 2, asynchronous, with replay and a best export; without what never changed."""


def test_a_state_in_which_two_parts_were_one_is_read_as_the_two(tmp_path):
    """Earlier versions merged what the source and the reporter save; nothing of it may be lost, or read by the wrong one."""
    read = present_form(WITH_HEAD)
    assert "head" not in read and {**read["source"], **read["reporter"]} == WITH_HEAD["head"]
    assert read["reporter"] == {name: WITH_HEAD["head"][name] for name in ("num_lines", "best", "run_id")}
    own = producer(replay_buffer_size=1, async_steps=1).state_dict()
    # Rubrics that evolve came later.
    assert read["source"].keys() == own.keys() - {"rollouts", "rubrics"} | {"data"}
    # The account of lost time came later.
    assert read["reporter"].keys() == Reporter(config(tmp_path), scale=None).state_dict().keys() - {"lost_time"}
    others = {name: value for name, value in WITH_HEAD.items() if name != "head"}
    assert {name: read[name] for name in others} == others
    assert present_form(read) is read


def test_a_run_continues_a_state_of_the_earlier_form(tmp_path, shape):
    """Folders of states outlive the version that wrote them."""
    write_rows(tmp_path, 1, 2, 3)
    run = config(tmp_path)
    head = WITH_HEAD["head"] | {"data": content(run), "sampler": WITH_HEAD["head"]["sampler"] | {"seed": 7}}
    state = WITH_HEAD | {"config": flat(run), "model": asdict(shape), "head": head}
    save(tmp_path / "out" / "checkpoints", 2, make_values(2), state=state)
    (problem,), changed = found(tmp_path, shape)
    assert problem.startswith("seed=1, but ") and "was saved with seed=7" in problem and not changed
    assert find_state(run).state["reporter"]["num_lines"] == 5
