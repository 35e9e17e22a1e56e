"""Generation: Ray, the vLLM engine actors, and the controller that turns prompts into scored groups."""
