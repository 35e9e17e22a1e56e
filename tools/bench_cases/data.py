"""Seconds and memory of preparing mixes of rows, new and from the cache, beside `datasets` alone."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tools.bench_cases.tokenizer import train_tokenizer
from tools.bench_cases.watch import Watch, memory

REPEATS = 1
PACKAGES = ("mgrpo", "pyarrow", "tokenizers", "transformers", "datasets", "numpy")
PROTOCOL = (
    "Rows are conversations of 20 to 80 words with a number as the label; the tokenizer is a byte-level BPE that is trained on the spot, "
    "with a chat template. Each figure is taken in a process of its own, which loads the tokenizer before the clock starts; the import "
    "of `datasets` counts for mgrpo, which imports it when it needs it. The baseline is `datasets` alone: load_dataset, a batched map in "
    "one process that renders and tokenizes, and a filter by length. Memory in MiB: the proportional set sizes of the process and its "
    "children, and their anonymous part. `repeats` times, the fastest."
)
MAX_TOKENS = 192
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--baseline_rows", type=int, default=100_000, help="most rows that the baseline is measured on")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    results = []
    with tempfile.TemporaryDirectory(prefix="mgrpo-bench-") as name:
        folder = Path(name)
        write_tokenizer(folder / "tokenizer")
        for count in args.rows:
            write_rows(folder / "rows.jsonl", count)
            for method in [name for name in METHODS if name == "mgrpo" or count <= args.baseline_rows]:
                rounds = [both_starts(method, folder) for _ in range(args.repeats)]
                for start in ("new", "cached"):
                    fastest = min((each[start] for each in rounds), key=lambda row: row["read_s"] + row["tokenize_s"])
                    results.append({"rows": count, "method": method, "start": start, **fastest})
    return {"results": results}


def both_starts(method: str, folder: Path) -> dict[str, dict[str, float]]:
    """Figures without a cache, and with the one that this left."""
    rows, found = folder / "rows.jsonl", {}
    for start in ("new", "cached"):
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            watch = Watch(pool.submit(os.getpid).result(), every_s=0.25, memory_every=1)
            row = pool.submit(measure_here, method, rows, folder / "tokenizer", folder / "cache").result()
        files = [path for path in (folder / "cache").rglob("*") if path.is_file()]
        found[start] = {
            "file_mb": rows.stat().st_size / 2**20,
            **row,
            "peak_pss_mb": watch.peak_mb,
            "peak_anonymous_mb": watch.peak_anonymous_mb,
            "cache_mb": sum(path.stat().st_size for path in files) / 2**20,
        }
    shutil.rmtree(folder / "cache")
    return found


def measure_here(method: str, rows: Path, tokenizer: Path, cache: Path) -> dict[str, float]:
    from transformers import PreTrainedTokenizerFast

    loaded = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    idle, before = memory(os.getpid())[1], time.process_time()
    found = METHODS[method](rows, loaded, cache)
    return {**found, "cpu_s": time.process_time() - before, "idle_anonymous_mb": idle}


def by_mgrpo(rows: Path, tokenizer: Any, cache: Path) -> dict[str, float]:
    """Both stages of a run's start."""
    from mgrpo.config.schema import Data
    from mgrpo.data.mixture import open_data

    settings = Data(
        dataset_mixer_list=(str(rows), "1.0"), max_prompt_token_length=MAX_TOKENS, dataset_local_cache_dir=str(cache)
    )
    start = time.perf_counter()
    mixture, _ = open_data(settings)
    read = time.perf_counter()
    prompts = mixture.encode(tokenizer)
    return {"read_s": read - start, "tokenize_s": time.perf_counter() - read, "prompts": len(prompts)}


def by_datasets(rows: Path, tokenizer: Any, cache: Path) -> dict[str, float]:
    """The same prompts."""
    import datasets

    datasets.disable_progress_bars()
    start = time.perf_counter()
    loaded = datasets.load_dataset("json", data_files=str(rows), split="train", cache_dir=str(cache))
    read = time.perf_counter()

    def tokenize(batch: dict[str, list]) -> dict[str, list]:
        render = tokenizer.apply_chat_template
        texts = [render(messages, tokenize=False, add_generation_prompt=True) for messages in batch["messages"]]
        return {"text": texts, "tokens": tokenizer(texts, add_special_tokens=False)["input_ids"]}

    encoded = loaded.map(tokenize, batched=True)
    kept = encoded.filter(lambda own: [len(ids) <= MAX_TOKENS for ids in own], input_columns="tokens", batched=True)
    return {"read_s": read - start, "tokenize_s": time.perf_counter() - read, "prompts": len(kept)}


METHODS: dict[str, Callable[[Path, Any, Path], dict[str, float]]] = {"mgrpo": by_mgrpo, "datasets": by_datasets}


def make_words() -> list[str]:
    """Random words with the lengths of natural ones."""
    rng = random.Random(0)
    lengths = (min(14, 1 + int(rng.gammavariate(3, 1.6))) for _ in range(5000))
    return ["".join(rng.choices("etaoinshrdlucmfwyp", k=length)) for length in lengths]


def write_rows(path: Path, count: int) -> None:
    """Conversations as a JSONL file."""
    rng, words = random.Random(count), make_words()
    with path.open("w") as file:
        for index in range(count):
            content = f"{index}: {' '.join(rng.choices(words, k=rng.randint(20, 80)))}?"
            row = {"messages": [{"role": "user", "content": content}], "ground_truth": str(index), "dataset": "gsm8k"}
            file.write(json.dumps(row) + "\n")


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE trained on the words."""
    rng, words = random.Random(1), make_words()
    texts = (" ".join(rng.choices(words, k=50)) for _ in range(2000))
    train_tokenizer(folder, texts, vocab_size=4096, template=TEMPLATE)
