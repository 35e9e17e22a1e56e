"""`mgrpo rollout`: some completions of a model, printed with their turns, tools and rewards, without training.

Sampled tokens, which a run would train on, are green; tokens between turns, which it would not, are yellow; the context is dim.
Branches of a tree of turns are printed one after the other, each from its fork.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mgrpo.config import Config, ConfigError
from mgrpo.moving import parse
from mgrpo.telemetry.completions import agent_facts, beginning
from mgrpo.telemetry.samples import branch_records
from mgrpo.telemetry.untrusted import printable
from mgrpo.types import Completion, Prompt, Score

if TYPE_CHECKING:
    from rich.console import Console

    from mgrpo.run.records import Evaluation

FLAG = "--num"
DEFAULT_NUM = 4
SAMPLED, BETWEEN, PROMPT = "green", "yellow", "dim"


def rollout_command(argv: Sequence[str]) -> int:
    """`mgrpo rollout`: sample a few prompts, print."""
    from mgrpo.run.commands.evaluate import ready

    try:
        num, argv = num_of(argv)
        config = first_prompts(parse(list(argv), prog="mgrpo rollout", defer=True), num)
        with ready(config, []) as (_, production):
            evaluation = production.evaluator.evaluate(done=0)
            show(evaluation, production.tokenizer)
    except ConfigError as err:
        sys.stderr.write(f"mgrpo: {err}\n")
        return 2
    return 0


def num_of(argv: Sequence[str]) -> tuple[int, list[str]]:
    """The value of `--num`, and the other words."""
    rest: list[str] = []
    words, num = iter(argv), str(DEFAULT_NUM)
    for word in words:
        if word == FLAG:
            num = next(words, "")
        elif word.startswith(f"{FLAG}="):
            num = word.removeprefix(f"{FLAG}=")
        else:
            rest.append(word)
    if not num.isdecimal() or not int(num):
        raise ConfigError([f"{FLAG}={num or '(nothing)'}: expected the number of prompts, at least 1"])
    return int(num), rest


def first_prompts(config: Config, num: int) -> Config:
    """The configuration with `num` prompts of the held-out data, or else of the training data, and one completion of each."""
    data = config.data
    mix, splits = data.dataset_mixer_eval_list, data.dataset_mixer_eval_list_splits
    if not mix:
        mix, splits = data.dataset_mixer_list, data.dataset_mixer_list_splits
    changed = dataclasses.replace(
        data, dataset_mixer_eval_list=(*mix[:1], str(num)) if mix else (), dataset_mixer_eval_list_splits=splits[:1]
    )
    return dataclasses.replace(config, data=changed, rollout=dataclasses.replace(config.rollout, eval_pass_at_k=1))


def show(evaluation: Evaluation, tokenizer: Any) -> None:
    """Print completions to the terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    for group in evaluation.groups:
        for completion, score in zip(group.group.completions, group.scores, strict=True):
            show_completion(console, group.group.prompt, completion, score, tokenizer)


def show_completion(console: Console, prompt: Prompt, completion: Completion, score: Score, tokenizer: Any) -> None:
    """Print one completion, token by token and branch after branch, and its rewards.

    Text of a model or an agent is untrusted input: control characters are printed visibly.
    """
    from rich.markup import escape
    from rich.text import Text

    console.rule(f"prompt {prompt.id[1]}", style=PROMPT)
    record = completion.trajectory
    for heading, parts in _parts(prompt, completion):
        if heading:
            console.print(Text(f"-- {heading}", style="bold"), soft_wrap=True)
        text = Text()
        for part, style in parts:
            text.append(printable(part if isinstance(part, str) else _decoded(part, tokenizer)), style=style)
        console.print(text, soft_wrap=True)
    facts = [f"reward {score.reward:g}", *(f"{name} {value:g}" for name, value in score.parts.items())]
    if record is not None:
        calls = [name or "(not a tool)" for turn in record.turns for name in turn.calls]
        turns = "1 turn" if len(record.turns) == 1 else f"{len(record.turns)} turns"
        facts += [turns, f"calls: {', '.join(calls) or 'none'}", f"ended by {record.ended_by}"]
        facts += agent_facts(dataclasses.asdict(record.agent)) if record.agent else []
        facts += [f"scored: {record.scored_text!r}"]
    else:
        facts += [f"ended by {completion.finish_reason}"]
    sampled = int(completion.loss_mask.sum())
    console.print(
        f"[bold]{escape(printable(' | '.join(facts)))}[/bold] [dim]{sampled} of {len(completion.tokens)} tokens sampled[/dim]",
        soft_wrap=True,
    )
    if record is not None and record.agent and (output := record.agent.output.strip()):
        console.print(Text(f"printed by the agent: {printable(output)}", style=PROMPT), soft_wrap=True)


Part = tuple[str | np.ndarray, str]
"""Text or tokens, and their style."""


def _parts(prompt: Prompt, completion: Completion) -> Iterator[tuple[str, list[Part]]]:
    """Heading, context and new tokens of each branch; a shared prefix is printed once."""
    record = completion.trajectory
    if record is None or not record.branches:
        yield "", [(prompt.text, PROMPT), *_tokens(completion, 0, len(completion.tokens))]
        return
    for number, (branch, told) in enumerate(zip(record.branches, branch_records(completion), strict=True)):
        context = branch.prompt_tokens
        if told["after"] is not None and not told["rewritten"]:
            before = record.branches[branch.parent]
            known = len(before.prompt_tokens) + record.turns[branch.after].end - before.start
            context = context[known:]
        heading = beginning(number, told) if len(record.branches) > 1 else ""
        yield heading, [(context, PROMPT), *_tokens(completion, branch.start, branch.end)]


def _tokens(completion: Completion, first: int, last: int) -> list[Part]:
    mask, tokens = completion.loss_mask[first:last], completion.tokens[first:last]
    return [(tokens[a:b], SAMPLED if is_sampled else BETWEEN) for a, b, is_sampled in spans(mask)]


def _decoded(tokens: np.ndarray, tokenizer: Any) -> str:
    return tokenizer.decode(tokens.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def spans(mask: np.ndarray) -> list[tuple[int, int, bool]]:
    """Runs of equal values of a mask `[len]` bool: start, end, value."""
    cuts = [0, *(np.flatnonzero(np.diff(mask.astype(np.int8))) + 1).tolist(), len(mask)]
    return [(a, b, bool(mask[a])) for a, b in itertools.pairwise(cuts) if b > a]
