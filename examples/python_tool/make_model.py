"""Makes the model of the tool `python`: half a million parameters that know how to write code, and mostly guess.

    python examples/python_tool/make_model.py [--seed N] [--out FOLDER]        # about two minutes on two CPU cores

Supervised training on conversations with the right code, then briefly on conversations of which most guess and half of the
rest slip: groups of eight samples then hold right and wrong answers, which is what GRPO learns from.
"""

from __future__ import annotations

import sys
from pathlib import Path

from task import TEMPLATE, draw, split_problems, transcript

sys.path.insert(0, str(Path(__file__).parents[1]))
from tool_model import Lesson, main

LESSON = Lesson(
    template=TEMPLATE,
    marks=["<python>", "</python>", "<output>", "</output>"],
    draw=draw,
    transcript=transcript,
    known=split_problems,
    vocab_size=256,
    max_length=256,
    clean_steps=600,
    clean_loss=0.05,
)

if __name__ == "__main__":
    main(LESSON, description=__doc__.splitlines()[0], folder=Path(__file__).parent / "model")
