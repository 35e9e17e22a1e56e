"""Telling: metrics, files, trackers, exports and the results of a run."""
