"""Files of a model folder besides its weights: which are copied, and which links are followed."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgrpo.models.hf_files.weight_files import files_beside

NAMES = ("LICENSE", "config.json", "tokenizer.json")


def test_links_into_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    """Everything that was downloaded by name is such a link."""
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0f"
    for folder in (blobs, snapshot / "additional_chat_templates"):
        folder.mkdir(parents=True)
    for name in (*NAMES, "additional_chat_templates/tools.jinja", "model.safetensors", ".hidden"):
        (blobs / name.replace("/", "-")).write_text(name)
        (snapshot / name).symlink_to(blobs / name.replace("/", "-"))
    (tmp_path / "link").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "link"):
        found = [str(path.relative_to(folder)) for path in files_beside(folder)]
        assert found == [*NAMES, "additional_chat_templates/tools.jinja"]


@pytest.mark.parametrize("place", ["tokenizer.json", "additional_chat_templates/tools.jinja"])
def test_links_out_of_the_folder_are_refused(tmp_path: Path, place: str) -> None:
    """An exported model would hold, and publish, any file of this machine that the folder's author named."""
    folder = tmp_path / "model"
    (folder / "additional_chat_templates").mkdir(parents=True)
    (folder / "inside.json").write_text("{}")
    (folder / "alias.json").symlink_to("inside.json")
    assert [path.name for path in files_beside(folder)] == ["alias.json", "inside.json"]
    (tmp_path / "secret").write_text("")
    (folder / place).symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=r"is a link to .*secret; put a copy of the file in its place"):
        files_beside(folder)
