"""Makes the coding agent's model: half a million parameters that know how to repair a file, and mostly do not.

    python examples/coding_agent/make_model.py [--seed N] [--out FOLDER]        # about six minutes on two CPU cores

Supervised training on conversations that repair the file, then briefly on conversations of which most do nothing and half of
the rest slip: groups of eight samples then hold right and wrong repairs, which is what GRPO learns from.
"""

from __future__ import annotations

import sys
from pathlib import Path

from task import TEMPLATE, draw, split_problems, transcript

sys.path.insert(0, str(Path(__file__).parents[1]))
from tool_model import Lesson, main

LESSON = Lesson(
    template=TEMPLATE,
    marks=["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"],
    draw=draw,
    transcript=transcript,
    known=split_problems,
    vocab_size=384,
    max_length=512,
    clean_steps=1500,
    clean_loss=0.02,
)

if __name__ == "__main__":
    main(LESSON, description=__doc__.splitlines()[0], folder=Path(__file__).parent / "model")
