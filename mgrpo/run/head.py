"""What only rank 0 has: Ray and the engines, data, verifiers, controller, and everything that is written or shown.

Made in two steps, because the engines take longest to start: `Head(...)` before torch is imported, `get_ready()` after.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
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
from mgrpo.config.derived import state_root
from mgrpo.config.rules import too_few_prompts
from mgrpo.data.sampler import Sampler
from mgrpo.rewards.rewarder import Scoring
from mgrpo.rollout.collect import EVALUATION, sampler_seed
from mgrpo.rollout.controller import Controller, Rollouts
from mgrpo.rollout.vllm.cluster import Cluster
from mgrpo.run.inputs import Inputs
from mgrpo.telemetry.evaluation import correctness, short_names, summarise
from mgrpo.telemetry.metrics import MetricsWriter
from mgrpo.telemetry.progress import Progress
from mgrpo.telemetry.report import write_report
from mgrpo.telemetry.samples import EvaluationTables, Traces
from mgrpo.types import Prompt, ScoredGroup

_log = logging.getLogger(__name__)


class Head:
    """Rank 0's side of a run. Always `close` it."""

    def __init__(
        self,
        config: Config,
        *,
        num_local_learners: int,
        inputs: Inputs,
        resume_from: str | None = None,
    ) -> None:
        """Start Ray, the engines and the verifiers."""
        self.config, self.inputs = config, inputs
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
        self.scoring = Scoring(config, inputs.functions, inputs.verifiers(config))
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="head")
        self.follower = ThreadPoolExecutor(max_workers=1, thread_name_prefix="follower")
        self.controller: Controller | None = None
        self.writer: MetricsWriter | None = None
        self.progress: Progress | None = None
        self.tables: EvaluationTables | None = None
        self.traces: Traces | None = None
        self.scoring.start()
        try:
            self.cluster = Cluster(config, num_local_learners=num_local_learners)
        except BaseException:
            self.scoring.close()
            raise

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
        from mgrpo.data.templates import missing_stop_strings
        from mgrpo.data.tokenizer import decode, load_tokenizer, stop_token_ids

        config = self.config
        self.tokenizer = load_tokenizer(config.tokenizer_path)
        train = self.inputs.train.encode(self.tokenizer) if len(self.inputs.train) else None
        held_out = self.inputs.held_out.encode(self.tokenizer) if len(self.inputs.held_out) else ()
        self.held_out_prompts = [self._remapped(held_out.prompt((0, i))) for i in range(len(held_out))]
        self.held_out_sources = short_names(held_out.source_of(i) for i in range(len(held_out))) if held_out else []
        """The dataset of each held-out prompt."""
        if train is not None:
            if problems := too_few_prompts(config, len(train)):
                raise ValueError(problems[0])
            self.sampler = Sampler(len(train), config.experiment.seed, shuffle=config.data.shuffle_dataset)
        stop_ids = stop_token_ids(config.model.model_name_or_path, self.tokenizer)
        if resumed:
            self.sampler.load_state_dict(resumed["head"]["sampler"])
            restore_random(resumed["head"]["random"])
        self.controller = Controller(
            config,
            self.cluster,
            next_prompts=lambda n: [self._remapped(train.prompt(prompt_id)) for prompt_id in self.sampler.take(n)],
            decode=partial(decode, self.tokenizer),
            score=self.scoring.score,
            keep=self._keep,
            stop_token_ids=stop_ids,
        )
        self._open_output(resumed)
        self.cluster.wait_ready()
        self.progress = Progress(config.num_training_steps)
        for text in missing_stop_strings(
            config.data.chat_template_name,
            stop_strings=config.rollout.stop_strings,
            stop_tokens=self.tokenizer.convert_ids_to_tokens(stop_ids),
        ):
            self.progress.say(f"chat_template_name={config.data.chat_template_name} goes with --stop_strings '{text}'")

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
        rollout = self.config.rollout
        resumed_after = resumed["step"] if goes_on else None
        self.tables = EvaluationTables(self.output_dir / "rollouts", resumed_after=resumed_after)
        if rollout.save_traces:
            self.traces = Traces(
                rollout.rollouts_save_path or self.output_dir / "rollouts",
                self.config.experiment.run_name,
                resumed_after=resumed_after,
            )
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

    def _remapped(self, prompt: Prompt) -> Prompt:
        """The prompt with the verifier that `remap_verifier` puts in place of another."""
        if not (pair := self.config.reward.verifier_replacement):
            return prompt
        names = tuple(pair[1] if name.lower() == pair[0] else name for name in prompt.verifiers)
        return dataclasses.replace(prompt, verifiers=names)

    def _keep(self, groups: Sequence[ScoredGroup]) -> list[bool]:
        """Which groups have something to learn from; prompts that are solved for good are not sampled again."""
        from mgrpo.algo import has_spread, solved_for_good

        algorithm = self.config.algorithm
        if not groups:
            return []
        rewards = np.stack([group.rewards for group in groups])
        scale = self.scoring.scale
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
            for name in self.scoring.weights
        ]
        return np.any([has_spread(values) for values in by_function], axis=0).tolist()

    def save_tokenizer(self, folder: Path) -> None:
        """Put into an exported model the tokenizer and the chat template that it was trained with, where they are not its own."""
        from mgrpo.data.templates import find_template

        data = self.config.data
        template = find_template(data.chat_template_name, self.tokenizer) if data.chat_template_name != "auto" else None
        if data.tokenizer_name_or_path is None and template is None:
            return
        tokenizer = copy.deepcopy(self.tokenizer)
        tokenizer.chat_template = template or tokenizer.chat_template
        tokenizer.save_pretrained(folder)

    def evaluation(self, *, next_step: int) -> Future[Rollouts]:
        """Sample the held-out prompts from random streams that training does not notice: that of `next_step` comes after."""
        self.random = random_states()
        return self.thread.submit(self._evaluate, next_step)

    def _evaluate(self, next_step: int) -> Rollouts:
        seed = sampler_seed(self.config.experiment.seed, EVALUATION, 0)
        self.cluster.finish(self.cluster.reseed(EVALUATION), "seed the sampler")
        # Reward functions may draw from Python's and numpy's own states, too.
        random.seed(seed)
        np.random.seed(seed % 2**32)
        with self.scoring.evaluating(next_step - 1):
            rollouts = self.controller.evaluate(self.held_out_prompts).result()
        restore_random(self.random)
        self.cluster.finish(self.cluster.reseed(next_step), "seed the sampler")
        self.random = None
        return rollouts

    def record_evaluation(self, step: int, rollouts: Rollouts, *, policy_version: int | None) -> dict[str, float]:
        """Metrics of the evaluation after training step `step`, written beside its samples and into the report."""
        metrics = summarise(
            rollouts.groups,
            scale=self.scoring.scale,
            sources=self.held_out_sources,
            generate_s=rollouts.generate_s,
        )
        metrics |= self.scoring.evaluation_metrics()
        version = {} if policy_version is None else {"policy_version": policy_version}
        self.writer.write(step, {**version, **metrics, "time/eval": rollouts.generate_s})
        self.tables.write(step, rollouts.groups, correctness(rollouts.groups, self.scoring.scale))
        self.write_report()
        return metrics

    def write_report(self) -> None:
        """Bring the run's report.html up to date; a page is no reason to end a run."""
        try:
            write_report(self.output_dir)
        except Exception as err:
            _log.warning("no report: %s: %s", type(err).__name__, err)

    def close(self) -> None:
        """End every process that this rank started."""
        self.inputs.train.cancel()
        self.inputs.held_out.cancel()
        for thread in (self.thread, self.follower):
            thread.shutdown(wait=False, cancel_futures=True)
        for part in (self.progress, self.writer, self.controller, self.scoring, self.cluster):
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
