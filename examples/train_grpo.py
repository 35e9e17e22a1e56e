"""Train with GRPO: `torchrun --nproc-per-node N examples/train_grpo.py --config examples/configs/quickstart.yaml`.

The same file runs on a laptop CPU and on many GPU nodes; `--help` lists every setting.
"""

import sys

from mgrpo.cli import train_command

if __name__ == "__main__":
    raise SystemExit(train_command(sys.argv[1:]))
