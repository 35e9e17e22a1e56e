"""Rubrics whose criteria evolve while the policy learns, as in DR Tulu (arXiv 2511.19399).

A judge reads a sampled group and proposes criteria that distinguish its answers (`proposals`); the group is scored by
them together with those of its row (`judging`); the verdicts decide which of them stay (`buffer`). `criteria` reads rows' labels.
"""
