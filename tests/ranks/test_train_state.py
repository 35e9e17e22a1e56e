"""A training state saved on one layout and continued on another, with everything it consists of."""

from __future__ import annotations

import pytest
import torch

from mgrpo.checkpoint.folder import step_path
from tests.ranks import cases, run_cases
from tests.ranks.test_learning import SETTINGS, scored_groups
from tests.tiny_models import load_hf, save_tiny
from tools import parity

pytestmark = pytest.mark.learners

STEPS, SAVED = 5, 3
CHANGES = [
    ("qwen2", "tp2+sp", "pp2"),
    ("qwen2", "tp2xpp2", "dp2"),
    ("qwen2", "dp2+zero0", "dp2"),
    ("qwen2", "dp2", "dp2+zero2"),
    ("qwen2", "dp2+zero2", "dp2+zero3"),
    ("qwen2", "dp2+zero3", "dp2+zero0"),
    ("qwen2", "cp2", "tp2+sp"),
    ("qwen3 (QK norm)", "pp2", "cp2xpp2"),
    ("llama, tied", "pp2xvpp2", "tp2"),
    ("llama, tied", "tp2", "pp2xvpp2"),
    ("llama, tied", "pp2xdp2+zero3", "dp1"),
    ("qwen3-moe", "ep2", "dp1"),
    ("qwen3-moe", "dp1", "ep2"),
    ("qwen3-moe", "ep2xtp2+sp", "dp2"),
    ("glm-4.5", "ep2", "dp2+zero3"),
    ("glm-4.5", "dp2+zero2", "tp2+sp"),
    ("gpt-oss", "ep2", "dp2+zero3"),
    ("gpt-oss", "dp2+zero2", "tp2+sp"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: save_tiny(tmp_path_factory.mktemp("models"), **model) for name, model in parity.MODELS.items()}


@pytest.fixture(scope="module")
def train(run_ranks, folders):
    """Outcome of rank 0, which is everyone's."""

    def outcome(model, name, **more):
        case = parity.parse(name)
        arguments = {"layout": case.layout, "samples": parity.SAMPLES, "settings": case.options["settings"], **more}
        ranks = run_ranks(case.ranks, cases.train_steps, model_dir=str(folders[model]), steps=STEPS, **arguments)
        assert all(rank["losses"] == ranks[0]["losses"] for rank in ranks)
        return ranks[0]

    return outcome


@pytest.fixture(scope="module")
def saved(train, tmp_path_factory):
    """A whole run, saved on the way: its outcome and the checkpoint."""
    made = {}

    def run(model, layout, **more):
        key = (model, layout, *more.values())
        if key not in made:
            root = str(tmp_path_factory.mktemp("state"))
            made[key] = train(model, layout, save_to=root, save_after=SAVED, **more), step_path(root, SAVED)
        return made[key]

    return run


@pytest.mark.parametrize(("model", "before", "after"), CHANGES, ids=[f"{m}: {a} to {b}" for m, a, b in CHANGES])
def test_a_run_goes_on_in_any_layout(train, saved, model, before, after):
    """Moments that are lost or land elsewhere make the next steps other steps than one rank would have done."""
    whole, checkpoint = saved(model, before)
    rest = train(model, after, resume_from=checkpoint)
    truth, _ = saved(model, "dp1")
    for name in ("losses", "grad_norms"):
        assert len(rest[name]) == STEPS - SAVED
        assert rest[name] == pytest.approx(truth[name][SAVED:], rel=1e-5), name
        assert whole[name] == pytest.approx(truth[name], rel=1e-5), name
    assert abs(truth["losses"][-1] - truth["losses"][SAVED - 1]) > 1e-2 * abs(truth["losses"][-1])


@pytest.mark.parametrize(
    ("model", "layout", "dtype"),
    [
        ("qwen2", "tp2+sp", "float32"),
        ("qwen2", "dp2+zero3", "float32"),
        ("llama, tied", "pp2xvpp2", "float32"),
        ("qwen3-moe", "ep2", "float32"),
        ("glm-4.5", "dp2+zero2", "bfloat16"),
        ("qwen2", "tp2+sp", "bfloat16"),
        ("qwen2", "dp2+zero2", "bfloat16"),
        ("qwen2", "dp2+zero0", "bfloat16"),
    ],
)
def test_the_same_layout_goes_on_exactly(train, saved, model, layout, dtype):
    """A master that went through bfloat16 or a step count that is off by one shows only here."""
    whole, checkpoint = saved(model, layout, dtype=dtype)
    rest = train(model, layout, resume_from=checkpoint, dtype=dtype)
    assert rest["losses"] == whole["losses"][SAVED:]
    assert rest["grad_norms"] == whole["grad_norms"][SAVED:]


LEARN = SETTINGS | {"ref_policy_update_freq": 1, "alpha": 0.3}
TENSOR = {"tensor_model_parallel_size": 2}
PIPELINE = {"pipeline_model_parallel_size": 2}


@pytest.fixture(scope="module")
def learned(run_ranks, folders, tmp_path_factory):
    """A policy with a reference that moves, three steps, saved after the second: results and checkpoint, by layout."""
    made = {}

    def run(**layout):
        key = tuple(layout.items())
        if key not in made:
            out = tmp_path_factory.mktemp("learned")
            settings = LEARN | layout | {"output_dir": str(out)}
            arguments = {"model_dir": str(folders["qwen2"]), "groups": scored_groups(), "steps": 3}
            results = run_ranks(
                2, run_cases.learn, settings=settings, folder=str(out / "hf"), save_after=2, **arguments
            )
            made[key] = results, str(out / "checkpoints" / "step_2"), load_hf(out / "hf")
        return made[key]

    return run


def go_on(run_ranks, model, out, checkpoint, **layout):
    settings = LEARN | layout | {"output_dir": str(out), "resume": checkpoint}
    arguments = {"model_dir": str(model), "groups": scored_groups(), "steps": 3, "folder": str(out / "hf")}
    return run_ranks(2, run_cases.learn, settings=settings, resume_from=checkpoint, **arguments)


@pytest.mark.parametrize("layout", [TENSOR, {"zero_stage": 3}], ids=["tp2", "dp2+zero3"])
def test_everything_hidden_comes_back(run_ranks, folders, learned, tmp_path, layout):
    """Random states by rank, Adam's step count, the reference and its float32 copies; and so the next step's metrics."""
    whole, checkpoint, model = learned(**layout)
    rest = go_on(run_ranks, folders["qwen2"], tmp_path, checkpoint, **layout)
    for own, truth in zip(rest, whole, strict=True):
        assert own == truth
    assert whole[0]["state"]["adam"] == [8.0]  # 2 steps x 2 epochs x 2 mini-batches
    assert whole[0]["state"]["masters"]
    assert whole[0]["state"]["random"] != whole[1]["state"]["random"]
    for (name, own), truth in zip(load_hf(tmp_path / "hf").named_parameters(), model.parameters(), strict=True):
        assert torch.equal(own, truth), name


def test_the_reference_follows_into_another_layout(run_ranks, folders, learned, tmp_path):
    """A reference that fell back to the first model would pull the policy there, and only the KL would tell."""
    whole, checkpoint, model = learned(**TENSOR)
    rest = go_on(run_ranks, folders["qwen2"], tmp_path, checkpoint, **PIPELINE)
    for name in ("objective/kl2_avg", "loss/kl_avg", "loss/policy_avg", "grad_norm"):
        assert rest[0][name] == pytest.approx(whole[0][name], rel=1e-5, abs=1e-7), name
    assert rest[0]["state"]["adam"] == [8.0]
    for (name, own), truth in zip(load_hf(tmp_path / "hf").named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own, truth, rtol=0, atol=5e-7, msg=name)


def test_another_models_state_is_refused(run_ranks, folders, learned, tmp_path):
    """Weights of one model in the layers of another are noise, and where shapes agree nothing else would notice."""
    _, checkpoint, _ = learned(**TENSOR)
    with pytest.raises(AssertionError, match=f"{checkpoint} is of another model than"):
        go_on(run_ranks, folders["qwen3 (QK norm)"], tmp_path, checkpoint, **TENSOR)


def test_a_damaged_state_is_refused_or_passed_over_on_every_rank(run_ranks, folders, tmp_path):
    """Only the rank that reads a file sees that its checksum differs; all must go on from the same state."""
    arguments = {"model_dir": str(folders["qwen2"]), "groups": scored_groups()}
    settings = LEARN | TENSOR | {"output_dir": str(tmp_path)}
    for refused, opened in run_ranks(2, run_cases.open_damaged, settings=settings, **arguments):
        assert f"{tmp_path}/checkpoints/step_2 is damaged: shard-00001-0-" in refused
        assert refused.endswith(f"--resume intact, or from one by name: --resume {tmp_path}/checkpoints/step_1")
        assert opened == f"{tmp_path}/checkpoints/step_1"


def test_a_run_goes_on_from_the_nodes_that_are_left_and_else_from_storage(run_ranks, folders, tmp_path):
    """A machine that fails takes its disk with it; two that fail take the newest state, and the one on storage is older."""
    settings = LEARN | TENSOR | {
        "output_dir": str(tmp_path), "checkpoint_local_dir": f"{tmp_path}/disk$RANK", "save_every_minutes": 1, "checkpoint_state_freq": 1,
    }  # fmt: skip
    arguments = {"model_dir": str(folders["qwen2"]), "groups": scored_groups(), "lost": [[], [0], [1], [0, 1]]}
    for found in run_ranks(2, run_cases.continue_from_nodes, settings=settings, **arguments):
        assert found == [[2, 0, True], [2, 0, True], [2, 0, True], [1, 1, False], False, []]


def test_one_folder_for_all_nodes_has_no_partner(run_ranks, folders, tmp_path):
    """Ranks of one machine lose their disk together: the state is there as long as it is."""
    settings = LEARN | TENSOR | {
        "output_dir": str(tmp_path), "checkpoint_local_dir": f"{tmp_path}/disk", "save_every_minutes": 1, "checkpoint_state_freq": 1,
    }  # fmt: skip
    arguments = {"model_dir": str(folders["qwen2"]), "groups": scored_groups(), "lost": [[], [0]]}
    for found in run_ranks(2, run_cases.continue_from_nodes, settings=settings, **arguments):
        assert found == [[2, 0, True], [1, 1, False], False, []]


def test_a_disk_that_one_node_lacks_is_said_on_every_rank(run_ranks, folders, tmp_path):
    """The other ranks would wait for the one that ends, until their time-out."""
    (tmp_path / "disk1").write_text("")
    settings = LEARN | TENSOR | {
        "output_dir": str(tmp_path), "checkpoint_local_dir": f"{tmp_path}/disk$RANK", "save_every_minutes": 1, "checkpoint_state_freq": 1,
    }  # fmt: skip
    with pytest.raises(
        AssertionError, match=rf"checkpoint_local_dir={tmp_path}/disk\$RANK on 127.0.0.1: {tmp_path}/disk1 is a file"
    ):
        run_ranks(2, run_cases.trainer_of, model_dir=str(folders["qwen2"]), settings=settings, groups=scored_groups())
