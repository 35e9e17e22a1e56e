"""Boxes for agents: one small protocol over walls of this machine, containers and other machines."""
