"""Start and judgement of agents that are commands: in boxes, by workers of the run or of another cluster."""
