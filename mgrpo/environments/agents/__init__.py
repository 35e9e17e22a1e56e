"""Trajectories driven by agents that know only the address of an endpoint: the side of the process that samples."""
