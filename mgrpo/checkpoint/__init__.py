"""The train states of a run, which can be resumed in any layout, and the folders that keep them."""
