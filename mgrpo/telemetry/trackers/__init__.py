"""Trackers that are other packages, Weights & Biases and trackio: each runs in a process of its own, see `process.Tracker`."""
