"""The model on Megatron's axes: build, load, optimizer, schedule, one training step. It does not know GRPO."""
