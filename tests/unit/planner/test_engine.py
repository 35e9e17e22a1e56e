"""Engines: weights, KV cache and the time of sampling, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mgrpo.config.schema import Engine
from mgrpo.layout import InferLayout
from mgrpo.models.family import shape_of
from mgrpo.planner.engines.decoding import decoder, generation_time
from mgrpo.planner.engines.engine_memory import SequenceCache, engine_memory, sequence_cache, worker_weights
from mgrpo.planner.engines.kernels import fixed_s
from mgrpo.planner.engines.transfers import all_gather_s, all_reduce_s
from mgrpo.planner.hardware import GIB, GPUS, Assumptions, Hardware
from mgrpo.planner.plan_command import shipped_config
from mgrpo.planner.work import Workload
from tests.unit.planner.test_work import MOE

QWEN_32B = shape_of(shipped_config("qwen2.5-32b"))
HARDWARE = Hardware(gpu=GPUS["H100"], nodes=1)
WORK = Workload(
    prompts=16,
    sequences=256,
    prompt_tokens=100.0,
    response_tokens=1000.0,
    longest_response=2000,
    shares_prompts=False,
)


def memory_of(workers: int, hardware: Hardware = HARDWARE, **settings):
    engine = Engine(vllm_tensor_parallel_size=workers, **settings)
    return engine_memory(QWEN_32B, engine, hardware, longest=10_240, dtype_bytes=2)


def test_cache_is_what_weights_and_workspace_leave() -> None:
    """32.76 billion weights over 4 workers; a token has 2 x 64 layers x 2 of 8 heads x 128 x 2 bytes = 64 KiB on each."""
    memory = memory_of(4)
    norms = 3 / 4 * (2 * 64 + 1) * 5120 * 2
    assert memory.weights == pytest.approx(32_763_876_352 * 2 / 4 + norms, rel=1e-6)
    assert memory.sequence.per_token == 64 << 10 and memory.sequence.state == 0
    assert memory.cache == int(0.9 * 80 * GIB) - memory.weights - 4 * GIB
    assert memory.longest_sequences == memory.cache // (64 << 10) // 10_240 == 84


def test_heads_are_copied_where_workers_are_more() -> None:
    """16 workers share 8 key-value heads: each holds one, as 8 workers do."""
    assert memory_of(16).sequence == memory_of(8).sequence
    assert memory_of(8).sequence.per_token == 32 << 10


def test_an_8_bit_cache_holds_twice_the_tokens() -> None:
    """One byte a value, without what few scales take."""
    assert memory_of(4, vllm_kv_cache_dtype="fp8").sequence.per_token == 32 << 10
    assert memory_of(4, vllm_kv_cache_dtype="fp8").cache == memory_of(4).cache


def test_whole_experts_weigh_as_much_as_their_cuts_unless_one_is_left_over() -> None:
    """Of 129 experts among 8 workers the first has 17, and 129 / 8 of each cut: 48 layers of 3 x 768 x 2048 for the difference."""
    shape = shape_of(shipped_config("qwen3-30b-a3b"))
    assert shape.experts is not None
    one_more = dataclasses.replace(shape, experts=dataclasses.replace(shape.experts, count=129))
    whole, cut = (
        [engine_memory(each, Engine(vllm_tensor_parallel_size=8, **given), HARDWARE, longest=1024, dtype_bytes=2).weights for each in (shape, one_more)]
        for given in ({"vllm_enable_expert_parallel": True}, {})
    )  # fmt: skip
    assert whole[0] == cut[0]
    assert whole[1] - cut[1] == (17 - 129 / 8) * 48 * 3 * 768 * 2048 * 2


def cache_of(name: str, workers: int) -> SequenceCache:
    return sequence_cache(shape_of(shipped_config(name)), workers=workers, dtype_bytes=2, element_bytes=2)


@pytest.mark.parametrize("workers", [1, 16])
def test_a_latent_vector_is_cached_whole_on_every_worker(workers: int) -> None:
    """DeepSeek-V3: 61 layers x (512 + 64) x 2 bytes, 70 KB a token as its paper says (arXiv:2412.19437, table 1 of 2505.09343).

    Its 128 key-value heads of 192 and 128 would be 57 times as much, and an engine would be planned for a handful of sequences.
    """
    assert cache_of("deepseek-v3", workers).per_token == 61 * (512 + 64) * 2 == pytest.approx(70.272e3)


def test_a_delta_net_has_a_state_and_no_cache() -> None:
    """Qwen3-Next: 12 of 48 layers cache 2 x 2 heads x 256; 36 keep 32 states of 128 x 128 in fp32 and 3 tokens of 8192 channels."""
    one, eight = cache_of("qwen3-next-80b-a3b", 1), cache_of("qwen3-next-80b-a3b", 8)
    assert one.per_token == 12 * 2 * 2 * 256 * 2
    assert one.state == 36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2) == 8 * eight.state
    assert one.of(1000) - one.of(0) == 1000 * one.per_token
    # Each token that is decoded reads all keys and values before it, and reads and writes the states.
    assert one.read(0, 10) == 50 * one.per_token + 10 * 2 * one.state


def test_a_window_caches_and_reads_no_more_than_it_sees() -> None:
    """gpt-oss: every other layer sees 128 tokens. At 10,000 tokens they are 1 % of the others' cache, not half of all."""
    cache = cache_of("gpt-oss-120b", 8)
    layer = 2 * 64 * 2
    assert dict(cache.by_window) == {None: 18 * layer, 128: 18 * layer}
    assert cache.of(100) == 100 * 36 * layer
    assert cache.of(10_000) == 18 * layer * (10_000 + 128)
    assert cache.read(5000, 5010) == pytest.approx(18 * layer * 10 * (5005 + 128))


def test_an_engine_without_room_for_a_sequence_has_no_time() -> None:
    """61 GiB of weights, 4 of workspace: 7 GiB remain of 72, 256 KiB a token; of 48 not even the weights fit."""
    assert memory_of(1).longest_sequences == 2
    memory = memory_of(1, vllm_gpu_memory_utilization=0.6)
    assert memory.longest_sequences == 0
    assert generation_time(QWEN_32B, Engine(), memory, WORK, HARDWARE, dtype_bytes=2) is None


def test_decoding_reads_weights_once_a_step_and_every_cached_token() -> None:
    """256 sequences of 1000 tokens on 64 slots: 4 rounds of 1000 steps, at 3350 GB/s x 0.83."""
    settings = Engine(vllm_tensor_parallel_size=4, vllm_max_num_seqs=64)
    memory = engine_memory(QWEN_32B, settings, HARDWARE, longest=2100, dtype_bytes=2)
    time = generation_time(QWEN_32B, settings, memory, WORK, HARDWARE, dtype_bytes=2)
    rate = 3350e9 * 0.83
    assert time.num_steps == 256 * 1000 / 64 and time.running == 64
    read = (32_763_876_352 - 152_064 * 5120) * 2 / 4  # not the embedding
    assert time.weights == pytest.approx(4000 * read / rate, rel=1e-3)
    assert time.cache == pytest.approx(256 * 1000 * (100 + 500) * (64 << 10) / rate)
    # 12 passes over 64 rows of float32 logits, beside the host.
    assert time.overhead == pytest.approx(4000 * (4e-3 + 64 * 152_064 * 4 * 12 / rate))
    # 64 layers of attention and 9 short kernels, and the head.
    assert time.kernels == pytest.approx(4000 * (64 * (10.6 + 9 * 3.05) + 3.05) * 1e-6)
    # Two sums a layer in a kernel of vLLM's own: 655 kB, three quarters twice at 450 GB/s x 0.3.
    assert time.exchange == pytest.approx(4000 * 128 * (5.1e-6 + 64 * 5120 * 2 * 1.5 / 135e9))


def test_more_engines_and_no_partners_take_less_time() -> None:
    """What the planner would recommend: the same GPUs as two engines, or one worker that waits for none."""
    wide, narrow = Engine(vllm_tensor_parallel_size=8), Engine(vllm_tensor_parallel_size=4, vllm_num_engines=2)
    alone = Engine(vllm_tensor_parallel_size=1)
    seconds = {}
    for settings in (wide, narrow, alone):
        memory = engine_memory(QWEN_32B, settings, HARDWARE, longest=2100, dtype_bytes=2)
        seconds[settings] = generation_time(QWEN_32B, settings, memory, WORK, HARDWARE, dtype_bytes=2)
    assert seconds[alone].exchange == 0 < seconds[wide].exchange
    assert seconds[narrow].cache == pytest.approx(seconds[wide].cache)
    assert seconds[narrow].num_steps <= seconds[wide].num_steps


def test_few_sequences_touch_few_experts() -> None:
    """A step of one sequence reads 8 of 128 experts a layer; one of many reads them all, but for the last ones of a batch."""
    settings = Engine(vllm_tensor_parallel_size=1)
    memory = engine_memory(MOE, settings, HARDWARE, longest=2100, dtype_bytes=2)
    few = dataclasses.replace(WORK, sequences=1, prompts=1, longest_response=1000)
    one = generation_time(MOE, settings, memory, few, HARDWARE, dtype_bytes=2)
    many = generation_time(MOE, settings, memory, WORK, HARDWARE, dtype_bytes=2)
    experts = 48 * 128 * 3 * 2048 * 768
    dense = 30_532_122_624 - 151_936 * 2048 - experts
    rate = 3350e9 * 0.83
    assert one.weights / one.num_steps == pytest.approx((dense + experts / 16) * 2 / rate, rel=1e-3)
    assert many.weights / many.num_steps == pytest.approx((dense + experts) * 2 / rate, rel=4e-2)


def test_slower_memory_by_assumption_takes_longer() -> None:
    """Efficiencies are the user's to correct, so they must count."""
    slow = dataclasses.replace(HARDWARE, assumed=Assumptions(decode_efficiency=0.415))
    settings = Engine(vllm_tensor_parallel_size=4)
    memory = engine_memory(QWEN_32B, settings, HARDWARE, longest=2100, dtype_bytes=2)
    fast_time = generation_time(QWEN_32B, settings, memory, WORK, HARDWARE, dtype_bytes=2)
    slow_time = generation_time(QWEN_32B, settings, memory, WORK, slow, dtype_bytes=2)
    assert slow_time.cache == pytest.approx(2 * fast_time.cache)


def test_a_batch_waits_for_its_longest_answer() -> None:
    """4 sequences at once of 500 to 2000 tokens: as many steps as the longest has, with fewer and fewer sequences.

    Means alone would say 1000 steps of 4.
    """
    settings = Engine(vllm_tensor_parallel_size=4)
    memory = engine_memory(QWEN_32B, settings, HARDWARE, longest=2100, dtype_bytes=2)
    recorded = dataclasses.replace(
        WORK, sequences=4, prompts=4, response_lengths=(500.0, 600.0, 900.0, 2000.0), response_tokens=1000.0
    )
    time = generation_time(QWEN_32B, settings, memory, recorded, HARDWARE, dtype_bytes=2)
    assert time.num_steps == 2000
    assert time.running == pytest.approx(4000 / time.num_steps, rel=0.02)


def test_sums_and_gathers_take_as_long_as_was_measured() -> None:
    """Of a node in vLLM's own kernel: 4.6 us for 8 KiB on 2 H100, 20 for 1 MiB on 8; over two nodes 42 to 50 us, and 89 for 1 MiB.

    Elsewhere NCCL's constants (src/graph/tuning.cc): a tree of 6.8 us and hops up and down, a ring of 6.6 us and hops.
    """
    cluster = Hardware(gpu=GPUS["H100"], nodes=4)

    def sum_us(size: float, ranks: int, on: Hardware = cluster) -> float:
        return all_reduce_s(size, ranks=ranks, hardware=on) * 1e6

    assert [sum_us(8 << 10, ranks) for ranks in (1, 2, 4, 8)] == pytest.approx([0, 4.4, 4.9, 5.2], rel=0.2, abs=0)
    assert sum_us(1 << 20, 8) == pytest.approx(19.4, rel=0.1)
    assert sum_us(32 << 10, 16) == pytest.approx(46, rel=0.1) and sum_us(1 << 20, 16) == pytest.approx(89, rel=0.02)
    assert sum_us(0, 32) == pytest.approx(6.8 + 2 * (7 * 0.6 + 2 * 15))
    assert sum_us(0, 2, Hardware(gpu=GPUS["L40S"], nodes=1)) == pytest.approx(6.8 + 2 * 1.0)
    ring = [all_gather_s(0, ranks=ranks, hardware=cluster) * 1e6 for ranks in (8, 32)]
    assert ring == pytest.approx([6.6 + 7 * 0.6, 6.6 + 28 * 0.6 + 3 * 8.1])
    # 4 MB: the part of three other nodes enters through 8 cards at 37.5 GB/s; inside, seven eighths pass at 337.5 GB/s.
    more = all_gather_s(4e6, ranks=32, hardware=cluster) - all_gather_s(0, ranks=32, hardware=cluster)
    assert more == pytest.approx(4e6 * 3 / 4 / 8 / 37.5e9, rel=0.2) and more >= 4e6 * 3 / 4 / 8 / 37.5e9


def test_kernels_take_a_time_that_no_token_explains() -> None:
    """Qwen3-235B on 8 H100: 94 layers of 27 us for experts beside what they read; 128 tokens took 241 us a layer where they were measured."""
    shape = shape_of(shipped_config("qwen3-235b-a22b"))
    assert fixed_s(shape) == pytest.approx((94 * (7 * 3.05 + 10.6 + 27) + 3.05) * 1e-6)
    read = 128 * 3 * 4096 * 1536 / 8 * 2
    assert 27e-6 + read / HARDWARE.decode_bytes_s == pytest.approx(241e-6, rel=0.05)


def test_latent_attention_takes_as_long_as_it_was_measured() -> None:
    """DeepSeek-V3, 4 heads a worker, 1 and 16 sequences of 1,024 tokens: 83 and 108 us a layer on an H100, most of which no byte explains.

    Every worker makes the latent vectors, so that 7168 x 2112 weights a layer are read whole.
    """
    shape = shape_of(shipped_config("deepseek-v3"))
    assert fixed_s(shape) == pytest.approx((61 * 75 + 58 * (6 * 3.05 + 27) + 3 * 5 * 3.05 + 3.05) * 1e-6)
    cluster = Hardware(gpu=GPUS["H100"], nodes=4)
    settings = Engine(vllm_tensor_parallel_size=32)
    memory = engine_memory(shape, settings, cluster, longest=2100, dtype_bytes=2)
    found = decoder(shape, settings, memory, WORK, cluster, dtype_bytes=2)
    projections = 7168 * 2112 + 4 * (1536 * 192 + 512 * 256 + 128 * 7168)
    for sequences, measured_us in ((1, 83), (16, 108)):
        read = (projections + sequences * 1024 * 576) * 2
        assert read / cluster.decode_bytes_s * 1e6 + 75 == pytest.approx(measured_us, rel=0.12)
    weights, _ = found.step_s(np.array([1.0]))
    chosen = 58 * (8 * 3 * 7168 * 2048 + 7168 * 256 + 3 * 7168 * 2048) + 3 * 3 * 7168 * 18432 + 7168 * 129_280
    assert weights[0] * cluster.decode_bytes_s / 2 == pytest.approx(61 * projections + chosen / 32, rel=0.01)


def test_heads_that_draft_take_memory_beside_the_model() -> None:
    """DeepSeek-V3's head is 23 GB of bfloat16 for all workers together, where its joining product lies on each; it caches one layer more."""
    shape, cluster = shape_of(shipped_config("deepseek-v3")), Hardware(gpu=GPUS["H200"], nodes=2)
    alone, drafting = (
        engine_memory(shape, Engine(vllm_tensor_parallel_size=16, **more), cluster, longest=2100, dtype_bytes=2)
        for more in ({}, {"vllm_speculative_method": "mtp", "vllm_num_speculative_tokens": 1})
    )
    head = 256 * 3 * 7168 * 2048 + 3 * 7168 * 2048 + 7168 * 256 + 61_000 * 3072
    assert (drafting.weights - alone.weights) * 8 == pytest.approx(head + 16 * 2 * 7168**2, rel=0.01)
    assert drafting.sequence.per_token * 61 == alone.sequence.per_token * 62
    assert drafting.cache < alone.cache


def test_experts_over_nodes_read_a_part_of_the_weights_on_each_worker() -> None:
    """Qwen3-235B, 32 copies of the attention with a 32nd of the experts each, beside four engines of 8 tensor ranks.

    A step reads 28 GiB less embedding instead of 54; each copy caches its own sequences; tokens go to experts and back in
    every layer, over 32 GPUs.
    """
    shape, cluster = shape_of(shipped_config("qwen3-235b-a22b")), Hardware(gpu=GPUS["H100"], nodes=4)
    wide = InferLayout(tensor=1, data=32, expert_parallel=True)
    experts = 94 * 128 * 3 * 4096 * 1536
    whole = 235_093_634_560
    assert worker_weights(shape, wide) == pytest.approx(whole - experts + experts / 32, rel=1e-3)
    settings = Engine(vllm_tensor_parallel_size=8)
    memory = engine_memory(shape, settings, cluster, longest=2100, dtype_bytes=2)
    narrow = decoder(shape, settings, memory, WORK, cluster, dtype_bytes=2)
    spread = dataclasses.replace(narrow, layout=wide, sequences=256, most=256)
    weights, exchange = spread.step_s(np.array([256.0]))
    read = whole - experts - 151_936 * 4096 + experts / 32
    assert weights[0] == pytest.approx(read * 2 / (3350e9 * 0.83), rel=1e-2)
    assert exchange[0] == pytest.approx(2 * 94 * all_gather_s(256 * 4096 * 2, ranks=32, hardware=cluster))
    assert weights[0] < 0.6 * narrow.step_s(np.array([64.0]))[0][0]
