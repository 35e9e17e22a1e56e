"""The quickstart's model learns with a custom loss.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/own_loss/train.py --output_dir output/own_loss

It takes the flags of every run, which override the quickstart's YAML file.
"""

import sys

from loss import smooth_clip

import mgrpo
from mgrpo.moving import parse

if __name__ == "__main__":
    # Two mini-batches per step: the second one is off-policy, and only there are ratios not 1.
    settings = ["--config", "examples/configs/quickstart.yaml", "--num_mini_batches", "2"]
    mgrpo.train(parse([*settings, *sys.argv[1:]]), loss=smooth_clip)
