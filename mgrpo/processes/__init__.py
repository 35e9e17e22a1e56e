"""Child processes, which end with their parent and exchange JSON lines with it."""
