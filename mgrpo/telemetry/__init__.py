"""What a run tells its user: metrics files, progress on the terminal, the reward curve. Imports nothing heavy."""
