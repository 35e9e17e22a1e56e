"""Other trainers' names for our settings, their presets, and the doors for their configurations."""
