"""The output of a run for its user: files of metrics and samples, progress on the terminal, the report. Imports nothing heavy."""
