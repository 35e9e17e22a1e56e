"""Trackers of a run. TensorBoard's files are written here; Weights & Biases and trackio run in a process of their own each.

`sinks` has their common interface, `process.Tracker` the run's side of a process, and `tracker` the program in it.
"""
