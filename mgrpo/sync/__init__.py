"""Weight sync from the training layout to the inference layout: reshard plan, channels, digests, and vLLM's end."""
