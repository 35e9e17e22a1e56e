"""Megatron's axes: process groups, the CPU stand-in, packed attention, and what rank 0 tells the others."""
