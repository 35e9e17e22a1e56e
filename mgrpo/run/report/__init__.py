"""Reports of a run: metrics, files, trackers, exports and results."""
