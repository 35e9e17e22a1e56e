"""Ranks of a run: how they start, meet, watch each other and end."""
