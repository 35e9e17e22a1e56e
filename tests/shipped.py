"""The configurations under examples/, and the sizes of the models that they name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples"
GAMES = EXAMPLES / "game" / "games.py"
FILES = sorted(
    str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.yaml") if path.parent.name not in ("cluster", "model")
)
SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
"""Of the model that users convert into examples/smollm2/model."""
