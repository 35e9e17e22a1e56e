"""Language models that judge: their servers (`endpoint`), their prompts (`judgements`), the requests to them (`client`).

`replies` reads their verdicts, `prompt_context` makes a prompt fit. `asking` has the base classes of the verifiers that use all
this.
"""
