"""TRL's `rollout_func(prompts, trainer)`: what one returns must be what was sampled, in one sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mgrpo.environments.offered.calling import WorkerLimits
from mgrpo.environments.workers.environment_catalog import PROGRAM, Spec
from mgrpo.environments.workers.pool import describe
from tests.unit.environments.test_programs import Engine, ids, play

FUNCTIONS = Path(__file__).with_name("trl_rollouts.py")
CHAT = [{"role": "user", "content": "hi"}]
PATIENT = WorkerLimits(tool_timeout_s=10)


def spec(name: str, **settings: Any) -> Spec:
    return Spec(entry=f"{PROGRAM}{FUNCTIONS}:{name}", settings=settings)


def run(name: str, *texts: str, prompt: Any = CHAT) -> Any:
    return play(Engine(*texts), "", own=spec(name), row={"prompt": prompt}, limits=PATIENT)


def test_a_function_of_one_turn_fits() -> None:
    """Further values are shown to reward functions."""
    group = run("one_turn", "abc")
    found = group.completions[0]
    assert group.prompt.tokens.tolist() == ids("uhi|>") and found.tokens.tolist() == ids("abc|")
    assert found.trajectory is not None
    assert (found.trajectory.ended_by, found.trajectory.reward) == ("stop", None)
    assert found.trajectory.snapshot == {"env_reward": 3.0}


def test_a_row_of_text_is_sampled_as_it_is() -> None:
    group = run("one_turn", "abc", prompt="plain")
    assert group.prompt.tokens.tolist() == [10, 11] and group.completions[0].tokens.tolist() == ids("abc|")


def test_a_sequence_that_grew_fits_with_its_mask() -> None:
    found = run("two_turns", "a", "b").completions[0]
    assert found.tokens.tolist() == ids("a|umore|>b|")
    assert found.trajectory is not None and found.trajectory.ended_by == "stop" and found.trajectory.snapshot == {}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("joined_turns", "its completion_ids has 4 entries that are not the 11 of what was sampled"),
        ("no_mask", "its env_mask has 0 entries that are not the 11"),
        ("other_prompt", "its prompt_ids has 1 entries that are not the 5"),
        ("other_logprobs", "its logprobs are not those of the tokens"),
        ("two_entries", "expected a list with one entry, for one prompt"),
        ("nothing", "it returned None, expected a dict with prompt_ids, completion_ids, logprobs"),
        ("re_renders", "and no processing_class here; write `async def rollout"),
        ("hotter", "generation_overrides holds temperature; only max_tokens"),
        ("other_text", "a prompt of text must be that of the row"),
    ],
)
def test_what_does_not_fit_has_no_score_and_a_remedy(name: str, why: str, caplog: pytest.LogCaptureFixture) -> None:
    """Trained as it is, tokens would follow others than those that they were sampled after."""
    record = run(name, "a", "b").completions[0].trajectory
    assert record is not None and record.ended_by == "error" and record.reward is None
    assert why in caplog.text


def test_an_async_function_of_this_form_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="is a plain function, and this is async"):
        describe([spec("coroutine")])
