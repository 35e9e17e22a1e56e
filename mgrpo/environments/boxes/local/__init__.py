"""Boxes of this machine: a keeper process each, its walls, and its leftovers."""
