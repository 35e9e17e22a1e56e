"""What is probably not meant is said, and what a run chooses by itself."""

import pytest

from mgrpo.config.derived import with_routing
from mgrpo.config.validate import problems, warnings
from mgrpo.moving import from_values


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"dataset_mixer_list": ["a", "1"]}, "amount 1 of a means a single row; 1.0 is the whole dataset"),
        ({"warmup_ratio": 0.1, "warm_up_steps": 5}, "warm_up_steps=5 is ignored"),
        ({"vllm_num_engines": 17}, "without work"),
        (
            {"num_mini_batches": 16, "num_samples_per_prompt_rollout": 1, "filter_zero_std_samples": False},
            "16 completions per step in num_mini_batches=16 parts leave some of 2",
        ),
        ({"learning_rate": 1e-5}, "learning_rate=1e-05 is high"),
        ({"delta": 1.1}, "delta=1.1 is not above 1 + clip_higher = 1.2"),
        ({"aggregation": "luspo"}, "aggregation=luspo is meant for ratio_level=sequence, got token"),
        (
            {"num_samples_per_prompt_rollout": 1, "filter_zero_std_samples": False},
            "the baseline is the mean of the batch",
        ),
        ({"alpha": 0.3}, "alpha=0.3 has no effect without ref_policy_update_freq"),
        (
            {"advantage_normalization_type": "package.module:f", "advantage_std": "sample"},
            "advantage_std=sample has no effect without a named advantage_normalization_type",
        ),
        ({"async_steps": 0, "max_staleness": 4}, "max_staleness=4 has no effect without async_steps above 0"),
        ({"vllm_server_timeout": 9}, "vllm_server_timeout=9 has no effect without vllm_mode=server"),
        (
            {"vllm_mode": "server", "vllm_server_base_url": ["http://a:1"], "vllm_kv_cache_mb": 9},
            "vllm_kv_cache_mb=9 has no effect without engines that the run starts (vllm_mode=ray or colocate)",
        ),
        (
            {"cast_lm_head_to_fp32": True, "model_dtype": "float32"},
            "cast_lm_head_to_fp32=true has no effect without a model_dtype of 16 bits",
        ),
        ({"inflight_kv": "keep"}, "inflight_kv=keep has no effect without inflight_updates=true"),
        (
            {"async_steps": 2, "policy_loss": "package.module:loss"},
            "is trained on tokens of policies up to 2 steps older and has to correct for that itself",
        ),
        ({"rho_mask_upper_bound": 3.0}, "rho_mask_upper_bound=3 has no effect without use_rho_correction=true"),
        (
            {"policy_loss": "reinforce", "ratio_level": "sequence"},
            "ratio_level=sequence has no effect without a policy",
        ),
        ({"lr_scheduler_type": "constant", "warm_up_steps": 3}, "warm_up_steps=3 has no effect without another lr_"),
        (
            {"tensor_model_parallel_size": 2, "pack_length": 513},
            "pack_length=513 is rounded up to 514, a multiple of 2:",
        ),
        ({"context_parallel_size": 2, "pack_length": 513}, "pack_length=513 is rounded up to 516, a multiple of 4:"),
        ({"cp_strategy": "ulysses"}, "cp_comm_type=a2a has no effect without context_parallel_size above 1"),
        (
            {"recompute_granularity": "full", "recompute_modules": ["mlp", "moe"]},
            "recompute_modules=mlp moe has no effect without recompute_granularity=selective",
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe"]},
            "recompute_modules: moe has no effect on a model without experts",
        ),
        (
            {
                "activation_offloading": True,
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": 2,
            },
            "activation_offloading=true has no effect on chunks of one layer, the last of which stays on the GPU",
        ),
        (
            {"optimizer_offload_fraction": 0.5},
            "optimizer_offload_fraction=0.5 has no effect without optimizer_cpu_offload=true",
        ),
        (
            {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"},
            "exp_avg_dtype=bfloat16, exp_avg_sq_dtype=bfloat16 has no effect without use_precision_aware_optimizer=true",
        ),
        (
            {"routing_replay": "learner", "num_epochs": 2},
            "routing_replay=learner has no effect on a model without experts",
        ),
        (
            {
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": 2,
                "num_mini_batches": 16,
                "num_samples_per_prompt_rollout": 1,
                "filter_zero_std_samples": False,
            },
            "interleaved stages take that many at a time, so some are empty",
        ),
        ({"tensor_model_parallel_size": 2, "num_learners_per_node": [1, 1]}, "some matrices are split across nodes"),
        (
            {
                "pipeline_model_parallel_size": 2,
                "num_mini_batches": 16,
                "num_samples_per_prompt_rollout": 1,
                "filter_zero_std_samples": False,
            },
            "16 completions per step make fewer micro-batches than pipeline_model_parallel_size=2",
        ),
    ],
)
def test_what_is_probably_not_meant_is_a_warning(model, values, words):
    """Legal, and almost always a mistake."""
    base = model | {"learning_rate": 1e-6}
    context = {"world_size": 2, "hf_config": {"hidden_size": 4096, "num_hidden_layers": 4}}
    assert warnings(from_values(base), **context) == []
    config = from_values(base | values)
    assert problems(config, **context) == []
    found = warnings(config, **context)
    assert [words in sentence for sentence in found].count(True) == 1
    assert len(found) == 1 or values["num_samples_per_prompt_rollout"] == 1


SERVERS = {"vllm_mode": "server", "vllm_server_base_url": ["http://h:1"]}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_epochs": 2}, None),
        ({"num_mini_batches": 2}, None),
        ({}, "without a second optimizer step on the same batch (num_epochs, num_mini_batches)"),
        ({"num_epochs": 2, "use_vllm_logprobs": True}, "with use_vllm_logprobs=true"),
    ],
)
@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_routing_is_replayed_where_there_is_something_to_replay(values, words, key):
    """The first update sees the weights that chose the experts: replaying their choice changes nothing."""
    config = from_values({"routing_replay": "learner"} | values)
    found = warnings(config, world_size=1, hf_config={key: 8})
    assert len(found) == (words is not None)
    assert all(words in sentence for sentence in found)


@pytest.mark.parametrize(
    ("hf_config", "values", "on_gpu", "mode", "words"),
    [
        ({}, {}, True, "auto", None),
        ({"num_experts": 8}, {}, True, "rollout", "are also those that are trained"),
        ({"num_local_experts": 8}, {}, False, "rollout", "are also those that are trained"),
        (
            {"num_experts": 8},
            {"vllm_enable_prefix_caching": False},
            True,
            "none",
            "vllm_enable_prefix_caching=true alone",
        ),
        (
            {"num_experts": 8},
            {"vllm_enable_prefix_caching": False},
            False,
            "rollout",
            "are also those that are trained",
        ),
        ({"num_experts": 8}, SERVERS, True, "none", "if they were started for it"),
        ({"num_experts": 8}, SERVERS | {"routing_replay": "rollout"}, True, "rollout", None),
        ({"num_experts": 8}, {"routing_replay": "learner"}, True, "learner", None),
    ],
)
def test_who_sets_nothing_replays_what_engines_can_say(hf_config, values, on_gpu, mode, words, monkeypatch):
    """Without replay a mixture trains other experts than those that sampled: its user must see which of both it is, and why."""
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    config = with_routing(from_values(values), hf_config, on_gpu=on_gpu)
    assert config.parallel.routing_replay == mode
    said = [note for note in config.notes if note.startswith("routing_replay is ")]
    assert len(said) == (words is not None)
    assert all(note.startswith(f"routing_replay is {mode}") and words in note for note in said)
    assert (config.provenance.sources.get("routing_replay") == "derived") == (words is not None)


@pytest.mark.parametrize(
    ("context", "tensor", "length"), [(1, 1, None), (2, 1, 604), (2, 4, 608), (3, 2, 606), (1, 4, 604)]
)
def test_a_pack_length_that_is_rounded_up_is_said(context, tensor, length):
    """Packs longer than what was asked for explain an out-of-memory."""
    values = {"context_parallel_size": context, "tensor_model_parallel_size": tensor, "pack_length": 601}
    found = [line for line in warnings(from_values(values), world_size=12 * tensor) if "rounded" in line]
    assert len(found) == (length is not None)
    assert all(f"pack_length=601 is rounded up to {length}," in line for line in found)


def test_functions_replace_all_that_only_verifiers_read():
    """Who sets a weight, a judge or a limit of programs believes that it counts."""
    replaced = {
        "apply_evolving_rubric_reward": True,
        "code_api_url": "http://h",
        "code_apply_perf_penalty": True,
        "llm_judge_model": "m",
        "max_length_verifier_max_length": 9,
        "non_stop_penalty": True,
        "remap_verifier": ("a=b",),
        "remote_verifier_concurrency": 2,
        "verification_reward": 2.0,
        "verifier_modules": ["mine"],
        "verifier_weights": ["math=2"],
    }
    kept = {"verifier_timeout": 3.0, "verifier_memory_mb": 999, "verifier_workers": 2, "apply_verifiable_reward": False}
    functions = {"reward_funcs": ["accuracy_reward"]}
    names = ", ".join(replaced)
    assert warnings(from_values(replaced | kept), world_size=1) == []
    assert warnings(from_values(functions | kept), world_size=1) == []
    assert warnings(from_values(replaced | kept | functions), world_size=1) == [
        f"{names} has no effect: rewards come from reward_funcs alone"
    ]
    for own in (replaced | kept, kept | functions):
        (found,) = warnings(from_values(own), world_size=1, num_reward_funcs=1)
        expected = names if "verifier_modules" in own else "reward_funcs"
        assert found == f"{expected} has no effect: rewards come from the functions passed to mgrpo.train alone"
