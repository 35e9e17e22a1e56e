"""Tools and environments as a run offers them to its model."""
