"""The ranks to rehearse, and the processes in which that is done. No torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from mgrpo.config.schema import Config
from mgrpo.layout import Layout

PROGRAM = "mgrpo.rehearsal"


def all_roles(layout: Layout) -> list[int]:
    """One rank of each kind: the first of every pipeline stage, and on the last stage also one that reports no metrics.

    Ranks of a stage that differ in their data coordinate only do the same.
    """
    stage_size = layout.world_size // layout.pipeline
    roles = [stage * stage_size for stage in range(layout.pipeline)]
    if layout.tensor * layout.context > 1:
        roles.append(layout.world_size - 1)
    return roles


def num_packs(layout: Layout) -> int:
    """Micro-batches after which memory has reached its peak and the pipeline's traffic repeats."""
    rounds = layout.micro_batches_multiple_of
    return -(-(layout.pipeline + 1) // rounds) * rounds


def document_lengths(config: Config, layout: Layout) -> tuple[int, int]:
    """Tokens of the prompt and of the response of each of the two completions in a pack, which together fill it."""
    multiple = 2 * layout.document_multiple_of
    length = layout.round_up(config.parallel.pack_length) // 2 // multiple * multiple
    prompts = config.data.max_prompt_token_length
    prompt = max(length * prompts // (prompts + config.rollout.response_length), 1)
    # The last token of a completion predicts nothing and is left out; a prompt that is shared is there once.
    shares = config.parallel.shared_prompt_packing is True
    return prompt, length - prompt + 1 + shares * (prompt // 2)


def rehearse_rank(
    rank: int,
    *,
    argv: Sequence[str],
    hf_config: dict[str, Any],
    teachers: Sequence[dict[str, Any]] = (),
    layout: Layout,
    memory_bytes: int,
) -> dict[str, Any]:
    """Rehearse the rank's step in a separate process; its result, see `mgrpo.rehearsal.rehearsed_step.rehearse`, or an `error`.

    Args:
        teachers: config.json of each of `Distillation.loaded_teachers`.
    Raises:
        ValueError: this machine's torch cannot rehearse.
    """
    request = {
        "argv": list(argv),
        "hf_config": hf_config,
        "teachers": list(teachers),
        "learners": layout.world_size,
        "rank": rank,
        "packs": num_packs(layout),
        "memory": memory_bytes,
    }
    done = subprocess.run(
        [sys.executable, "-m", PROGRAM], input=json.dumps(request), capture_output=True, text=True, check=False
    )
    if done.returncode == 0 and done.stdout:
        found = json.loads(done.stdout.splitlines()[-1])
        if "refused" in found:
            raise ValueError(found["refused"])
        return found
    reason = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return {"rank": rank, "error": f"its process ended: {reason[-1]}", "at": []}
