"""A checkpoint that is not what was written: refused by name, with the one to resume from."""

from __future__ import annotations

import json
import random

import pytest

from mgrpo.checkpoint.folder import latest, open_folder
from mgrpo.checkpoint.manifest import DamagedCheckpoint, OtherVersion, signed
from mgrpo.checkpoint.reader import open_checkpoint
from mgrpo.models.placement.boxes import Box
from tests.unit.checkpoint.states import assert_holds, make_values, save


@pytest.fixture
def damaged(root):
    """Two checkpoints, the folder of the newer one, and the name of one of its shards."""
    save(root, 1, make_values(1))
    save(root, 2, make_values(2))
    folder = open_folder(root).child("step_2")
    return root, folder, min(name for name in folder.names() if name.startswith("shard-00001-0"))


def refusal(path) -> DamagedCheckpoint:
    with pytest.raises(DamagedCheckpoint) as caught:
        open_checkpoint(path).verify()
    return caught.value


def test_a_truncated_file_is_named_and_the_previous_checkpoint_offered(damaged):
    """A full disk or a copy that broke off; the run could go on from the one before, if it knew."""
    root, folder, name = damaged
    data = folder.read(name)
    folder.replace(name, data[:-5])
    error = refusal(latest(root))
    assert f"step_2 is damaged: {name} is truncated, {len(data) - 5} bytes of {len(data)}" in str(error)
    assert error.previous == latest(root).replace("step_2", "step_1")
    assert str(error).endswith(f"--resume {error.previous}")
    checkpoint = open_checkpoint(error.previous)
    checkpoint.verify()
    assert_holds(checkpoint, make_values(1))


def test_a_flipped_bit_is_found(damaged):
    """One wrong weight changes a run without an error."""
    root, folder, name = damaged
    data = bytearray(folder.read(name))
    data[-3] ^= 4
    folder.replace(name, bytes(data))
    assert f"{name} has changed since it was written, its checksum differs" in str(refusal(latest(root)))


def test_every_flipped_bit_of_a_state_is_found(tmp_path):
    """In whatever file it lies: tensors, their headers, the trainer's own state, the manifest."""
    save(tmp_path, 1, make_values(1))
    rng, files = random.Random(3), sorted((tmp_path / "step_1").iterdir())
    assert len(files) == 5
    for number in range(100):
        path = files[number % len(files)]
        content = path.read_bytes()
        place, bit = rng.randrange(len(content)), rng.randrange(8)
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
        assert "step_1 is damaged" in str(refusal(tmp_path / "step_1")), (path.name, place, bit)
        path.write_bytes(content)
    open_checkpoint(tmp_path / "step_1").verify()


def test_a_file_of_another_step_is_found(tmp_path):
    """A link to a file of the same name and size: whole, and of no step of this run."""
    for run, seed in (("one", 1), ("other", 2)):
        save(tmp_path / run, 1, make_values(seed), world_size=1)
    first, second = (next((tmp_path / run / "step_1").glob("*.safetensors")) for run in ("one", "other"))
    assert first.name == second.name and first.stat().st_size == second.stat().st_size
    second.unlink()
    second.symlink_to(first)
    assert f"{second.name} has changed since it was written" in str(refusal(tmp_path / "other" / "step_1"))


def test_a_missing_file_is_found(damaged):
    """Clean-up jobs delete what is old."""
    root, folder, name = damaged
    folder.remove(name)
    assert f"{name} is missing" in str(refusal(latest(root)))


def test_a_longer_file_is_found(damaged):
    """Two copies of one run into the same folder."""
    root, folder, name = damaged
    folder.replace(name, folder.read(name) + b"\0")
    assert f"{name} is too long" in str(refusal(latest(root)))


def test_a_changed_state_is_found_when_it_is_read(damaged):
    """The step count, the data order and the random states of the run are in it."""
    root, folder, _ = damaged
    folder.replace("state-run-2.json", folder.read("state-run-2.json").replace(b"2", b"3"))
    with pytest.raises(DamagedCheckpoint, match=r"state-run-2\.json has changed"):
        assert open_checkpoint(latest(root)).state


def test_the_ranks_together_check_every_file(damaged):
    """Each file is read once, not once for every rank; none must be left out."""
    root, folder, name = damaged
    folder.remove(name)
    refused = 0
    for rank in range(3):
        try:
            open_checkpoint(latest(root)).verify(rank, 3)
        except DamagedCheckpoint:
            refused += 1
    assert refused == 1


def test_shards_that_changed_places_are_found_without_checksums(tmp_path):
    """Reading does not hash; the shape and type of what it finds must still be the manifest's."""
    save(tmp_path, 1, make_values(1), file_bytes=1)
    manifest = tmp_path / "step_1" / "manifest.json"
    data = json.loads(manifest.read_text())
    pieces = [own["pieces"] for own in data["tensors"]["master"].values()]
    pieces[0][0][2:], pieces[1][0][2:] = pieces[1][0][2:], pieces[0][0][2:]
    rewrite(manifest, data)
    with pytest.raises(DamagedCheckpoint, match=r"is F32 \[.*\], expected F32 \["):
        open_checkpoint(tmp_path / "step_1").read("master", Box("embed", (0, 0), (13, 6)))


def test_a_file_that_is_no_safetensors_is_named(tmp_path):
    """The package's own error names no file."""
    save(tmp_path, 1, make_values(1), world_size=1)
    (path,) = (tmp_path / "step_1").glob("*.safetensors")
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(DamagedCheckpoint, match=r"shard-00000-0-run-1\.safetensors cannot be read"):
        open_checkpoint(tmp_path / "step_1").read("master", Box("norm", (0,), (7,)))


def rewrite(manifest, data):
    """A manifest with a checksum that is right."""
    data.pop("sha256", None)
    manifest.write_bytes(signed(data))


def first_piece(data):
    return data["tensors"]["master"]["norm"]["pieces"][0]


def rename(data, name):
    old = first_piece(data)[2]
    data["files"][name] = data["files"].pop(old)
    for by_name in data["tensors"].values():
        for own in by_name.values():
            for piece in own["pieces"]:
                piece[2] = name if piece[2] == old else piece[2]


HOSTILE = {
    "a path upwards": lambda data: rename(data, "../secret"),
    "an absolute path": lambda data: rename(data, "/etc/passwd"),
    "a folder": lambda data: rename(data, "a/b"),
    "another system's path": lambda data: rename(data, "a\\b"),
    "dots": lambda data: rename(data, ".."),
    "nothing": lambda data: rename(data, ""),
    "a zero byte": lambda data: rename(data, "a\0b"),
    "a state elsewhere": lambda data: data.update(state="../state.json"),
    "itself": lambda data: data.update(state="manifest.json"),
    "a file without checksum": lambda data: data["files"].pop(first_piece(data)[2]),
    "a wrong checksum's form": lambda data: data["files"][first_piece(data)[2]].update(sha256="x"),
    "negative bytes": lambda data: data["files"][first_piece(data)[2]].update(bytes=-1),
    "a true version": lambda data: data.update(version=True),
    "no version": lambda data: data.pop("version"),
    "another step": lambda data: data.update(step=7),
    "a true step": lambda data: data.update(step=True),
    "a step in words": lambda data: data.update(step="1"),
    "no tensors": lambda data: data.pop("tensors"),
    "tensors in a list": lambda data: data.update(tensors=[1, 2]),
    "a tensor that is text": lambda data: data["tensors"]["master"].update(norm="x"),
    "a missing piece": lambda data: data["tensors"]["master"]["norm"].update(pieces=[]),
    "a piece twice": lambda data: data["tensors"]["master"]["norm"]["pieces"].append(first_piece(data)),
    "a piece too short": lambda data: first_piece(data).pop(),
    "a negative start": lambda data: first_piece(data).__setitem__(0, [-1]),
    "a start beyond": lambda data: first_piece(data).__setitem__(0, [10**30]),
    "another dimension": lambda data: first_piece(data).__setitem__(0, [0, 0]),
    "another shape": lambda data: data["tensors"]["master"]["norm"].update(shape=[8]),
    "a type": lambda data: data["tensors"]["master"]["norm"].update(dtype="object"),
    "a key": lambda data: first_piece(data).__setitem__(3, 5),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_manifest_that_nobody_wrote_is_refused(tmp_path, what):
    """Checkpoints are downloaded: a name must not lead out of the folder, a number not into another tensor's rows."""
    save(tmp_path, 0, make_values(0))
    save(tmp_path, 1, make_values(1))
    manifest = tmp_path / "step_1" / "manifest.json"
    data = json.loads(manifest.read_text())
    HOSTILE[what](data)
    rewrite(manifest, data)
    with pytest.raises(DamagedCheckpoint, match=r"step_1 is damaged: ") as caught:
        open_checkpoint(tmp_path / "step_1")
    assert caught.value.previous == f"{tmp_path}/step_0"


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"[]", b"null", b'{"version": 1}', b'{"version"', b"[" * 100_000])
def test_a_manifest_that_is_no_manifest_is_refused(root, text):
    """A Python error from deep inside says nothing about which file to look at."""
    save(root, 1, make_values(1))
    open_folder(root).child("step_1").replace("manifest.json", text)
    with pytest.raises(DamagedCheckpoint, match=r"step_1 is damaged: manifest\.json is"):
        open_checkpoint(latest(root))


def test_a_manifest_that_changed_without_a_trace_is_found(tmp_path):
    """Two tensors of one shape that change places are a sound manifest, and another model."""
    save(tmp_path, 1, make_values(1))
    manifest = tmp_path / "step_1" / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"exp_avg"', '"exp_avg_"').replace('"master"', '"exp_avg"', 1))
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json has changed since it was written"):
        open_checkpoint(tmp_path / "step_1")


def test_a_state_of_another_version_is_not_damaged(root):
    """The one before it has that version as well; and the version before it is still read."""
    save(root, 1, make_values(1))
    save(root, 2, make_values(2))
    folder = open_folder(root).child("step_2")
    data = json.loads(folder.read("manifest.json"))
    folder.replace("manifest.json", signed(data | {"version": 99}))
    with pytest.raises(OtherVersion) as caught:
        open_checkpoint(latest(root))
    assert "step_2 was written by another version of mgrpo: manifest.json has version 99, this mgrpo reads 1 and 2" in (
        str(caught.value)
    )
    assert "damaged" not in str(caught.value) and "--resume never" in str(caught.value)
    folder.replace("manifest.json", json.dumps(data | {"version": 1}).encode())
    assert_holds(open_checkpoint(latest(root)), make_values(2))


def test_a_folder_in_place_of_the_manifest_is_named(tmp_path):
    """A copy that went wrong; Python's own error says neither which state nor what to do."""
    save(tmp_path, 1, make_values(1))
    save(tmp_path, 2, make_values(2))
    (tmp_path / "step_2" / "manifest.json").unlink()
    (tmp_path / "step_2" / "manifest.json").mkdir()
    assert "manifest.json cannot be read" in str(refusal(tmp_path / "step_2"))
    assert refusal(tmp_path / "step_2").previous == f"{tmp_path}/step_1"


def test_no_change_of_a_manifest_gets_past_all_checks(tmp_path):
    """Whatever a byte becomes: the same values, or one kind of error."""
    save(tmp_path, 1, make_values(1), world_size=2)
    manifest = tmp_path / "step_1" / "manifest.json"
    original, rng, refused = manifest.read_bytes(), random.Random(0), 0
    for _ in range(300):
        data = bytearray(original)
        data[rng.randrange(len(data))] = rng.choice(b'0123456789"[]{},:abc/\\. -\x00\xff')
        manifest.write_bytes(bytes(data))
        try:
            checkpoint = open_checkpoint(tmp_path / "step_1")
            checkpoint.verify()
            for name in make_values(1)["master"].keys() & set(checkpoint.names("master")):
                shape = checkpoint.shape("master", name)
                checkpoint.read("master", Box(name, (0,) * len(shape), shape))
        except DamagedCheckpoint:
            refused += 1
    assert refused > 200


@pytest.mark.parametrize("ending", ["", "/"])
def test_the_folder_of_all_checkpoints_is_no_checkpoint(root, ending):
    """`--resume output/checkpoints` is the natural mistake; the sentence says what to give instead."""
    save(root, 1, make_values(1))
    save(root, 12, make_values(2))
    with pytest.raises(
        ValueError, match=r"is not a checkpoint, whose folder is called step_N; the newest in it is .*/step_12$"
    ):
        open_checkpoint(root + ending)
    assert open_checkpoint(latest(root) + ending).step == 12


def test_a_path_without_a_checkpoint_is_refused(root):
    """A typing error must not start a run anew."""
    with pytest.raises(
        ValueError, match=r"step_3 is not a complete checkpoint, it has no manifest\.json; none is complete"
    ):
        open_checkpoint(f"{root}/step_3")
    with pytest.raises(ValueError, match=r"nowhere is not a checkpoint, whose folder is called step_N$"):
        open_checkpoint("nowhere")
