"""How rules read a configuration: by names that exist, all of which they use, and only where those are sound."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import types
import typing
from dataclasses import replace

import pytest

from mgrpo.config import Config, adapter, distillation, validate
from mgrpo.config.fields import alternatives, build, problem_of, section_types, settings
from mgrpo.config.model_rules import MODEL_RULES
from mgrpo.config.provenance import Provenance
from mgrpo.config.rules import Reading, parameters
from mgrpo.config.validate import LATER_WARNINGS, RULES, WARNINGS, problems
from mgrpo.layout import Layout

EVERY_RULE = (*RULES, *adapter.MODEL, *distillation.MODEL, *MODEL_RULES, *WARNINGS, *LATER_WARNINGS)
NEEDS = {need: name for name, setting in settings().items() for need in setting.needs}
FACTS: dict[str, object] = {
    "world_size": 1,
    "hf_config": {},
    "has_dataset": False,
    "has_eval_dataset": False,
    "num_reward_funcs": 0,
    "preset_rate": 1e-6,
}
READING = Reading(Config(), facts=FACTS)


def name_of(rule):
    return f"{rule.__module__.removeprefix('mgrpo.config.')}.{rule.__name__}"


def widened(kind):
    """A choice as the type of its words."""
    if typing.get_origin(kind) is typing.Literal:
        return {type(choice) for choice in typing.get_args(kind)}
    return {kind}


@pytest.mark.parametrize("rule", EVERY_RULE, ids=name_of)
def test_a_rule_reads_what_exists_by_its_type_and_uses_all_of_it(rule):
    """A name that is not used would silence the rule with a setting that it does not judge; a wrong type hides a mistake from mypy."""
    hints = typing.get_type_hints(rule)
    source = ast.parse(textwrap.dedent(inspect.getsource(rule))).body[0]
    used = {node.id for node in ast.walk(ast.Module(source.body, [])) if isinstance(node, ast.Name)}
    for name in parameters(rule):
        READING[name]
        assert name in used, name
        if name in settings():
            own = settings()[name].type
            wanted = set().union(*map(widened, alternatives(own)))
            assert set(alternatives(hints[name])) in (wanted, {*alternatives(own)}), name


@pytest.mark.parametrize("need", NEEDS, ids=lambda need: need.condition[:40])
def test_what_a_setting_needs_is_read_by_names_that_exist(need):
    """A misspelt name would end a run that is given the setting."""
    assert READING.holds(need) in (True, False)
    assert parameters(need.holds)


def test_every_rule_of_a_section_is_judged():
    """A rule that no list has is one that never speaks."""
    listed = {name_of(rule) for rule in EVERY_RULE}
    for section in section_types():
        module = getattr(validate, section)
        source = inspect.getsource(module)
        for name, value in vars(module).items():
            is_own = isinstance(value, types.FunctionType) and value.__module__ == module.__name__
            is_rule = is_own and name.startswith("_") and "Iterator[str]" in str(inspect.signature(value))
            is_part = re.search(rf"(?<!def ){name}\(", source)
            assert not is_rule or is_part or name_of(value) in listed, f"{section}.{name}"


def test_a_property_belongs_to_one_section():
    """Rules name it without its section."""
    properties = [
        name for kind in section_types().values() for name, own in vars(kind).items() if isinstance(own, property)
    ]
    assert len(set(properties)) == len(properties)
    assert not set(properties) & {name for name, own in vars(Config).items() if isinstance(own, property)}


def direct(tools, zero_stage):
    yield f"{tools} {zero_stage}"


def by_a_property(max_age):
    yield f"{max_age}"


def by_a_property_that_need_not_look(has_turns):
    yield f"{has_turns}"


def by_a_method(config):
    yield f"{config.parallel.recomputes('mlp')}"


def by_the_layout(layout):
    yield f"{layout.data}"


@pytest.mark.parametrize(
    ("rule", "unsound", "others", "sentence"),
    [
        (direct, "tools", "output_dir", "('python',) 1"),
        (direct, "zero_stage", "output_dir", "('python',) 1"),
        (by_a_property, "max_staleness", "output_dir", "0"),
        (by_a_property_that_need_not_look, "rollout_func", "output_dir", "True"),
        (by_a_method, "recompute_granularity", "context_parallel_size", "False"),
        (by_the_layout, "context_parallel_size", "recompute_granularity", "1"),
    ],
)
def test_a_rule_is_not_judged_where_it_reads_what_is_unsound(rule, unsound, others, sentence):
    """One mistake would make several sentences, most of them nonsense."""
    reading = Reading(build({"tools": ("python",)}), facts=FACTS)
    assert reading.find(rule) == [sentence]
    assert replace(reading, unsound={others}).find(rule) == [sentence]
    assert replace(reading, unsound={unsound}).find(rule) == []


def test_what_could_not_be_read_holds_a_default_and_is_not_judged():
    """The sentence about the text has been said; one about the default, which nobody wrote, would confuse."""
    values = {"model_name_or_path": "a/b", "pack_length": 1}
    assert any("pack_length=1 cannot hold" in sentence for sentence in problems(build(values), world_size=1))
    unread = build(values, Provenance(unsound=frozenset({"response_length"})))
    assert not any("pack_length" in sentence for sentence in problems(unread, world_size=1))


def test_settings_that_share_a_need_are_named_together():
    """Seven warnings for one forgotten switch would bury it."""
    sources = {"rho_level": "flag", "rho_mask_upper_bound": "flag", "rho_clamp_upper_bound": "preset p"}
    values = {"rho_level": "sequence_sum", "rho_mask_upper_bound": 3.0, "rho_clamp_upper_bound": 4.0}
    found = validate.warnings(build(values, Provenance(sources=sources)), world_size=1)
    assert found == ["rho_level=sequence_sum, rho_mask_upper_bound=3 has no effect without use_rho_correction=true"]


def test_a_setting_may_need_two_things():
    """Whichever is missing is the warning."""
    values = {"max_tool_calls": 3}
    for more, expected in (({}, "tools or an agent"), ({"rollout_func": "a:b"}, "tools or environment_factory")):
        given = values | more
        found = validate.warnings(build(given, Provenance(sources=dict.fromkeys(given, "flag"))), world_size=1)
        assert [sentence.partition("max_tool_calls=3 has no effect without ")[2] for sentence in found] == [expected]


def test_a_text_has_a_form():
    """A number that is none would be found by the loss, after the engines have started."""
    setting = settings()["loss_denominator"]
    assert [problem_of(setting, text) for text in ("token", "12.5")] == ["", ""]
    assert problem_of(setting, "12,5") == "loss_denominator='12,5' must be token or a finite number above 0"


def test_the_layout_is_that_of_the_ranks():
    assert Reading(build({"tensor_model_parallel_size": 2}), facts={"world_size": 4})["layout"] == Layout(
        world_size=4, tensor=2, sequence_parallel=True, zero_stage=1
    )
