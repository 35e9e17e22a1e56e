"""Prompts of a run: its data under the model's chat template, tokenizer and limits, and their problems."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgrpo.config import Config
from mgrpo.config.validate import too_few_prompts
from mgrpo.run.inputs.toolset import Toolset, make_language
from mgrpo.run.ranks.process import prepare_environment

if TYPE_CHECKING:
    import numpy as np

    from mgrpo.data.mixture import Mixture
    from mgrpo.data.prompt_set import PromptSet
    from mgrpo.environments.loop.language import TemplateLanguage
    from mgrpo.types import Prompt

QUICK_ROWS = 20_000
"""Rows that are tokenized within seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The rows as tokens, and the tokenizer and language that turn them and the completions into text."""

    tokenizer: Any
    stop_ids: list[int]
    """Tokens that end a completion."""
    train: PromptSet | None
    """The training rows; None if a model is only evaluated."""
    held_out: PromptSet | None
    language: TemplateLanguage | None = None
    """Reads and answers turns, in a run with tools."""

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt, before filtering and truncation."""
        sets = [own.statistics["total"]["tokens"] for own in (self.train, self.held_out) if own is not None]
        return max((tokens["max"] for tokens in sets if tokens), default=0)

    def opened(self, prompt: Prompt, text: str, *, is_training: bool) -> Prompt:
        """A prompt with its environment's opening in the last user message."""
        own = self.train if is_training else self.held_out
        assert own is not None, "the prompt is one of these"
        return own.with_opening(prompt, text, self.tokenizer)

    def asked(self, prompt: Prompt, *, is_training: bool) -> object:
        """The row's question: text, or messages."""
        own = self.train if is_training else self.held_out
        assert own is not None, "the prompt is one of these"
        return own.asked(prompt)

    def reworded(self, prompt: Prompt, change: Callable[[str], str]) -> np.ndarray:
        """Tokens of a training prompt with a changed question, see `PromptSet.reworded`."""
        assert self.train is not None, "the prompt is one of these"
        return self.train.reworded(prompt, change, self.tokenizer)


def make_prompts(
    config: Config, mixtures: Sequence[Mixture], *, toolset: Toolset | None = None, vocab: int | None, is_sound: bool
) -> tuple[Prompts | None, list[str]]:
    """Tokenize all rows, or load an earlier run's tokens; None and the problems if the run cannot start.

    Imports transformers, and with it torch.

    Args:
        mixtures: the training and the held-out data; empty if unreadable: then only the tokenizer is checked.
        vocab: tokens of the model; None: unknown.
        is_sound: False if the run will not start anyway: large data, which can take minutes, are only tried on one row.
    """
    from mgrpo.data.tokenizer import load_tokenizer, stop_token_ids

    prepare_environment(config)
    try:
        tokenizer = load_tokenizer(config.tokenizer_path)
    except ValueError as err:
        return None, [str(err)]
    problems: list[str] = []
    stop_ids: list[int] = []
    try:
        stop_ids = stop_token_ids(config.model_path, tokenizer)
    except ValueError as err:
        problems.append(str(err))
    if vocab and max(stop_ids, default=0) >= vocab:
        origin = f"model_name_or_path={config.model.model_name_or_path}"
        cure = "correct generation_config.json, or use the model's own tokenizer"
        if not _names_eos(config.model_path):
            origin = f"the tokenizer, which {origin} takes without one in generation_config.json or config.json,"
            cure = "name the token that ends a completion in generation_config.json (eos_token_id)"
        problems.append(
            f"eos_token_id={max(stop_ids)} of {origin} is not among the model's {vocab} tokens (vocab_size in config.json); {cure}"
        )
    sets: list[PromptSet | None] = []
    shown = toolset.shown(config) if toolset else None
    for mixture in mixtures:
        made = None
        try:
            if len(mixture):
                mixture.try_out(tokenizer, tools=shown)
                if is_sound or len(mixture) <= QUICK_ROWS:
                    made = mixture.encode(tokenizer, tools=shown, has_row_tools=toolset is None)
        except ValueError as err:
            problems += [str(err)] if str(err) not in problems else []
        problems += _unknown_tokens(made, vocab) if made is not None and vocab else []
        sets.append(made)
    if sets and sets[0] is not None:
        problems += too_few_prompts(config, len(sets[0]))
    if problems or not sets:
        return None, problems
    language = None
    if toolset is not None:
        try:
            language = make_language(config, toolset, tokenizer=tokenizer, stop_ids=stop_ids, prompts=sets)
        except ValueError as err:
            return None, [str(err)]
        stop_ids = list(dict.fromkeys([*stop_ids, *language.stop_ids]))
    prompts = Prompts(tokenizer=tokenizer, stop_ids=stop_ids, train=sets[0], held_out=sets[1], language=language)
    return prompts, []


def vocabulary_notes(tokenizer: Any, vocab: int) -> Iterator[str]:
    """Note on a tokenizer with tokens that the model lacks, although no prompt of the run has one."""
    if len(tokenizer) > vocab:
        yield (
            f"the tokenizer knows {len(tokenizer)} tokens, and the model {vocab} (vocab_size in config.json): no prompt here uses "
            "the others, but a model that meets one fails; is it the model's own tokenizer?"
        )


def _unknown_tokens(prompts: PromptSet, vocab: int) -> Iterator[str]:
    """Problem of a prompt with a token for which the model has no embedding."""
    found = prompts.beyond(vocab)
    if found is not None:
        origin, token, text = found
        yield (
            f"{origin} has token {token} ({text!r}), but the model has only {vocab} (vocab_size in config.json): tokens were "
            "added to the tokenizer and not to the model; resize the model's embeddings, or use its own tokenizer"
        )


def _names_eos(model_path: str) -> bool:
    files = [Path(model_path) / name for name in ("generation_config.json", "config.json")]
    return any(json.loads(file.read_text()).get("eos_token_id") is not None for file in files if file.is_file())
