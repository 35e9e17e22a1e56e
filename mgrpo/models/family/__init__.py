"""The shape of a model, read from a Hugging Face config.json, for the families that can be built exactly.

A family is one entry of `FAMILIES`: the defaults of transformers, and a small function from the config to those fields
of `ModelShape` in which the family differs from a Llama. New tensor names go into `table`, new modules into
`policy.layers.architecture`; `tests/unit/models/test_checkpoints.py` and `tests/ranks/test_families.py` compare the result with
transformers.
"""

from mgrpo.models.family.catalogue import FAMILIES
from mgrpo.models.family.from_config import shape_of

__all__ = ["FAMILIES", "shape_of"]
