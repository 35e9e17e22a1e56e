"""examples/distillation: the copy that is taught has layers of its teacher, in their order, and everything beside them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from tests.tiny_models import load_hf, save_tiny

PROGRAM = Path(__file__).parents[3] / "examples" / "distillation" / "make_student.py"


def test_a_cut_down_copy_has_the_layers_that_its_program_names(tmp_path):
    """Layers in another order, or the last one lost, make a student that cannot write at all."""
    spec = importlib.util.spec_from_file_location("make_student", PROGRAM)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    assert program.kept(30, 24) == [
        0,
        1,
        3,
        4,
        5,
        6,
        8,
        9,
        10,
        11,
        13,
        14,
        15,
        16,
        18,
        19,
        20,
        21,
        23,
        24,
        25,
        26,
        28,
        29,
    ]
    teacher = save_tiny(tmp_path, "llama", layers=6)
    (teacher / "tokenizer_config.json").write_text("{}")
    assert program.cut(teacher, 4, tmp_path / "student") == [0, 2, 3, 5]
    assert (tmp_path / "student" / "tokenizer_config.json").read_text() == "{}"
    theirs, own = (load_hf(folder).state_dict() for folder in (teacher, tmp_path / "student"))
    places = {f"layers.{new}.": f"layers.{old}." for new, old in enumerate([0, 2, 3, 5])}
    for name, tensor in own.items():
        place = next((place for place in places if place in name), None)
        assert torch.equal(tensor, theirs[name.replace(place, places[place]) if place else name]), name
    assert len(own) == len(theirs) - 2 * len([name for name in own if "layers.0." in name])
