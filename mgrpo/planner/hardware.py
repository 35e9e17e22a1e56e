"""GPUs as their data sheets describe them, the cluster they make, and how much of a data sheet a run is assumed to reach.

Peak rates are the vendor's; what a program reaches of them is an assumption, a field of `Assumptions`, never a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One accelerator."""

    name: str
    tflops: float
    """Peak of dense bf16 matrix products, 1e12 operations a second."""
    memory_gib: float
    """What a data sheet calls GB of a GPU is nearly GiB; the difference is part of `Assumptions.reserved_gib`."""
    hbm_gb_s: float
    """Peak memory bandwidth, 1e9 bytes a second."""
    nvlink_gb_s: float
    """To the node's other GPUs, one direction, 1e9 bytes a second; PCIe's where there is no NVLink."""
    pcie_gb_s: float
    """To the host, one direction, 1e9 bytes a second."""

    @property
    def memory_bytes(self) -> int:
        """Memory of the device."""
        return int(self.memory_gib * GIB)


# NVIDIA's data sheets "A100 80GB" (SXM), "H100" (SXM5), "H200" (SXM), "HGX B200" (a GPU's eighth) and "L40S". Where only
# the rate with sparsity is printed, half of it; NVLink's figures add both directions, so half of those, too.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(name="A100-80", tflops=312, memory_gib=80, hbm_gb_s=2039, nvlink_gb_s=300, pcie_gb_s=32),
        Gpu(name="H100", tflops=989, memory_gib=80, hbm_gb_s=3350, nvlink_gb_s=450, pcie_gb_s=64),
        Gpu(name="H200", tflops=989, memory_gib=141, hbm_gb_s=4800, nvlink_gb_s=450, pcie_gb_s=64),
        Gpu(name="B200", tflops=2250, memory_gib=180, hbm_gb_s=7700, nvlink_gb_s=900, pcie_gb_s=64),
        # No NVLink; ECC takes a sixteenth of the 48 GB.
        Gpu(name="L40S", tflops=362, memory_gib=45, hbm_gb_s=864, nvlink_gb_s=32, pcie_gb_s=32),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What no configuration says and nothing here measures. Each is a flag of the command of the same name."""

    compute_efficiency: float = 0.55
    """Share of a GPU's peak that matrix products reach, communication and waiting apart."""
    expert_efficiency: float = 0.3
    """The same for experts, whose matrix products are many and small."""
    link_efficiency: float = 0.75
    """Share of NVLink's and the network's rate that collectives reach."""
    hbm_efficiency: float = 0.7
    """Share of the memory's rate that decoding and the optimizer reach."""
    allreduce_us: float = 15.0
    """Microseconds of a small all-reduce between an engine's workers, two a layer and decoding step."""
    decode_step_ms: float = 4.0
    """Milliseconds an engine spends on a decoding step beside the model: scheduling, sampling, launching."""
    reserved_gib: float = 4.0
    """Of each learner GPU: CUDA's context, NCCL's buffers, libraries, and what the data sheet's GB lacks in GiB."""
    fragmentation: float = 0.1
    """What the allocator wastes, as a share of activations and logits."""
    engine_workspace_gib: float = 4.0
    """Of each engine GPU, within vllm_gpu_memory_utilization: activations of a forward pass and CUDA graphs."""
    prompt_share: float = 0.5
    """Mean prompt, as a share of max_prompt_token_length."""
    response_share: float = 0.5
    """Mean completion, as a share of response_length."""
    pack_fill: float = 0.95
    """Tokens of a mean pack, as a share of pack_length."""


@dataclass(frozen=True, slots=True)
class Flops:
    """Operations of matrix products; those of experts are apart, whose products are smaller."""

    dense: float = 0.0
    experts: float = 0.0

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.dense + other.dense, self.experts + other.experts)

    def __mul__(self, times: float) -> Flops:
        return Flops(self.dense * times, self.experts * times)

    @property
    def total(self) -> float:
        """Both."""
        return self.dense + self.experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal nodes of equal GPUs."""

    gpu: Gpu
    nodes: int
    gpus_per_node: int = 8
    network_gbps: float = 400.0
    """Of each GPU's network card, one direction, 1e9 bits a second."""
    assumed: Assumptions = Assumptions()

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus_per_node

    def compute_seconds(self, work: Flops, *, gpus: float) -> float:
        """Seconds that `gpus` of them take for matrix products spread evenly."""
        at_peak = work.dense / self.assumed.compute_efficiency + work.experts / self.assumed.expert_efficiency
        return at_peak / (gpus * self.gpu.tflops * 1e12)

    @property
    def hbm_bytes_s(self) -> float:
        """Bytes a second that a GPU's memory is assumed to deliver."""
        return self.gpu.hbm_gb_s * 1e9 * self.assumed.hbm_efficiency

    def link_bytes_s(self, span: int) -> float:
        """Bytes a second and GPU that a group reaches whose ranks lie among `span` consecutive ones.

        Within a node it is NVLink; a group that leaves its node is as fast as its slowest part, the network.
        """
        is_local = span <= self.gpus_per_node
        gb_s = self.gpu.nvlink_gb_s if is_local else self.network_gbps / 8
        return gb_s * 1e9 * self.assumed.link_efficiency
