"""Metrics: the meaning of each name, the computation for a batch and an evaluation, and the writer of metrics.jsonl."""
