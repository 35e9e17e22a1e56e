"""From data sets to prompts.

`amounts` says how many rows of what, `sources` reads them, `rows` knows their contracts and `checking` finds the bad ones;
`encoding` makes prompts of them, with `templates` and `tokenizer`, and `building` does so for a whole mix, in processes
(`workers`, `worker`) where it is large. `mixture` is all of that in two calls, `cache` keeps what they made, `prompt_set` hands
it out and `sampler` says in which order.
"""
