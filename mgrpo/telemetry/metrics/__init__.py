"""Metrics: what each name means, how those of a batch and of an evaluation are computed, and where they are written."""
