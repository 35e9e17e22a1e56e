"""Seconds of the learners in a training step."""
