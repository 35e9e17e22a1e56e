"""Where agents run: one small protocol, behind it walls of this machine, containers and other machines."""
