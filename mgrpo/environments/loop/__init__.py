"""The loop of a trajectory: turns, the tokens between them, and who drives: the loop itself or a program of the user's."""
