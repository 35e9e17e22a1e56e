"""The memory and time of a run, on paper: pure functions of the model's shape and the layout, no torch and no device."""
