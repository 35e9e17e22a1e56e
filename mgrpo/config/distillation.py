"""The distillation section: teachers, where they run, and what the policy learns from them on its own samples."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from string import Formatter
from typing import Annotated, Literal, NamedTuple
from urllib.parse import urlsplit

from mgrpo.config.annotations import NOT_NEGATIVE, ONE_OR_MORE, POSITIVE, SHARE, Needs, Rule
from mgrpo.models.cuts import size_of
from mgrpo.models.hf_config import HfConfig, is_hub_name, no_model

TEACHERS = "teacher_model_name_or_path"
SELF = "self"
"""In the place of a teacher's model: the policy itself, which sees a longer prompt."""

WITH_TEACHER = Needs("teacher_model_name_or_path", lambda teacher_model_name_or_path: bool(teacher_model_name_or_path))
OWN_ENGINES = Needs("teacher_mode=engine", lambda teacher_mode: teacher_mode == "engine")
SERVERS = Needs("teacher_mode=server", lambda teacher_mode: teacher_mode == "server")
WITH_SELF = Needs("the teacher self", lambda is_own_teacher: is_own_teacher)
LIKELIEST = Needs("a distillation_loss other than sampled", lambda distillation_loss: distillation_loss != "sampled")


class Teacher(NamedTuple):
    """One of the teachers of a run."""

    name: str
    """The rows that it teaches: those of this dataset, or with this in their column `teacher`; empty: all that name no other."""
    model: str
    """A folder, a name on the Hub, the name by which servers know it, or `SELF`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    teacher_model_name_or_path: tuple[str, ...] = ()
    """Models to learn from, each a folder or a name on the Hub, with the policy's tokenizer: MODEL teaches all rows, NAME:MODEL those
    of the dataset NAME or with NAME in their column teacher. self: the policy itself, which then sees teacher_prompt_template. With
    teacher_mode=server the names by which the servers know their models. Empty: no teacher."""
    teacher_mode: Annotated[Literal["learner", "engine", "server"], WITH_TEACHER] = "learner"
    """Where teachers run: learner: on the learners' layout, beside the policy; engine: on vLLM engines of their own, which the run starts;
    server: on vLLM servers that run already."""
    teacher_server_base_url: Annotated[tuple[str, ...], SERVERS] = ()
    """Addresses of the teachers' servers, http://HOST:PORT; several with one model share its work."""
    teacher_num_engines: Annotated[int, ONE_OR_MORE, OWN_ENGINES] = 1
    """Engines of each teacher."""
    teacher_tensor_parallel_size: Annotated[int, ONE_OR_MORE, OWN_ENGINES] = 1
    """Workers of each of these engines."""
    teacher_gpu_memory_utilization: Annotated[float, SHARE, OWN_ENGINES] = 0.9
    """Share of a GPU's memory that such an engine may use; on a GPU that several share, their shares add up to at most 1."""
    teacher_prompt_template: Annotated[str | None, WITH_TEACHER] = None
    """What a teacher reads in place of the last message of the user: a text with {prompt} and any of {answer} (a right answer of the group),
    {feedback} (of a reward function or an environment) and columns of the row, {solution}; the completion's tokens stay the same. none: what the policy read."""
    teacher_update_rate: Annotated[float, SHARE, WITH_SELF] = 1.0
    """Of the teacher self: below 1 it is an average of the policies so far, average <- rate x policy + (1 - rate) x average after
    every step."""
    teacher_temperature: Annotated[float, POSITIVE, WITH_TEACHER] = 1.0
    """Teachers' logits are divided by this; a server's cannot be."""
    distillation_coef: Annotated[float, NOT_NEGATIVE, WITH_TEACHER] = 1.0
    """Weight of what is learned from teachers."""
    distillation_only: Annotated[bool, WITH_TEACHER] = False
    """Learn from teachers alone: rewards are measured and not trained on."""
    distillation_loss: Annotated[Literal["sampled", "forward_kl", "reverse_kl", "jsd"], WITH_TEACHER] = "sampled"
    """sampled: the advantage of each sampled token gains distillation_coef x (teacher's - policy's log-probability); the others are added to
    the loss, over the teacher's likeliest tokens: KL(teacher, policy), KL(policy, teacher), or the Jensen-Shannon divergence of GKD."""
    distillation_topk: Annotated[int, ONE_OR_MORE, LIKELIEST] = 16
    """The teacher's likeliest tokens that are compared, beside the sampled one; all others count as one token."""

    @property
    def teachers(self) -> tuple[Teacher, ...]:
        """The teachers, in the order of `Prompt.teacher`."""
        entries = [entry for text in self.teacher_model_name_or_path for entry in text.split(",") if entry]
        return tuple(Teacher(name, model) for name, _, model in (entry.rpartition(":") for entry in entries))

    @property
    def teacher_names(self) -> tuple[str, ...]:
        """What metrics and messages call them; the unnamed one is "teacher"."""
        return tuple(teacher.name.replace("/", "-") or "teacher" for teacher in self.teachers)

    @property
    def loaded_teachers(self) -> tuple[Teacher, ...]:
        """Those whose weights this run loads."""
        return tuple(t for t in self.teachers if t.model != SELF and self.teacher_mode != "server")

    @property
    def is_own_teacher(self) -> bool:
        """Whether the policy, or an average of it, is one of the teachers."""
        return any(teacher.model == SELF for teacher in self.teachers)

    @property
    def averages(self) -> bool:
        """Whether one of the teachers is an average of the policies so far."""
        return self.is_own_teacher and self.teacher_update_rate < 1

    @property
    def distills(self) -> bool:
        """Whether there is a teacher."""
        return bool(self.teacher_model_name_or_path)

    @property
    def num_engines(self) -> int:
        """Engines of all teachers that the run starts."""
        return len(self.teachers) * self.teacher_num_engines if self.teacher_mode == "engine" else 0

    @property
    def engines_per_gpu(self) -> int:
        """Engines of one worker whose shares of memory fit on a GPU together."""
        return int(1 / self.teacher_gpu_memory_utilization + 1e-9)

    @property
    def num_likeliest(self) -> int:
        """The teacher's likeliest tokens that are compared at each token; 0: only the sampled one."""
        return 0 if self.distillation_loss == "sampled" else self.distillation_topk


def _teachers(
    teachers: tuple[Teacher, ...], teacher_model_name_or_path: tuple[str, ...], teacher_mode: str
) -> Iterator[str]:
    given = " ".join(teacher_model_name_or_path)
    names = [teacher.name for teacher in teachers]
    for name, model in teachers:
        if not model:
            yield f"teacher_model_name_or_path={given}: {name} has no model; write {name}:MODEL"
        elif model == SELF and teacher_mode != "learner":
            yield (
                f"teacher_model_name_or_path={given}: self is the policy itself, which learners ask; got teacher_mode={teacher_mode}, "
                "use learner"
            )
        elif model != SELF and teacher_mode != "server" and _is_nowhere(model):
            yield f"teacher_model_name_or_path={no_model(model)}"
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        what = f"{name} twice" if name else "two models for the same rows"
        yield f"teacher_model_name_or_path={given} names {what}; give each its own rows: math:MODEL1 code:MODEL2"


def _is_nowhere(model: str) -> bool:
    return not os.path.isfile(os.path.join(model, "config.json")) and (os.path.isdir(model) or not is_hub_name(model))


def _only(
    distills: bool,
    distillation_only: bool,
    distillation_coef: float,
    advantage_normalization_type: str,
    is_own_estimator: bool,
) -> Iterator[str]:
    if distillation_only and is_own_estimator:
        yield (
            f"distillation_only=true makes every advantage 0, so that advantage_normalization_type={advantage_normalization_type} "
            "has no effect; leave one of them out"
        )
    if distillation_only and not distills:
        yield (
            "distillation_only=true learns from a teacher alone, and there is none; give teacher_model_name_or_path, or leave it out"
        )
    elif distills and not distillation_coef:
        what = "and from nothing else either" if distillation_only else "which would be asked for nothing"
        yield (
            f"distillation_coef=0 learns nothing from the teacher, {what}; set it above 0, or leave teacher_model_name_or_path out"
        )


def _itself(
    is_own_teacher: bool,
    teacher_prompt_template: str | None,
    teacher_update_rate: float,
    use_peft: bool,
) -> Iterator[str]:
    if not is_own_teacher:
        return
    if teacher_prompt_template is None and teacher_update_rate == 1:
        yield (
            "teacher_model_name_or_path=self knows no more than the policy that it is; let it see more "
            "(teacher_prompt_template='{prompt} A right answer: {answer}'), or lag behind (teacher_update_rate below 1)"
        )
    if use_peft and teacher_update_rate < 1:
        yield (
            f"teacher_update_rate={teacher_update_rate:g} keeps an average of all weights, and use_peft=true trains none of them; use 1"
        )


def _servers(teacher_mode: str, distills: bool, teacher_server_base_url: tuple[str, ...]) -> Iterator[str]:
    urls = teacher_server_base_url
    if not distills:
        return
    if teacher_mode == "server" and not urls:
        yield "teacher_mode=server needs teacher_server_base_url, the addresses of vLLM servers: http://HOST:PORT"
    elif urls and teacher_mode != "server":
        yield (
            f"teacher_server_base_url={' '.join(urls)} is used with teacher_mode=server, but it is {teacher_mode}; change it, or leave "
            "the addresses out"
        )
    elif len({url.rstrip("/") for url in urls}) < len(urls):
        yield f"teacher_server_base_url={' '.join(urls)} names a server twice"
    for url in urls:
        if not url.startswith(("http://", "https://")) or not urlsplit(url).hostname:
            yield f"teacher_server_base_url={url} is not an address of a server; write http://HOST:PORT"


def _shared_servers(teacher_server_base_url: tuple[str, ...], vllm_server_base_url: tuple[str, ...]) -> Iterator[str]:
    shared = {url.rstrip("/") for url in teacher_server_base_url} & {url.rstrip("/") for url in vllm_server_base_url}
    if shared:
        yield (
            f"teacher_server_base_url={' '.join(sorted(shared))} is also in vllm_server_base_url, where the policy's weights are sent; "
            "start a server of its own for the teacher"
        )


def _cut(distills: bool, teacher_mode: str, is_cut: bool, top_k: int) -> Iterator[str]:
    if distills and is_cut and teacher_mode != "learner":
        yield (
            f"teacher_mode={teacher_mode} gives log-probabilities over the whole vocabulary, and top_k={top_k} makes the policy's those of the "
            "tokens that are left to sample from; use teacher_mode=learner, which takes the same, or sample without top_k, top_p, min_p and "
            "vllm_guided_decoding_regex"
        )


def _temperature(distills: bool, teacher_mode: str, teacher_temperature: float) -> Iterator[str]:
    if distills and teacher_mode == "server" and teacher_temperature != 1:
        yield (
            f"teacher_temperature={teacher_temperature:g} cannot be asked of teacher_mode=server: vLLM gives the log-probabilities of a prompt at "
            "temperature 1; use 1, or engine or learner"
        )


def _replaced_groups(distills: bool, active_sampling: bool, replay_buffer_size: int) -> Iterator[str]:
    for name, is_on in (
        (f"replay_buffer_size={replay_buffer_size}", replay_buffer_size),
        ("active_sampling=true", active_sampling),
    ):
        if distills and is_on:
            yield (
                f"{name} replaces groups that have nothing to learn from, and with a teacher every group has; leave one of them out"
            )


def template_problems(text: str) -> Iterator[str]:
    """Sentences about the form of `teacher_prompt_template`; which columns there are, rows decide."""
    shown = repr(text)
    try:
        fields = [
            name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
            for _, name, form, conversion in Formatter().parse(text)
            if name is not None
        ]
    except ValueError as err:
        yield f"teacher_prompt_template={shown} cannot be read ({err}); write {{{{ and }}}} for braces that are meant"
        return
    strange = next((name for name in fields if not name.isidentifier()), None)
    if strange is not None:
        yield f"teacher_prompt_template={shown}: {{{strange}}} is not the name of a column; write {{prompt}}, {{answer}}, {{feedback}} or a column"
    elif "prompt" not in fields:
        yield f"teacher_prompt_template={shown} has no {{prompt}}, and the teacher would not see the question; add it"
    elif fields == ["prompt"]:
        yield (
            f"teacher_prompt_template={shown} adds nothing that the policy does not see; add {{answer}}, {{feedback}} or a column of the row"
        )


def _template(
    distills: bool,
    teacher_prompt_template: str | None,
    num_samples_per_prompt_rollout: int,
    num_reward_funcs: int,
    has_turns: bool,
) -> Iterator[str]:
    if teacher_prompt_template is None or not distills:
        return
    problems = list(template_problems(teacher_prompt_template))
    yield from problems
    names = [] if problems else [name for _, name, _, _ in Formatter().parse(teacher_prompt_template)]
    if "answer" in names and num_samples_per_prompt_rollout == 1:
        yield (
            f"teacher_prompt_template={teacher_prompt_template!r} shows another answer of the group, but num_samples_per_prompt_rollout=1; "
            "sample at least 2, or use a column of the row"
        )
    if "feedback" in names and not num_reward_funcs and not has_turns:
        yield (
            f"teacher_prompt_template={teacher_prompt_template!r} shows feedback, which reward functions, tools and environments give, and "
            "verifiers do not; use {answer} or a column of the row"
        )


def _choices(hf_config: HfConfig, num_likeliest: int) -> Iterator[str]:
    vocab = size_of(hf_config, "vocab_size")
    if vocab and num_likeliest > vocab:
        yield f"distillation_topk={num_likeliest} is more than the {vocab} tokens of the model (vocab_size); lower it"


RULES: tuple[Rule, ...] = (
    _teachers,
    _only,
    _itself,
    _servers,
    _shared_servers,
    _cut,
    _temperature,
    _replaced_groups,
    _template,
)
MODEL: tuple[Rule, ...] = (_choices,)


def _no_difference(
    teachers: tuple[Teacher, ...],
    model_name_or_path: str | None,
    teacher_prompt_template: str | None,
    teacher_temperature: float,
    temperature: float,
) -> Iterator[str]:
    is_same = teacher_prompt_template is None and teacher_temperature == temperature
    if is_same and any(teacher.model == model_name_or_path for teacher in teachers):
        yield (
            f"teacher_model_name_or_path={model_name_or_path} is the model that is trained: its teacher holds it where it begins, as beta does"
        )


WARNINGS: tuple[Rule, ...] = (_no_difference,)
