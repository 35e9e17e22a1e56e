"""What only rank 0 has: Ray and the engines, data, verifiers, controller, and everything that is written or shown.

Made in two steps, because the engines take longest to start: `Head(...)` before torch is imported, `get_ready()` after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from mgrpo.config import Config, to_yaml
from mgrpo.data.mixing import Row, read_rows
from mgrpo.data.sampler import Sampler
from mgrpo.rewards.compose import score_groups, score_with_functions
from mgrpo.rewards.pool import VerifierPool
from mgrpo.rollout.cluster import Cluster
from mgrpo.rollout.controller import Controller, Rollouts
from mgrpo.telemetry.metrics import MetricsWriter, move_aside
from mgrpo.telemetry.progress import Progress
from mgrpo.types import Prompt


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
    ) -> None:
        self.config, self.rows, self.held_out, self.reward_funcs = config, rows, held_out, reward_funcs
        self.output_dir = Path(config.experiment.output_dir)
        self.output_dir.mkdir(parents=True, exist_ok=True)
        move_aside(self.output_dir)
        (self.output_dir / "config.yaml").write_text(to_yaml(config))
        self.pool = VerifierPool(
            config.reward.verifier_workers,
            config.reward.verifier_timeout,
            verifiers=sorted({name for row in [*rows, *held_out] for name in row.verifiers}),
        )
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="head")
        self.controller: Controller | None = None
        self.writer: MetricsWriter | None = None
        self.progress: Progress | None = None
        self.cluster = Cluster(config, num_local_learners=num_local_learners)
        self.pool.start()

    def get_ready(self) -> Future[None]:
        """Tokenise the data and wait for the engines, in a thread; call when torch has been imported."""
        return self.thread.submit(self._get_ready)

    def finish(self, calls: list[Any], what: str) -> Future[None]:
        """Wait for the engines' part of a weight sync, in a thread."""
        return self.thread.submit(self.cluster.finish, calls, what)

    def _get_ready(self) -> None:
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
        score = (
            partial(score_with_functions, functions=self.reward_funcs)
            if self.reward_funcs
            else partial(score_groups, pool=self.pool, config=config.reward)
        )
        self.controller = Controller(
            config,
            self.cluster,
            next_prompts=lambda n: [train.prompt(prompt_id) for prompt_id in self.sampler.take(n)],
            decode=partial(decode, tokenizer),
            score=score,
            stop_token_ids=stop_token_ids(config.model.model_name_or_path, tokenizer),
        )
        self.writer = MetricsWriter(self.output_dir)
        self.cluster.wait_ready()
        self.progress = Progress(config.num_training_steps)

    def evaluation(self) -> Future[Rollouts]:
        """Start sampling the held-out prompts."""
        rollout = self.config.rollout
        return self.controller.evaluate(
            self.held_out_prompts, num_samples=rollout.eval_pass_at_k, temperature=rollout.temperature
        )

    def close(self) -> None:
        """End every process that this rank started."""
        self.thread.shutdown(wait=False, cancel_futures=True)
        for part in (self.progress, self.writer, self.controller, self.pool, self.cluster):
            if part is not None:
                part.close()


def read_data(config: Config, *, need_verifiers: bool) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows, checked; needs neither tokenizer nor engines."""
    data = config.data
    return (
        read_rows(data.dataset_mixer_list, data.dataset_mixer_list_splits, need_verifiers=need_verifiers),
        read_rows(data.dataset_mixer_eval_list, data.dataset_mixer_eval_list_splits, need_verifiers=need_verifiers)
        if data.dataset_mixer_eval_list
        else [],
    )
