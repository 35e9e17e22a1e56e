"""Which environment variables other programs are given."""

from __future__ import annotations

import pytest

from mgrpo.processes.visible import is_key, without_secrets

HUB = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
KEYS = (
    "WANDB_API_KEY", "OPENAI_API_KEY", "AZURE_API_KEY", "MY_HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN",
    "VLLM_API_KEY", "DB_PASSWORD", "GOOGLE_APPLICATION_CREDENTIALS", "openai_apikey", "SECRET",
)  # fmt: skip
OTHERS = (
    "PATH", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "TOKENIZERS_PARALLELISM", "CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "HF_HOME",
    "KEYBOARD", "VLLM_USE_V1", "XLA_FLAGS", "LD_LIBRARY_PATH", "MAX_TOKENS",
)  # fmt: skip


def test_a_key_is_known_by_its_name():
    """Ray's own token must stay, or its processes cannot talk to each other; without the Hub's a node cannot download a private model."""
    assert [name for name in KEYS if not is_key(name)] == [name for name in (*OTHERS, *HUB) if is_key(name)] == []


@pytest.mark.parametrize("name", [*KEYS, *HUB, "DATABASE_URL", "HTTPS_PROXY"])
def test_a_program_that_meets_untrusted_text_sees_none_of_them(monkeypatch, name):
    """Nor what no rule of names would find."""
    monkeypatch.setenv(name, "value")
    assert name not in without_secrets("MGRPO_VERIFIER_")
