"""Functions in the form of TRL's `rollout_func`."""

from __future__ import annotations

from typing import Any

from mgrpo.environments.adaptors.trl_rollout import generate_rollout_completions


def one_turn(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
    outputs = generate_rollout_completions(trainer, prompts)
    own = {name: [output[name] for output in outputs] for name in ("prompt_ids", "completion_ids", "logprobs")}
    return {**own, "env_reward": [float(len(output["text"])) for output in outputs]}


def two_turns(prompts: list[Any], trainer: Any, wrong: str = "") -> dict[str, list[Any]]:
    """One growing sequence, with a mask."""
    (messages,) = prompts
    first = trainer.generate_rollout_completions([messages], generation_overrides={"max_tokens": 30})[0]
    messages = [*messages, {"role": "assistant", "content": first["text"]}, {"role": "user", "content": "more"}]
    second = trainer.generate_rollout_completions([messages])[0]
    start = len(first["prompt_ids"])
    between = second["prompt_ids"][start + len(first["completion_ids"]) :]
    answers = first["completion_ids"], second["completion_ids"]
    return {
        "prompt_ids": [first["prompt_ids"]],
        "completion_ids": [[*answers[0], *between, *answers[1]]],
        "logprobs": [[*first["logprobs"], *[0.0] * len(between), *second["logprobs"]]],
        "env_mask": [[1] * len(answers[0]) + [0] * len(between) + [1] * len(answers[1])],
    }


def joined_turns(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
    """Answers side by side, without what stood between them."""
    found = two_turns(prompts, trainer)
    keep = [place for place, own in enumerate(found["env_mask"][0]) if own]
    return {
        "prompt_ids": found["prompt_ids"],
        "completion_ids": [[found["completion_ids"][0][place] for place in keep]],
        "logprobs": [[found["logprobs"][0][place] for place in keep]],
    }


def no_mask(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
    found = two_turns(prompts, trainer)
    del found["env_mask"]
    return found


def other_prompt(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
    return one_turn(prompts, trainer) | {"prompt_ids": [[1]]}


def other_logprobs(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
    found = one_turn(prompts, trainer)
    return found | {"logprobs": [[0.5 for _ in found["logprobs"][0]]]}


def two_entries(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
    return {name: values * 2 for name, values in one_turn(prompts, trainer).items()}


def nothing(prompts: list[Any], trainer: Any) -> None:
    return None


def re_renders(prompts: list[Any], trainer: Any) -> None:
    trainer.processing_class.apply_chat_template(prompts[0])


def hotter(prompts: list[Any], trainer: Any) -> None:
    trainer.generate_rollout_completions(prompts, generation_overrides={"temperature": 2})


def other_text(prompts: list[Any], trainer: Any) -> None:
    trainer.generate_rollout_completions(["something else"])


async def coroutine(prompts: list[Any], trainer: Any) -> None:
    pass
