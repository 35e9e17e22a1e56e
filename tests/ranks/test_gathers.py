"""Updated weights that come while the next forward pass begins: each is waited for by what reads it, and by nothing else."""

from __future__ import annotations

import pytest

from tests.ranks import gather_cases as cases
from tests.ranks.lora_oracle import LORA
from tests.ranks.test_learning import scored_groups
from tests.tiny_models import save_tiny
from tools import parity

pytestmark = pytest.mark.learners


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: save_tiny(tmp_path_factory.mktemp("models"), **model) for name, model in parity.MODELS.items()}


LAYOUTS = [
    ("qwen2", "dp2", {}),
    ("qwen2", "dp2", {"dtype": "bfloat16"}),
    ("qwen2", "dp2", {"logits_chunk": 17}),
    ("qwen2", "dp2+full", {}),
    ("llama, tied", "dp2", {"logits_chunk": 17}),
    ("llama, tied", "pp2xdp2", {"logits_chunk": 17}),
    ("qwen3 (QK norm)", "tp2xdp2+sp", {}),
    ("gemma-3", "cp2", {}),
    ("qwen2", "pp2xvpp2xdp2", {}),
    ("qwen3-moe", "ep2", {}),
    ("qwen3-moe", "ep2xdp4", {}),
    ("qwen2", "dp2", {"lora": LORA}),
    ("qwen3-moe", "dp2", {"lora": LORA}),
]


@pytest.mark.parametrize(("model", "layout", "options"), LAYOUTS, ids=lambda part: str(part).replace(" ", ""))
def test_late_weights_teach_the_same(run_ranks, folders, model, layout, options):
    """A module that reads weights before they have come computes with those of the previous step, and no error says so."""
    case = parity.parse(layout)
    arguments = {"model_dir": str(folders[model]), "layout": case.layout, "samples": parity.SAMPLES, **options}
    late, whole = (
        run_ranks(case.ranks, cases.trained, overlaps=overlaps, settings=case.options["settings"], **arguments)
        for overlaps in (True, False)
    )
    for own, truth in zip(late, whole, strict=True):
        assert own["learned"] == truth["learned"]
        assert not any(truth["events"])
        first, skipped, second, score, third = own["events"]
        buckets = [bucket for event, bucket in first if event == "begun"]
        begun = [("begun", bucket) for bucket in buckets]
        assert begun == first == second == third
        assert len(set(begun)) == len(begun)
        for forward in (skipped, score):
            assert sorted(forward) == sorted(("waited for", bucket) for bucket in buckets)
            # Within a layer modules are called in another order than they are made.
            # In parts of layers, which adapters are, they may be the first.
            if "lora" not in options:
                assert (forward[0][1], forward[-1][1]) == (buckets[0], buckets[-1])
    # A layer does not wait for what only those after it need.
    assert late[0]["late_after_layers"] > 0


def test_each_reader_waits(run_ranks, folders, tmp_path):
    """What is exported, sent or followed before it has come is a mixture of two steps."""
    settings = {"num_mini_batches": 2, "beta": 0.1}
    arguments = {"model_dir": str(folders["qwen2"]), "groups": scored_groups(), "folder": str(tmp_path / "hf")}
    for readers in run_ranks(2, cases.read, settings=settings, **arguments):
        assert readers == {name: {"had_come": False, "are_read_whole": True} for name in readers}


def test_the_size_of_adapters_is_measured_when_they_have_come(run_ranks, folders):
    """Half of it would be that of the step before, in a metric that nothing else is compared with."""
    arguments = {"model_dir": str(folders["qwen2"]), "groups": scored_groups(), "settings": {"learning_rate": 1e-2}}
    ratios = run_ranks(2, cases.update_ratio, **arguments)
    assert 0 < ratios[0] < 1 and ratios[0] == ratios[1]
