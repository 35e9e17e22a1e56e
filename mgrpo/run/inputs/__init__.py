"""The data, code and files that a user brings to a run, and those it will write."""
