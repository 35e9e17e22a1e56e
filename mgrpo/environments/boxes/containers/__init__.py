"""Boxes that are containers, by the command line of docker or podman."""
