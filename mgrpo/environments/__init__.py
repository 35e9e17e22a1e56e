"""Rollouts of several turns: environments and tools, the loop that drives them, and the processes that they run in."""
