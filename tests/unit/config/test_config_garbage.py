"""Whatever is given, reading and judging it raise nothing: it is sound, or there is a sentence."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from mgrpo.config import ConfigError
from mgrpo.config.fields import build, problem_of, section_types, settings
from mgrpo.config.validate import problems, warnings
from mgrpo.moving import from_values
from mgrpo.moving.foreign_names import accepted
from mgrpo.moving.presets import PRESETS
from tests.unit.config.model_sizes import SIZES

GARBAGE = (
    None,
    "",
    "x",
    "1",
    True,
    0,
    1,
    -1,
    2**70,
    10**400,
    0.5,
    float("nan"),
    float("-inf"),
    (),
    ("a",),
    [],
)
WITH_RANKS = ("experiment", "rollout", "parallel")
"""Sections that rules compare with the number of ranks."""


def test_no_value_of_any_field_makes_the_validator_raise():
    """A crash in the validator shows a traceback where a sentence was promised."""
    for section, value in itertools.product(section_types(), GARBAGE):
        own = [setting for setting in settings().values() if setting.section == section]
        accepted = [setting.name for setting in own if not problem_of(setting, value)]
        # What its own field refuses reaches no rule, so a section may hold it in several fields at once.
        refused = {setting.name: value for setting in own if setting.name not in accepted}
        assert len(problems(build(refused), world_size=6, hf_config=SIZES)) >= len(refused)
        for name in accepted:
            for world_size in (0, 1, 6) if section in WITH_RANKS else (6,):
                assert isinstance(problems(build({name: value}), world_size=world_size, hf_config=SIZES), list)


def test_a_wrong_type_is_one_sentence_for_every_field():
    """Values of a wrong type must be caught by their own field, not by a rule that trips over them."""
    for name in settings():
        found = problems(build({name: object()}), world_size=1, hf_config=SIZES)
        assert sum(sentence.startswith(f"{name}=<object") for sentence in found) == 1


TEXTS = st.one_of(
    st.sampled_from(
        [
            "",
            "none",
            "true",
            "0",
            "1",
            "-1",
            "2",
            "8",
            "1e5",
            "0.5",
            "nan",
            "inf",
            "-inf",
            "9" * 400,
            "token",
            "a,b",
            "1,2",
        ]
    ),
    st.text(max_size=6),
    st.integers().map(str),
    st.floats().map(str),
)


VALUES = st.one_of(
    TEXTS, st.none(), st.booleans(), st.lists(TEXTS, max_size=3), st.dictionaries(TEXTS, TEXTS, max_size=1)
)


@hypothesis_settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(st.sampled_from(list(accepted())), VALUES, max_size=8),
    st.sampled_from(list(PRESETS)),
    st.integers(1, 96),
)
def test_no_combination_of_names_makes_reading_or_judging_raise(values, preset, world_size):
    """A crash shows a traceback where a sentence was promised."""
    try:
        config = from_values(values | {"preset": preset}, world_size=world_size)
    except ConfigError as err:
        assert all(isinstance(sentence, str) for sentence in err.problems)
        return
    if not problems(config, world_size=world_size, has_dataset=True):
        warnings(config, world_size=world_size)


TYPED = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.tuples(st.floats()))


@hypothesis_settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(list(settings())), TYPED, max_size=6), st.integers(-1, 9))
def test_no_values_make_the_validator_raise(values, world_size):
    """A Config built in Python has passed no reader."""
    shape = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "num_hidden_layers": 30}
    for sentence in problems(build(values), world_size=world_size, hf_config=shape, has_dataset=True):
        assert isinstance(sentence, str)
