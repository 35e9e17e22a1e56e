"""Python face of the compiled ops in csrc/: argument checks, autograd, and the reference that runs without them.

Imports torch and nothing else of the project. Life of an op: csrc/README.md.
"""

from mgrpo.ops.library import build_info
from mgrpo.ops.logprobs import token_logprobs

__all__ = ["build_info", "token_logprobs"]
