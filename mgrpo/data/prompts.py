"""Rows to tokens and tokens to text: the controller's only use of the tokenizer. Ids are never tokenised again."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mgrpo.data.mixing import Message, Row
from mgrpo.types import Prompt, PromptId

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """Every prompt of a run by its index; rows and their labels cannot part, as one record holds both."""

    rows: tuple[Row, ...]
    texts: tuple[str, ...]
    tokens: tuple[np.ndarray, ...]
    """`[len]` int32 each."""
    num_left_out: int
    """Rows longer than the limit."""

    def __len__(self) -> int:
        return len(self.rows)

    def prompt(self, prompt_id: PromptId) -> Prompt:
        """The prompt at the index of `prompt_id` (epoch, index)."""
        index = prompt_id[1]
        row = self.rows[index]
        return Prompt(
            id=prompt_id,
            tokens=self.tokens[index],
            text=self.texts[index],
            verifiers=row.verifiers,
            ground_truths=row.ground_truths,
        )


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a checkpoint folder (a transformers tokenizer)."""
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"model folder {path} does not exist (looked for {folder.absolute()})")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as err:
        present = ", ".join(sorted(file.name for file in folder.iterdir())[:20]) or "nothing"
        raise ValueError(
            f"no tokenizer could be loaded from {path}, which holds {present}; "
            f"expected tokenizer.json and tokenizer_config.json ({type(err).__name__}: {err})"
        ) from err


def encode(
    rows: Sequence[Row],
    tokenizer: Any,
    *,
    max_prompt_token_length: int,
    chat_template_name: Literal["auto", "none"],
) -> PromptSet:
    """Template and tokenize rows; those longer than `max_prompt_token_length` are left out, never cut.

    Text prompts are encoded as they are, without special tokens. `messages` go through the tokenizer's chat template,
    which writes the special tokens itself; with "none" their contents are joined by newlines. An answer that ends the
    messages is dropped in both cases: it is what the model is to write.
    """
    if chat_template_name not in ("auto", "none"):
        raise ValueError(f"chat_template_name={chat_template_name!r}; expected auto or none")
    texts = [_text(row, tokenizer, chat_template_name) for row in rows]
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    empty = [row.origin for row, ids in zip(rows, encoded, strict=True) if not ids]
    if empty:
        raise ValueError(f"{len(empty)} prompts have no tokens; the first is {empty[0]}")
    kept = [index for index, ids in enumerate(encoded) if len(ids) <= max_prompt_token_length]
    num_left_out = len(rows) - len(kept)
    if not kept:
        lengths = f"; the shortest has {min(map(len, encoded))} tokens" if encoded else ""
        raise ValueError(f"none of {len(rows)} prompts fits max_prompt_token_length={max_prompt_token_length}{lengths}")
    if num_left_out:
        _log.warning(
            "%d of %d prompts are longer than %d tokens and left out", num_left_out, len(rows), max_prompt_token_length
        )
    return PromptSet(
        rows=tuple(rows[index] for index in kept),
        texts=tuple(texts[index] for index in kept),
        tokens=tuple(np.array(encoded[index], dtype=np.int32) for index in kept),
        num_left_out=num_left_out,
    )


def decode(tokenizer: Any, tokens: Sequence[np.ndarray]) -> list[str]:
    """Text of each token array without special tokens; ids that the tokenizer does not know have no text.

    A model's vocabulary is often padded beyond its tokenizer's, and an early policy samples from the padding.
    """
    # Fast tokenizers skip unknown ids themselves; the others look ids up in a list.
    end = 2**31 if getattr(tokenizer, "is_fast", False) else len(tokenizer)
    return [
        tokenizer.decode(
            array[(array >= 0) & (array < end)].tolist(),
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        for array in tokens
    ]


def stop_token_ids(model_dir: str | Path, tokenizer: Any) -> list[int]:
    """Ids that end a completion: of generation_config.json, else config.json, else the tokenizer's own."""
    for name in ("generation_config.json", "config.json"):
        path = Path(model_dir) / name
        if not path.is_file():
            continue
        try:
            found = json.loads(path.read_text()).get("eos_token_id")
        except ValueError as err:
            raise ValueError(f"{path} is no JSON: {err}") from err
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if not all(isinstance(token, int) and token >= 0 for token in ids):
            raise ValueError(f"{path} has eos_token_id={found!r}; expected a token id or a list of them")
        if ids:
            return list(dict.fromkeys(ids))
    if tokenizer.eos_token_id is not None:
        return [tokenizer.eos_token_id]
    raise ValueError(
        f"nothing says which token ends a completion: neither generation_config.json nor config.json in {model_dir} "
        "has eos_token_id, and the tokenizer has no eos token; add eos_token_id to generation_config.json"
    )


def _text(row: Row, tokenizer: Any, chat_template_name: str) -> str:
    if row.messages is None:
        assert row.prompt is not None
        return row.prompt
    messages = _without_answer(row.messages)
    if chat_template_name == "none":
        return "\n".join(message["content"] for message in messages)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"{row.origin} has messages, and the tokenizer {getattr(tokenizer, 'name_or_path', '')} has no chat template; "
            "pass chat_template_name none to join their contents as plain text, or choose a chat model"
        )
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as err:
        raise ValueError(f"{row.origin}: the tokenizer's chat template refused the messages: {err}") from err


def _without_answer(messages: Sequence[Message]) -> list[Message]:
    if len(messages) > 1 and messages[-1]["role"] == "assistant":
        return list(messages[:-1])
    return list(messages)
