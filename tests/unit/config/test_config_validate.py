"""What is impossible about a configuration."""

import dataclasses
import typing

import pytest

from mgrpo.config import Config, ConfigError
from mgrpo.config.derived import layout_of, widest_cut
from mgrpo.config.fields import alternatives, build, flat, settings
from mgrpo.config.validate import problems, warnings
from mgrpo.layout import Layout
from mgrpo.moving import from_values, parse
from tests.unit.config.model_sizes import HEADS, SIZES


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def problems_of(model, values, *, world_size=1, **context):
    base = {"model_name_or_path": model, "dataset_mixer_list": ["train.jsonl", "1.0"], "output_dir": f"{model}/out"}
    return problems(from_values(base | values), world_size=world_size, **context)


def test_the_defaults_are_sound_once_model_and_data_are_named(model):
    """A default that the validator refuses would end every run of a newcomer."""
    assert problems_of(model, {}) == []
    assert problems_of(model, {}, hf_config=SIZES) == []


def test_the_bare_defaults_lack_a_model_and_data_and_nothing_else():
    """The first message a newcomer sees must say what to give."""
    found = problems(Config(), world_size=1)
    assert len(found) == 2
    assert "model_name_or_path is not set" in found[0]
    assert "dataset_mixer_list is empty" in found[1]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": 0}, "temperature=0.0 must be in [0.01, 2.0]; the training logits are divided by it"),
        ({"temperature": "nan"}, "temperature=nan must be in [0.01, 2.0]"),
        ({"temperature": "inf"}, "temperature=inf must be in [0.01, 2.0]"),
        ({"learning_rate": 0}, "learning_rate=0.0 must be above 0"),
        ({"adam_beta1": 1}, "adam_beta1=1.0 must be in [0, 1)"),
        ({"adam_beta2": -0.1}, "adam_beta2=-0.1 must be in [0, 1)"),
        ({"clip_lower": 1}, "clip_lower=1.0 must be in [0, 1)"),
        ({"clip_higher": 0}, "clip_higher=0.0 must be above 0"),
        ({"beta": -0.1}, "beta=-0.1 must be at least 0"),
        ({"max_grad_norm": -1}, "max_grad_norm=-1.0 must be at least 0"),
        ({"warmup_ratio": 1}, "warmup_ratio=1.0 must be in [0, 1)"),
        ({"vllm_gpu_memory_utilization": 1.1}, "vllm_gpu_memory_utilization=1.1 must be in (0, 1]"),
        ({"verifier_timeout": 0}, "verifier_timeout=0.0 must be above 0"),
        ({"r1_style_format_reward": 0}, "r1_style_format_reward=0.0 must be above 0"),
        ({"seed": -1}, "seed=-1 must be in [0, 4294967295]"),
        ({"response_length": 0}, "response_length=0 must be at least 1"),
        ({"loss_denominator": "tokens"}, "loss_denominator='tokens' must be token or a finite number above 0"),
        ({"loss_denominator": 0}, "loss_denominator='0'"),
        ({"loss_denominator": "nan"}, "loss_denominator='nan'"),
        ({"loss_denominator": "inf"}, "loss_denominator='inf'"),
        ({"load_ref_policy": False}, "beta=0.05 needs the reference model, but load_ref_policy=false"),
        ({"pack_length": 511}, "pack_length=511 cannot hold max_prompt_token_length 256 + response_length 256; use at"),
        ({"apply_verifiable_reward": False}, "no reward is on"),
        ({"total_episodes": 63}, "total_episodes=63 is less than one step of 16 prompts x 4 samples; use at least 64"),
        ({"num_mini_batches": 17}, "num_mini_batches=17 is more than the 16 prompts of a step"),
        ({"total_episodes": 64, "warm_up_steps": 2}, "warm_up_steps=2 is more than the run's 1 optimizer steps"),
        ({"dataset_mixer_list": ["a", "1.0", "b"]}, "dataset_mixer_list has 3 words (a 1.0 b), expected pairs"),
        ({"dataset_mixer_list": ["a", "all"]}, "dataset_mixer_list: amount 'all' of a must be a share"),
        ({"dataset_mixer_list": ["a", "0.0"]}, "amount '0.0' of a"),
        ({"dataset_mixer_eval_list": ["a", "-5"]}, "dataset_mixer_eval_list: amount '-5' of a"),
        ({"dataset_mixer_list_splits": ["x", "y"]}, "dataset_mixer_list_splits has 2 entries, expected 1 or one for"),
        ({"dataset_mixer_list_splits": []}, "dataset_mixer_list_splits has 0 entries"),
        ({"dataset_mixer_list": []}, "dataset_mixer_list is empty"),
        ({"model_name_or_path": None}, "model_name_or_path is not set"),
        ({"model_name_or_path": "/no/such"}, "model_name_or_path=/no/such is not a folder"),
        ({"model_name_or_path": "~/model"}, "~ is not expanded"),
        ({"output_dir": ""}, "output_dir is empty"),
        ({"zero_stage": 2, "fsdp_shard_degree": 1}, "fsdp_shard_degree=1 needs zero_stage=3, got 2"),
        ({"context_parallel_size": 2}, "cannot be split into tensor 1 x pipeline 1 x context 2"),
        ({"sequence_parallel": True}, "sequence_parallel=true needs tensor_model_parallel_size > 1"),
    ],
)
def test_what_cannot_work_is_refused(model, values, words):
    """Each of these would fail hours later, or train nothing without saying so."""
    assert words in "\n".join(problems_of(model, values))


@pytest.mark.parametrize(
    "values",
    [
        {"beta": 0, "load_ref_policy": False},
        {"loss_denominator": "1000"},
        {"pack_length": 512, "response_length": 256},
        {"max_grad_norm": 0, "local_eval_every": -1, "save_freq": -1, "non_stop_penalty_value": -10},
        {"apply_verifiable_reward": False, "non_stop_penalty": True},
        {"apply_verifiable_reward": False, "apply_r1_style_format_reward": True, "r1_style_format_reward": 0.5},
        {"dataset_mixer_list": ["a", "2.5", "b", "100"], "dataset_mixer_list_splits": ["train", "dev"]},
        {"total_episodes": 64, "warm_up_steps": 1},
        {"total_episodes": 64, "warm_up_steps": 50, "warmup_ratio": 0.1},
        {"model_name_or_path": "owner/name"},
    ],
)
def test_what_can_work_is_accepted(model, values):
    """A rule that is too strict keeps a sound run from starting."""
    assert problems_of(model, values) == []


def test_a_model_folder_without_config_is_refused(model, tmp_path):
    """A checkpoint's parent folder is the usual mistake."""
    (tmp_path / "parent").mkdir()
    assert "has no config.json" in problems_of(model, {"model_name_or_path": str(tmp_path / "parent")})[0]


def test_an_output_dir_that_is_a_file_is_refused(model):
    """The run would end at its first write, after the engines have started."""
    assert "is a file" in problems_of(model, {"output_dir": f"{model}/config.json"})[0]


def test_all_problems_come_in_one_list(model):
    """A user would otherwise start the run once for each mistake."""
    values = {"temperature": -1, "beta": 0.1, "load_ref_policy": False, "pack_length": 10, "top_p": 0.9}
    config = from_values({"model_name_or_path": model} | values)
    text = str(ConfigError(problems(config, world_size=3, hf_config=HEADS | {"num_hidden_layers": 4})))
    assert text.startswith("5 problems in the configuration:")
    for word in ("temperature", "load_ref_policy", "pack_length", "top_p", "dataset_mixer_list is empty"):
        assert word in text


def test_one_mistake_makes_one_sentence(model):
    """A zero batch size also breaks the step count and the mini-batches; three messages would hide the cause."""
    assert len(problems_of(model, {"num_unique_prompts_rollout": 0})) == 1


def test_a_caller_with_its_own_data_and_rewards_needs_neither(model):
    """In Python a dataset and reward functions are passed directly."""
    values = {"dataset_mixer_list": [], "apply_verifiable_reward": False}
    assert len(problems_of(model, values)) == 2
    assert problems_of(model, values, has_dataset=True, num_reward_funcs=1) == []


def test_heads_that_do_not_split_are_named_with_the_sizes_that_do(model):
    """The message must hold the next thing to try."""
    found = problems_of(model, {"tensor_model_parallel_size": 2}, world_size=2, hf_config=HEADS)
    assert found == [
        "tensor_model_parallel_size=2 does not divide num_attention_heads=9; choose from {1, 3, 9}",
        "tensor_model_parallel_size=2 neither divides nor is a multiple of num_key_value_heads=3; choose from {1, 3, 9}",
    ]


def test_the_sizes_offered_pass_every_rule_of_the_model(model):
    """Nine ranks divide the heads but not the vocabulary: following the advice must not lead to the next error."""
    found = problems_of(model, {"tensor_model_parallel_size": 2}, world_size=2, hf_config=SIZES)
    assert all("choose from {1, 3}" in sentence for sentence in found)
    for size in (1, 3):
        values = {"tensor_model_parallel_size": size}
        assert problems_of(model, values, world_size=size, hf_config=SIZES) == []
    nine = problems_of(model, {"tensor_model_parallel_size": 9}, world_size=9, hf_config=SIZES)
    assert [sentence.split(";")[0].split("divide ")[1] for sentence in nine] == [
        "intermediate_size=1536",
        "padded vocabulary=49152",
    ]


def test_key_value_heads_may_be_copied(model):
    """Two key-value heads on four ranks are held twice each: legal in Megatron and in vLLM."""
    shape = {"num_attention_heads": 8, "num_key_value_heads": 2}
    values = {"tensor_model_parallel_size": 4, "vllm_tensor_parallel_size": 8}
    assert problems_of(model, values, world_size=4, hf_config=shape) == []


def test_the_vocabulary_is_judged_after_padding(model):
    """151936 columns do not split over 3, nor does their padded number; 100 columns pad to 128 and split over 2."""
    shape = {"num_attention_heads": 12, "vocab_size": 151_936}
    found = problems_of(model, {"tensor_model_parallel_size": 3}, world_size=3, hf_config=shape)
    assert found == ["tensor_model_parallel_size=3 does not divide padded vocabulary=151936; choose from {1, 2, 4}"]
    shape = {"num_attention_heads": 12, "vocab_size": 99}
    assert problems_of(model, {"tensor_model_parallel_size": 2}, world_size=2, hf_config=shape) == []


def test_layers_and_engines_are_judged_too(model):
    """An uneven pipeline or an engine that cannot split dies in another process, far from the cause."""
    values = {"pipeline_model_parallel_size": 4, "vllm_tensor_parallel_size": 2}
    found = problems_of(model, values, world_size=4, hf_config=SIZES)
    assert found[0].startswith("vllm_tensor_parallel_size=2 does not divide num_attention_heads=9; choose from {1, 3}")
    assert found[-1] == (
        "pipeline_model_parallel_size=4 does not divide num_hidden_layers=30; choose from {1, 2, 3, 5, 6, 10, 15, 30}"
    )


def test_a_context_longer_than_the_model_is_refused(model):
    """Positions the model never saw give noise, and vLLM refuses to start."""
    found = problems_of(model, {}, hf_config={"max_position_embeddings": 400})
    assert "max_prompt_token_length + response_length = 512" in found[0]
    assert found[0].endswith(
        "(max_prompt_token_length=256 by default and response_length=256 by default were not given)"
    )
    values = {"preset": "trl_seed", "max_completion_length": 6, "num_unique_prompts_rollout": 4}
    found = problems_of(model, values, hf_config={"max_position_embeddings": 400})
    assert found[0].endswith("shorten one of them (max_prompt_token_length=512 of preset trl_seed was not given)")
    found = problems_of(model, {"eval_response_length": 9}, hf_config={"max_position_embeddings": 400})
    assert "max_prompt_token_length + response_length = 512" in found[0]


def test_the_longer_length_of_an_evaluation_is_named(model):
    """Shortening response_length, as the sentence used to say, would change nothing."""
    values = {"eval_response_length": 1000}
    found = problems_of(model, values, hf_config={"max_position_embeddings": 600})
    assert "max_prompt_token_length + eval_response_length = 1256" in found[0]
    assert problems_of(model, values, hf_config={"max_position_embeddings": 1256}) == []
    found = problems_of(model, values | {"vllm_max_model_length": 600})
    assert "less than max_prompt_token_length + eval_response_length = 1256" in found[0]


def test_a_model_config_without_sizes_is_no_problem(model):
    """Unknown architectures are the models room's question, not a crash here."""
    hf_config = {"num_attention_heads": None, "hidden_size": "big", "num_hidden_layers": 0}
    assert problems_of(model, {"tensor_model_parallel_size": 2}, world_size=2, hf_config=hf_config) == []


def test_another_choice_is_refused(model):
    """A Config built in Python does not pass the loader's type check."""
    config = build({"model_name_or_path": model, "model_dtype": "float8", "dataset_mixer_list": ("a", "1.0")})
    found = problems(config, world_size=1)
    assert found == ["model_dtype='float8' must be one of bfloat16, float16, float32; did you mean float32?"]


@pytest.mark.parametrize(("name", "value"), [("seed", True), ("seed", 2.0), ("kl_estimator", True), ("beta", "0.1")])
def test_a_value_of_a_near_type_is_refused(model, name, value):
    """True counts as 1 in Python: a switch and a number set the wrong way round would pass."""
    base = {"model_name_or_path": model, "dataset_mixer_list": ("a", "1.0")}
    found = problems(build(base | {name: value}), world_size=1)
    assert len(found) == 1 and found[0].startswith(f"{name}={value!r} must be")
    assert problems(build(base | {"beta": 1}), world_size=1) == []


def test_every_number_has_a_range():
    """A new field would slip past the validator."""
    for name, setting in settings().items():
        assert bool({int, float} & set(alternatives(setting.type))) == (setting.range is not None), name


def test_the_layout_follows_the_parallel_section():
    """Sequence parallelism on auto belongs to tensor parallelism: alone it is an error in Megatron."""
    values = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 3}
    expected = Layout(world_size=12, tensor=2, pipeline=3, sequence_parallel=True)
    assert layout_of(from_values(values), 12) == expected
    assert layout_of(from_values(values), 12).data == 2
    assert layout_of(from_values(values | {"sequence_parallel": False}), 12) == dataclasses.replace(
        expected, sequence_parallel=False
    )
    assert layout_of(Config(), 2).sequence_parallel is False


def test_settings_that_need_reward_functions_or_must_not_have_them():
    """Found at step 1, Ray and the engines would have been started for nothing."""
    context = {"world_size": 1, "has_dataset": True}
    gdpo = from_values({"advantage_normalization_type": "gdpo", "model_name_or_path": "m"})
    assert any("gdpo weighs reward functions" in problem for problem in problems(gdpo, **context))
    assert not any("gdpo" in problem for problem in problems(gdpo, **context, num_reward_funcs=2))
    penalty = from_values({"non_stop_penalty": True, "model_name_or_path": "m"})
    assert warnings(penalty, world_size=1) == []
    (found,) = warnings(penalty, world_size=1, num_reward_funcs=1)
    assert found == "non_stop_penalty has no effect: rewards come from the functions passed to mgrpo.train alone"
    solved = from_values({"no_resampling_pass_rate": 0.9, "model_name_or_path": "m"})
    assert not any("no_resampling" in problem for problem in problems(solved, **context))
    assert any("no_resampling_pass_rate=0.9" in problem for problem in problems(solved, **context, num_reward_funcs=1))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"apply_verifiable_reward": False, "non_stop_penalty": True}, "apply_verifiable_reward is false; turn it on"),
        ({"num_samples_per_prompt_rollout": 1}, "needs num_samples_per_prompt_rollout of at least 2"),
        ({"max_active_rubrics": 0}, "max_active_rubrics=0 must be at least 1"),
    ],
)
def test_rubrics_that_cannot_evolve_are_refused(model, values, words):
    """Each would pay for proposals that no reward counts, or for criteria that nothing can be told apart by."""
    own = {"apply_evolving_rubric_reward": True}
    assert any(words in problem for problem in problems_of(model, own | values))
    assert problems_of(model, own) == []
    assert not any("rubric" in problem for problem in problems_of(model, values | {"max_active_rubrics": 3}))
    (found,) = warnings(from_values({"max_active_rubrics": 3}), world_size=1)
    assert found == "max_active_rubrics=3 has no effect without apply_evolving_rubric_reward"


def test_every_section_of_the_schema_is_a_dataclass_of_defaults():
    """`Config()` must exist: tests, tools and Python users start from it."""
    for section in typing.get_type_hints(Config).values():
        section()
    assert set(flat(Config())) == set(settings())


def test_a_whole_number_is_not_asked_to_be_finite(model):
    """It always is."""
    assert problems_of(model, {"vllm_num_engines": 0}) == ["vllm_num_engines=0 must be at least 1"]
    (found,) = problems_of(model, {"learning_rate": -1})
    assert found.startswith("learning_rate=-1.0 must be ") and "and finite" in found


def test_advice_to_python_has_no_flags(model):
    """Who writes `mgrpo.train({...})` cannot pass `--dataset_mixer_list`."""
    found = problems(from_values({"aggregation": "constant"}), world_size=1, has_dataset=False)
    assert any(sentence.endswith('name the training data: dataset_mixer_list=["PATH", "1.0"]') for sentence in found)
    assert any(sentence.endswith("needs the number to divide by: loss_denominator=N") for sentence in found)
    flags = problems(parse(["--aggregation", "constant"], defer=True), world_size=1)
    assert any(sentence.endswith("--dataset_mixer_list PATH 1.0") for sentence in flags)


@pytest.mark.parametrize(
    ("given", "top_k"),
    [
        ({"top_p": 0.95}, 2048),
        ({"min_p": 0.1, "preset": "trl_main"}, 2048),
        ({"top_p": 0.95, "eval_temperature": 0}, 64),
        ({"top_p": 0.95, "top_k": 8}, 8),
        ({"top_p": 0.95, "vllm_mode": "server", "vllm_server_base_url": ["http://h:1"]}, 0),
        ({}, 0),
    ],
)
def test_a_cut_alone_takes_what_engines_on_gpus_can_say(given, top_k):
    """top_p=0.95 alone is the most common cut; the set that is sampled from has to fit into what an engine returns."""
    config = widest_cut(from_values(given), 100_000)
    assert config.rollout.top_k == top_k
    assert sum(note.startswith(f"top_k is {top_k}") for note in config.notes) == (top_k > 8)
    assert not any("top_k" in sentence for sentence in problems(config, world_size=1)) or not top_k
    assert widest_cut(from_values({"top_p": 0.5}), 500).rollout.top_k == 500


def test_lengths_that_an_engine_has_no_angles_for_are_refused(model):
    """vLLM reads its table for yarn beyond the end: log-probabilities are NaN, or those of other positions."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 300, "rope_theta": 100.0}
    values = {"max_prompt_token_length": 1000, "response_length": 256, "pack_length": 2048}
    for rope in (
        {"rope_scaling": yarn},
        {"rope_parameters": yarn},
        {"rope_parameters": {"full_attention": yarn, "sliding_attention": {}}},
    ):
        (found,) = problems_of(model, values, hf_config={"max_position_embeddings": 4096, **rope})
        assert "= 1256 is more than the 1200 positions for which the model's yarn scaling" in found
    longer = {"max_position_embeddings": 4096, "rope_scaling": yarn | {"factor": 4.2}}
    assert problems_of(model, values, hf_config=longer) == []
