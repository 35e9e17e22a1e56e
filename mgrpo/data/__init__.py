"""Prompts from datasets, on the `datasets` library.

`amounts` decides how many rows of which source a mix takes, `sources` reads them, `rows` defines the format of a row
and `checking` finds the bad ones. `encoding` makes prompts of rows with `templates` and `tokenizer`, and `building`
maps it over a whole mix. `mixture` combines all of that in two calls, `cache` keeps the results, `prompt_set` serves the
prompts and `sampler` orders them.
"""
