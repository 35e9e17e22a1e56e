"""What an adapter to start from brings along, and the dropout that other trainers have by default."""

from __future__ import annotations

from mgrpo.config.fields import shown
from mgrpo.config.peers.names import table
from mgrpo.config.resolution import Resolution
from mgrpo.models.peft import stored_lora


def apply(r: Resolution) -> None:
    """Both, where adapters are trained."""
    if r.value("use_peft") and r.peer("lora_dropout", 0) in table()["lora_dropout"].neutral and r.peer("lora_dropout"):
        r.notes.append(f"lora_dropout has no effect: {table()['lora_dropout'].sentence}")
    folder = r.value("lora_adapter_path")
    if not (folder and r.value("use_peft")):
        return
    try:
        stored = stored_lora(folder)
    except ValueError:  # which the check of the model reports
        return
    for name, value in (
        ("lora_r", stored.rank),
        ("lora_alpha", int(stored.alpha)),
        ("lora_target_modules", stored.targets),
        ("use_rslora", stored.use_rslora),
    ):
        if not r.rank(name) and r.value(name) != value:
            r.derive(name, value, f"{name} is {shown(value)}, that of the adapter in lora_adapter_path={folder}")
