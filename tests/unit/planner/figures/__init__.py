"""Public figures of training, generation and RL, and what the planner says of the same runs."""
