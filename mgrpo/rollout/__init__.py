"""Generation: prompts out to the inference engines, groups of completions back. `vllm/` runs the engines.

Five objects in `engines/` share the engines of one model: `Members` holds their states (pure), `Roster` is their registry and restarts
them, `Fleet` makes the calls to all of them at once and the weight sync, `Loads` tracks the load of each (pure), and `EngineQueue` the
requests and answers. The policy's queue is the `Dispatcher`; each teacher on engines of its own has one in `Teachers`.
"""
