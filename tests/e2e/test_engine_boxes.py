"""The boxes of an engine's workers in the rule table, against what vLLM's own loader gives to workers of every layout."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from mgrpo.layout import InferLayout
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.models.placement.boxes import Box
from mgrpo.models.table import engine_boxes
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.slow
MIXTURES = [
    "mixtral",
    "qwen3_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v3",
    "qwen3_next",
    "qwen3_5_moe_text",
    "gpt_oss",
]
LAYOUTS = [
    InferLayout(tensor=2),
    InferLayout(tensor=2, expert_parallel=True),
    InferLayout(data=2, expert_parallel=True),
    InferLayout(tensor=2, data=2, expert_parallel=True),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_workers_hold_what_the_table_says(layout, tmp_path):
    """A sync into an engine with other boxes is refused when the run has started, on the GPUs that have been paid for."""
    # vLLM serves no gpt-oss with other widths on a CPU.
    widths = {"gpt_oss": {"intermediate_size": 64}}
    folders = {name: str(save_tiny(tmp_path, name, **widths.get(name, {}))) for name in MIXTURES}
    for name, found in zip(folders, vllm_boxes(layout, [*folders.values()]), strict=True):
        expected = engine_boxes(shape_of(read_hf_config(folders[name])), layout)
        for worker, (boxes, own) in enumerate(zip(found, expected, strict=True)):
            assert len(boxes) == len(set(boxes)) and set(boxes) == set(own), (name, worker, set(boxes) ^ set(own))


def vllm_boxes(layout: InferLayout, folders: list[str]) -> list[list[list[Box]]]:
    """For each model and worker, the boxes that vLLM's loader fills."""
    settings = {"tensor": layout.tensor, "data": layout.data, "expert_parallel": layout.expert_parallel}
    with socket.create_server(("127.0.0.1", 0)) as free:
        settings |= {"port": free.getsockname()[1], "folders": folders}
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.vllm_boxes", json.dumps(settings | {"rank": rank})],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(layout.workers)
    ]
    printed = [worker.communicate(timeout=460)[0] for worker in workers]
    assert not any(worker.returncode for worker in workers), printed
    lines = [[line for line in text.splitlines() if line.startswith("boxes ")] for text in printed]
    return [
        [
            [Box(name, tuple(start), tuple(shape)) for name, start, shape in json.loads(line.removeprefix("boxes "))]
            for line in of_model
        ]
        for of_model in zip(*lines, strict=True)
    ]
