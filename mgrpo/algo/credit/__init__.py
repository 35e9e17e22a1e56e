"""Advantages beyond one number per completion: of turns, and those that a user's function gives."""
