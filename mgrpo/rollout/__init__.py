"""Generation: prompts out to the inference engines, groups of completions back. `vllm/` runs the engines.

Five objects know the engines, each by one side: in `engines/` `Members` their states (pure), `Roster` which there are and their restarts,
and `Fleet` the calls to all of them at once and the weight sync; `Loads` the work that each has (pure), and `Dispatcher` the groups that
go out and back.
"""
