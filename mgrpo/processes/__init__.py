"""Child processes: they die with their parent, and talk in JSON lines."""
