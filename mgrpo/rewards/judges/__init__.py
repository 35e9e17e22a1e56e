"""Language models that judge: where they live (`endpoint`), what they are told (`judgements`), how they are asked (`client`).

`replies` reads their verdicts, `context` makes a prompt fit, `usage` counts what it costs. `asking` has the bases
of the verifiers that use all this.
"""

from mgrpo.rewards.judges.endpoint import problems

__all__ = ["problems"]
