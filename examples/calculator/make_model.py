"""Makes the calculator's model: half a million parameters that know how to call the tool, and mostly do not.

    python examples/calculator/make_model.py [--seed N] [--out FOLDER]        # about two minutes on two CPU cores

Supervised training on conversations with two calls, then briefly on conversations of which most guess and half of the rest
slip: groups of eight samples then hold right and wrong answers, which is what GRPO learns from.
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
    vocab_size=192,
    max_length=512,
    clean_steps=300,
    clean_loss=0.055,
)

if __name__ == "__main__":
    main(LESSON, description=__doc__.splitlines()[0], folder=Path(__file__).parent / "model")
