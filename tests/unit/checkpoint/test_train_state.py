"""A train state written in one layout and read in another, on every kind of storage."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors.torch import load_file

from mgrpo.checkpoint.folder import complete, latest, step_path
from mgrpo.checkpoint.reader import open_checkpoint
from mgrpo.checkpoint.saver import Saver
from mgrpo.checkpoint.shard import Part
from mgrpo.models.placement.boxes import Box
from tests.unit.checkpoint.states import SHAPES, assert_holds, make_holdings, make_values, region, save


@pytest.mark.parametrize("seed", range(6))
def test_any_layout_reads_what_any_layout_wrote(root, seed):
    """A run that resumes on other ranks would train on other weights or moments."""
    values = make_values(seed)
    save(root, seed, values, world_size=1 + seed, file_bytes=200, state={"seed": seed, "lr": 0.1, "text": "\u00e9"})
    checkpoint = open_checkpoint(latest(root))
    assert (checkpoint.step, checkpoint.world_size) == (seed, 1 + seed)
    assert checkpoint.state == {"seed": seed, "lr": 0.1, "text": "\u00e9"}
    assert checkpoint.kinds == sorted(values)
    assert_holds(checkpoint, values)
    for kind, box in make_holdings(seed + 100, world_size=2)[0]:
        assert torch.equal(checkpoint.read(kind, box), values[kind][box.name][region(box)])
    for rank in range(2):
        checkpoint.verify(rank, 2)
    checkpoint.close()


def test_views_of_parameters_are_saved_as_they_look(root):
    """Megatron's parameters are looked at through slices and transposes; their memory is in another order."""
    values = torch.arange(24.0).reshape(4, 6)
    column, turned = Box("a", (0, 0), (4, 2)), Box("b", (0, 0), (6, 4))
    parts = [Part("master", column, values[:, 2:4]), Part("master", turned, values.t())]
    Saver(root, 0, 1, keep_last_n=3).save(1, parts, {}, {"master": {"a": (4, 2), "b": (6, 4)}}, "x")
    checkpoint = open_checkpoint(latest(root))
    assert torch.equal(checkpoint.read("master", column), values[:, 2:4])
    assert torch.equal(checkpoint.read("master", turned), values.t())


def test_values_are_read_into_live_parameters(root):
    """A second copy of every parameter would not fit beside the first."""
    values = make_values(1)
    save(root, 1, values)
    live = torch.zeros(SHAPES["embed"], requires_grad=True)
    box = Box("embed", (3, 1), (5, 4))
    returned = open_checkpoint(latest(root)).read("reference", box, out=live[region(box)])
    assert returned.data_ptr() == live[region(box)].data_ptr()
    assert torch.equal(live[region(box)], values["reference"]["embed"][region(box)].float())
    assert live.sum() == live[region(box)].sum()


def test_files_are_bounded_and_plain_safetensors(tmp_path):
    """Other tools read a checkpoint, too; one file of a terabyte fits no object store."""
    values = make_values(2)
    save(tmp_path, 2, values, file_bytes=150)
    files = sorted((tmp_path / "step_2").glob("*.safetensors"))
    assert len(files) > 3
    found = {}
    for path in files:
        tensors = load_file(path)
        assert_aligned(path)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 150
        found |= tensors
    assert sum(tensor.numel() for tensor in found.values()) == sum(
        value.numel() for by_name in values.values() for value in by_name.values()
    )
    assert all(torch.isfinite(tensor).all() for tensor in found.values())


def assert_aligned(path):
    """Every tensor begins at a multiple of its type's size."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    assert size % 8 == 0
    width = {"F64": 8, "F32": 4, "BF16": 2}
    for tensor in json.loads(data[8 : 8 + size]).values():
        assert tensor["data_offsets"][0] % width.get(tensor["dtype"], 1) == 0


def test_types_of_other_widths_share_a_file(tmp_path):
    """A tensor that begins in the middle of a word is refused by readers."""
    parts = [
        Part(kind, Box("w", (0,), (3,)), torch.tensor([1, 0, 1]).to(dtype))
        for kind, dtype in {"a": torch.uint8, "b": torch.float64, "c": torch.bool, "d": torch.bfloat16}.items()
    ]
    Saver(tmp_path, 0, 1, keep_last_n=3).save(0, parts, {}, {kind: {"w": (3,)} for kind in "abcd"}, "x")
    (path,) = (tmp_path / "step_0").glob("*.safetensors")
    assert_aligned(path)
    checkpoint = open_checkpoint(tmp_path / "step_0")
    for part in parts:
        assert torch.equal(checkpoint.read(part.kind, part.box), part.tensor)
    assert checkpoint.dtype("d", "w") == torch.bfloat16
    with pytest.raises(Exception, match=r"type torch\.complex64, which safetensors cannot hold"):
        odd = Part("a", Box("w", (0,), (1,)), torch.zeros(1, dtype=torch.complex64))
        Saver(tmp_path, 0, 1, keep_last_n=3).save(1, [odd], {}, {"a": {"w": (1,)}}, "x")


def test_only_the_files_that_a_box_meets_are_read(tmp_path):
    """A rank that read everything would read the whole model, once for every rank."""
    values = make_values(3)
    whole = Box("embed", (0, 0), SHAPES["embed"])
    upper, lower = Box("embed", (0, 0), (6, 6)), Box("embed", (6, 0), (7, 6))
    embed = values["master"]["embed"]
    for rank, box in ((1, lower), (0, upper)):
        Saver(tmp_path, rank, 2, keep_last_n=3).save(
            1, [Part("master", box, embed[region(box)])], {}, {"master": {"embed": SHAPES["embed"]}}, "x"
        )
    next((tmp_path / "step_1").glob("shard-00001-*")).unlink()
    checkpoint = open_checkpoint(tmp_path / "step_1")
    assert torch.equal(checkpoint.read("master", upper), embed[:6])
    with pytest.raises(ValueError, match=r"shard-00001-0-x\.safetensors is missing"):
        checkpoint.read("master", whole)


def test_what_is_not_there_is_named(root):
    """A model that has changed since would get zeros, or a KeyError."""
    save(root, 1, make_values(1))
    checkpoint = open_checkpoint(latest(root))
    with pytest.raises(ValueError, match="holds no exp_avg_sq, only exp_avg, master, reference"):
        checkpoint.read("exp_avg_sq", Box("norm", (0,), (7,)))
    with pytest.raises(ValueError, match="holds no master of lm_head"):
        checkpoint.shape("master", "lm_head")
    with pytest.raises(ValueError, match=r"master norm\[0:8\] reaches beyond its tensor .* \[7\]"):
        checkpoint.read("master", Box("norm", (0,), (8,)))
    assert checkpoint.shape("master", "proj") == (5, 4, 3)


def test_a_step_saved_again_replaces_the_first(root):
    """A run that saves its last step twice, or saves one again after a resume."""
    save(root, 4, make_values(1), attempt="first", world_size=4)
    save(root, 4, make_values(2), attempt="second", world_size=2)
    checkpoint = open_checkpoint(latest(root))
    assert_holds(checkpoint, make_values(2))
    checkpoint.verify()


def test_a_url_of_files_is_a_folder(tmp_path):
    """`file://` is how a launcher writes a path; it must be as durable as one."""
    save(f"file://{tmp_path}/a", 1, make_values(1))
    assert complete(tmp_path / "a") == [1]
    assert_holds(open_checkpoint(latest(f"file://{tmp_path}/a")), make_values(1))


def test_a_checkpoint_may_be_moved(tmp_path):
    """Paths inside a checkpoint would break it on the next machine."""
    save(tmp_path / "a", 1, make_values(1))
    (tmp_path / "a").rename(tmp_path / "b")
    checkpoint = open_checkpoint(step_path(tmp_path / "b", 1))
    checkpoint.verify()
    assert_holds(checkpoint, make_values(1))


def test_copies_of_remote_files_lie_in_the_cache_or_are_deleted(tmp_path, monkeypatch):
    """A node's disk would fill with copies of old checkpoints."""
    url = f"memory://{tmp_path}/remote"
    save(url, 1, make_values(1))
    checkpoint = open_checkpoint(latest(url), cache=tmp_path / "cache")
    assert_holds(checkpoint, make_values(1))
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".safetensors"}
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "cache"))
    private = open_checkpoint(latest(url))
    before = set((tmp_path / "cache").iterdir())
    assert_holds(private, make_values(1))
    (held,) = [path for path in before if path.is_dir()]
    assert any(held.iterdir())
    private.close()
    assert not held.exists()


def test_random_boxes_of_a_checkpoint(tmp_path):
    """A slice that is off by one row reads a neighbour's weights."""
    values, rng = make_values(5), random.Random(5)
    save(tmp_path, 5, values, world_size=4, file_bytes=100)
    checkpoint = open_checkpoint(tmp_path / "step_5")
    for _ in range(100):
        name = rng.choice(list(SHAPES))
        start = tuple(rng.randrange(length) for length in SHAPES[name])
        box = Box(name, start, tuple(rng.randint(1, length - a) for a, length in zip(start, SHAPES[name], strict=True)))
        assert torch.equal(checkpoint.read("master", box), values["master"][name][region(box)])
