"""A disk that fills up while a run writes to it: every rank learns of it, and what was trained is kept if it can be."""

from __future__ import annotations

from tests.ranks import run_cases
from tests.ranks.test_learning import SETTINGS, scored_groups
from tests.tiny_models import load_hf, save_tiny


def test_a_full_disk_is_said_with_path_and_bytes_and_loses_no_more_than_it_must(run_ranks, tmp_path):
    """The export after the last step ended the run with a bare error, half a folder, and the model lost."""
    model, out = save_tiny(tmp_path / "model", "qwen2"), tmp_path / "out"
    settings = SETTINGS | {"output_dir": str(out), "tensor_model_parallel_size": 2}
    ranks = run_ranks(2, run_cases.run_out_of_room, model_dir=str(model), settings=settings, groups=scored_groups())
    weights = sum(parameter.nbytes for parameter in load_hf(model).parameters())
    needed = f"{weights / 1000:.3g} kB are needed"
    for found in ranks:
        exporting, saving = (
            f"the model could not be exported to {out}/hf/step_1: ",
            f"save step 1 in {out}/checkpoints/step_1",
        )
        assert found["export in the middle"].startswith(
            f"{exporting}File too large: {needed}, and {out}/hf/step_1 has "
        )
        assert found["export at the start"] == f"{exporting}{needed}, but {out}/hf/step_1 has 1 kB free"
        assert found["save in the middle"].startswith(f"rank 1 could not {saving}: File too large: ")
        assert "kB are needed" in found["save in the middle"]
        assert found["save at the start"].startswith(
            f"the state of step 1 could not be saved in {out}/checkpoints/step_1: "
        )
        assert found["neither"] == ([found["save at the start"]], False)
        (lost, kept), is_state = found["the model only"]
        assert lost.startswith("the state of step 1 could not be saved") and not is_state
        assert kept == f"the model of step 1 is in {out}/hf/step_1"
        assert found["left"] == ["checkpoints", "hf", "step_1"]
        assert found["modes"] == {"0o640"}
        assert found["exported"] == f"{out}/hf/step_1"
    assert ranks[0]["said"] == [
        f"no room for the trained model: {needed}, but {out} has 1 kB free; waiting 0 minutes for room"
    ]
    kept = f"the same command continues from {out}/checkpoints/step_1"
    assert [found["the end"] for found in ranks] == [f"metrics cannot be written; {kept}", ""]
    load_hf(out / "hf" / "step_1")
