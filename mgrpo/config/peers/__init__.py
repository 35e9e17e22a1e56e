"""Other trainers' names for settings of this project, their defaults as presets, and configs made from theirs."""
