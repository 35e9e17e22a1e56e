"""The model on Megatron's axes: build, load, optimizer, schedule, one training step. Independent of GRPO."""
