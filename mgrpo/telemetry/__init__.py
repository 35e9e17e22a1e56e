"""Output of a run for its user: metrics files, progress on the terminal, samples, the report. Imports nothing heavy."""
