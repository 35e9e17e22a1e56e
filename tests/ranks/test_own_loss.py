"""A user's loss in every layout."""

from __future__ import annotations

import pytest

from tests.ranks import own_losses
from tests.ranks.cases import random_samples
from tests.tiny_models import save_tiny

SETTINGS = {
    "beta": 0.0,
    "use_vllm_logprobs": True,  # ratios far from 1
    "aggregation": "seq_mean",
    "temperature": 0.8,
    "learning_rate": 1e-2,
    "pack_length": 64,
    "sequence_parallel": False,
}
LAYOUTS = {
    "one": (1, {}),
    "tp2+sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
    "dp2": (2, {}),
    "dp2, ZeRO-2": (2, {"zero_stage": 2}),
}


@pytest.fixture(scope="module")
def truth(run_ranks, tmp_path_factory):
    """The model, and what one rank gives."""
    model = save_tiny(tmp_path_factory.mktemp("models"), "qwen2")
    return model, run_ranks(1, own_losses.both, model_dir=str(model), settings=SETTINGS, samples=random_samples(3))[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_users_loss_is_the_named_one_that_it_repeats_in_every_layout(run_ranks, truth, name):
    """Rows in another order, a denominator of one rank, or a gradient counted per rank would train another policy."""
    model, one = truth
    world_size, layout = LAYOUTS[name]
    ranks = run_ranks(
        world_size, own_losses.both, model_dir=str(model), settings=SETTINGS | layout, samples=random_samples(3)
    )
    expected = one["metrics"][own_losses.NAMED]
    assert expected["policy/clipfrac_avg"] > 0.1
    for rank in ranks:
        named, own = (rank["metrics"][loss] for loss in (own_losses.NAMED, own_losses.OWN))
        assert rank["error"] < 2e-6 * max(rank["largest"], 1.0)
        assert own["grad_norm"] == pytest.approx(named["grad_norm"], rel=1e-5)
        # Reduced over ranks with their counts, and known on ranks that never saw the loss.
        assert own["custom/loss/ratio"] == pytest.approx(expected["val/ratio"], rel=1.3e-6)
        assert own["custom/loss/loss"] == pytest.approx(expected["loss/policy_avg"], rel=1.3e-6)
        assert own["custom/loss/good_ratio"] == pytest.approx(
            one["metrics"][own_losses.OWN]["custom/loss/good_ratio"], rel=1.3e-6
        )
        # What does not depend on the surrogate is still measured, what does is not.
        for metric in ("val/ratio", "policy/approxkl_avg", "debug/vllm_vs_local_logprob_diff_mean"):
            assert own[metric] == named[metric]
        assert "loss/policy_avg" not in own and "policy/clipfrac_avg" not in own
