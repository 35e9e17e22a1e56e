"""The reward section: what scores a completion, and the values that its texts stand for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Annotated

from mgrpo.config.annotations import (
    FINITE,
    NOT_NEGATIVE,
    ONE_OR_MORE,
    OPEN_INSTRUCT,
    POSITIVE,
    TRL,
    Needs,
    Range,
    Rule,
)

USED_BY_FUNCTIONS = (
    "reward_funcs_timeout",
    "apply_verifiable_reward",
    "verifier_memory_mb",
    "verifier_timeout",
    "verifier_workers",
)
"""Settings of the section that apply to reward functions as well: limits of the workers, and turning verifiers off."""

EVOLVING = Needs("apply_evolving_rubric_reward", lambda apply_evolving_rubric_reward: apply_evolving_rubric_reward)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    apply_verifiable_reward: Annotated[bool, OPEN_INSTRUCT] = True
    """Score completions with the verifiers that each row names."""
    verification_reward: Annotated[float, POSITIVE, OPEN_INSTRUCT] = 10.0
    """Factor of the verifiers' score."""
    apply_r1_style_format_reward: Annotated[bool, OPEN_INSTRUCT] = False
    """Reward the format `...</think> <answer>...</answer>`."""
    r1_style_format_reward: Annotated[float, POSITIVE, OPEN_INSTRUCT] = 1.0
    """Reward for the format."""
    additive_format_reward: Annotated[bool, OPEN_INSTRUCT] = False
    """Add the format reward to the verifiers'; false: a completion without the format scores 0 (gate)."""
    non_stop_penalty: Annotated[bool, OPEN_INSTRUCT] = False
    """Replace the reward of completions that did not stop by themselves."""
    non_stop_penalty_value: Annotated[float, FINITE, OPEN_INSTRUCT] = 0.0
    """Reward of completions that did not stop by themselves, with non_stop_penalty."""
    remap_verifier: Annotated[tuple[str, ...], OPEN_INSTRUCT] = ()
    """old=new, ...: rows that name the verifier old use the verifier new."""
    verifier_weights: tuple[str, ...] = ()
    """name=weight, ...: weights of verifiers in the sum of their scores; 1 for the others."""
    reward_funcs: Annotated[tuple[str, ...], TRL] = ()
    """Reward functions in place of verifiers: package.module.function, file.py:function, one of TRL's six names, or the folder
    of a sequence-classification model. reward_weights weighs them."""
    reward_funcs_timeout: Annotated[int, ONE_OR_MORE] = 3600
    """Seconds that a reward function may take for one batch of completions before the run ends with its name."""
    reward_model_gpu: Annotated[int | None, NOT_NEGATIVE] = None
    """Number of the GPU on which reward models run, in bfloat16; it must be left out of CUDA_VISIBLE_DEVICES, because learners and
    engines use all that are there. none: on one core of the CPU, in float32."""
    verifier_modules: tuple[str, ...] = ()
    """Python modules with verifiers of your own, which rows refer to by name."""
    max_length_verifier_max_length: Annotated[int, ONE_OR_MORE, OPEN_INSTRUCT] = 32768
    """Deviation in tokens at which the verifiers max_length and up_to_max_length score 0."""
    code_api_url: Annotated[str | None, OPEN_INSTRUCT] = None
    """URL of a code service, .../test_program; none: the environment variable CODE_API_URL, else a sandbox on this machine."""
    code_max_execution_time: Annotated[float, POSITIVE, OPEN_INSTRUCT] = 1.0
    """Seconds that each test of a program may take."""
    code_pass_rate_reward_threshold: Annotated[float, Range(low=0, high=1), OPEN_INSTRUCT] = 0.0
    """Programs that pass a smaller share of their tests score 0."""
    code_apply_perf_penalty: Annotated[bool, OPEN_INSTRUCT] = False
    """Passed tests count less the longer they took."""
    code_sandbox_accept_risk: bool = False
    """Run programs even if this machine cannot isolate them."""
    llm_judge_model: Annotated[str | None, OPEN_INSTRUCT] = None
    """Judge model; hosted_vllm/NAME and azure/NAME find their servers in the environment, and RUBRIC_JUDGE_MODEL there names another one
    for rubrics, see docs/judges.md."""
    llm_judge_base_url: str | None = None
    """OpenAI-compatible endpoint of the judge, for example http://localhost:8000/v1."""
    llm_judge_max_tokens: Annotated[int, ONE_OR_MORE, OPEN_INSTRUCT] = 2048
    """Maximum tokens of a judgement."""
    llm_judge_max_context_length: Annotated[int, ONE_OR_MORE, OPEN_INSTRUCT] = 8192
    """Tokens in the judge's context; longer answers are shortened in the middle."""
    llm_judge_temperature: Annotated[float, NOT_NEGATIVE, OPEN_INSTRUCT] = 1.0
    """Sampling temperature of the judge."""
    llm_judge_timeout: Annotated[int, ONE_OR_MORE, OPEN_INSTRUCT] = 60
    """Seconds that one judgement may take."""
    apply_evolving_rubric_reward: Annotated[bool, OPEN_INSTRUCT] = False
    """Have a judge read each group of rows with the verifier rubric and propose criteria that tell its answers apart; rewards count
    them as well, see docs/judges.md."""
    max_active_rubrics: Annotated[int, ONE_OR_MORE, OPEN_INSTRUCT, EVOLVING] = 5
    """Proposed criteria of a question that stay in use: those whose verdicts on a group have differed most."""
    cache_evolving_rubric_data_dir: Annotated[str | None, OPEN_INSTRUCT, EVOLVING] = None
    """Folder for evolving_rubrics.jsonl: each group's answers, criteria and verdicts, and which criteria stay. none: not written."""
    remote_verifier_concurrency: Annotated[int, ONE_OR_MORE] = 64
    """Most concurrent calls of judges and code services."""
    verifier_memory_mb: Annotated[int, Range(low=256)] = 2048
    """MiB of memory that a verifier process may use."""
    verifier_timeout: Annotated[float, POSITIVE] = 10.0
    """Seconds a verifier may spend on one completion before it is killed and the completion has no score."""
    verifier_workers: Annotated[int, ONE_OR_MORE] = 1
    """Number of verifier processes."""

    @property
    def verifier_replacements(self) -> Mapping[str, str]:
        """The verifiers that `remap_verifier` replaces and those in their places, in lower case; ValueError for another form."""
        return replacements(self.remap_verifier)

    @property
    def weight_by_verifier(self) -> Mapping[str, float]:
        """`verifier_weights` by name in lower case; ValueError for another form."""
        return _weights(self.verifier_weights)

    @property
    def max_possible_score(self) -> float:
        """Highest reward of a completion with one verifier."""
        has_format_reward = self.apply_r1_style_format_reward and (
            self.additive_format_reward or not self.apply_verifiable_reward
        )
        return self.verification_reward * self.apply_verifiable_reward + self.r1_style_format_reward * has_format_reward


@cache
def replacements(words: tuple[str, ...]) -> Mapping[str, str]:
    """The pairs of remap_verifier; ValueError for another form."""
    found: dict[str, str] = {}
    for pair in words:
        old, equals, new = (word.strip().lower() for word in pair.partition("="))
        if not (old and equals and new) or "=" in new:
            raise ValueError(f"remap_verifier={pair} must be old=new, the names of two verifiers")
        if old in found:
            raise ValueError(f"remap_verifier replaces {old} twice, by {found[old]} and by {new}; keep one")
        found[old] = new
    return MappingProxyType(found)


@cache
def _weights(words: tuple[str, ...]) -> Mapping[str, float]:
    weights: dict[str, float] = {}
    for word in words:
        name, _, number = word.partition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not name.strip() or not math.isfinite(weight):
            raise ValueError(f"verifier_weights={word} must be name=weight, a verifier and a finite number")
        name = name.strip().lower()
        if name in weights:
            raise ValueError(f"verifier_weights={' '.join(words)} weighs {name} twice; give each verifier one weight")
        weights[name] = weight
    return MappingProxyType(weights)


def _verifiers(remap_verifier: tuple[str, ...], verifier_weights: tuple[str, ...]) -> Iterator[str]:
    for read in (lambda: replacements(remap_verifier), lambda: _weights(verifier_weights)):
        try:
            read()
        except ValueError as err:
            yield str(err)


def _something_is_rewarded(
    apply_verifiable_reward: bool,
    apply_r1_style_format_reward: bool,
    non_stop_penalty: bool,
    has_turns: bool,
    num_reward_funcs: int,
) -> Iterator[str]:
    switches = {
        "apply_verifiable_reward": apply_verifiable_reward,
        "apply_r1_style_format_reward": apply_r1_style_format_reward,
        "non_stop_penalty": non_stop_penalty,
    }
    # An environment may reward by itself.
    if not num_reward_funcs and not has_turns and not any(switches.values()):
        yield f"no reward is on, so nothing can be learned; turn on one of {', '.join(switches)}"


def _evolving_rubrics(
    apply_evolving_rubric_reward: bool,
    apply_verifiable_reward: bool,
    num_samples_per_prompt_rollout: int,
    num_reward_funcs: int,
) -> Iterator[str]:
    if not apply_evolving_rubric_reward or num_reward_funcs:
        return
    if not apply_verifiable_reward:
        yield (
            "apply_evolving_rubric_reward=true needs the verifier rubric, which judges by the criteria, but "
            "apply_verifiable_reward is false; turn it on"
        )
    if num_samples_per_prompt_rollout == 1:
        yield (
            "apply_evolving_rubric_reward=true needs num_samples_per_prompt_rollout of at least 2: criteria are proposed to "
            "tell the answers of a group apart"
        )


RULES: tuple[Rule, ...] = (_verifiers,)
SOURCES: tuple[Rule, ...] = (_something_is_rewarded, _evolving_rubrics)
