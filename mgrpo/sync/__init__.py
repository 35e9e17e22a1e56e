"""From the training layout to the inference layout: the reshard plan, its channels, its proof, and vLLM's end of it."""
