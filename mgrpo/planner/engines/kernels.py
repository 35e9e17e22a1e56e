"""Times of a decoding step's kernels: a fixed time each, however few tokens they have, and bytes at a share of the memory's rate.

Both are fitted to NVIDIA's measurements of vLLM 0.19's kernels on an H100 SXM, each replayed in a CUDA graph
(github.com/ai-dynamo/aiconfigurator, commit 095f58a, systems/data/h100_sxm), for 1 to 256 tokens in bfloat16:

    kernel                fixed us    share of 3350 GB/s    shapes    median error
    product               3.05        0.82                  483       9 %
    attention             10.6        0.84                  36        9 %
    experts (fused)       27          0.86                  126       10 %
    latent attention      75          0.82, cache 0.84      480       5 % (with its projections and norms)

No kernel is shorter than a product of next to nothing, so that norms, rotations, gates and writes of the cache count as one each.
"""

from __future__ import annotations

from functools import cache

from mgrpo.models.memory import FP32_BYTES, padded_vocab
from mgrpo.models.shape import ModelShape

SHORT_US, ATTENTION_US, EXPERTS_US, LATENT_US = 3.05, 10.6, 27.0, 75.0
SAMPLER_PASSES = 12
"""Times that vLLM's sampler reads or writes the logits in float32: a copy, temperature, log-softmax, softmax, random numbers and
their quotient, the largest, and the sampled token's rank (vllm/v1/sample)."""


@cache
def fixed_s(shape: ModelShape) -> float:
    """Seconds that all kernels of a decoding step take besides their reads."""
    return 1e-6 * (SHORT_US + sum(_layer_us(shape, layer) for layer in range(shape.num_layers)))


def _layer_us(shape: ModelShape, layer: int) -> float:
    """Two norms, products before and after attention, rotation with the norms of heads, and the cache's write; then the MLP."""
    attention = SHORT_US * (2 + 1 + 1) + ATTENTION_US
    if shape.latent:
        attention = LATENT_US
    if experts := shape.experts_of(layer):
        shared = 3 * bool(experts.shared_ffn)
        return SHORT_US * (2 + 1 + shared) + attention + EXPERTS_US
    return SHORT_US * (2 + 3) + attention


def sampled_bytes(shape: ModelShape) -> float:
    """Bytes that sampling one token reads and writes; every worker of a copy samples."""
    return SAMPLER_PASSES * padded_vocab(shape) * FP32_BYTES
