"""How agents that are commands start, and how they are judged: in boxes, by workers of the run or of another cluster."""
