"""A Megatron folder, or the checkpoint of a run, to a Hugging Face folder, streamed.

    python tools/convert_megatron_to_hf.py --checkpoint DIR --out DIR [--hf DIR] [--dtype bfloat16] [--verify]

The same as `mgrpo convert megatron-to-hf`; docs/conversion.md describes the format, and what is refused.
"""

from __future__ import annotations

import sys

from mgrpo.model_io.convert import megatron_to_hf_command

if __name__ == "__main__":
    raise SystemExit(megatron_to_hf_command(sys.argv[1:], prog="convert_megatron_to_hf.py"))
