"""Questions about data, rewards and evaluation. Each is asked only when its fields are sound."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping

from mgrpo.config.rules import Rule
from mgrpo.config.schema import Config, Reward


def remapped(text: str | None) -> tuple[str, str] | None:
    """The verifier that is replaced and the one in its place, of `remap_verifier`; names in lower case."""
    if text is None:
        return None
    old, equals, new = (word.strip().lower() for word in text.partition("="))
    if not (old and equals and new) or "=" in new:
        raise ValueError(f"remap_verifier={text} must be old=new, the names of two verifiers")
    return old, new


def verifier_weights(settings: Reward) -> Mapping[str, float]:
    """Weight by verifier, in lower case, of `verifier_weights`."""
    weights: dict[str, float] = {}
    for word in settings.verifier_weights:
        name, _, number = word.partition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not name.strip() or not math.isfinite(weight):
            raise ValueError(f"verifier_weights={word} must be name=weight, a verifier and a finite number")
        name = name.strip().lower()
        if name in weights:
            raise ValueError(
                f"verifier_weights={' '.join(settings.verifier_weights)} weighs {name} twice; give each verifier one weight"
            )
        weights[name] = weight
    return weights


def _verifiers(config: Config) -> Iterator[str]:
    for read in (lambda: remapped(config.reward.remap_verifier), lambda: verifier_weights(config.reward)):
        try:
            read()
        except ValueError as err:
            yield str(err)


def _good_outputs(config: Config) -> Iterator[str]:
    if config.reward.only_reward_good_outputs:
        yield (
            "only_reward_good_outputs=true rewards completions that used a tool with success, but tools do not exist yet, so "
            "nothing would be rewarded; leave it out"
        )


def _tokenizer(config: Config) -> Iterator[str]:
    path = config.data.tokenizer_name_or_path
    if path is not None and not os.path.isdir(path):
        yield f"tokenizer_name_or_path={path} is not a folder; give the folder of the tokenizer's files"


def _stop_strings(config: Config) -> Iterator[str]:
    if any(not text for text in config.rollout.stop_strings):
        yield "stop_strings holds an empty text, which would end every completion at once; leave it out"


def _greedy(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.eval_temperature == 0 and rollout.eval_pass_at_k > 1:
        yield (
            f"eval_pass_at_k={rollout.eval_pass_at_k} samples of eval_temperature=0 are all the same; use eval_pass_at_k=1, "
            "or a temperature above 0"
        )


REWARD_RULES: tuple[Rule, ...] = (
    (("remap_verifier", "verifier_weights"), _verifiers),
    (("only_reward_good_outputs",), _good_outputs),
    (("tokenizer_name_or_path",), _tokenizer),
    (("stop_strings",), _stop_strings),
    (("eval_temperature", "eval_pass_at_k"), _greedy),
)
"""Questions about data, rewards and evaluation, each with the fields that must be sound before it is asked."""
