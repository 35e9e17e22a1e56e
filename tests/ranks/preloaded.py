"""What every rank imports; the fork server imports it once, and its ranks have it when they start."""

from mgrpo.parallel import backend

backend.install()

import megatron.core.distributed.fsdp.mcore_fsdp_adapter  # noqa: E402
import megatron.core.models.gpt  # noqa: E402, F401

from tests.ranks import cases  # noqa: E402, F401
