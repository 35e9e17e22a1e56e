"""The weight sync where learners and engines share the devices of several nodes."""
