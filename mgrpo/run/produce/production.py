"""Rank 0's half of a run that samples: first the processes that take long to start, then data, producer and evaluator."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mgrpo.config import Config
from mgrpo.config.derived import most_tokens
from mgrpo.config.distillation import SELF
from mgrpo.data.prompt_set import PromptSet
from mgrpo.data.sampler import Sampler
from mgrpo.rewards.rewarder import Rewarder
from mgrpo.rollout.dispatch import Dispatcher
from mgrpo.rollout.engines.fleet import Fleet
from mgrpo.rollout.interaction import Interaction
from mgrpo.rollout.requests import Decode
from mgrpo.rollout.start import TextSample, request_bounds, started_engines
from mgrpo.rollout.teachers import Teachers
from mgrpo.run.inputs.reading import Inputs
from mgrpo.run.inputs.row_teachers import RowTeachers, TeacherTemplate, template_remarks
from mgrpo.run.inputs.toolset import make_interaction, remarks, turn_rewards, with_stop_strings
from mgrpo.run.produce.evaluator import Evaluator
from mgrpo.run.produce.lessons import Lessons
from mgrpo.run.produce.producer import Producer
from mgrpo.telemetry.metrics.evaluation import short_names
from mgrpo.telemetry.progress import StartUp
from mgrpo.types import Prompt, PromptId

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mgrpo.algo import AdvantageFunction
    from mgrpo.run.inputs.prompts import Prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The parts that are started before Megatron is imported."""

    inputs: Inputs
    fleet: Fleet
    rewarder: Rewarder
    interaction: Interaction | None = None
    """Between engines and environments, in a run with tools."""
    teachers: Teachers | None = None
    """Teachers on engines or servers of their own."""
    startup: StartUp = field(default_factory=StartUp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Production:
    """The sampling half of a run, on rank 0, ready to work."""

    config: Config
    tokenizer: PreTrainedTokenizerBase
    producer: Producer | None
    """None without training data."""
    evaluator: Evaluator
    data: Sequence[Mapping[str, Any]]
    """`Mixture.content` of the training data."""
    remarks: Sequence[str]
    """Sentences for the user about the run."""
    advantage_fn: AdvantageFunction | None = None
    """Computes the advantages in place of the named estimator."""

    def save_tokenizer(self, folder: Path) -> None:
        """Add the tokenizer and chat template of the training to an exported model, if they differ from the source model's."""
        from mgrpo.data.templates import find_template

        data = self.config.data
        template = find_template(data.chat_template_name, self.tokenizer) if data.chat_template_name != "auto" else None
        if self.config.tokenizer_path == self.config.model_path and template is None:
            return
        tokenizer = copy.deepcopy(self.tokenizer)
        tokenizer.chat_template = template or tokenizer.chat_template
        tokenizer.save_pretrained(folder)


@contextmanager
def started(
    config: Config,
    inputs: Inputs,
    *,
    num_local_learners: int,
    on_failure: Callable[[str], object] | None,
    startup: StartUp | None = None,
) -> Iterator[Started]:
    """Start the engines and the scoring processes without waiting for them; they end with the context.

    Call from the main thread, see `started_engines`, also for `on_failure`.
    """
    startup = startup or StartUp()
    assert inputs.prompts is not None, "checked: the rows are prompts"
    config = with_stop_strings(config, inputs.prompts.language)
    rewarder = Rewarder(config, inputs.functions, inputs.verifiers(config), turn_rewards(config))
    try:
        rewarder.start()
        startup.say(_beginning(config), "processes")
        with (
            started_engines(
                config,
                num_local_learners=num_local_learners,
                on_failure=on_failure,
                sample=_sample(config, inputs.prompts.tokenizer),
            ) as engines,
            _interacting(config, inputs) as interaction,
        ):
            yield Started(
                inputs=inputs,
                fleet=engines.fleet,
                teachers=engines.teachers,
                rewarder=rewarder,
                startup=startup,
                interaction=interaction,
            )
    finally:
        rewarder.close()


@contextmanager
def _interacting(config: Config, inputs: Inputs) -> Iterator[Interaction | None]:
    """The interaction with environments, None without tools; their processes end with the context."""
    prompts, toolset = inputs.prompts, inputs.toolset
    if prompts is None or prompts.language is None or toolset is None:
        yield None
        return
    interaction = make_interaction(config, toolset, prompts.language, opened=prompts.opened, asked=prompts.asked)
    try:
        yield interaction
    finally:
        interaction.close()


def prepare(config: Config, parts: Started) -> Production:
    """Connect data, rewards and engines, and wait for the engines.

    Raises:
        EngineError: an engine could not be started.
    """
    from mgrpo.data.templates import missing_stop_strings
    from mgrpo.data.tokenizer import decode, token_ids

    prompts = parts.inputs.prompts
    assert prompts is not None, "checked: the rows are prompts"
    tokenizer, train, held_out, stop_ids = prompts.tokenizer, prompts.train, prompts.held_out, prompts.stop_ids
    with_strings = with_stop_strings(config, prompts.language)
    dispatcher = Dispatcher(
        parts.fleet,
        with_strings.rollout,
        run_seed=config.experiment.seed,
        # The language of an interaction reads turns and decodes whole completions.
        decode=partial(_told, parts.startup, partial(decode, tokenizer) if parts.interaction is None else _undecoded),
        stop_token_ids=stop_ids,
        samples_per_engine=_samples_per_engine(config),
        interaction=parts.interaction,
        bounds=request_bounds(with_strings),
    )
    prompt = partial(_prompt, replacements=config.reward.verifier_replacements)
    evaluator = Evaluator(
        config,
        [prompt(held_out, (0, index)) for index in range(len(held_out))] if held_out else [],
        sources=short_names(map(held_out.source_of, range(len(held_out)))) if held_out else [],
        dispatcher=dispatcher,
        rewarder=parts.rewarder,
    )
    producer = None
    if train is not None:
        sampler = Sampler(len(train), config.experiment.seed, shuffle=config.data.shuffle_dataset)
        producer = Producer(
            config,
            sampler,
            prompt=partial(_training_prompt, config, prompts),
            dispatcher=dispatcher,
            rewarder=parts.rewarder,
            lessons=_lessons(config, prompts, parts.rewarder),
            teachers=parts.teachers,
        )
    if config.engine.vllm_mode != "server":
        parts.startup.say(f"waiting for {_engines(config)} with {config.model.model_name_or_path}", "engines")
    parts.fleet.wait_ready()
    if parts.teachers is not None:
        parts.startup.say("waiting for the teachers", "engines")
        parts.teachers.wait_ready()
    template = config.data.chat_template_name
    missing = missing_stop_strings(
        template, stop_strings=config.rollout.stop_strings, stop_tokens=tokenizer.convert_ids_to_tokens(stop_ids)
    )
    toolset, language = parts.inputs.toolset, prompts.language
    return Production(
        config=config,
        tokenizer=tokenizer,
        producer=producer,
        evaluator=evaluator,
        data=parts.inputs.train.content,
        advantage_fn=parts.inputs.advantage_fn,
        remarks=[
            *([_own_advantages(config)] if parts.inputs.advantage_fn else ()),
            *(f"chat_template_name={template} needs --stop_strings '{text}'" for text in missing),
            *(remarks(config, toolset, language) if toolset and language else ()),
            *template_remarks(
                config,
                parts.inputs.train.columns,
                longest=prompts.longest,
                limit=min(_most_tokens(config), default=0),
                num_tokens=lambda text: len(token_ids(tokenizer, [text])[0]),
            ),
        ],
    )


def _own_advantages(config: Config) -> str:
    algorithm = config.algorithm
    left_out = "; groups whose rewards are all equal are left out (filter_zero_std_samples)"
    return (
        f"advantage_normalization_type {algorithm.advantage_normalization_type}: your own function, called on rank 0"
        f"{left_out if algorithm.filter_zero_std_samples else ''}"
    )


def _sample(config: Config, tokenizer: PreTrainedTokenizerBase) -> TextSample | None:
    """Text and tokens that teachers on servers must tokenize as the policy does; None: no such teachers."""
    from mgrpo.data.tokenizer import text_of_all_tokens

    return TextSample(*text_of_all_tokens(tokenizer)) if config.distillation.teacher_server_base_url else None


def _told(startup: StartUp, decode: Decode, tokens: Sequence[np.ndarray]) -> list[str]:
    startup.sampled()
    return decode(tokens)


def _undecoded(tokens: Sequence[np.ndarray]) -> list[str]:
    return [""] * len(tokens)


def _samples_per_engine(config: Config) -> int | None:
    """A little more than an engine samples at a time; other requests go to the engine that is ready first.

    None in a run that repeats: engines then get whole batches.
    """
    if config.repeats:
        return None
    at_once = config.engine.vllm_max_num_seqs * config.engine.vllm_data_parallel_size
    return at_once + at_once // 4


def _beginning(config: Config) -> str:
    if config.engine.vllm_mode == "server":
        return f"connecting to {' '.join(config.engine.vllm_server_base_url)}"
    return f"starting Ray and {_engines(config)}"


def _engines(config: Config) -> str:
    count = config.engine.vllm_num_engines
    return "the engine" if count == 1 else f"{count} engines"


def _training_prompt(config: Config, prompts: Prompts, prompt_id: PromptId, opening: str = "") -> Prompt:
    """A training prompt with its teacher and an environment's opening."""
    train = prompts.train
    assert train is not None, "checked: there are training data"
    prompt = _prompt(train, prompt_id, replacements=config.reward.verifier_replacements)
    if config.distillation.distills:
        teacher = RowTeachers(config.distillation).of(prompt.columns, train.source_of(prompt_id[1]))
        prompt = dataclasses.replace(prompt, teacher=teacher)
    return prompts.opened(prompt, opening, is_training=True)


def _lessons(config: Config, prompts: Prompts, rewarder: Rewarder) -> Lessons | None:
    if not config.distillation.distills:
        return None
    text = config.distillation.teacher_prompt_template
    return Lessons(
        None if text is None else TeacherTemplate.read(text),
        reworded=prompts.reworded,
        scale=rewarder.scale,
        longest=_most_tokens(config),
    )


def _most_tokens(config: Config) -> list[int]:
    """Most tokens of a sequence, for each teacher."""
    own = config.distillation
    return [
        most_tokens(config, config.model_path if teacher.model == SELF else config.teacher_path(teacher))
        if teacher.model == SELF or teacher in own.loaded_teachers
        else config.max_taught_length
        for teacher in own.teachers
    ]


def _prompt(prompts: PromptSet, prompt_id: PromptId, *, replacements: Mapping[str, str]) -> Prompt:
    """One prompt, with verifiers replaced by `remap_verifier`."""
    prompt = prompts.prompt(prompt_id)
    if not replacements:
        return prompt
    verifiers = tuple(replacements.get(name.lower(), name) for name in prompt.verifiers)
    return dataclasses.replace(prompt, verifiers=verifiers)
