"""The cost of training on a document, by which ranks are balanced and shared prompts are judged."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """a * tokens + b * tokens^2 for a document, in any unit.

    A transformer layer of width h does 24 h^2 operations per token in its matrices (12 h^2 weights) and 4 h s for a
    token that attends to s others, so b / a = 4 h / 24 h^2 = 1 / (6 h) (arXiv:2104.04473, section 4.1). Causal
    attention needs half of that, but its kernels run at about half the speed of matrix products, so the ratio holds.
    The default is h = 4096, as in models of 7 to 8 billion parameters: both parts are equal at 24,576 tokens.
    """

    a: float = 1.0
    b: float = 1 / (6 * 4096)

    @classmethod
    def of_width(cls, hidden_size: int) -> Cost:
        """The cost in a model whose layers are `hidden_size` wide."""
        return cls(b=1 / (6 * hidden_size))

    def of(self, length: int) -> float:
        """One document of `length` tokens."""
        return self.a * length + self.b * length * length
