"""The processes that environments live in, and the pool of those that trajectories are lent."""
