"""Tools and environments that ship."""
