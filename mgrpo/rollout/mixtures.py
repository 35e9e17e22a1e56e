"""MoE layers of a model, and vLLM's routed experts of each token in them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.types import Routes


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixtures:
    """The MoE layers of a model."""

    layers: tuple[int, ...]
    count: int
    top_k: int
    num_layers: int
    """Number of all layers of the model."""

    @property
    def dtype(self) -> type[np.generic]:
        """Type of expert ids; a row of its highest value must not be a possible choice, see `Routes`."""
        return np.uint8 if self.count < 256 or (self.count == 256 and self.top_k > 1) else np.uint16

    @property
    def most_bytes(self) -> int:
        """Most bytes of a token in a server's answer, which is in base64."""
        return 2 * 2 * (self.num_layers * self.top_k)

    def routes(self, found: np.ndarray | None, prompt: int, sampled: int) -> Routes:
        """The rows of a completion.

        Args:
            found: `[tokens, layers, top_k]`, vLLM's answer for all layers of the model; None: no answer.
            prompt, sampled: numbers of tokens. Without sampled tokens there are no rows.
        Raises:
            ValueError: the answer's shape does not fit these tokens, except the last, or this model.
        """
        if found is None or not sampled:
            return np.zeros((0, len(self.layers), self.top_k), self.dtype)
        num_tokens = prompt + sampled - 1
        if len(found) != num_tokens or found.ndim != 3 or found.shape[1:] != (self.num_layers, self.top_k):
            raise ValueError(
                f"experts of shape {list(found.shape)}, expected {[num_tokens, self.num_layers, self.top_k]}: tokens, layers, experts"
            )
        return found[:, self.layers].astype(self.dtype)


def mixtures(folder: str) -> Mixtures:
    """MoE layers of the model in this folder, which must have some."""
    shape = shape_of(read_hf_config(folder))
    assert shape.experts is not None, "a dense model"
    layers = tuple(layer for layer in range(shape.num_layers) if shape.has_experts(layer))
    return Mixtures(layers=layers, count=shape.experts.count, top_k=shape.experts.top_k, num_layers=shape.num_layers)
