"""The processes in which environments live, and the pool that lends environments to trajectories."""
