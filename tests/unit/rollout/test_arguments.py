"""What this machine cannot do is said before anything starts."""

from __future__ import annotations

import json
import os
import socket

import pytest

from mgrpo.models.adapters import LINEAR_LAYERS
from mgrpo.moving import from_values
from mgrpo.rollout.vllm import engine_arguments
from mgrpo.rollout.vllm.engine_set import engine_bundles
from mgrpo.rollout.vllm.ray_processes.node import address_problems


def test_kernels_of_gpus_are_asked_for_where_learners_are(monkeypatch):
    """An engine's machine may lack what the learners of another one have."""
    monkeypatch.setattr(engine_arguments, "kernel_problems", lambda config, *, has_gpus: [f"{has_gpus=}"])
    config = from_values({})
    for gpus, learners, expected in ((["0", "1"], 1, ["has_gpus=True"]), ([], 1, ["has_gpus=False"]), ([], 0, [])):
        monkeypatch.setattr(engine_arguments, "serving_gpus", lambda gpus=gpus: gpus)
        found = engine_arguments.machine_problems(
            config, num_local_learners=learners, hf_config={"head_dim": 64}, starts_engines=True
        )
        assert found == expected


def test_a_model_of_float32_may_be_served_and_trained_on_gpus(monkeypatch):
    """The quickstart and the proof of the layouts are float32."""
    monkeypatch.setattr(engine_arguments, "serving_gpus", lambda: ["0", "1"])
    config = from_values({"model_dtype": "float32"})
    assert (
        engine_arguments.machine_problems(config, num_local_learners=1, hf_config={"head_dim": 64}, starts_engines=True)
        == []
    )


@pytest.mark.parametrize(
    ("learners", "starts_engines", "words"),
    [
        (4, True, None),
        (8, False, None),
        (8, True, "need 4 GPUs, but of 8 on this machine 8 belong to learners"),
        (9, False, "9 learners were started on this machine, which has 8 GPUs"),
        (9, True, "9 learners were started on this machine, which has 8 GPUs"),
    ],
)
def test_engines_need_gpus_on_rank_0s_machine_alone(monkeypatch, learners, starts_engines, words):
    """Learners on 4 GPUs of one node and on 8 of another, engines on the 4 that are left: nothing is missing on the second."""
    monkeypatch.setattr(engine_arguments, "serving_gpus", lambda: list("01234567"))
    config = from_values({"vllm_num_engines": 4})
    found = engine_arguments.machine_problems(
        config, num_local_learners=learners, hf_config={"head_dim": 64}, starts_engines=starts_engines
    )
    assert len(found) == (words is not None) and all(words in sentence for sentence in found)


def test_a_reward_model_has_a_gpu_of_its_own(monkeypatch):
    """A learner or an engine has taken the memory already, or finds it taken in the middle of a step."""
    monkeypatch.setattr(engine_arguments, "serving_gpus", lambda: ["0", "1", "2"])
    for gpu, count in ((None, 0), (3, 0), (2, 1)):
        found = engine_arguments.machine_problems(
            from_values({"reward_model_gpu": gpu}),
            num_local_learners=1,
            hf_config={"head_dim": 64},
            starts_engines=True,
        )
        assert len(found) == count and all("reward_model_gpu=2 is one of the GPUs" in sentence for sentence in found)


@pytest.mark.parametrize(
    ("settings", "length"), [({}, 150), ({"eval_response_length": 300}, 400), ({"eval_response_length": 10}, 150)]
)
def test_an_engine_has_room_for_the_longer_of_both_kinds_of_completion(settings, length):
    """vLLM cuts what does not fit without a word."""
    config = from_values({"max_prompt_token_length": 100, "response_length": 50, "model_name_or_path": "m", **settings})
    assert engine_arguments.engine_args(config, on_gpu=False)["max_model_len"] == length


@pytest.mark.parametrize("on_gpu", [False, True])
def test_only_engines_of_several_workers_name_their_executor(on_gpu):
    """vLLM would choose Ray's inside an actor, which serves neither two GPUs of one bundle nor a CPU."""
    for workers, backend in ((1, None), (2, "mp")):
        config = from_values({"model_name_or_path": "m", "vllm_tensor_parallel_size": workers})
        args = engine_arguments.engine_args(config, on_gpu=on_gpu)
        assert args.get("distributed_executor_backend") == backend and args["tensor_parallel_size"] == workers
    assert (
        engine_arguments.engine_args(config, on_gpu=on_gpu, spans_nodes=True)["distributed_executor_backend"] == "ray"
    )


APART = {"use_peft": True, "lora_sync": "adapter"}


@pytest.mark.parametrize(
    ("values", "rank", "targets"),
    [
        ({}, 16, [*LINEAR_LAYERS]),
        ({"lora_r": 3, "lora_target_modules": ["q_proj", "w2"]}, 8, ["q_proj", "w2"]),
        ({"lora_r": 1}, 1, [*LINEAR_LAYERS]),
    ],
)
def test_engines_have_room_for_an_adapter_only_where_it_is_sent(values, rank, targets):
    """Without room vLLM refuses the request; with it for nothing, every token takes longer."""
    names = ("enable_lora", "max_loras", "max_lora_rank", "lora_target_modules")
    for sync, expected in (("adapter", [True, 1, rank, targets]), ("merged", [None] * 4)):
        config = from_values({"model_name_or_path": "m", **APART, "lora_sync": sync, **values})
        args = engine_arguments.engine_args(config, on_gpu=False)
        assert [args.get(name) for name in names] == expected


@pytest.mark.parametrize(
    ("values", "num_local_learners", "load_format"),
    [
        ({}, 1, "dummy"),
        ({"use_peft": True, "lora_sync": "merged"}, 4, "dummy"),
        (APART, 1, "hf"),
        ({}, 0, "hf"),
    ],
)
def test_engines_read_the_model_only_where_no_sync_brings_all_of_it(values, num_local_learners, load_format):
    """Read for nothing, a large model costs minutes of a start; not read where no sync comes, an evaluation is of noise."""
    config = from_values({"model_name_or_path": "m", **values})
    kind = engine_arguments.policy_kind(config, on_gpu=False, num_local_learners=num_local_learners)
    assert kind.args(False)["load_format"] == load_format


@pytest.mark.parametrize("on_gpu", [False, True])
def test_what_engines_cannot_do_with_adapters_is_said(monkeypatch, tmp_path, on_gpu):
    """Triton's kernels stop at float32 in the first request, and a model in Megatron's layout is never loaded."""
    monkeypatch.setattr(engine_arguments, "serving_gpus", lambda: ["0", "1"] if on_gpu else [])

    def found(**values):
        config = from_values({"model_name_or_path": str(tmp_path), **APART, **values})
        return engine_arguments.machine_problems(
            config, num_local_learners=1, hf_config={"head_dim": 64}, starts_engines=True
        )

    assert found() == found(model_dtype="float16") == found(model_dtype="float32", lora_sync="merged") == []
    precise = found(model_dtype="float32")
    assert len(precise) == on_gpu and all("kernels for adapters on a GPU are of bfloat16" in line for line in precise)
    (tmp_path / "megatron.json").touch()
    (problem,) = found()
    assert (
        problem.startswith("lora_sync=adapter needs a model that engines can load") and found(lora_sync="merged") == []
    )


@pytest.mark.parametrize(
    ("workers", "copies", "gpus_a_node", "bundles"),
    [
        (2, 1, None, [{"CPU": 1}]),
        (8, 1, 8, [{"GPU": 8, "CPU": 1}]),
        (3, 1, 2, [{"GPU": 1, "CPU": 1}, {"GPU": 1}, {"GPU": 1}]),
        (2, 2, None, [{"CPU": 1}]),
        (8, 4, 8, [{"GPU": 8, "CPU": 1}]),
        (32, 32, 8, [{"GPU": 8, "CPU": 1}] * 4),
        (32, 8, 8, [{"GPU": 8, "CPU": 1}] * 4),
        # Copies are not divided, and all parts are equal.
        (12, 6, 7, [{"GPU": 6, "CPU": 1}] * 2),
        (9, 3, 5, [{"GPU": 3, "CPU": 1}] * 3),
    ],
)
def test_an_engine_is_one_bundle_where_it_fits_on_a_node(workers, copies, gpus_a_node, bundles):
    """Ray divides no bundle between nodes, and may place several bundles on several."""
    assert engine_bundles(workers, copies=copies, gpus_a_node=gpus_a_node) == bundles


def test_a_copy_of_attention_that_no_node_has_room_for_is_refused():
    """Ray would wait for the bundle for ever."""
    with pytest.raises(RuntimeError, match=r"vllm_tensor_parallel_size=8 workers, and no node .* more than 4 GPUs"):
        engine_bundles(16, copies=2, gpus_a_node=4)


def test_an_engine_on_gpus_has_its_own_queues_allocator_and_address(monkeypatch):
    """Those of a learner would make its copies wait for each other, and its memory pools fail."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    config = from_values({"model_name_or_path": "m"})
    found = engine_arguments.engine_environment(config, on_gpu=True, is_local=True)
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"] == "8" and found["VLLM_HOST_IP"] == "127.0.0.1"
    assert found["PYTORCH_ALLOC_CONF"] == found["PYTORCH_CUDA_ALLOC_CONF"] == ""
    assert found["VLLM_USE_FLASHINFER_SAMPLER"] == "0"


@pytest.mark.parametrize(
    ("settings", "learners", "threads"),
    [
        ({}, 2, 8),
        ({"async_steps": 1, "use_rho_correction": True}, 2, 6),
        ({"async_steps": 1, "use_rho_correction": True}, 0, 8),
        ({"async_steps": 1, "use_rho_correction": True}, 9, 1),
        ({"vllm_num_engines": 2, "vllm_tensor_parallel_size": 2}, 2, 2),
    ],
)
def test_an_engine_has_the_cores_that_learners_do_not_use_at_that_time(
    monkeypatch, tmp_path, settings, learners, threads
):
    """One thread leaves cores idle while learners wait; threads for a tiny model only wait for each other."""
    config = from_values({"model_name_or_path": str(tmp_path), **settings})
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8))

    def found() -> int:
        own = {"on_gpu": False, "is_local": True, "num_local_learners": learners}
        return int(engine_arguments.engine_environment(config, **own)["OMP_NUM_THREADS"])

    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(engine_arguments.WIDE_BYTES - 1)
        assert found() == 1
        weights.truncate(engine_arguments.WIDE_BYTES)
    assert found() == threads


@pytest.mark.parametrize("on_gpu", [False, True])
def test_engines_on_other_nodes_use_the_learners_adapters_and_interfaces_of_their_own(monkeypatch, on_gpu):
    """They have the environment of `ray start`; rank 0's eth0 would be a node's without that name."""
    network = {"NCCL_IB_HCA": "mlx5", "UCX_TLS": "rc"}
    interfaces = {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0"}
    for name, value in {**network, **interfaces, "SOME_NCCL": "1"}.items():
        monkeypatch.setenv(name, value)
    config = from_values({"model_name_or_path": "m", "ray_address": "head:6379"})
    found = engine_arguments.engine_environment(config, on_gpu=on_gpu, is_local=False)
    assert {name: value for name, value in found.items() if name in network} == network
    assert not {"SOME_NCCL", "VLLM_HOST_IP", *interfaces} & found.keys()
    local = engine_arguments.engine_environment(config, on_gpu=on_gpu, is_local=True)
    assert not network.keys() & local.keys(), "a private Ray has rank 0's environment"


@pytest.mark.parametrize(("given", "expected"), [(None, "INFO"), ("ERROR", "ERROR")])
def test_an_engine_says_what_it_has_chosen_unless_the_user_wants_less(monkeypatch, given, expected):
    """Attention backend, size of the cache, runner: at a level above, none of these is said."""
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    if given:
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", given)
    found = engine_arguments.engine_environment(from_values({"model_name_or_path": "m"}), on_gpu=True, is_local=True)
    assert found["VLLM_LOGGING_LEVEL"] == expected


@pytest.mark.parametrize(("given", "expected"), [(None, ""), ("1", ""), ("12", "12")])
def test_an_engine_on_a_gpu_loads_with_more_threads_than_a_learner(monkeypatch, given, expected):
    """1 is what mgrpo, torchrun and Ray set: with it a large model is loaded by one core. Empty: none is given."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    found = engine_arguments.engine_environment(from_values({"model_name_or_path": "m"}), on_gpu=True, is_local=True)
    assert found["OMP_NUM_THREADS"] == expected


def test_the_core_is_in_the_actors_process_on_a_cpu_unless_the_user_wants_it_apart(monkeypatch):
    """On a GPU it never is: there the host would schedule, and handle tokens, in turns."""
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    cases = ((1, False), (2, False), (1, True))
    assert [engine_arguments.has_local_core(n, on_gpu=on_gpu) for n, on_gpu in cases] == [True, False, False]
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    assert not engine_arguments.has_local_core(1, on_gpu=False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"pass_config": {"fuse_allreduce_rms": False}}),
        (
            {"mode": 3, "pass_config": {"fuse_norm_quant": True}},
            {"mode": 3, "pass_config": {"fuse_allreduce_rms": False, "fuse_norm_quant": True}},
        ),
        ({"pass_config": {"fuse_allreduce_rms": True}}, {"pass_config": {"fuse_allreduce_rms": True}}),
    ],
)
def test_no_kernel_is_compiled_with_whatever_nvcc_is_there(given, expected):
    """Engines with several workers would compile FlashInfer's when they start, on every node, without a word."""
    values = {"model_name_or_path": "m", "vllm_tensor_parallel_size": 2}
    if given:
        values["vllm_extra_args"] = json.dumps({"compilation_config": given})
    assert engine_arguments.engine_args(from_values(values), on_gpu=True)["compilation_config"] == expected
    assert engine_arguments.engine_args(from_values(values), on_gpu=False).get("compilation_config", {}) == given


@pytest.mark.parametrize(
    ("on_gpu", "values", "extra", "expected"),
    [
        (True, {}, {}, 8192),
        (True, {"response_length": 20_000}, {}, 8192),
        (True, {"response_length": 20_000}, {"enable_chunked_prefill": False}, 20_050),
        (True, {"vllm_max_num_seqs": 9000}, {}, 9000),
        (True, {}, {"max_num_batched_tokens": 1024}, 1024),
        (False, {}, {}, 4096),
        (False, {"response_length": 20_000}, {}, 20_050),
        (False, {"response_length": 20_000}, {"enable_chunked_prefill": True}, 4096),
    ],
)
def test_a_step_of_an_engine_has_room_for_prompts_beside_completions(on_gpu, values, extra, expected):
    """vLLM alone reads 2048 tokens a step on a GPU, and refuses fewer than a whole prompt, or one of each sequence, needs."""
    given = {"model_name_or_path": "m", "max_prompt_token_length": 50, "vllm_extra_args": json.dumps(extra), **values}
    assert engine_arguments.engine_args(from_values(given), on_gpu=on_gpu)["max_num_batched_tokens"] == expected


def test_an_engine_finds_the_model_from_any_working_directory(monkeypatch, tmp_path):
    """On another node it has that of `ray start`, and vLLM takes a relative path for the name of a model on the Hub."""
    monkeypatch.chdir(tmp_path)
    values = {"model_name_or_path": "models/m", "tokenizer_name_or_path": "models/t", "stop_strings": ["x"]}
    args = engine_arguments.engine_args(from_values(values), on_gpu=False)
    monkeypatch.chdir("/")
    assert (args["model"], args["tokenizer"]) == (f"{tmp_path}/models/m", f"{tmp_path}/models/t")


def test_an_engine_rounds_as_the_settings_say():
    """Logits in fp32 on one side only, or an 8-bit cache that is not asked for, make two policies of one."""
    plain = engine_arguments.engine_args(from_values({"model_name_or_path": "m"}), on_gpu=True)
    assert plain["kv_cache_dtype"] == "auto" and "hf_overrides" not in plain
    given = {"model_name_or_path": "m", "cast_lm_head_to_fp32": True, "use_fp8_kv_cache": True}
    args = engine_arguments.engine_args(from_values(given), on_gpu=True)
    assert args["kv_cache_dtype"] == "fp8" and args["hf_overrides"] == {"head_dtype": "float32"}


@pytest.mark.parametrize(
    ("flags", "head_dim", "dtype", "words"),
    [
        ("fpu avx512f", 64, "fp8", None),
        ("fpu amx_tile", 32, "fp8_e5m2", None),
        ("fpu avx2", 80, "auto", None),
        ("fpu avx2", 64, "fp8", "vllm_kv_cache_dtype=fp8 needs a CPU with AVX-512 or AMX, which this machine's is not"),
        ("fpu avx512f", 80, "fp8", "needs a model with a head_dim of a multiple of 32 on a CPU, this one has 80; use auto"),
        ("fpu avx512f", 64, "fp8_per_token_head", "is for GPUs; on a CPU use fp8, fp8_e5m2 or auto"),
    ],
)  # fmt: skip
def test_an_8_bit_cache_needs_a_kernel_of_this_cpu(monkeypatch, tmp_path, flags, head_dim, dtype, words):
    """vLLM says so only when the engine has loaded the model, or at the first prompt."""
    (tmp_path / "cpuinfo").write_text(f"flags : {flags}\n")
    monkeypatch.setattr(engine_arguments, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(engine_arguments, "serving_gpus", list)
    config = from_values({"vllm_kv_cache_dtype": dtype})
    found = engine_arguments.machine_problems(
        config, num_local_learners=0, hf_config={"head_dim": head_dim}, starts_engines=True
    )
    assert len(found) == (words is not None) and all(words in sentence for sentence in found)


def test_an_engine_has_a_tokenizer_only_for_stop_strings():
    """Turning every token into text costs time; without text a stop string is never found."""
    values = {"model_name_or_path": "/m", "tokenizer_name_or_path": "/t"}
    plain = engine_arguments.engine_args(from_values(values), on_gpu=False)
    assert plain["skip_tokenizer_init"] and "tokenizer" not in plain
    for given, expected in ((values, "/t"), ({"model_name_or_path": "/m"}, "/m")):
        args = engine_arguments.engine_args(from_values({**given, "stop_strings": ["</answer>"]}), on_gpu=False)
        assert not args["skip_tokenizer_init"] and args["tokenizer"] == expected


def test_all_that_a_machine_lacks_is_said_at_once(monkeypatch):
    """A second start for the second reason costs as much as the first."""
    monkeypatch.setattr(engine_arguments, "kernel_problems", lambda config, *, has_gpus: ["a kernel is missing"])
    monkeypatch.setattr(engine_arguments, "serving_gpus", list)
    sentences = engine_arguments.machine_problems(
        from_values({}), num_local_learners=1, hf_config={"head_dim": 48}, starts_engines=True
    )
    assert len(sentences) == 2 and "head_dim=48 is not served" in sentences[1]


def test_an_address_where_no_ray_cluster_answers_is_a_problem_of_the_configuration():
    """Ray tries for minutes, and says in the end that it could not connect to another address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert address_problems(f"127.0.0.1:{port}") == []
    (sentence,) = address_problems(f"127.0.0.1:{port}")
    assert f"ray_address=127.0.0.1:{port}: no Ray cluster answers there" in sentence and "ray start --head" in sentence
    (sentence,) = address_problems("no-such-host.invalid:6379")
    assert "no-such-host.invalid:6379" in sentence
    assert address_problems(None) == address_problems("auto") == []


SHARED = {"vllm_mode": "colocate", "vllm_num_engines": 2, "vllm_tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("learners", "settings", "words"),
    [
        (4, {"vllm_kv_cache_mb": 4096}, None),
        (
            2,
            {"vllm_kv_cache_mb": 4096},
            "this machine has 2 learners, and vllm_num_engines=2 x vllm_tensor_parallel_size=2 = 4",
        ),
        (4, {}, "needs vllm_kv_cache_mb, the MiB of a GPU for an engine's KV cache"),
    ],
)
def test_workers_share_the_learners_gpus_one_each(monkeypatch, learners, settings, words):
    """A cache sized by what is free when the engine starts leaves the learner nothing, or ends it out of memory."""
    monkeypatch.setattr(engine_arguments, "serving_gpus", lambda: list("0123"))
    found = engine_arguments.machine_problems(
        from_values(SHARED | settings), num_local_learners=learners, hf_config={"head_dim": 64}, starts_engines=True
    )
    assert len(found) == (words is not None) and all(words in sentence for sentence in found)


def test_an_engine_on_a_shared_gpu_can_sleep_and_has_the_cache_that_it_was_given():
    """Only memory of vLLM's own pool is given up."""
    model = {"model_name_or_path": "a/model"}
    settings = {**model, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True, "vllm_kv_cache_mb": 4096}
    on_gpu = engine_arguments.engine_args(from_values(settings), on_gpu=True)
    assert (on_gpu["enable_sleep_mode"], on_gpu["kv_cache_memory_bytes"]) == (True, 4 << 30)
    assert "enable_sleep_mode" not in engine_arguments.engine_args(from_values(settings), on_gpu=False)
    alone = engine_arguments.engine_args(from_values(model), on_gpu=True)
    assert "kv_cache_memory_bytes" not in alone
    # The learner has taken some of the GPU when vLLM asks whether this much is free.
    assert on_gpu["gpu_memory_utilization"] == 0.3 and alone["gpu_memory_utilization"] == 0.9


@pytest.mark.parametrize(
    ("hf_config", "expected"),
    [
        ({"kv_lora_rank": 512}, {"attention_backend": "CPU_MLA"}),
        ({"linear_num_key_heads": 16}, {"enable_prefix_caching": False, "mamba_ssm_cache_dtype": "float32"}),
        ({}, {"enable_prefix_caching": True}),
    ],
)
def test_what_a_model_needs_on_a_cpu_is_set(tmp_path, hf_config, expected):
    """On a machine with AMX a sync would find the weights of latent attention given up; a hybrid would not start at all."""
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    config = from_values({"model_name_or_path": str(tmp_path)})
    args = engine_arguments.engine_args(config, on_gpu=False)
    assert args.items() >= expected.items()
    assert "attention_backend" not in engine_arguments.engine_args(config, on_gpu=True)


@pytest.mark.parametrize(
    ("settings", "sizes", "words"),
    [
        ({}, (512, 64), None),
        ({}, (256, 64), "kv_lora_rank=256 is not served by vLLM on a CPU, which supports kv_lora_rank=512, qk_rope_head_dim=64"),
        ({}, (512, 32), "qk_rope_head_dim=32 is not served"),
        ({"vllm_kv_cache_dtype": "fp8"}, (512, 64), "vllm_kv_cache_dtype=fp8 is for models without latent attention on a CPU"),
    ],
)  # fmt: skip
def test_a_cpu_serves_latent_attention_of_one_size(monkeypatch, settings, sizes, words):
    """With another vLLM dies when it loads the model, or at the first prompt."""
    monkeypatch.setattr(engine_arguments, "serving_gpus", list)
    hf_config = dict(zip(("kv_lora_rank", "qk_rope_head_dim"), sizes, strict=True)) | {"head_dim": 48}
    found = engine_arguments.machine_problems(
        from_values(settings), num_local_learners=0, hf_config=hf_config, starts_engines=True
    )
    assert len(found) == (words is not None) and all(words in sentence for sentence in found)
