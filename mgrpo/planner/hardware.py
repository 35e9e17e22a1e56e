"""GPUs by their data sheets, clusters of them, and the share of a peak rate that a run is assumed to reach.

Peak rates are the vendor's; the share that a program reaches is assumed (a field of `Assumptions`), not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One accelerator."""

    name: str
    tflops: float
    """Peak of dense bf16 matrix products, 1e12 operations per second."""
    fp32_tflops: float
    """The same in float32, without TF32."""
    memory_gib: float
    """The data sheets' GB are nearly GiB; the difference is part of `Assumptions.reserved_gib`."""
    hbm_gb_s: float
    """Peak memory bandwidth, 1e9 bytes per second."""
    nvlink_gb_s: float
    """1e9 bytes per second to the other GPUs of the node, one direction; PCIe's rate without NVLink."""
    pcie_gb_s: float
    """1e9 bytes per second to the host, one direction."""

    @property
    def memory_bytes(self) -> int:
        """Memory of the device."""
        return int(self.memory_gib * GIB)


# NVIDIA's data sheets "A100 80GB" (SXM, also with 40 GB), "H100" (SXM5), "H200" (SXM), "HGX B200" (an eighth per GPU), "L40S" and the white paper of "Ada" (RTX 4090, with fp32 accumulation). Where
# only the rate with sparsity is printed, half of it; NVLink's figures add both directions, so half of those as well.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(name="A100-40", tflops=312, fp32_tflops=19.5, memory_gib=40, hbm_gb_s=1555, nvlink_gb_s=300, pcie_gb_s=32),
        Gpu(name="A100-80", tflops=312, fp32_tflops=19.5, memory_gib=80, hbm_gb_s=2039, nvlink_gb_s=300, pcie_gb_s=32),
        Gpu(name="H100", tflops=989, fp32_tflops=67, memory_gib=80, hbm_gb_s=3350, nvlink_gb_s=450, pcie_gb_s=64),
        Gpu(name="H200", tflops=989, fp32_tflops=67, memory_gib=141, hbm_gb_s=4800, nvlink_gb_s=450, pcie_gb_s=64),
        Gpu(name="B200", tflops=2250, fp32_tflops=75, memory_gib=180, hbm_gb_s=7700, nvlink_gb_s=900, pcie_gb_s=64),
        # No NVLink; ECC takes a sixteenth of the 48 GB.
        Gpu(name="RTX4090", tflops=165, fp32_tflops=83, memory_gib=24, hbm_gb_s=1008, nvlink_gb_s=32, pcie_gb_s=32),
        Gpu(name="L40S", tflops=362, fp32_tflops=92, memory_gib=45, hbm_gb_s=864, nvlink_gb_s=32, pcie_gb_s=32),
    )
}


_DEVICE_NAMES = {
    "NVIDIA A100-SXM4-40GB": "A100-40",
    "NVIDIA A100-SXM4-80GB": "A100-80",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H200": "H200",
    "NVIDIA B200": "B200",
    "NVIDIA GeForce RTX 4090": "RTX4090",
    "NVIDIA L40S": "L40S",
}
"""CUDA's names of the GPUs. Other forms of a chip, such as PCIe cards, have other peaks."""


def gpu_of(device_name: str) -> Gpu | None:
    """The GPU that CUDA calls `device_name`; None where its data sheet is not known."""
    return GPUS.get(_DEVICE_NAMES.get(device_name, ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Numbers that no configuration defines and nothing here measures. The command has a flag of the same name for each."""

    compute_efficiency: float = 0.6
    """Share of a GPU's peak that layers' matrix products reach. This and the next are derived from runs that others published
    (docs/figures.md); a single large product reaches 0.79 forward and 0.72 backward on an H100 (benchmarks/ops-cuda.json)."""
    expert_efficiency: float = 0.25
    """The same for experts, whose products are many and small: grouped ones reached 0.29 and 0.20 there."""
    attention_efficiency: float = 0.35
    """The same for attention: FlashAttention 2 on an H100; FlashAttention 3 and cuDNN reach 0.55 (arXiv:2407.08608)."""
    elementwise_passes: float = 1.0
    """Times the least memory traffic that norms, rotation, gates and the loss cause; about 3 where no kernels are fused."""
    host_layer_ms: float = 4.8
    """Milliseconds in which the host starts the kernels of a layer, forward and backward, for one pack; with experts `host_experts_ms`."""
    host_experts_ms: float = 10.5
    """The same of a layer with experts: measured on an H100 (benchmarks/training-cuda.json)."""
    tensor_exposed: float = 1.0
    """Share of the traffic between tensor ranks that products do not hide."""
    expert_exposed: float = 1.0
    """Share of the traffic of experts that products do not hide."""
    overlap_cost: float = 0.15
    """Share of hidden traffic's time that products lose: NCCL takes about 20 of 132 multiprocessors (arXiv:2412.19437, section 3.2.2)."""
    gradient_bytes: float = 10.0
    """Bytes of memory traffic for each weight and pack whose product does not add to the gradient buffer itself: a bf16 gradient
    read, and the fp32 buffer read and written."""
    link_efficiency: float = 0.75
    """Share of NVLink's and the network's rate that collectives reach."""
    hbm_efficiency: float = 0.7
    """Share of the memory bandwidth that norms, gates and the optimizer reach."""
    decode_efficiency: float = 0.83
    """Share of the memory bandwidth that an engine's kernels reach, besides a fixed time each (planner/engines/kernels.py)."""
    host_adam_gweights_s: float = 0.1
    """1e9 weights per second that a learner's host updates (optimizer_cpu_offload), on one thread: OMP_NUM_THREADS is 1."""
    decode_step_ms: float = 4.0
    """Milliseconds of a decoding step outside the model and sampling: the host's scheduling, inputs and outputs."""
    piece_us: float = 12.6
    """Microseconds of host time for each piece of a tensor that a weight sync cuts out or puts into place."""
    reserved_gib: float = 4.0
    """GiB per learner GPU for the CUDA context, NCCL, libraries, and for data-sheet GB that are less than GiB."""
    fragmentation: float = 0.1
    """Memory that the allocator wastes, as a share of each micro-batch's transient memory."""
    engine_workspace_gib: float = 4.0
    """GiB per engine GPU, within vllm_gpu_memory_utilization, for activations of a step of 8192 tokens and CUDA graphs."""
    prompt_share: float = 0.5
    """Mean prompt length as a share of max_prompt_token_length."""
    response_share: float = 0.5
    """Mean completion length as a share of response_length."""
    response_spread: float = 0.9
    """Standard deviation of the logarithm of completion lengths, which are taken to be log-normal and cut at response_length."""
    response_lengths: tuple[float, ...] = ()
    """Lengths of completions that a run has recorded, in place of both."""
    pack_fill: float = 0.95
    """Mean tokens in a pack as a share of pack_length."""


@dataclass(frozen=True, slots=True)
class Flops:
    """Operations of matrix products, by the share of a GPU's peak that they reach."""

    dense: float = 0.0
    experts: float = 0.0
    """Products of experts, which are smaller."""
    attention: float = 0.0
    """Queries x keys and scores x values."""
    own: float = 0.0
    """Layers that are Megatron's own also where others are Transformer Engine's (`work.fused_weights`): learners never round them."""
    head: float = 0.0
    """The LM head, which is not computed in 8 bits where layers are."""

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            self.dense + other.dense,
            self.experts + other.experts,
            self.attention + other.attention,
            self.own + other.own,
            self.head + other.head,
        )

    def __mul__(self, times: float) -> Flops:
        return Flops(
            self.dense * times, self.experts * times, self.attention * times, self.own * times, self.head * times
        )

    @property
    def total(self) -> float:
        """All of them."""
        return self.dense + self.experts + self.attention + self.own + self.head


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Equal nodes of equal GPUs."""

    gpu: Gpu
    nodes: int
    gpus_per_node: int = 8
    network_gbps: float = 400.0
    """Rate of each GPU's network card, one direction, 1e9 bits per second."""
    assumed: Assumptions = Assumptions()
    in_8_bits: tuple[str, ...] = ()
    """Parts of `Flops` whose operands learners round to fp8, of which GPUs since Hopper compute twice as much in a second."""
    dispatches_by_node: bool = False
    """DeepEP or HybridEP moves tokens to experts, not Megatron's "alltoall" dispatcher."""

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus_per_node

    def compute_seconds(
        self, work: Flops, *, gpus: float, dtype_bytes: int = 2, in_8_bits: tuple[str, ...] = ()
    ) -> float:
        """Seconds of matrix products spread evenly over `gpus` GPUs; 4 bytes: in float32."""
        assumed = self.assumed
        at_peak = work.head / assumed.compute_efficiency + work.attention / assumed.attention_efficiency
        at_peak += work.dense / assumed.compute_efficiency / (2 if "dense" in in_8_bits else 1)
        at_peak += work.own / assumed.compute_efficiency / (2 if "own" in in_8_bits else 1)
        at_peak += work.experts / assumed.expert_efficiency / (2 if "experts" in in_8_bits else 1)
        tflops = self.gpu.tflops if dtype_bytes < 4 else self.gpu.fp32_tflops
        return at_peak / (gpus * tflops * 1e12)

    @property
    def hbm_bytes_s(self) -> float:
        """Assumed bytes per second from a GPU's memory."""
        return self.gpu.hbm_gb_s * 1e9 * self.assumed.hbm_efficiency

    @property
    def decode_bytes_s(self) -> float:
        """Assumed bytes per second that an engine reads in decoding."""
        return self.gpu.hbm_gb_s * 1e9 * self.assumed.decode_efficiency

    def link_bytes_s(self, span: int) -> float:
        """Assumed bytes per second and GPU for a group within `span` consecutive ranks.

        Within a node the link is NVLink; a group across nodes is as fast as its slowest link, the network.
        """
        is_local = span <= self.gpus_per_node
        gb_s = self.gpu.nvlink_gb_s if is_local else self.network_gbps / 8
        return gb_s * 1e9 * self.assumed.link_efficiency
