"""The distillation section: teachers, where they run, and what the policy learns from them on its own samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from mgrpo.config.annotations import NOT_NEGATIVE, ONE_OR_MORE, POSITIVE, SHARE, Needs, Range, Rule

SELF = "self"
"""In the place of a teacher's model: the policy itself, which sees a longer prompt."""

WITH_TEACHER = Needs("teacher_model_name_or_path", lambda teacher_model_name_or_path: bool(teacher_model_name_or_path))
OWN_ENGINES = Needs("teacher_mode=engine", lambda teacher_mode: teacher_mode == "engine")
SERVERS = Needs("teacher_mode=server", lambda teacher_mode: teacher_mode == "server")
SAMPLED = Needs("distillation_loss=sampled", lambda distillation_loss: distillation_loss == "sampled")
LIKELIEST = Needs("a distillation_loss other than sampled", lambda distillation_loss: distillation_loss != "sampled")
WITH_JSD = Needs("distillation_loss=jsd", lambda distillation_loss: distillation_loss == "jsd")
BETWEEN = Range(low=0, high=1, low_open=True, high_open=True)


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
    {feedback} (the verifier's) and columns of the row, {solution}; the completion's tokens stay the same. none: what the policy read."""
    teacher_update_rate: Annotated[float, SHARE, WITH_TEACHER] = 1.0
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
    distillation_jsd_beta: Annotated[float, BETWEEN, WITH_JSD] = 0.5
    """Weight of the teacher in the mixture of the Jensen-Shannon divergence; towards 0 it is like forward_kl, towards 1 like reverse_kl."""
    distillation_temperature: Annotated[float | None, POSITIVE, LIKELIEST] = None
    """The policy's logits are divided by this where they are compared with a teacher's; none: by temperature, as in sampling."""
    distillation_clip: Annotated[float | None, POSITIVE, SAMPLED] = None
    """Largest difference of the log-probabilities of teacher and policy that counts at a token; none: any."""

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
    def distills(self) -> bool:
        """Whether there is a teacher."""
        return bool(self.teacher_model_name_or_path)

    @property
    def num_likeliest(self) -> int:
        """The teacher's likeliest tokens that are compared at each token; 0: only the sampled one."""
        return 0 if self.distillation_loss == "sampled" else self.distillation_topk


RULES: tuple[Rule, ...] = ()
