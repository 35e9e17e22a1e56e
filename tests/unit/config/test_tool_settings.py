"""Settings of tools and environments: how they are written, what they become, and what is refused."""

from __future__ import annotations

import functools
import importlib
import json
import subprocess
import sys

import pytest

import mgrpo
from mgrpo.config import Config, ConfigError
from mgrpo.config.dump import to_yaml
from mgrpo.config.tools import Tools, ToolSpec
from mgrpo.config.validate import problems, warnings
from mgrpo.moving import from_values, parse
from mgrpo.moving.config_doors import with_tools

HERE = importlib.import_module(__name__)


def add(a: int, b: int) -> int:
    """A tool of the user."""
    return a + b


class Game:
    """An environment of the user, in TRL's form."""


def found_in(model, values, **context):
    config = from_values(model | {"output_dir": f"{model['model_name_or_path']}/out"} | values)
    return problems(config, world_size=1, **context)


@pytest.mark.parametrize(
    "words",
    [
        ['{"a": 1, "b": [1, 2]}', "{}"],
        ['{"a": 1, "b": [1, 2]},{}'],
        ['{"a": 1, "b": [1, 2]} {}'],
    ],
)
def test_the_commas_of_an_object_do_not_end_it(words):
    """A comma separates the words of every other list: `{"a": 1` would be the first tool's settings."""
    config = parse(["--tools", "python", "search", "--tool_configs", *words])
    assert [spec.settings for spec in config.tools.specs] == [{"a": 1, "b": [1, 2]}, {}]


def test_an_object_that_cannot_be_read_is_that_of_its_tool_alone():
    """The next tool's would be taken for a part of it, and both would seem wrong."""
    config = parse(["--tools", "python", "search", "--tool_configs", "{'a': 1}", '{"b": 2}'])
    assert config.tools.tool_configs == ("{'a': 1}", '{"b": 2}')


def test_settings_of_tools_may_be_mappings_in_a_file_and_in_python(tmp_path):
    """JSON in quotes in YAML is hard to read, and harder to write."""
    path = tmp_path / "run.yaml"
    path.write_text("tools: [a, b]\ntool_configs:\n- {url: 'http://x', n: 3}\n- '{}'\n")
    from_file = parse([str(path)])
    from_python = from_values({"tools": ["a", "b"], "tool_configs": [{"url": "http://x", "n": 3}, {}]})
    assert from_file == from_python
    assert from_file.tools.specs[0].settings == {"url": "http://x", "n": 3}
    path.write_text(to_yaml(from_python))
    assert parse([str(path)]) == from_python
    path.write_text("tools: [a]\ntool_configs:\n  url: x\n  since: 2026-01-02\n")
    assert parse([str(path)]).tools.specs[0].settings == {"url": "x", "since": "2026-01-02"}
    path.write_text("tools: [a]\ntool_configs: [[1]]\n")
    with pytest.raises(ConfigError, match="tool_configs must be a list of JSON objects, got a list of lists"):
        parse([str(path)])


def test_what_is_asked_for_becomes_one_record_each():
    """The records are what a worker process builds from: a name in the wrong place is another tool."""
    config = from_values(
        {
            "tools": ["python", "package.module.name", "some/file.py:name", "package.module:name"],
            "tool_call_names": ["code", "b", "c", "d"],
            "tool_configs": ['{"stateful": false}', "{}", "{}", "{}"],
            "code_tool_api_endpoint": "http://h/run",
            "search_api_endpoint": "http://h/search",
            "environment_factory": ["chess=a.py:Chess", "package.Go"],
        }
    )
    assert config.tools.specs == (
        ToolSpec(entry="python", call_name="code", settings={"endpoint": "http://h/run", "stateful": False}),
        ToolSpec(entry="package.module:name", call_name="b"),
        ToolSpec(entry="some/file.py:name", call_name="c"),
        ToolSpec(entry="package.module:name", call_name="d"),
        ToolSpec(entry="trl:a.py:Chess", call_name="chess"),
        ToolSpec(entry="trl:package:Go"),
    )
    named = from_values({"tools": ["search"], "search_api_endpoint": "u"})
    assert named.tools.specs[0].settings == {"endpoint": "u"}
    assert Config().tools.specs == () and not Config().has_turns
    program = from_values({"rollout_func": "package.module.go", "tool_configs": ['{"turns": 3}']})
    assert program.tools.specs == (ToolSpec(entry="rollout:package.module:go", settings={"turns": 3}),)


ON = {"tools": ["calculate"]}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tool_call_names": ["a", "b"]}, "tool_call_names has 2 entries for 0 tools; give one for each, or none"),
        (ON | {"tool_configs": ["{}", "{}"]}, "tool_configs has 2 entries for 1 tools; give one for each"),
        (ON | {"tool_configs": ["{"]}, "tool_configs: { of calculate is not JSON (Expecting property name"),
        (ON | {"tool_configs": ["[1]"]}, "tool_configs: [1] of calculate must be a JSON object, {} for none"),
        (ON | {"tool_call_names": ["x y"]}, "tool_call_names: 'x y' must be a name of letters, digits and _ . -"),
        ({"tools": ["a", "b"], "tool_call_names": ["x", "x"]}, "tool_call_names has x 2 times; give each tool a name"),
        ({"tools": ["a", "b", "a"]}, "tools has a 2 times; leave one out, or name them: tool_call_names=[\"a_1\", \"a_2\"]"),
        ({"tools": ["a.py"]}, "tools: a.py names a file but nothing in it; write a.py:NAME"),
        ({"tools": ["nowhere.py:f"]}, "tools: there is no file /"),
        ({"tools": ["http://host"]}, "tools: http://host must be package.module:NAME or file.py:NAME"),
        ({"environment_factory": ["Chess"]}, "environment_factory: Chess must be package.module:NAME or file.py:NAME"),
        ({"rollout_func": "go"}, "rollout_func: go must be package.module:NAME or file.py:NAME"),
        ({"rollout_func": "verifiers"}, "rollout_func: verifiers is an agent; write agent=verifiers"),
        ({"rollout_func": "a:go"} | ON, "rollout_func=a:go drives the model by itself, so tools would answer nothing"),
        ({"rollout_func": "a:go", "tool_configs": ["{}", "{}"]}, "tool_configs has 2 entries for the program; give one"),
        ({"rollout_func": "a:go", "tool_configs": ["[1]"]}, "tool_configs: [1] of a:go must be a JSON object"),
        ({"rollout_func": "a:go", "chat_template_name": "none"}, "rollout_func=a:go talks to the model in chats, but"),
        (ON | {"env_python": "/nowhere/python"}, "env_python=/nowhere/python must be the path of a Python interpreter"),
        (ON | {"env_python": __file__}, "must be the path of a Python interpreter, such as"),
        (
            ON | {"mask_tool_use": False, "use_vllm_logprobs": True},
            "mask_tool_use=false trains on tokens that no engine has sampled, which have no logprob of one, but "
            "use_vllm_logprobs=true compares with it; set mask_tool_use to true, or turn that off",
        ),
        (ON | {"mask_tool_use": False, "use_rho_correction": True}, "but use_rho_correction=true compares with it"),
        (ON | {"mask_tool_use": False, "off_policy_mask_threshold": 1}, "off_policy_mask_threshold compares with it"),
        (ON | {"mask_tool_use": False, "thinking_history": "strip"},
            "thinking_history=strip samples a turn after a context of its own, which is not trained on, but mask_tool_use="),
        (ON | {"per_turn_max_tokens": 257}, "per_turn_max_tokens=257 is more than response_length=256, which all"),
        (ON | {"max_observation_tokens": 256}, "max_observation_tokens=256 must be below response_length=256, which"),
        (ON | {"max_tool_calls": 0}, "max_tool_calls=0 must be at least 1"),
        (ON | {"pool_size": 0}, "pool_size=0 must be at least 1"),
        (ON | {"tool_timeout": 3600}, "tool_timeout=3600 must be below rollout_timeout=3600, after which the whole"),
        (ON | {"trajectory_timeout": 90, "rollout_timeout": 80}, "trajectory_timeout=90 must be below rollout_timeout=80"),
        (ON | {"rollout_timeout": 60}, "rollout_timeout=60, after which the whole run ends, must be above the 60 s that an"),
        (ON | {"tool_timeout": 1800}, "must be above the 3600 s that an environment may take to begin, twice tool_timeout=1800"),
        ({"only_reward_good_outputs": True}, "only_reward_good_outputs=true rewards only completions that have called"),
        (ON | {"pool_size": 3}, "pool_size=3 must be at least num_samples_per_prompt_rollout=4: the completions of a"),
        (ON | {"pool_size": 4, "eval_pass_at_k": 5}, "pool_size=4 must be at least eval_pass_at_k=5"),
        (ON | {"chat_template_name": "none"}, "tool_parser_type=auto writes what a tool answers by the chat template"),
    ],
)  # fmt: skip
def test_a_rule_of_tools_fires_on_its_mistake_alone(model, values, words):
    """Each of these would fail after the engines have started, or train something that was not asked for."""
    found = found_in(model, values)
    assert len(found) == 1, found
    assert words in found[0]


@pytest.mark.parametrize(
    "values",
    [
        ON,
        ON | {"mask_tool_use": False},
        ON | {"thinking_history": "strip"},
        {"mask_tool_use": False, "use_vllm_logprobs": True},
        ON | {"apply_verifiable_reward": False},
        {"tools": ["mcp", "mcp"], "tool_configs": ['{"url": "a"}', '{"url": "b"}']},
        {"tools": ["python", "python"], "tool_call_names": ["a", "b"]},
        {"tools": ["python"], "code_tool_api_endpoint": "http://a", "tool_configs": ['{"endpoint": "http://a"}']},
        {"tools": [f"{__file__}:add"], "environment_factory": [f"{__file__}:Game"]},
        ON | {"per_turn_max_tokens": 256, "max_observation_tokens": 255, "tool_timeout": 1799},
        ON | {"chat_template_name": "none", "tool_parser_type": "legacy"},
        {"rollout_func": "package.module.function", "max_tool_calls": None},
        {"rollout_func": "package.module:Game", "tool_configs": ['{"id": "game"}'], "env_python": sys.executable},
        {"tools": None, "tool_call_names": None, "tool_configs": None, "pool_size": None},
        {"tool_timeout": 1e6},
        ON | {"pool_size": 4},
    ],
)
def test_sound_settings_of_tools_are_accepted(model, values):
    """A rule that is too strict keeps a sound run from starting."""
    assert found_in(model, values) == []


def test_two_endpoints_of_one_tool_are_a_contradiction():
    """One of them would be asked, and nobody would know which."""
    own = {"tools": ["python"], "code_tool_api_endpoint": "http://a", "tool_configs": ['{"endpoint": "http://b"}']}
    with pytest.raises(
        ConfigError, match="tool_configs gives python the endpoint http://b, but code_tool_api_endpoint"
    ):
        from_values(own)
    note = "code_tool_api_endpoint has no effect without the tool code"
    assert note in from_values(ON | {"code_tool_api_endpoint": "http://h"}).notes


def test_returns_of_turns_cannot_weigh_reward_functions(model):
    """Rewards of functions belong to whole completions: a turn has none of its own."""
    values = ON | {"turn_credit": "return", "advantage_normalization_type": "gdpo"}
    (found,) = found_in(model, values, num_reward_funcs=2)
    assert found.startswith("turn_credit=return compares the rewards of turns, but advantage_normalization_type=gdpo")


def test_returns_of_turns_are_not_beside_advantages_of_ones_own(model):
    """The function's advantages would take the place of those of turns, and nobody would know."""
    own = ON | {"advantage_normalization_type": "package.module:f"}
    assert found_in(model, own) == []
    (found,) = found_in(model, own | {"turn_credit": "return"})
    assert found.startswith("turn_credit=return has no effect with advantage_normalization_type=package.module:f")


def test_all_mistakes_about_tools_come_at_once(model):
    """A user would otherwise start the run once for each."""
    found = found_in(
        model,
        {
            "tools": ["nowhere.py:f", "python"],
            "tool_call_names": ["x"],
            "tool_configs": ["{", "3"],
            "mask_tool_use": False,
            "use_vllm_logprobs": True,
            "max_tool_calls": 0,
        },
    )
    assert len(found) == 6


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_tool_calls": 3, "pool_size": 9}, "max_tool_calls=3, pool_size=9 has no effect without tools"),
        ({"rollout_func": "a:b", "max_tool_calls": 3}, "max_tool_calls=3 has no effect without tools or environment"),
        (ON | {"pool_size": 63}, "pool_size=63 is less than the 64 completions of a step, so some wait"),
        (ON | {"vllm_enable_prefix_caching": False}, "vllm_enable_prefix_caching=false makes engines read all earlier"),
        (ON | {"pool_size": 64, "turn_credit": "return", "scored_text": "all"}, None),
        ({"preset": "seed", "async_steps": 0}, None),
    ],
)  # fmt: skip
def test_what_of_tools_is_without_effect_is_said(values, words):
    """A setting that changes nothing is believed to count."""
    found = warnings(from_values(values), world_size=1)
    assert len(found) == (words is not None), found
    assert all(words in line for line in found)


@pytest.mark.parametrize(
    ("values", "calls", "episodes"),
    [
        (ON | {"max_steps": 7}, 7, 100_000),
        (ON | {"max_steps": 7, "preset": "open_instruct_main"}, 7, 100_000),
        (ON | {"max_steps": 7, "preset": "trl_main", "num_unique_prompts_rollout": 2}, None, 112),
        ({"max_steps": 7, "rollout_func": "a:b"}, 5, 448),
        ({"max_steps": 5}, 5, 100_000),
        (ON | {"max_tool_calls": 2}, 2, 100_000),
        (ON | {"max_tool_calls": None}, None, 100_000),
        (ON | {"max_tool_calling_iterations": 3}, None, 100_000),
        (ON | {"max_tool_calling_iterations": 3, "max_tool_calls": 2}, 2, 100_000),
        (ON | {"max_tool_calling_iterations": None}, 5, 100_000),
    ],
)
def test_a_number_of_steps_means_what_its_trainer_means(values, calls, episodes):
    """Calls of a completion in one trainer, optimizer steps of the run in the other."""
    config = from_values(values)
    assert (config.tools.max_tool_calls, config.experiment.total_episodes) == (calls, episodes)


@pytest.mark.parametrize(
    "beside", [{"num_generations": 8}, {"max_tool_calling_iterations": 3}, {"environment_factory": ["a:B"]}]
)
def test_a_number_of_steps_that_may_mean_either_is_refused(beside):
    """Guessing would end the run after seven steps, or every completion after seven calls."""
    with pytest.raises(ConfigError) as caught:
        from_values(ON | {"max_steps": 7} | beside)
    (found,) = caught.value.problems
    assert "max_tool_calls=7 limits the calls of a completion" in found and "total_episodes the run" in found


def test_a_limit_given_by_open_instructs_name_is_told_by_it(model):
    """The user has never written max_tool_calls."""
    (found,) = found_in(model, ON | {"max_steps": 0})
    assert found == "max_tool_calls=0 must be at least 1 (max_tool_calls was given as max_steps)"


def test_a_script_with_tools_runs_as_it_is():
    """Open Instruct's flags, with the defaults that its flags have there."""
    script = """--tools python serper_search --tool_call_names code search --tool_configs '{"timeout": 3}' '{"n": 1, "m": 2}'
        --tool_parser_type vllm_hermes --max_steps 8 --pool_size 128 --per_turn_max_tokens 512 --mask_tool_use True
        --only_reward_good_outputs False --pass_tools_to_chat_template true --reward_aggregator sum
        --response_length 2048 --pack_length 4096 --model_name_or_path owner/model --dataset_mixer_list rows 1.0"""
    config = mgrpo.GRPOConfig.from_open_instruct(script)
    assert problems(config, world_size=1) == []
    own = config.tools
    assert [(spec.entry, spec.call_name, spec.settings) for spec in own.specs] == [
        ("python", "code", {"timeout": 3}),
        ("serper_search", "search", {"n": 1, "m": 2}),
    ]
    assert (own.tool_parser_type, own.max_tool_calls, own.reward_aggregator, own.scored_text) == (
        "vllm_hermes", 8, "sum", "all",
    )  # fmt: skip
    assert mgrpo.GRPOConfig.from_open_instruct("--tools python").tools.tool_parser_type == "legacy"


def test_python_passes_functions_and_classes():
    """As TRL's trainer takes them; the configuration holds their names, which a worker process finds again."""
    config = mgrpo.GRPOConfig(tools=[add, "search"], environment_factory={"game": Game}, rollout_func=None)
    assert config.tools.tools == (mine("add"), "search")
    assert config.tools.environment_factory == (f"game={mine('Game')}",)
    assert config.tools.specs[2] == ToolSpec(entry=f"trl:{mine('Game')}", call_name="game")
    assert mgrpo.GRPOConfig(tools=add, environment_factory=Game).tools == Tools(
        tools=(mine("add"),), environment_factory=(mine("Game"),)
    )
    assert mgrpo.GRPOConfig(rollout_func=add).tools.rollout_func == mine("add")
    assert mgrpo.GRPOConfig(tools=[json.dumps]).tools.tools == ("json:dumps",)


def mine(name):
    """The name of something in this file."""
    module = HERE.__name__
    return f"{module}:{name}" if "." in module else f"{__file__}:{name}"


def test_the_caller_of_a_run_replaces_the_tools_of_the_configuration():
    """Call names and settings belong to the tools that they were written for."""
    config = from_values({"tools": ["python", "search"], "tool_call_names": ["a", "b"], "max_tool_calls": 2})
    changed = with_tools(config, {"tools": [add], "environment_factory": None, "rollout_func": None})
    assert changed.tools == Tools(tools=(mine("add"),), max_tool_calls=2)
    assert changed.provenance.sources["tools"] == "argument"
    assert with_tools(config, {"tools": None}) == config
    named = from_values({"tool_call_names": ["plus"]})
    assert with_tools(named, {"tools": add}).tools.specs == (ToolSpec(entry=mine("add"), call_name="plus"),)


def test_an_address_of_a_service_is_that_of_the_callers_tools():
    """Code would run on this machine in place of the service, without a word."""
    url = {"code_tool_api_endpoint": "http://h/run"}
    for tools in ({"tools": ["python"]}, {"tools": ["search", "python"]}, {}):
        config = with_tools(from_values(tools | url), {"tools": ["python", add]})
        assert [spec.settings for spec in config.tools.specs] == [{"endpoint": "http://h/run"}, {}]
        assert not any("no effect" in note for note in config.notes)
        assert sum("code_tool_api_endpoint" in note for note in config.notes) == 1
    own = from_values({"tool_configs": ['{"timeout": 3}'], **url})
    assert with_tools(own, {"tools": ["python"]}).tools.specs[0].settings == {"timeout": 3, "endpoint": "http://h/run"}
    without = with_tools(from_values({"tools": ["python"], **url}), {"tools": [add]})
    assert without.tools.tool_configs == ()
    assert "code_tool_api_endpoint has no effect without the tool code" in without.notes
    kept = from_values({"tools": ["python"], **url})
    assert with_tools(kept, {"environment_factory": Game}).tools.tool_configs == kept.tools.tool_configs


@pytest.mark.parametrize(
    "function", [lambda a: a, functools.partial(add, 1), [].append, functools.wraps(add)(lambda a: a)]
)
def test_a_function_that_no_other_process_can_find_is_refused(function):
    """It would be missed in a worker, after the engines have started."""
    with pytest.raises(ConfigError, match="must be a function or class at the top of a module: other processes import"):
        mgrpo.GRPOConfig(tools=[function])


@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_script_whose_work_would_be_done_again_is_refused(tmp_path, is_guarded):
    """A worker that imports the script of the run would start the run in itself."""
    path = tmp_path / "script.py"
    guard = 'if __name__ == "__main__":\n    ' if is_guarded else ""
    path.write_text(f"import mgrpo\ndef tool(): pass\n{guard}print(mgrpo.GRPOConfig(tools=[tool]).tools.tools)\n")
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=60)
    if is_guarded:
        assert done.stdout == f"('{path}:tool',)\n"
    else:
        assert (
            "other processes would run again to import it; put what the script does under `if __name__" in done.stderr
        )
