"""Every setting of a run: one flat namespace on the command line and in YAML, sections in the code.

Each section is a module: its fields, what they need to have an effect, and its rules, those between several sections with the one
that they are mainly about. Names are Open Instruct's where it has one, and Megatron's for Megatron's own settings. A field's
annotation holds its range, what it needs, and the other trainers with a setting of the same name; the docstring under it is its
--help text. Each default is written once, in its section; `None` means off unless the docstring says otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mgrpo.config.adapter import Adapter
from mgrpo.config.agent import Agent
from mgrpo.config.algorithm import Algorithm
from mgrpo.config.checkpoint import Checkpoint
from mgrpo.config.data import Data
from mgrpo.config.distillation import TEACHERS, Distillation, Teacher
from mgrpo.config.engine import Engine
from mgrpo.config.experiment import Experiment
from mgrpo.config.hub import Hub
from mgrpo.config.loss import LossConfig
from mgrpo.config.model import Model
from mgrpo.config.optimizer import Optimizer
from mgrpo.config.parallel import Parallel
from mgrpo.config.provenance import Provenance
from mgrpo.config.reward import Reward
from mgrpo.config.rollout import MOST_KEPT as MOST_KEPT
from mgrpo.config.rollout import MOST_TEMPERATURE as MOST_TEMPERATURE
from mgrpo.config.rollout import Rollout
from mgrpo.config.tools import Tools
from mgrpo.config.tracking import Tracking


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole configuration of a run. Types are not enough: `validate` says whether it can run."""

    experiment: Experiment = field(default_factory=Experiment)
    model: Model = field(default_factory=Model)
    adapter: Adapter = field(default_factory=Adapter)
    data: Data = field(default_factory=Data)
    rollout: Rollout = field(default_factory=Rollout)
    reward: Reward = field(default_factory=Reward)
    tools: Tools = field(default_factory=Tools)
    agent: Agent = field(default_factory=Agent)
    loss: LossConfig = field(default_factory=LossConfig)
    algorithm: Algorithm = field(default_factory=Algorithm)
    distillation: Distillation = field(default_factory=Distillation)
    optimizer: Optimizer = field(default_factory=Optimizer)
    parallel: Parallel = field(default_factory=Parallel)
    engine: Engine = field(default_factory=Engine)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    hub: Hub = field(default_factory=Hub)
    tracking: Tracking = field(default_factory=Tracking)
    provenance: Provenance = field(default_factory=Provenance, compare=False, repr=False)

    @property
    def has_turns(self) -> bool:
        """Whether a completion may have several turns."""
        # Reads all in any case: a rule that asks is not judged where one of them is unsound.
        tools = self.tools
        return any((tools.tools, tools.environment_factory, tools.rollout_func, self.agent.agent))

    @property
    def batch_size(self) -> int:
        """Completions per training step."""
        return self.rollout.num_unique_prompts_rollout * self.rollout.num_samples_per_prompt_rollout

    @property
    def completions_per_optimizer_step(self) -> int:
        """batch_size / num_mini_batches, rounded up."""
        return -(-self.batch_size // self.algorithm.num_mini_batches)

    @property
    def has_length(self) -> bool:
        """Whether the number of steps is known; with num_train_epochs it is when `counted` has been told of the data."""
        return self.experiment.num_train_epochs is None

    @property
    def num_training_steps(self) -> int:
        """Rollout batches of the run."""
        assert self.has_length, "the training prompts have not been counted"
        return self.experiment.total_episodes // self.batch_size

    @property
    def steps_ahead(self) -> int:
        """Steps that generation may run ahead of training, those that extra groups fill included; 0: they take turns."""
        return self.rollout.async_steps + math.ceil(self.algorithm.active_sampling_oversample)

    @property
    def least_age(self) -> int:
        """The least that `max_age` can be."""
        return self.steps_ahead + self.engine.weight_sync_steps - 1

    @property
    def max_age(self) -> int:
        """Greatest age of a group at its training: the steps since those whose weights the engines had when its sampling began."""
        limit = self.rollout.max_staleness
        # Where nothing begins before its step, nothing waits.
        return self.least_age if limit is None or not self.steps_ahead else limit

    @property
    def repeats(self) -> bool:
        """Whether no duration has an influence: steps take groups in order, and weights change only between completions."""
        is_ordered = self.max_age == self.least_age and not self.algorithm.active_sampling_oversample
        return is_ordered and not self.rollout.inflight_updates

    @property
    def is_off_policy(self) -> bool:
        """Whether steps train on tokens of older policies."""
        return self.max_age > 0 or self.algorithm.replay_buffer_size > 0

    @property
    def num_extra_groups(self) -> int:
        """Groups that are sampled beyond those of the steps that may be under way."""
        return math.ceil(self.algorithm.active_sampling_oversample * self.rollout.num_unique_prompts_rollout)

    @property
    def tokenizer_path(self) -> str:
        """Folder of the tokenizer."""
        return self.provenance.folder("tokenizer_name_or_path", self.data.tokenizer_name_or_path) or self.model_path

    @property
    def model_path(self) -> str:
        """Folder of the model, of a configuration that has been checked."""
        return self.provenance.folder("model_name_or_path", self.model.model_name_or_path) or ""

    def teacher_path(self, teacher: Teacher) -> str:
        """Folder of a teacher that this run loads itself: one with its own weights, and not on a server."""
        return self.provenance.folder(f"{TEACHERS}:{teacher.model}", teacher.model) or ""

    @property
    def max_model_length(self) -> int:
        """Tokens of the longest sequence in an engine."""
        rollout = self.rollout
        return self.data.max_prompt_token_length + max(rollout.response_length, rollout.eval_response_length or 0)

    @property
    def max_taught_length(self) -> int:
        """Tokens of the longest sequence that a teacher is asked about; with a prompt of its own it fits a pack."""
        has_own_prompt = self.distillation.teacher_prompt_template is not None
        return self.parallel.pack_length if has_own_prompt else self.max_model_length

    @property
    def num_optimizer_steps(self) -> int:
        """Optimizer steps of the run, the horizon of the learning-rate schedule."""
        return self.num_training_steps * self.algorithm.num_epochs * self.algorithm.num_mini_batches

    @property
    def notes(self) -> tuple[str, ...]:
        """How names that are not settings were understood, one sentence each."""
        return self.provenance.notes
