"""Ray's processes on a machine: their start, monitoring and end."""
