"""Open Instruct's names for a repository on the Hub: owner and name apart."""

from __future__ import annotations

from mgrpo.config.resolution import Resolution


def apply(r: Resolution) -> None:
    """hf_entity and hf_repo_id, which may hold the owner as well, as one name."""
    owner, name = r.peer("hf_entity"), r.peer("hf_repo_id")
    if owner is None and name is None:
        return
    name = name or f"{r.value('exp_name')}__{r.value('seed')}"
    r.put("hub_model_id", f"{owner}/{name}" if owner and "/" not in name else name, "hf_entity", "hf_repo_id")
