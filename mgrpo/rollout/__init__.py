"""Generation: prompts out to the inference engines, groups of completions back. What runs an engine is below, in `vllm/`."""
