"""A `Config` from the words of verl's and slime's commands, with every problem reported at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mgrpo.config.errors import ConfigError
from mgrpo.config.fields import BOOLEANS
from mgrpo.config.schema import Config
from mgrpo.config.tracking import TRACKERS
from mgrpo.moving.command_words import Word, find, words
from mgrpo.moving.config_doors import from_values
from mgrpo.moving.scripts.shell_lexer import UNKNOWN, known, reasons

Text = str | tuple[str, ...]
Values = dict[str, object]
WRITTEN = ("console", "file")
"""Trackers that every run has anyway: lines of its log, and metrics.jsonl."""
NOTHING = ("", "null", "none")
KL_TYPES = {"kl": "0", "k1": "0", "mse": "1", "k2": "1", "low_var_kl": "2", "k3": "2"}
AGGREGATIONS = {
    "token-mean": "token",
    "seq-mean-token-mean": "seq_mean",
    "seq-mean-token-sum": "luspo",
    "seq-mean-token-sum-norm": "dr_grpo",
}


@dataclass(slots=True)
class Read:
    """The texts of a command by the trainer's names, the lines on which they stand, and the problems of reading them."""

    texts: dict[str, Text] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class Given:
    """The values of a command under the trainer's names, with the trainer's defaults for those that it leaves out."""

    def __init__(self, trainer: str, read: Read, fields: Mapping[str, object]) -> None:
        self.trainer, self.texts, self.lines, self.fields = trainer, dict(read.texts), read.lines, fields
        """`fields`: settings of this project that the caller gives in addition."""
        self.problems: list[str] = list(read.problems)
        self.notes: list[str] = []
        self.values: Values = {}
        self.idle: dict[str, list[str]] = {}
        """Names without effect, by the reason."""

    def text(self, name: str) -> str:
        """The text of one name; a list's words with blanks between them."""
        text = self.texts.get(name, words(self.trainer)[name].default)
        return text if isinstance(text, str) else " ".join(text)

    def at(self, name: str) -> str:
        """The line of a name, in brackets, where it is known."""
        return f" (line {self.lines[name]})" if self.lines.get(name) else ""

    def has(self, name: str) -> bool:
        """True if the command gives a value under that name."""
        return name in self.texts and self.text(name).lower() not in NOTHING

    def is_on(self, name: str) -> bool:
        """True if a switch is on; a problem where the text is neither on nor off."""
        text = self.text(name).lower()
        if text in NOTHING or UNKNOWN in text:
            return False
        if text not in BOOLEANS:
            self.problems.append(f"{name}={self.text(name)} must be true or false{self.at(name)}")
        return BOOLEANS.get(text, False)

    def number(self, name: str) -> float | None:
        """The number under that name; None for text that is not a number, which is a problem, and without a value."""
        text = self.text(name)
        if text.lower() in NOTHING or UNKNOWN in text:
            return None
        try:
            return float(text)
        except ValueError:
            self.problems.append(f"{name}={text} must be a number{self.at(name)}")
            return None

    def count(self, name: str, *, least: int = 1) -> int | None:
        """The whole number, at least 1 or `least`."""
        number = self.number(name)
        if number is not None and (number < least or not number.is_integer()):
            self.problems.append(f"{name}={self.text(name)} must be a whole number above {least - 1}{self.at(name)}")
            return None
        return None if number is None else int(number)

    def whole(self, setting: str, default: int) -> int:
        """The whole number that a setting is given, or else `default`, also where its text is not a number, which is reported later."""
        text = str(self.values.get(setting, default))
        return int(text) if text.removeprefix("-").isdecimal() else default

    def choice(self, name: str, choices: Mapping[str, object]) -> object:
        """The meaning of one of a few words; None and a problem for others."""
        text = self.text(name)
        if UNKNOWN in text:
            return None
        if text.lower() not in choices:
            self.refuse(words(self.trainer)[name], text, f"choose from {', '.join(filter(None, choices))}")
            return None
        return choices[text.lower()]

    def trackers(self, names: Sequence[str], *, project: str) -> None:
        """report_to, to which TensorBoard always belongs, and the name under which others keep the runs of a project."""
        unknown = [name for name in names if name not in (*TRACKERS, *WRITTEN)]
        if unknown and "report_to" not in self.fields:
            self.problems.append(f"{', '.join(unknown)} is not among the trackers {', '.join(TRACKERS)}; see report_to")
        chosen = [name for name in TRACKERS if name in names or name == "tensorboard"]
        if chosen != ["tensorboard"]:
            self.values |= {"report_to": chosen, "wandb_project": self.text(project) or None}

    def refuse(self, word: Word, text: str, why: str) -> None:
        """A problem, unless the caller gives the settings in its place."""
        if word.targets and set(word.targets) & self.fields.keys():
            given = ", ".join(sorted(set(word.targets) & self.fields.keys()))
            self.notes.append(f"{word.name}={text} has no effect: {given} is given in its place")
        else:
            self.problems.append(f"{word.name}={text} is refused{self.at(word.name)}: {why}")

    def leave_out(self, names: Sequence[str], why: str) -> None:
        """Note that the given ones among the names have no effect, for this reason."""
        if found := [name for name in names if self.has(name) and name not in self.left_out]:
            self.idle.setdefault(why, []).extend(found)

    @property
    def left_out(self) -> set[str]:
        """The names without effect."""
        return {name for names in self.idle.values() for name in names}

    def refuse_entropy(self, word: Word, average: str) -> None:
        """The problem that the entropy bonus has an average there that it does not have here."""
        self.refuse(
            word,
            self.text(word.name),
            f"with {average} the bonus is averaged as the loss is, and here over all tokens of the mini-batch; "
            "give entropy_coef if that is wanted",
        )

    def part(self, whole: str, part: str, num_whole: int | None, num_part: int | None) -> int | None:
        """`num_whole / num_part`, which must be a whole number."""
        if num_whole is None or num_part is None:
            return None
        if num_whole % num_part:
            self.problems.append(f"{part}={num_part} does not divide {whole}={num_whole}{self.at(part)}")
            return None
        return num_whole // num_part


def clip_bounds(given: Given, low: str, high: str) -> None:
    """The bounds of the ratio, which stand under these names; CISPO needs no lower one where that is 0 or less."""
    values = given.values
    least = given.number(low)
    if values.get("policy_loss") == "cispo":
        values["cispo_two_sided"] = least is not None and least < 1
    if values.get("cispo_two_sided", True):
        values["clip_lower"] = given.text(low)
    values["clip_higher"] = given.text(high)


def precision_of_moments(given: Given, name: str) -> None:
    """Set Adam's moments in fewer bits, which an optimizer in host memory does not have."""
    if given.is_on(name) and str(given.values.get("optimizer_cpu_offload", "false")).lower() != "true":
        given.values["use_precision_aware_optimizer"] = True


def config_of(trainer: str, read: Read, fields: Mapping[str, object], *, combine: Callable[[Given], None]) -> Config:
    """The config of the texts in `read`, with `fields` on top.

    Raises:
        ConfigError: every problem in them.
    """
    given = Given(trainer, read, fields)
    for word in words(trainer).values():
        if word.status == "alias" and word.default and word.name not in given.texts:
            _set(given, word, word.default)
    for name, text in given.texts.items():
        _take(given, name, text)
    combine(given)
    # Both score a right answer with 1.
    given.values.setdefault("verification_reward", 1.0)
    told = {name: value for name, value in given.values.items() if value is not None} | dict(fields)
    try:
        config = from_values(told)
    except ConfigError as err:
        raise ConfigError([*given.problems, *err.problems]) from None
    if given.problems:
        raise ConfigError(given.problems)
    return replace(config, provenance=replace(config.provenance, notes=(*_notes(given), *given.notes, *config.notes)))


def _take(given: Given, name: str, text: Text) -> None:
    word, shown = find(given.trainer, name), given.text(name) if name in words(given.trainer) else _shown(text)
    if word is None:
        given.problems.append(
            f"unknown name {name} of {given.trainer}{given.at(name)}; leave it out, or give the setting that does it"
        )
        return
    if UNKNOWN in shown:
        given.problems.append(
            f"{name}={known(shown)} has a value that only a shell knows ({reasons(shown)}); write it out"
        )
        return
    is_neutral = shown.lower() in word.neutral or shown.lower() in NOTHING
    if word.status == "no effect" and not is_neutral:
        given.idle.setdefault(word.sentence, []).append(name)
    elif word.status == "refused" and not is_neutral:
        given.refuse(replace(word, name=name), shown, f"{word.sentence or 'it does not exist here'}")
    elif word.status == "alias" and (not is_neutral or word.convert.startswith("none_is")):
        _set(given, word, text)
    elif word.status == "alias" and word.default and shown.lower() not in word.neutral:
        given.refuse(word, shown or "nothing", f"its default there is {word.default}; give a value")


def _notes(given: Given) -> Iterator[str]:
    """The notes: the settings that each name of the command has become, or why it has no effect."""
    for name in given.texts:
        word = find(given.trainer, name)
        if (
            word is None
            or word.status not in ("alias", "combined")
            or word.targets == (name,)
            or name in given.left_out
        ):
            continue
        made = [f"{target} ({_shown(given.values[target])})" for target in word.targets if target in given.values]
        if made:
            yield f"{name} -> {', '.join(made)}"
    for sentence, names in given.idle.items():
        yield f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} no effect: {sentence}"


def _set(given: Given, word: Word, text: Text) -> None:
    try:
        made = CONVERT[word.convert](text)
    except (KeyError, ValueError):
        given.refuse(word, _shown(text), word.sentence or "it has another form")
        return
    values = made if isinstance(made, list) else [made] * len(word.targets)
    given.values |= {name: value for name, value in zip(word.targets, values, strict=True) if value is not None}


def _shown(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return " ".join(map(str, value))
    return str(value)


def _files(text: Text) -> tuple[str, ...]:
    files = (text,) if isinstance(text, str) else text
    return tuple(word for file in files for word in (file, "1.0"))


def _named(text: Text) -> Text:
    if isinstance(text, tuple) and len(text) % 2:
        raise ValueError(text)
    return text[1::2] if isinstance(text, tuple) else text


def _pair(text: Text) -> list[object]:
    first, second = text.split(",") if isinstance(text, str) else text
    return [first.strip(), second.strip()]


def _text(text: Text) -> str:
    return text if isinstance(text, str) else " ".join(text)


CONVERT: dict[str, Callable[[Text], object]] = {
    "": lambda text: text,
    "files": _files,
    # A name, then its file, and so on.
    "named_files": lambda text: _files(_named(text)),
    "message_key": lambda text: None if text == "prompt" else text,
    "json": _text,
    "recompute": lambda text: "full" if _text(text).lower() == "true" else "none",
    "warm_up": lambda text: max(int(_text(text)), 0),
    "pair": _pair,
    "kl": lambda text: KL_TYPES[_text(text)],
    "aggregation": lambda text: AGGREGATIONS[_text(text)],
    "none_is_one": lambda text: "1" if _text(text).lower() in NOTHING else text,
    "none_is_none": lambda text: "none" if _text(text).lower() in NOTHING else text,
    "none_is_all": lambda text: "-1" if _text(text).lower() in NOTHING else text,
    "top_k": lambda text: max(int(_text(text)), 0),
    "turns": lambda text: int(_text(text)) - 1,
    "parser": lambda text: f"vllm_{text}",
    "learner": lambda text: "learner" if _text(text).lower() == "true" else None,
    "rollout": lambda text: "rollout" if _text(text).lower() == "true" else None,
    "routing": lambda text: {"disabled": "none", "r2": "learner", "r3": "rollout"}[_text(text).lower()],
    "fp16": lambda text: "float16" if _text(text).lower() == "true" else None,
}
"""Conversions of a text to the value of the targets, a list to one value for each; None leaves a target unchanged."""
