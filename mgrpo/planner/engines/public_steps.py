"""The fastest published steps of RL, by size of model and GPU, to show beside a plan.

Answers and clusters differ from run to run, so that tokens a second and GPU are compared, prompts with answers.
"""

from __future__ import annotations

from dataclasses import dataclass

LIKE = 1.5
"""Models of one kind are alike up to this ratio of their weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicStep:
    """One run, GRPO in bfloat16."""

    model: str
    weights: float
    """1e9."""
    has_experts: bool
    gpu: str
    gpus: int
    sequences: int
    tokens: int
    """Mean of a prompt with its answer."""
    seconds: float
    source: str

    @property
    def tokens_s_gpu(self) -> float:
        """Tokens a second and GPU."""
        return self.sequences * self.tokens / self.seconds / self.gpus

    @property
    def sentence(self) -> str:
        """The reported step in words."""
        return (
            f"{self.source}: {self.model} on {self.gpus} {self.gpu}, {self.sequences:,} x {self.tokens:,} tokens in "
            f"{self.seconds:.0f} s, {self.tokens_s_gpu:,.0f} tokens a second and GPU"
        )


_V5, _V6 = "NeMo RL v0.5, one step ahead", "NeMo RL v0.6, one step ahead"
_V7 = "NeMo RL v0.7, one step ahead"
# https://docs.nvidia.com/nemo/rl, "Performance" of each release.
STEPS = (
    PublicStep(
        model="Llama 3.1 8B",
        weights=8.0,
        has_experts=False,
        gpu="H100",
        gpus=16,
        sequences=2048,
        tokens=1123,
        seconds=64.8,
        source=_V5,
    ),
    PublicStep(
        model="Qwen3-32B",
        weights=32.8,
        has_experts=False,
        gpu="H100",
        gpus=64,
        sequences=2048,
        tokens=3252,
        seconds=161,
        source=_V7,
    ),
    PublicStep(
        model="Qwen3-30B-A3B",
        weights=30.5,
        has_experts=True,
        gpu="H100",
        gpus=32,
        sequences=2048,
        tokens=3201,
        seconds=141,
        source=_V7,
    ),
    PublicStep(
        model="Qwen3-235B-A22B",
        weights=235.1,
        has_experts=True,
        gpu="H100",
        gpus=256,
        sequences=512,
        tokens=5707,
        seconds=203,
        source=_V5,
    ),
    PublicStep(
        model="DeepSeek-V3",
        weights=671.0,
        has_experts=True,
        gpu="H100",
        gpus=512,
        sequences=512,
        tokens=710,
        seconds=64.1,
        source=_V6,
    ),
)


def public_step(*, weights: float, has_experts: bool, gpu: str) -> PublicStep | None:
    """The published step of the model nearest in size, on the same GPU; None where none is alike.

    Args:
        weights: 1e9.
    """

    def ratio(step: PublicStep) -> float:
        return max(step.weights / weights, weights / step.weights)

    alike = [step for step in STEPS if (step.has_experts, step.gpu) == (has_experts, gpu) and ratio(step) <= LIKE]
    return min(alike, key=ratio, default=None)
