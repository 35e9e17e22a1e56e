"""What every rank imports; the fork server imports it once, and its ranks have it when they start."""

import gc
import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for GPUs

from mgrpo.parallel import backend

backend.install()

import megatron.core.distributed.fsdp.mcore_fsdp_adapter  # noqa: E402
import megatron.core.models.gpt  # noqa: E402, F401

from tests.ranks import cases, run_cases  # noqa: E402, F401

gc.collect()
gc.freeze()
"""Each case collects what the one before left; without this a quarter of its time goes through torch's own objects."""
