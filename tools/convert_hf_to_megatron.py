"""A Hugging Face folder to the weights of a Megatron layout, streamed.

    python tools/convert_hf_to_megatron.py --hf DIR --out DIR --tensor_model_parallel_size N
        --pipeline_model_parallel_size N [--verify]

The same as `mgrpo convert hf-to-megatron`; docs/conversion.md describes the format, and what is refused.
"""

from __future__ import annotations

import sys

from mgrpo.model_io.convert import hf_to_megatron_command

if __name__ == "__main__":
    raise SystemExit(hf_to_megatron_command(sys.argv[1:], prog="convert_hf_to_megatron.py"))
