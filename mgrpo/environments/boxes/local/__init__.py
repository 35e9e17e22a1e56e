"""Boxes of this machine: a keeper's process each, the walls that it raises, and what may be left of it."""
