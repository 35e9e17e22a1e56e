"""Generation: prompts out to the inference engines, groups of completions back. `vllm/` runs the engines.

Five objects know the engines of one model, each by one side: in `engines/` `Members` their states (pure), `Roster` which there are and
their restarts, and `Fleet` the calls to all of them at once and the weight sync; `Loads` the work that each has (pure), and `EngineQueue`
the requests that go out and back. The policy's queue is the `Dispatcher`; each teacher on engines of its own has one in `Teachers`.
"""
