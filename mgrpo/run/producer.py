"""Rank 0 produces: data, engines and rewards, from the next prompts to scored groups. No torch, no other ranks."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mgrpo.config import Config
from mgrpo.config.reward_rules import remapped
from mgrpo.config.rules import too_few_prompts
from mgrpo.data.prompt_set import PromptSet
from mgrpo.data.sampler import Sampler
from mgrpo.rewards.rewarder import Rewarder, logged_metrics
from mgrpo.rollout.collect import EVALUATION, seed_of
from mgrpo.rollout.dispatch import Dispatcher, Submitted
from mgrpo.rollout.fleet import Fleet
from mgrpo.rollout.vllm.cluster import Cluster
from mgrpo.run.inputs import Inputs
from mgrpo.telemetry.evaluation import short_names
from mgrpo.types import Prompt, RewardContext, ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """The scored groups of one step, in the order of their prompts."""

    groups: list[ScoredGroup]
    """To train on."""
    dropped: list[ScoredGroup]
    """Sampled, but not worth training on."""
    generate_s: float = 0.0
    score_s: float = 0.0
    reward_metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """What judges have cost so far, and what reward functions have logged in this step."""
    num_excluded: int = 0
    """Prompts that were found solved for good in this step, and are not sampled again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The scored groups of all held-out prompts, in their order."""

    groups: list[ScoredGroup]
    sources: Sequence[str]
    """The dataset of each."""
    generate_s: float
    reward_metrics: Mapping[str, float]
    """What reward functions have logged, as `eval/...`."""


@contextmanager
def started_producer(config: Config, inputs: Inputs, *, num_local_learners: int) -> Iterator[Producer]:
    """Start the engines, which take longest, and the processes that score; they end with the context.

    Call from the main thread and before torch is imported, see `Cluster`.
    """
    rewarder, cluster = Rewarder(config, inputs.functions, inputs.verifiers(config)), None
    try:
        rewarder.start()
        cluster = Cluster(config, num_local_learners=num_local_learners)
        fleet = Fleet(cluster.engines, config.engine, seed=config.experiment.seed, keep_logs=cluster.keep_logs)
        yield Producer(config, inputs, fleet, rewarder)
    finally:
        inputs.train.cancel()
        inputs.held_out.cancel()
        rewarder.close()
        if cluster is not None:
            cluster.close()


class Producer:
    """Turns prompts into scored groups. For one thread at a time, except `abort`."""

    def __init__(self, config: Config, inputs: Inputs, fleet: Fleet, rewarder: Rewarder) -> None:
        self.config, self.inputs, self.fleet, self.rewarder = config, inputs, fleet, rewarder
        self.sampler: Sampler | None = None
        """None without training data."""
        self.submitted: Submitted | None = None
        """The next step's prompts, queued in the engines."""
        self.before: dict[str, Any] | None = None
        """Where the sampler stood before it handed out the prompts that are queued or being sampled."""

    def start(self) -> list[str]:
        """Tokenise the data and wait for the engines; returns what the user should know."""
        from mgrpo.data.templates import missing_stop_strings
        from mgrpo.data.tokenizer import decode, load_tokenizer, stop_token_ids

        config = self.config
        self.tokenizer = load_tokenizer(config.tokenizer_path)
        self.prompts = self.inputs.train.encode(self.tokenizer) if len(self.inputs.train) else None
        held_out = self.inputs.held_out.encode(self.tokenizer) if len(self.inputs.held_out) else None
        self.held_out = self._prompts(held_out, [(0, i) for i in range(len(held_out))]) if held_out else []
        self.held_out_sources = short_names(map(held_out.source_of, range(len(held_out)))) if held_out else []
        if self.prompts is not None:
            if problems := too_few_prompts(config, len(self.prompts)):
                raise ValueError(problems[0])
            self.sampler = Sampler(len(self.prompts), config.experiment.seed, shuffle=config.data.shuffle_dataset)
        stop_ids = stop_token_ids(config.model.path, self.tokenizer)
        self.dispatcher = Dispatcher(
            self.fleet,
            config.rollout,
            run_seed=config.experiment.seed,
            decode=partial(decode, self.tokenizer),
            stop_token_ids=stop_ids,
        )
        self.fleet.wait_ready()
        template = config.data.chat_template_name
        missing = missing_stop_strings(
            template,
            stop_strings=config.rollout.stop_strings,
            stop_tokens=self.tokenizer.convert_ids_to_tokens(stop_ids),
        )
        return [f"chat_template_name={template} goes with --stop_strings '{text}'" for text in missing]

    def submit_ahead(self) -> None:
        """Queue the next step's prompts in the engines, which begin with them when `collect` is called."""
        assert self.sampler is not None
        self.before = self.sampler.state_dict()
        self.submitted = self._submit(self.config.rollout.num_unique_prompts_rollout)

    def collect(self, step: int) -> Rollouts:
        """Sample and score the groups of training step `step`; with active sampling others in place of those left out.

        Neither groups nor dropped ones: every prompt is solved for good.
        """
        algorithm, wanted = self.config.algorithm, self.config.rollout.num_unique_prompts_rollout
        assert self.sampler is not None
        if self.submitted is None:
            self.submit_ahead()
        submitted, self.submitted = self.submitted, None
        excluded_before = self.sampler.num_excluded
        kept: list[ScoredGroup] = []
        dropped: list[ScoredGroup] = []
        logged: dict[str, list[float]] = {}
        generate_s = score_s = 0.0
        for round_number in range(algorithm.active_sampling_max_rounds if algorithm.active_sampling else 1):
            sampled = self.dispatcher.take(submitted or self._submit(wanted - len(kept)))
            submitted = None
            start = time.perf_counter()
            scored = self.rewarder.score(sampled.groups, self._training(step, round_number))
            generate_s, score_s = generate_s + sampled.seconds, score_s + time.perf_counter() - start
            for name, values in scored.logged.items():
                logged.setdefault(name, []).extend(values)
            for group, is_kept in zip(scored.groups, self._keep(scored.groups), strict=True):
                (kept if is_kept else dropped).append(group)
            if len(kept) == wanted or not scored.groups:
                break
        return Rollouts(
            groups=kept,
            dropped=dropped,
            generate_s=generate_s,
            score_s=score_s,
            reward_metrics=self.rewarder.metrics() | logged_metrics(logged),
            num_excluded=self.sampler.num_excluded - excluded_before,
        )

    def evaluate(self, done: int) -> Evaluation:
        """Sample and score the held-out prompts after `done` training steps.

        Evaluations draw from a random stream of their own, always the same; the next step's begins after it.
        """
        rollout = self.config.rollout
        context = RewardContext(
            step=done,
            seed=seed_of(self.config.experiment.seed, "rewards", EVALUATION),
            max_tokens=rollout.eval_response_length or rollout.response_length,
        )
        self.fleet.reseed(EVALUATION)
        sampled = self.dispatcher.take(self.dispatcher.submit_evaluation(self.held_out))
        scored = self.rewarder.score(sampled.groups, context)
        self.fleet.reseed(done + 1)
        return Evaluation(
            groups=scored.groups,
            sources=self.held_out_sources,
            generate_s=sampled.seconds,
            reward_metrics=logged_metrics(scored.logged, "eval/"),
        )

    def abort(self) -> None:
        """End what the engines sample; the `collect` or `evaluate` that waits for it raises EngineError."""
        self.fleet.abort()

    def finished(self) -> None:
        """The step's groups have been taken over: they are not handed out again after a resume."""
        self.before = None

    def state_dict(self) -> dict[str, Any]:
        """Where the data stand, in JSON: prompts that are queued or being sampled are handed out again."""
        assert self.sampler is not None
        return {"sampler": self.before or self.sampler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; call after `start`."""
        assert self.sampler is not None
        self.sampler.load_state_dict(state["sampler"])

    def save_tokenizer(self, folder: Path) -> None:
        """Add to an exported model the tokenizer and chat template that it was trained with, where they are not its own."""
        from mgrpo.data.templates import find_template

        data = self.config.data
        template = find_template(data.chat_template_name, self.tokenizer) if data.chat_template_name != "auto" else None
        if data.tokenizer_name_or_path is None and template is None:
            return
        tokenizer = copy.deepcopy(self.tokenizer)
        tokenizer.chat_template = template or tokenizer.chat_template
        tokenizer.save_pretrained(folder)

    def _submit(self, num_prompts: int) -> Submitted:
        assert self.sampler is not None and self.prompts is not None
        return self.dispatcher.submit(self._prompts(self.prompts, self.sampler.take(num_prompts)))

    def _prompts(self, source: PromptSet, ids: Sequence[tuple[int, int]]) -> list[Prompt]:
        """Prompts of these ids, with the verifier that `remap_verifier` puts in place of another."""
        prompts = [source.prompt(prompt_id) for prompt_id in ids]
        if not (pair := remapped(self.config.reward.remap_verifier)):
            return prompts
        old, new = pair
        return [
            dataclasses.replace(
                prompt, verifiers=tuple(new if name.lower() == old else name for name in prompt.verifiers)
            )
            for prompt in prompts
        ]

    def _training(self, step: int, round_number: int) -> RewardContext:
        return RewardContext(
            step=step - 1,
            seed=seed_of(self.config.experiment.seed, "rewards", step, round_number),
            max_tokens=self.config.rollout.response_length,
        )

    def _keep(self, groups: Sequence[ScoredGroup]) -> list[bool]:
        """Which groups have something to learn from; prompts that are solved for good are not sampled again."""
        from mgrpo.algo import has_spread, solved_for_good

        algorithm, scale = self.config.algorithm, self.rewarder.scale
        if not groups:
            return []
        if algorithm.no_resampling_pass_rate is not None and scale is not None and self.sampler is not None:
            shares = np.array([scale.shares(group) for group in groups])
            solved = solved_for_good(shares, pass_rate=algorithm.no_resampling_pass_rate)
            self.sampler.exclude(
                {group.group.prompt.id[1] for group, is_solved in zip(groups, solved, strict=True) if is_solved}
            )
        if not algorithm.filter_zero_std_samples:
            return [True] * len(groups)
        if algorithm.advantage_normalization_type != "gdpo":
            return has_spread(np.stack([group.rewards for group in groups])).tolist()
        # Functions that differ may add up to the same reward; each has an advantage of its own.
        by_function = [
            np.array([[score.parts[name] for score in group.scores] for group in groups])
            for name in self.rewarder.weights
        ]
        return np.any([has_spread(values) for values in by_function], axis=0).tolist()
