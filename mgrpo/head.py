"""What only rank 0 has: Ray and the engines, data, verifiers, controller, and everything that is written or shown.

Made in two steps, because the engines take longest to start: `Head(...)` before torch is imported, `get_ready()` after.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mgrpo.checkpoint.folder import abandon, lies_in
from mgrpo.config import Config, to_yaml
from mgrpo.config.derived import derive, state_root
from mgrpo.data.mixing import Row, read_rows
from mgrpo.data.sampler import Sampler
from mgrpo.rewards.compose import add_to_rewards, function_names, score_groups, score_with_functions
from mgrpo.rewards.pool import VerifierPool
from mgrpo.rollout.cluster import Cluster
from mgrpo.rollout.collect import EVALUATION
from mgrpo.rollout.controller import Controller, Rollouts
from mgrpo.telemetry.batch import RewardScale
from mgrpo.telemetry.metrics import MetricsWriter
from mgrpo.telemetry.progress import Progress
from mgrpo.types import Prompt, RolloutGroup, ScoredGroup


class Head:
    """Rank 0's side of a run. Always `close` it."""

    def __init__(
        self,
        config: Config,
        *,
        num_local_learners: int,
        rows: Sequence[Row],
        held_out: Sequence[Row],
        reward_funcs: Sequence[Callable] = (),
        resume_from: str | None = None,
    ) -> None:
        self.config, self.rows, self.held_out, self.reward_funcs = config, rows, held_out, reward_funcs
        self.output_dir = Path(config.experiment.output_dir)
        self.output_dir.mkdir(parents=True, exist_ok=True)
        self.resume_from = resume_from
        self.stopping = threading.Event()
        """Set by SIGTERM: the run is to save its state and end."""
        self.is_training = False
        """Whether there is a trainer that looks at `stopping`."""
        self.cursor: dict[str, Any] | None = None
        """Where the sampler stood before it handed out the prompts of the step that is under way."""
        self.random: dict[str, Any] | None = None
        """The random states before the batch that is under way, which reward functions may be changing."""
        self.pool = VerifierPool(
            config.reward.verifier_workers,
            config.reward.verifier_timeout,
            verifiers=sorted({name for row in [*rows, *held_out] for name in row.verifiers}),
        )
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="head")
        self.follower = ThreadPoolExecutor(max_workers=1, thread_name_prefix="follower")
        self.controller: Controller | None = None
        self.writer: MetricsWriter | None = None
        self.progress: Progress | None = None
        self.cluster = Cluster(config, num_local_learners=num_local_learners)
        self.pool.start()

    def get_ready(self, resumed: Mapping[str, Any] | None = None) -> Future[None]:
        """Tokenise the data and wait for the engines, in a thread; call when torch has been imported.

        Args:
            resumed: the trainer's state from the checkpoint that the run continues.
        """
        return self.thread.submit(self._get_ready, resumed)

    def after(self, future: Future, then: Callable[[Any], Any]) -> Future:
        """`then` of the future's result, in a thread: however long it takes, rank 0 can tell the others it is alive."""
        return self.follower.submit(lambda: then(future.result()))

    def finish(self, calls: list[Any], what: str) -> Future[None]:
        """Wait for the engines' part of a weight sync, in a thread."""
        return self.thread.submit(self.cluster.finish, calls, what)

    def _get_ready(self, resumed: Mapping[str, Any] | None) -> None:
        from mgrpo.data.prompts import decode, encode, load_tokenizer, stop_token_ids

        config = self.config
        tokenizer = load_tokenizer(config.model.model_name_or_path)
        limits = {
            "max_prompt_token_length": config.data.max_prompt_token_length,
            "chat_template_name": config.data.chat_template_name,
        }
        train = encode(self.rows, tokenizer, **limits)
        held_out = encode(self.held_out, tokenizer, **limits) if self.held_out else ()
        self.held_out_prompts: list[Prompt] = [held_out.prompt((0, i)) for i in range(len(held_out))]
        self.sampler = Sampler(len(train), config.experiment.seed)
        if resumed:
            self.sampler.load_state_dict(resumed["head"]["sampler"])
            restore_random(resumed["head"]["random"])
        self.controller = Controller(
            config,
            self.cluster,
            next_prompts=lambda n: [train.prompt(prompt_id) for prompt_id in self.sampler.take(n)],
            decode=partial(decode, tokenizer),
            score=self._score,
            keep=self._keep,
            stop_token_ids=stop_token_ids(config.model.model_name_or_path, tokenizer),
        )
        self._open_output(resumed)
        self.cluster.wait_ready()
        self.progress = Progress(config.num_training_steps)

    def _open_output(self, resumed: Mapping[str, Any] | None) -> None:
        """The run's files. Nothing of an earlier run is touched before: the start may have failed."""
        root = state_root(self.config)
        goes_on = resumed is not None and lies_in(self.resume_from, root)
        self.writer = MetricsWriter(
            self.output_dir,
            resumed_after=resumed["step"] if goes_on else None,
            num_lines=resumed["head"]["num_lines"] if goes_on else 0,
        )
        (self.output_dir / "config.yaml").write_text(to_yaml(self.config))
        abandon(root, after=resumed["step"] if goes_on else -1)

    def prepare(self, *, is_next: bool = True) -> None:
        """The batch under way has arrived; queue the next step's prompts in the engines, if it `is_next`, without sampling."""
        self.cursor = self.random = None
        if is_next:
            self.cursor = self.sampler.state_dict()
            self.controller.prepare()

    def next_batch(self) -> Future[Rollouts]:
        """Start sampling the next step."""
        if self.controller.prepared is None:
            self.prepare()
        self.random = random_states()
        return self.controller.next_batch()

    def reseed(self, step: int) -> Future[None]:
        """Begin the engines' random stream of training step `step`."""
        return self.finish(self.cluster.reseed(step), "seed the sampler")

    def state_dict(self) -> dict[str, Any]:
        """What only rank 0 knows, as it was when the last step was done: prompts handed out since are handed out again."""
        return {
            "sampler": self.cursor or self.sampler.state_dict(),
            "random": self.random or random_states(),
            "num_lines": self.writer.num_lines,
        }

    def _score(self, groups: Sequence[RolloutGroup]) -> list[ScoredGroup]:
        """Rewards of the user's functions or of the rows' verifiers, and what the completion's length costs."""
        algorithm, limit = self.config.algorithm, self.config.rollout.response_length
        if self.reward_funcs:
            scored = score_with_functions(groups, self.reward_funcs, algorithm.reward_weights)
        else:
            scored = score_groups(groups, self.pool, self.config.reward)
        if algorithm.overlong_cache_length is None:
            return scored
        from mgrpo.algo import overlong_penalty

        return [
            add_to_rewards(
                group,
                "overlong",
                overlong_penalty(
                    np.array([len(completion.tokens) for completion in group.group.completions]),
                    max_length=limit,
                    cache_length=algorithm.overlong_cache_length,
                ),
            )
            for group in scored
        ]

    def _keep(self, groups: Sequence[ScoredGroup]) -> list[bool]:
        """Which groups have something to learn from; prompts that are solved for good are not sampled again."""
        from mgrpo.algo import has_spread, solved_for_good

        algorithm = self.config.algorithm
        if not groups:
            return []
        rewards = np.stack([group.rewards for group in groups])
        scale = self.reward_scale
        if algorithm.no_resampling_pass_rate is not None and scale is not None:
            shares = np.array([scale.shares(group) for group in groups])
            solved = solved_for_good(shares, pass_rate=algorithm.no_resampling_pass_rate)
            self.sampler.exclude(
                {group.group.prompt.id[1] for group, is_solved in zip(groups, solved, strict=True) if is_solved}
            )
        if not algorithm.filter_zero_std_samples:
            return [True] * len(groups)
        if algorithm.advantage_normalization_type != "gdpo":
            return has_spread(rewards).tolist()
        # Functions that differ may add up to the same reward; each has an advantage of its own.
        by_function = [
            np.array([[score.parts[name] for score in group.scores] for group in groups])
            for name in self.reward_weights
        ]
        return np.any([has_spread(values) for values in by_function], axis=0).tolist()

    @property
    def reward_weights(self) -> dict[str, float]:
        """Weight of each of the user's reward functions, and of what the length costs, by name."""
        algorithm, names = self.config.algorithm, function_names(self.reward_funcs)
        weights = dict(zip(names, algorithm.reward_weights or [1.0] * len(names), strict=True))
        return weights | {"overlong": 1.0} if weights and algorithm.overlong_cache_length is not None else weights

    @property
    def reward_scale(self) -> RewardScale | None:
        """What rewards are measured in; nothing where the user's functions decide."""
        if self.reward_funcs:
            return None
        reward = self.config.reward
        return RewardScale(
            max_possible_score=derive(self.config, world_size=1).max_possible_score,
            verification_reward=reward.verification_reward if reward.apply_verifiable_reward else 0.0,
            format_reward=reward.r1_style_format_reward,
        )

    def evaluation(self, *, next_step: int) -> Future[Rollouts]:
        """Sample the held-out prompts from a random stream that training does not notice: that of `next_step` comes after."""
        self.random = random_states()
        return self.thread.submit(self._evaluate, next_step)

    def _evaluate(self, next_step: int) -> Rollouts:
        rollout = self.config.rollout
        self.cluster.finish(self.cluster.reseed(EVALUATION), "seed the sampler")
        rollouts = self.controller.evaluate(
            self.held_out_prompts, num_samples=rollout.eval_pass_at_k, temperature=rollout.temperature
        ).result()
        self.cluster.finish(self.cluster.reseed(next_step), "seed the sampler")
        self.random = None
        return rollouts

    def close(self) -> None:
        """End every process that this rank started."""
        for thread in (self.thread, self.follower):
            thread.shutdown(wait=False, cancel_futures=True)
        for part in (self.progress, self.writer, self.controller, self.pool, self.cluster):
            if part is not None:
                part.close()


def random_states() -> dict[str, Any]:
    """Python's and numpy's global random states, which reward functions may use; in JSON."""
    version, numbers, normal = random.getstate()
    name, keys, *rest = np.random.get_state()
    return {"python": [version, list(numbers), normal], "numpy": [name, keys.tolist(), *rest]}


def restore_random(states: Mapping[str, Any]) -> None:
    """Go on where `random_states` was."""
    version, numbers, normal = states["python"]
    random.setstate((version, tuple(numbers), normal))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))


def read_data(config: Config, *, need_verifiers: bool) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows, checked; needs neither tokenizer nor engines."""
    data = config.data
    return (
        read_rows(data.dataset_mixer_list, data.dataset_mixer_list_splits, need_verifiers=need_verifiers),
        read_rows(data.dataset_mixer_eval_list, data.dataset_mixer_eval_list_splits, need_verifiers=need_verifiers)
        if data.dataset_mixer_eval_list
        else [],
    )
