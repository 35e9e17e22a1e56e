"""The loop of a trajectory: turns and the tokens between them, driven by the loop itself or by a user program."""
