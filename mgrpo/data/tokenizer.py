"""The tokenizer of a run: loading, fingerprint, encoding, decoding, and which tokens end a completion.

Completions are never tokenized again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import Executor
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np


def load_tokenizer(path: str | Path) -> Any:
    """The transformers tokenizer in a folder, which may be a checkpoint."""
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"tokenizer folder {path} does not exist (looked for {folder.absolute()})")
    from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedConfig

    present = sorted(file.name for file in folder.iterdir())
    missing = [name for name in ("tokenizer.json", "tokenizer_config.json") if name not in present]
    holds = ", ".join(present[:20]) or "nothing"
    cure = f"expected {' and '.join(missing)} as well" if missing else "are they of this model, and complete?"
    if "auto_map" in _json(folder / "tokenizer_config.json"):
        cure = (
            "its tokenizer_config.json names Python code that comes with the model (auto_map), which is never run; give a tokenizer.json "
            "and take auto_map out"
        )
    advice = f"no tokenizer could be loaded from {path}, which holds {holds}; {cure}"
    model_type = str(_json(folder / "config.json").get("model_type", "llama"))
    # transformers cannot read config.json of an unknown type, which decides nothing here.
    known = {} if model_type in CONFIG_MAPPING else {"config": PreTrainedConfig()}
    try:
        # Never the code that may lie in the folder, and no question about it on the terminal.
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **known)
    except Exception as err:
        raise ValueError(f"{advice} ({type(err).__name__}: {err})") from err
    # Without its files transformers makes a tokenizer of special tokens alone.
    if len(tokenizer) - len(tokenizer.added_tokens_decoder) < 2:
        raise ValueError(advice)
    return tokenizer


def _json(path: Path) -> dict[str, Any]:
    """The object in a file; an empty one where there is none, or the file is not JSON: transformers reports the problem."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def fingerprint(tokenizer: Any) -> str:
    """A hash of everything that decides which tokens a text becomes, and of the special tokens a template may write."""
    import tokenizers

    found = hashlib.sha256(f"tokenizers {tokenizers.__version__}\n{type(tokenizer).__name__}\n".encode())
    if getattr(tokenizer, "is_fast", False):
        content = tokenizer.backend_tokenizer.to_str()
        # Without truncation and padding, which come first and are set by every call.
        found.update(content[content.index('"added_tokens"') :].encode())
    else:
        found.update(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
        for name in sorted(set(getattr(tokenizer, "vocab_files_names", {}).values())):
            path = Path(getattr(tokenizer, "name_or_path", "")) / name
            found.update(path.read_bytes() if path.is_file() else b"")
    specials = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    found.update(json.dumps(specials, sort_keys=True).encode())
    return found.hexdigest()


def first_difference(tokenizer: Any, other: Any) -> tuple[int, str, str | None] | None:
    """The first of a tokenizer's ids that is another token, or none, of `other`: the id, and its token in each; None: no difference."""
    own, others = ({number: token for token, number in t.get_vocab().items()} for t in (tokenizer, other))
    return next(((n, own[n], others.get(n)) for n in sorted(own) if own[n] != others.get(n)), None)


def text_of_all_tokens(tokenizer: Any) -> tuple[str, list[int]]:
    """A text in which almost every token occurs that texts can hold, and its tokens. Another tokenizer reads others in it."""
    texts = tokenizer.batch_decode([[number] for number in range(len(tokenizer))], skip_special_tokens=True)
    text = "\n".join(each for each in texts if each and "\ufffd" not in each)
    return text, token_ids(tokenizer, [text])[0]


def special_token(tokenizer: Any, text: str) -> str:
    """The first special token that a text from outside would put into a prompt, "" for none."""
    tokens = (
        token for token in tokenizer.added_tokens_decoder.values() if token.special and len(token.content.strip()) > 1
    )
    return next((token.content for token in tokens if token.content in text), "")


def token_ids(
    tokenizer: Any, texts: Sequence[str], *, threads: Executor | None = None, num_threads: int = 1
) -> list[list[int]]:
    """The tokens of texts, in which every special token is written out.

    Args:
        threads: `num_threads` of them, for a fast tokenizer, which does not hold Python's lock while it encodes.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if (
        backend is None
        or not hasattr(backend, "encode_batch_fast")
        or not _is_plain(tokenizer, "__call__", "_encode_plus")
    ):
        options = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False}
        return tokenizer(list(texts), verbose=False, **options)["input_ids"]
    # As in transformers, without the offsets and masks that it requests: a quarter of the time.
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = tokenizer.split_special_tokens

    def encode(part: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in backend.encode_batch_fast(part, add_special_tokens=False)]

    if threads is None:
        return encode(texts)
    size = max(1, -(-len(texts) // num_threads))
    return list(chain.from_iterable(threads.map(encode, [texts[i : i + size] for i in range(0, len(texts), size)])))


def _is_plain(tokenizer: Any, *methods: str) -> bool:
    """True if a tokenizer of transformers has these methods of the base class of the fast ones, which call its backend."""
    from transformers import PreTrainedTokenizerFast

    return isinstance(tokenizer, PreTrainedTokenizerFast) and all(
        getattr(type(tokenizer), name, None) is getattr(PreTrainedTokenizerFast, name, 0) for name in methods
    )


def decode(tokenizer: Any, tokens: Sequence[np.ndarray]) -> list[str]:
    """Text of each token array without special tokens; ids outside its vocabulary become no text.

    A model's vocabulary is often padded beyond its tokenizer's, and an untrained policy samples from the padding.
    """
    # Fast tokenizers skip unknown ids themselves; others look ids up in a list.
    end = 2**31 if getattr(tokenizer, "is_fast", False) else len(tokenizer)
    known = [array[(array >= 0) & (array < end)].tolist() for array in tokens]
    if _is_plain(tokenizer, "decode", "_decode"):
        # One call without Python's lock: after each of many, this thread would wait for it anew.
        return tokenizer.backend_tokenizer.decode_batch(known, skip_special_tokens=True)
    return [tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) for ids in known]


def stop_token_ids(model_dir: str | Path, tokenizer: Any) -> list[int]:
    """Ids that end a completion: of generation_config.json, else config.json, else the tokenizer's own."""
    for name in ("generation_config.json", "config.json"):
        path = Path(model_dir) / name
        if not path.is_file():
            continue
        try:
            found = json.loads(path.read_text()).get("eos_token_id")
        except ValueError as err:
            raise ValueError(f"{path} is not JSON: {err}") from err
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if not all(isinstance(token, int) and token >= 0 for token in ids):
            raise ValueError(f"{path} has eos_token_id={found!r}; expected a token id or a list of them")
        if ids:
            return list(dict.fromkeys(ids))
    if tokenizer.eos_token_id is not None:
        return [tokenizer.eos_token_id]
    raise ValueError(
        f"no token ends a completion: neither generation_config.json nor config.json in {model_dir} has eos_token_id, "
        "and the tokenizer has no eos token; add eos_token_id to generation_config.json"
    )
