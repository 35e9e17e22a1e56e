"""A real vLLM server on this machine's CPU, for runs that do not start their own engines."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.ports import free_port

NEEDED = (
    "jmespath", "lmformatenforcer", "model_hosting_container_standards", "prometheus_fastapi_instrumentator", "uvicorn",
    "vllm", "watchfiles",
)  # fmt: skip
MISSING = [module for module in NEEDED if importlib.util.find_spec(module) is None]
REASON = f"vLLM's server needs {', '.join(MISSING)}: pip install --no-deps -r requirements/judge.txt"
TOKEN = "secret-1"
ON_A_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
"""Environment of a server that is small and alone."""


class Server:
    """`vllm serve` as docs/servers.md starts it on a CPU."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        max_model_len: int,
        flags: Sequence[str] = (),
        is_stock: bool = False,
        has_tokenizer: bool = False,
    ) -> None:
        """
        Args:
            flags: further ones.
            is_stock: without anything that a policy's server needs.
            has_tokenizer: a policy's server has one.
        """
        self.url = f"http://127.0.0.1:{free_port()}"
        self.log = folder / "server.txt"
        self.command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1",
            "--port", self.url.rpartition(":")[2], "--dtype", "float32", "--max-model-len", str(max_model_len),
            "--api-key", TOKEN, "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20),
            *flags,
        ]  # fmt: skip
        self.environment = os.environ | ON_A_CPU
        if not is_stock:
            self.command += [
                "--weight-transfer-config", '{"backend": "mgrpo"}', "--logprobs-mode", "processed_logprobs",
                "--enable-scale-out", *([] if has_tokenizer else ["--skip-tokenizer-init"]), "--block-size", "32", "--max-num-seqs", "256",
                "--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096",
            ]  # fmt: skip
            self.environment |= {"MGRPO_ENGINE": "1", "VLLM_SERVER_DEV_MODE": "1"}
        self.start()

    def start(self) -> None:
        """The first time, or again at the same address."""
        self.process = subprocess.Popen(
            self.command,
            stdout=self.log.open("a"),
            stderr=subprocess.STDOUT,
            env=self.environment,
            start_new_session=True,
        )

    def wait(self, timeout_s: float = 240) -> None:
        """Until it answers."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            except OSError:
                assert self.process.poll() is None, f"ended early:\n{self.log.read_text()[-3000:]}"
                assert time.monotonic() < deadline, f"not ready:\n{self.log.read_text()[-3000:]}"
                time.sleep(0.2)

    def says(self, path: str) -> Any:
        """What it answers to a GET."""
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return json.loads(answer.read())

    def end(self) -> None:
        """It and all that it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
