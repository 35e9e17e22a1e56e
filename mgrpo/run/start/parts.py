"""The two halves of a run as objects, for a training loop of one's own in one process: engines that sample, and a learner.

    with start_engines(config) as engines:
        learner = make_learner(config)
        engines.receive_weights(learner)
        completions = engines.sample(prompts)

A run's dispatch, resume, reports and many ranks are `mgrpo.train`'s. This module imports neither torch nor Megatron at its top: Ray
and the engines, which take longest to start, come first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mgrpo.config import Config, ConfigError
from mgrpo.config.derived import layout_of, with_routing
from mgrpo.config.validate import problems
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.rollout.dispatch import Dispatcher
from mgrpo.rollout.engines.fleet import Fleet
from mgrpo.rollout.requests import evaluation_requests, training_sampling
from mgrpo.rollout.start import machine_problems, request_bounds, serving_gpus, started_fleet
from mgrpo.run.inputs.snapshots import located
from mgrpo.run.ranks.process import prepare_environment, world_size
from mgrpo.types import Completion, Prompt

if TYPE_CHECKING:
    from mgrpo.run.train.engine_weights import EngineWeights
    from mgrpo.run.train.learner import Learner


class SamplingEngines:
    """The engines of a configuration, which stand still between the calls of one thread."""

    def __init__(self, config: Config, fleet: Fleet) -> None:
        from mgrpo.data.tokenizer import decode, load_tokenizer, stop_token_ids

        self.config, self.fleet = config, fleet
        self.tokenizer = load_tokenizer(config.tokenizer_path)
        """Tokenizer of transformers."""
        self.version = -1
        """Version of the engines' weights; -1: those of the model's folder."""
        self._weights: EngineWeights | None = None
        self._num_calls = 0
        self._dispatcher = Dispatcher(
            fleet,
            config.rollout,
            run_seed=config.experiment.seed,
            decode=partial(decode, self.tokenizer),
            stop_token_ids=stop_token_ids(config.model_path, self.tokenizer),
            bounds=request_bounds(config),
        )

    def sample(
        self,
        prompts: Sequence[Sequence[int] | np.ndarray],
        *,
        num_samples: int | None = None,
        temperature: float | None = None,
    ) -> list[tuple[Completion, ...]]:
        """The completions of each prompt, with their log-probabilities under the engines' weights.

        Args:
            prompts: token ids.
            num_samples: completions per prompt; None: `num_samples_per_prompt_rollout`.
            temperature: 0 is greedy; None: the configuration's.
        Raises:
            EngineError: an engine has failed, or `rollout_timeout` seconds have passed; RefusedError: a prompt is too long for the
                engines.
        """
        dispatcher, self._num_calls = self._dispatcher, self._num_calls + 1
        sampling = training_sampling(self.config.rollout, dispatcher.stop_token_ids)
        sampling = replace(
            sampling,
            num_samples=sampling.num_samples if num_samples is None else num_samples,
            temperature=sampling.temperature if temperature is None else temperature,
        )
        # On a GPU a prompt's random numbers follow from its id.
        records = [
            Prompt(id=(self._num_calls, n), tokens=np.asarray(ids, np.int32), text="", verifiers=(), ground_truths=())
            for n, ids in enumerate(prompts)
        ]
        whole, requests = evaluation_requests(records, sampling)
        dispatcher.post(dispatcher.resume)
        dispatcher.post(partial(dispatcher.send, requests))
        try:
            groups = dispatcher.wait(whole)
        finally:
            dispatcher.wait(dispatcher.thread.submit(dispatcher.pause).result())
        return [group.completions for group in groups]

    def receive_weights(self, learner: Learner) -> None:
        """Send the learner's weights to the engines; the first time digests of every tensor are compared.

        Raises:
            RuntimeError: digests differ, or an engine has failed.
        """
        if self._weights is None:
            self._weights = self._connected(learner)
        self.version += 1
        self._weights.send(self.version, step=self.version + 1, check=self.version == 0)

    def _connected(self, learner: Learner) -> EngineWeights:
        from mgrpo.run.ranks.lead import Lead
        from mgrpo.run.train.engine_weights import EngineWeights

        weights = EngineWeights(
            learner.policy,
            shape=learner.shape,
            layout=learner.policy.layout,
            settings=self.config.engine,
            lead=Lead(),
            fleet=self.fleet,
            host_group=learner.host_group,
        )
        self.fleet.wait_ready()
        weights.connect()
        return weights


@contextmanager
def start_engines(config: Config) -> Iterator[SamplingEngines]:
    """Start the engines of `config` without waiting for them; they end with the context. Call from the main thread.

    Args:
        config: as `mgrpo.GRPOConfig(...)` makes it; its data are not read.
    Returns:
        A context manager with the engines.
    Raises:
        ConfigError: every problem with the configuration and this machine at once, before anything is started.
    """
    config = _checked(config)
    with started_fleet(config, num_local_learners=1, on_failure=None) as fleet:
        yield SamplingEngines(config, fleet)


def make_learner(config: Config) -> Learner:
    """Load the policy of `config` in this process, with its reference, optimizer and loss; once per process, after `start_engines`.

    Args:
        config: the engines' own. Its steps are those of the learning rate's schedule.
    Returns:
        The learner; `learn` trains it on packs.
    Raises:
        ConfigError: every problem with the configuration and this machine at once.
    """
    config = _checked(config)
    from mgrpo.parallel import backend

    backend.install()
    backend.init_process_group(rank=0, world_size=1, timeout_minutes=config.experiment.backend_timeout)
    import torch.distributed as dist

    from mgrpo.run.train.learner import Learner

    return Learner(
        config,
        shape=shape_of(read_hf_config(config.model_path)),
        layout=layout_of(config, 1),
        host_group=dist.new_group(backend="gloo"),
    )


def _checked(config: Config) -> Config:
    """`config` with the folders of the models that it names on the Hub, checked; sets the environment for torch."""
    config = located(config, None)
    found = problems(config, world_size=world_size(), hf_config=None, has_dataset=True)
    if world_size() > 1:
        found.append(f"WORLD_SIZE={world_size()}: a loop of one's own has one learner; start it without torchrun")
    if config.engine.shares_gpus:
        found.append("vllm_mode=colocate takes turns with learners, which mgrpo.train arranges; choose ray or server")
    beyond = {"teachers": config.distillation.distills, "tools and agents": config.has_turns}
    found += [
        f"{what} take part in mgrpo.train alone, not in a loop of one's own" for what, used in beyond.items() if used
    ]
    if not found:
        hf_config = read_hf_config(config.model_path)
        config = with_routing(config, hf_config, on_gpu=bool(serving_gpus()))
        found = machine_problems(config, num_local_learners=1, hf_config=hf_config, starts_engines=True)
    if found:
        raise ConfigError(found)
    prepare_environment(config)
    return config
