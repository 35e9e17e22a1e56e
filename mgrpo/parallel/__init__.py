"""Megatron's axes: process groups, the CPU stand-in, attention over packs, and broadcasts from rank 0."""
