"""A user's advantages in every layout."""

from __future__ import annotations

import pytest

from tests.ranks import own_advantages, run_cases
from tests.ranks.test_learning import SETTINGS, measured, scored_groups
from tests.ranks.test_parity import CASES
from tests.tiny_models import load_hf, save_tiny
from tests.unit.algo.test_own_advantages import from_page
from tools import parity

SHORT_LIST = sorted({layout for _, layout in CASES})


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """The estimator that the page teaches, by its name."""
    return f"{from_page('rloo.py', tmp_path_factory.mktemp('own'))}:rloo"


@pytest.mark.parametrize("name", SHORT_LIST)
def test_rloo_as_a_function_packs_what_the_named_one_packs_in_every_layout(run_ranks, own, name):
    """Learners read nothing but their packs: where these are equal to the bit, so is everything that follows."""
    case = parity.parse(name)
    centered, named, function = zip(
        *run_ranks(
            case.ranks,
            own_advantages.packs,
            layout=case.layout,
            estimators=["centered", "rloo", own],
            groups=scored_groups(),
            pack_length=case.options.get("pack_length", 64),
        ),
        strict=True,
    )
    assert function == named != centered


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (1, {}),
        (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        (4, {"pipeline_model_parallel_size": 2}),
    ],
    ids=["one", "tp2+sp", "pp2xdp2"],
)
def test_rloo_as_a_function_trains_the_model_that_the_named_one_trains(run_ranks, own, tmp_path, world_size, layout):
    """The whole step, from scored groups to an exported model."""
    model = save_tiny(tmp_path / "model", "qwen2")
    found: dict[str, tuple[list, list]] = {}
    for name in ("rloo", own):
        folder = tmp_path / str(len(found))
        ranks = run_ranks(
            world_size,
            run_cases.learn,
            model_dir=str(model),
            settings=SETTINGS | layout | {"num_mini_batches": 1, "advantage_normalization_type": name},
            groups=scored_groups(),
            folder=str(folder),
        )
        found[name] = [measured(rank) for rank in ranks], [p.tolist() for p in load_hf(folder).parameters()]
    assert found[own] == found["rloo"]
    assert found[own][0][0]["grad_norm"] > 0
