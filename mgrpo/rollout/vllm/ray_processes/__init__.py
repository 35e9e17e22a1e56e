"""Ray's processes on a machine: how they start, who watches them, and who ends them when nobody else does."""
