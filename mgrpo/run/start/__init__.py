"""Starting a run: its checks, its processes, and the parts that they connect."""
