"""What this machine cannot do is said before anything starts."""

from __future__ import annotations

import pytest

from mgrpo.config import from_values
from mgrpo.rollout import engine_args


@pytest.mark.parametrize(
    ("found", "asked", "words"),
    [
        (None, True, "use_precision_aware_optimizer=true needs Transformer Engine, which is not installed"),
        (object(), True, None),
        (None, False, None),
    ],
)
@pytest.mark.parametrize("gpus", [[], ["0", "1"]])
def test_an_optimizer_that_needs_transformer_engine_says_so(monkeypatch, gpus, found, asked, words):
    """Megatron would say it when the engines are up and the weights are loaded, and only in a stack trace."""
    monkeypatch.setattr(engine_args, "find_spec", lambda name: found)
    monkeypatch.setattr(engine_args, "serving_gpus", lambda: gpus)
    config = from_values({"use_precision_aware_optimizer": asked})
    sentences = engine_args.machine_problems(config, num_local_learners=1, head_dim=64)
    assert len(sentences) == (words is not None)
    assert all(words in sentence for sentence in sentences)


def test_all_that_a_machine_lacks_is_said_at_once(monkeypatch):
    """A second start for the second reason costs as much as the first."""
    monkeypatch.setattr(engine_args, "find_spec", lambda name: None)
    monkeypatch.setattr(engine_args, "serving_gpus", list)
    config = from_values({"use_precision_aware_optimizer": True})
    sentences = engine_args.machine_problems(config, num_local_learners=1, head_dim=48)
    assert len(sentences) == 2 and "head_dim=48 is not served" in sentences[1]
