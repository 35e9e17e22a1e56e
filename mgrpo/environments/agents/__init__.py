"""Trajectories driven by agents through the address of an endpoint: the controller's side."""
