"""From prompts to the batch of a step."""
