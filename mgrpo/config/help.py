"""The --help text: settings by section, explained by the docstring beneath its field in the schema."""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import sys
import typing
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from typing import Any, Literal

from mgrpo.config.errors import ConfigError
from mgrpo.config.fields import Setting, alternatives, section_types, settings

COMMANDS = {
    "mgrpo train": "Trains a model.",
    "mgrpo eval": "Evaluates a model on the held-out prompts, without a learner; one process.",
    "mgrpo rollout": "Prints some completions, with their turns and tools; one process, no training.",
}
"""The commands that take settings, and what they do."""
OWN_FLAGS = {
    "mgrpo train": (
        ("--nproc-per-node", "N", "Start N ranks on this machine; without it the command is one rank, or torchrun's."),
    ),
    "mgrpo rollout": (("--num", "N", "How many prompts. (default: 4)"),),
}
"""Flags of a command that are no settings: name, value and meaning."""


FIRST = {
    "what is trained": "model_name_or_path model_dtype use_peft chat_template_name",
    "on which data": "dataset_mixer_list dataset_mixer_eval_list max_prompt_token_length",
    "what is sampled": "num_unique_prompts_rollout num_samples_per_prompt_rollout response_length temperature async_steps",
    "what is rewarded": "verification_reward reward_funcs tools agent",
    "how it learns": "learning_rate lr_scheduler_type max_grad_norm beta clip_lower clip_higher",
    "how long": "total_episodes local_eval_every eval_pass_at_k",
    "what is kept": "exp_name seed output_dir save_freq checkpoint_state_freq",
    "learners' GPUs": "tensor_model_parallel_size pack_length recompute_granularity",
    "engines' GPUs": "vllm_mode vllm_num_engines vllm_tensor_parallel_size vllm_gpu_memory_utilization vllm_max_num_seqs",
}
"""The settings that a user needs first, by the question that they answer."""
ALL = "all"


def help_text(
    prog: str | None = None, *, topic: str = "", presets: Iterable[str] = ("mgrpo",), other_names: str = ""
) -> str:
    """What the command does and takes, and settings with type, meaning and default.

    Args:
        topic: a section, a setting or `ALL`; empty: the settings that a user needs first.
        presets: the names that --preset takes.
        other_names: the sentence that says which names are accepted beside the settings'.
    Raises:
        ConfigError: there is no such topic.
    """
    groups = _groups(topic)
    command = prog or ""
    does = f"{COMMANDS[command]} " if command in COMMANDS else ""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s [--config FILE.yaml | FILE.yaml] [--preset NAME] [--name value | --name=value ...]",
        description=does
        + "A flag wins over the file, the file over the preset, the preset over the default. Lists take several "
        f"words or a comma between them. {other_names}".rstrip(),
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=8, width=100),
        epilog=f"--help all lists all {len(settings())} settings, --help NAME one, --help SECTION those of a section: "
        f"{', '.join(section_types())}.",
        allow_abbrev=False,
        add_help=False,
    )
    general = parser.add_argument_group("general")
    general.add_argument("--config", metavar="FILE", help="YAML file of `name: value` lines.")
    general.add_argument(
        "--preset",
        metavar="{" + ",".join(presets) + "}",
        help="Whose defaults to use; `preset: NAME` in a file does the same. (default: mgrpo)",
    )
    for name, value, meaning in OWN_FLAGS.get(command, ()):
        general.add_argument(name, metavar=value, help=meaning)
    if command not in ("mgrpo eval", "mgrpo rollout"):
        general.add_argument("--show_config", action="store_true", help="Print every value with its source and exit.")
        general.add_argument(
            "--dry_run",
            action="store_true",
            help="Check configuration, data and layout, start everything, train one step and keep nothing.",
        )
    general.add_argument(
        "-h", "--help", metavar="TOPIC", help="Show this text, or one about a section, a setting, or all."
    )
    for heading, names in groups.items():
        group = parser.add_argument_group(heading)
        for name in names:
            setting = settings()[name]
            document = field_docs(section_types()[setting.section]).get(name, "")
            text = f"{document} (default: {shown_default(setting.default)})".strip()
            group.add_argument(f"--{name}", metavar=metavar(setting), help=text.replace("%", "%%"))
    return parser.format_help()


def _groups(topic: str) -> dict[str, list[str]]:
    """Names of settings below their headings."""
    sections = {
        section: [own.name for own in settings().values() if own.section == section] for section in section_types()
    }
    if not topic:
        return {question: names.split() for question, names in FIRST.items()}
    if topic == ALL:
        return sections
    if topic in sections:
        return {topic: sections[topic]}
    if topic in settings():
        return {settings()[topic].section: [topic]}
    near = difflib.get_close_matches(topic, [ALL, *sections, *settings()], n=1)
    raise ConfigError(
        [
            f"--help {topic}: there is no such section or setting; "
            + (f"did you mean {near[0]}?" if near else f"sections are {', '.join(sections)}")
        ]
    )


def field_docs(record: type) -> dict[str, str]:
    """Docstring beneath each field of a dataclass, on one line; empty when Python runs without sources."""
    try:
        tree = _syntax_tree(record.__module__)
    except OSError:
        return {}
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == record.__name__)
    return {
        field.target.id: " ".join(str(below.value.value).split())
        for field, below in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }


@cache
def _syntax_tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[module]))


def metavar(setting: Setting) -> str:
    """A setting's type as the word after its flag."""
    return "|".join(_word(kind) for kind in alternatives(setting.type) if kind is not type(None))


def _word(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        choices = [str(choice) for choice in typing.get_args(kind)]
        return choices[0] if len(choices) == 1 else "{" + ",".join(choices) + "}"
    if typing.get_origin(kind) is tuple:
        return f"{_word(typing.get_args(kind)[0])} ..."
    return {int: "INT", float: "FLOAT", bool: "BOOL", str: "TEXT"}.get(kind, "JSON")


def shown_default(default: object) -> str:
    """A default as a user would write it."""
    if isinstance(default, tuple):
        return " ".join(map(str, default)) or "empty"
    if default is None or isinstance(default, bool):
        return str(default).lower()
    return str(default)
