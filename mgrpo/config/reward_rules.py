"""Rules between settings of data, rewards and evaluation."""

from __future__ import annotations

import os
from collections.abc import Iterator

from mgrpo.config.rules import Rule
from mgrpo.config.schema import Config
from mgrpo.models.family import is_hub_name


def _verifiers(config: Config) -> Iterator[str]:
    reward = config.reward
    for read in (lambda: reward.verifier_replacement, lambda: reward.weight_by_verifier):
        try:
            read()
        except ValueError as err:
            yield str(err)


def _tokenizer(config: Config) -> Iterator[str]:
    path = config.data.tokenizer_name_or_path
    if path is not None and not os.path.isdir(path) and not is_hub_name(path):
        yield f"tokenizer_name_or_path={path} is not a folder; give the folder of the tokenizer's files, or a name on the Hub"


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
    (("tokenizer_name_or_path",), _tokenizer),
    (("stop_strings",), _stop_strings),
    (("eval_temperature", "eval_pass_at_k"), _greedy),
)
"""Each rule with the fields that must be sound before it is checked."""
