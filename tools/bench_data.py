"""Preparing data: seconds and memory for mixes of 10 k, 100 k and 1 M rows, new and from the cache.

    python tools/bench_data.py [--rows 10000 100000 1000000] [--baseline_rows 100000] [--num_proc 0]

Rows are conversations of 20 to 80 words with a number as the label; the tokenizer is a byte-level BPE that is trained on the
spot, with a chat template. Each figure is taken in a process of its own, which loads the tokenizer before the clock starts; the
import of `datasets` counts for mgrpo, which imports it when it needs it, and not for the baseline. CPU seconds include what is
measured in addition (2,000 prompts); seconds are of the clock and depend on what else the machine does. The baseline is
`datasets` alone: load_dataset, a batched map in one process that renders and tokenizes, and a filter by length. Memory is sampled
every quarter of a second: the proportional set sizes of the process and its children, with the pages of mapped files, and the part
of it that is anonymous, which they cannot give back.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
MAX_TOKENS = 192
VOCABULARY = 4096
NUM_WORDS = 5000
SAMPLE_S = 0.25
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


class MemoryWatch(threading.Thread):
    """Peaks of a process and its descendants, in MiB."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.peak_pss, self.peak_anonymous = pid, 0.0, 0.0

    def run(self) -> None:
        while psutil.pid_exists(self.pid):
            pss, anonymous = memory(self.pid)
            self.peak_pss, self.peak_anonymous = max(self.peak_pss, pss), max(self.peak_anonymous, anonymous)
            time.sleep(SAMPLE_S)


def memory(pid: int) -> tuple[float, float]:
    """Proportional set size of a process and its descendants, and its anonymous part, in MiB."""
    totals = {"Pss:": 0, "Pss_Anon:": 0}
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0, 0.0
    for process in family:
        try:
            for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
                name, *value = line.split()
                if name in totals:
                    totals[name] += int(value[0])
        except OSError:
            continue
    return totals["Pss:"] / 1024, totals["Pss_Anon:"] / 1024


def make_words() -> list[str]:
    """Random words with the lengths of natural ones."""
    rng = random.Random(0)
    return [
        "".join(rng.choices("etaoinshrdlucmfwyp", k=min(14, 1 + int(rng.gammavariate(3, 1.6)))))
        for _ in range(NUM_WORDS)
    ]


def write_rows(path: Path, num_rows: int) -> None:
    """Conversations as a JSONL file."""
    rng, words = random.Random(num_rows), make_words()
    with path.open("w") as file:
        for index in range(num_rows):
            content = f"{index}: {' '.join(rng.choices(words, k=rng.randint(20, 80)))}?"
            row = {"messages": [{"role": "user", "content": content}], "ground_truth": str(index), "dataset": "gsm8k"}
            file.write(json.dumps(row) + "\n")


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE trained on the words."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng, words = random.Random(1), make_words()
    tokenizer.train_from_iterator((" ".join(rng.choices(words, k=50)) for _ in range(2000)), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[1], chat_template=TEMPLATE).save_pretrained(
        folder
    )


def measure_ours(data: Path, tokenizer: Any, cache: Path, num_proc: int) -> dict[str, float]:
    """Both stages, and the time per prompt."""
    from mgrpo.config.schema import Data
    from mgrpo.data.mixture import open_data

    settings = Data(
        dataset_mixer_list=(str(data), "1.0"),
        max_prompt_token_length=MAX_TOKENS,
        dataset_local_cache_dir=str(cache),
        dataset_num_proc=num_proc,
    )
    start = time.perf_counter()
    mixture, _ = open_data(settings)
    read = time.perf_counter()
    prompts = mixture.encode(tokenizer)
    end = time.perf_counter()
    rng = random.Random(0)
    chosen = [(0, rng.randrange(len(prompts))) for _ in range(2000)]
    asked = time.perf_counter()
    tokens = sum(len(prompts.prompt(prompt_id).tokens) for prompt_id in chosen)
    return {
        "read_s": read - start,
        "tokenize_s": end - read,
        "prompts": len(prompts),
        "mean_tokens": tokens / len(chosen),
        "us_a_prompt": (time.perf_counter() - asked) / len(chosen) * 1e6,
    }


def measure_datasets(data: Path, tokenizer: Any, cache: Path, num_proc: int) -> dict[str, float]:
    """The same prompts by `datasets`; `num_proc` is not used."""
    import datasets

    datasets.disable_progress_bars()
    start = time.perf_counter()
    rows = datasets.load_dataset("json", data_files=str(data), split="train", cache_dir=str(cache))
    read = time.perf_counter()

    def tokenize(batch: dict[str, list]) -> dict[str, list]:
        texts = [
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            for messages in batch["messages"]
        ]
        return {"text": texts, "tokens": tokenizer(texts, add_special_tokens=False)["input_ids"]}

    encoded = rows.map(tokenize, batched=True)
    kept = encoded.filter(
        lambda tokens: [len(ids) <= MAX_TOKENS for ids in tokens], input_columns="tokens", batched=True
    )
    return {"read_s": read - start, "tokenize_s": time.perf_counter() - read, "prompts": len(kept)}


METHODS: dict[str, Callable[[Path, Any, Path, int], dict[str, float]]] = {
    "mgrpo": measure_ours,
    "datasets": measure_datasets,
}


def measure_here(method: str, data: Path, tokenizer_folder: Path, cache: Path, num_proc: int) -> None:
    """One figure, as a line of JSON; runs in a process of its own."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    idle = memory(os.getpid())[1]
    before = sum(os.times()[:4])
    found = METHODS[method](data, tokenizer, cache, num_proc)
    print(json.dumps({**found, "cpu_s": sum(os.times()[:4]) - before, "idle_anonymous_mb": idle}))


def measure(method: str, data: Path, tokenizer: Path, cache: Path, num_proc: int) -> dict[str, float]:
    """One figure."""
    command = [sys.executable, __file__, "--measure", method, str(data), str(tokenizer), str(cache), str(num_proc)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | SETTINGS, cwd=ROOT)
    watch = MemoryWatch(process.pid)
    watch.start()
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{output[-2000:]}")
    return json.loads(output.splitlines()[-1]) | {
        "peak_pss_mb": watch.peak_pss,
        "peak_anonymous_mb": watch.peak_anonymous,
    }


def measure_sampler(num_rows: int) -> dict[str, float]:
    """The cost of the order of prompts, with a tenth of them excluded."""
    from mgrpo.data.sampler import Sampler

    start = time.perf_counter()
    sampler = Sampler(num_rows, seed=1)
    made = time.perf_counter()
    sampler.take(512)
    taken = time.perf_counter()
    sampler.exclude(range(0, num_rows, 10))
    excluded = time.perf_counter()
    state = json.dumps(sampler.state_dict())
    return {
        "rows": num_rows,
        "epoch_ms": (made - start) * 1e3,
        "take_512_ms": (taken - made) * 1e3,
        "exclude_ms": (excluded - taken) * 1e3,
        "state_bytes": len(state),
    }


def size_mb(folder: Path) -> float:
    """MiB of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20


def run(rows: list[int], baseline_rows: int, num_proc: int, folder: Path) -> list[dict[str, Any]]:
    """All figures, printed as they come."""
    print(
        f"{'rows':>9} {'method':<9}{'start':<8}{'read s':>8}{'tokens s':>10}{'CPU s':>8}{'rows/s':>9}"
        f"{'PSS MB':>8}{'anon MB':>9}{'idle':>6}"
    )
    tokenizer = folder / "tokenizer"
    write_tokenizer(tokenizer)
    results = []
    for num_rows in rows:
        data, num_caches = folder / "rows.jsonl", 0
        write_rows(data, num_rows)
        for method in METHODS:
            if method != "mgrpo" and num_rows > baseline_rows:
                continue
            cache = folder / f"cache-{num_caches}"
            num_caches += 1
            for start in ("new", "cached"):
                found = measure(method, data, tokenizer, cache, num_proc)
                total = found["read_s"] + found["tokenize_s"]
                print(
                    f"{num_rows:>9} {method:<9}{start:<8}{found['read_s']:>8.2f}{found['tokenize_s']:>10.2f}"
                    f"{found['cpu_s']:>8.2f}{num_rows / total:>9.0f}{found['peak_pss_mb']:>8.0f}{found['peak_anonymous_mb']:>9.0f}"
                    f"{found['idle_anonymous_mb']:>6.0f}",
                    flush=True,
                )
                results.append(
                    {"rows": num_rows, "method": method, "start": start, "file_mb": data.stat().st_size / 2**20}
                    | found
                    | {"cache_mb": size_mb(cache)}
                )
            for path in sorted(cache.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
    return results


def cpu_model() -> str:
    """Name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--baseline_rows", type=int, default=100_000, help="most rows that the baseline is measured on")
    parser.add_argument("--num_proc", type=int, default=0, help="threads of mgrpo; 0: one per core")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "data.json")
    parser.add_argument("--measure", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        method, data, tokenizer, cache, num_proc = args.measure
        measure_here(method, Path(data), Path(tokenizer), Path(cache), int(num_proc))
        return

    os.environ.update(SETTINGS)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="mgrpo-bench-data-") as folder:
        results = run(args.rows, args.baseline_rows, args.num_proc, Path(folder))
    sampler = [measure_sampler(num_rows) for num_rows in args.rows]
    packages = ("mgrpo", "pyarrow", "tokenizers", "transformers", "datasets", "numpy")
    report = {
        "protocol": " ".join(__doc__.split("\n\n", 2)[2].split()),
        "machine": {
            "cpu": cpu_model(),
            "cpus": os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30),
            "load_before": load,
            "python": platform.python_version(),
        },
        "versions": {name: version(name) for name in packages},
        "results": results,
        "sampler": sampler,
    }
    for row in sampler:
        print("sampler: " + ", ".join(f"{name} {value:.6g}" for name, value in row.items()))
    args.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
