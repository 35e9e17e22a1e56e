"""Language models that judge: where they are served (`endpoint`), their prompts (`judgements`), how they are asked (`client`).

`replies` reads their verdicts, `prompt_context` makes a prompt fit. `asking` has the base classes of the verifiers that use all
this.
"""
