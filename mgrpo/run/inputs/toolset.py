"""The tools of a run: their description by the process that builds them, and all that stands between engines and environments."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import mgrpo
from mgrpo.config import Config
from mgrpo.config.agent import DEFAULT_TIMEOUT_S, JOIN_TOKEN, WORKER_KEY
from mgrpo.config.tools import ACQUIRE_TIMEOUT_S, PYTHON, ToolSpec, reference, settings_of, source_problems
from mgrpo.environments.boxes.opening import VARIABLES
from mgrpo.environments.formats import detected, named
from mgrpo.environments.offered.agent import ENDING_S
from mgrpo.environments.offered.calling import WorkerLimits
from mgrpo.environments.offered.description import Description, Offer
from mgrpo.environments.workers.environment_catalog import AGENT, NAMES, Spec
from mgrpo.environments.workers.pool import EnvironmentPool, describe
from mgrpo.rewards.trajectory_rewards import TurnRewards

if TYPE_CHECKING:
    from mgrpo.data.mixture import Mixture
    from mgrpo.data.prompt_set import PromptSet
    from mgrpo.environments.agents.agent_episodes import Agents
    from mgrpo.environments.environment import Tool
    from mgrpo.environments.loop.language import TemplateLanguage
    from mgrpo.rollout.interaction import Asked, Interaction, Opened

UNLIMITED = 1 << 30
MOST_WORKERS = 8
UNUSED_FORMAT = "hermes"
"""The tool-call format of runs without tools."""
_REMOTE_OFFER = Offer(
    name="remote",
    entry="remote",
    tools=(),
    is_repeatable=False,
    gives_reward=False,
    is_alternative=False,
    is_agent=True,
)
"""Tool entry of remote agents, which connect and request their tasks."""
ROW_COLUMNS = frozenset({"tools", "env_config", "environment"})
"""Columns in which a row names its own tools or environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolset:
    """The tools of the settings, and their description."""

    specs: tuple[Spec, ...]
    description: Description

    def shown(self, config: Config) -> Description | None:
        """The description of the tools in prompts; None: prompts have none."""
        is_shown = config.tools.pass_tools_to_chat_template and self.description.tools
        return self.description if is_shown else None

    def plays_in_rounds(self, config: Config) -> bool:
        """True if all trajectories finish a turn before any begins its next; only then is a run bitwise repeatable."""
        return not config.steps_ahead and config.tools.pool_size is None and self.description.is_repeatable


def read_tools(config: Config) -> tuple[Toolset | None, list[str]]:
    """The configuration's tools, built once in a process of their own; and every problem with them."""
    # The rules report malformed settings.
    if not config.has_turns or any(source_problems(config.tools, config.agent.agent)):
        return None, []
    if config.agent.agent_kind == "remote":
        return Toolset(specs=(), description=Description(offers=(_REMOTE_OFFER,))), []
    try:
        specs = tuple(_spec(config, spec) for spec in config.tools.specs) or (_agent_spec(config),)
        description = describe(specs, folders=_folders(), python=config.tools.env_python, variables=_variables(config))
        return Toolset(specs=specs, description=description), []
    except ValueError as err:
        return None, [str(err)]


def _spec(config: Config, asked: ToolSpec) -> Spec:
    settings = dict(asked.settings)
    if asked.entry in PYTHON and config.reward.code_sandbox_accept_risk:
        settings.setdefault("accept_risk", True)
    return Spec(entry=asked.entry, call_name=asked.call_name, settings=settings)


def _agent_spec(config: Config) -> Spec:
    own, given = config.agent, config.tools.tool_configs
    assert own.agent is not None
    if own.agent_kind != "command":
        return Spec(entry=AGENT + reference(own.agent), settings=settings_of(own.agent, given[0]) if given else {})
    settings = {
        "command": own.agent,
        "check": own.agent_check,
        "box": own.agent_box,
        "image": own.agent_image,
        "network": own.agent_network,
        "files": own.agent_files,
        "env": list(own.agent_env),
        "max_processes": own.agent_max_processes,
        "memory_mb": own.agent_memory_mb,
        "disk_mb": own.agent_disk_mb,
        "cpus": own.agent_cpus,
        "sets_reward": own.agent_sets_reward,
    }
    return Spec(entry=f"{AGENT}command", settings=settings)


def with_stop_strings(config: Config, language: TemplateLanguage | None) -> Config:
    """The configuration with the parser's stop strings, so that turns end with a tool call."""
    if language is None or not language.format.stop_strings:
        return config
    texts = dict.fromkeys((*config.rollout.stop_strings, *language.format.stop_strings))
    return replace(config, rollout=replace(config.rollout, stop_strings=tuple(texts)))


def make_language(
    config: Config,
    toolset: Toolset,
    *,
    tokenizer: Any,
    stop_ids: Sequence[int],
    prompts: Sequence[PromptSet | None],
) -> TemplateLanguage:
    """The language of a run, checked for its template, tokenizer and tools.

    Args:
        prompts: all prompts of the run.
    Raises:
        ValueError: the format of tool calls is unknown; the template cannot continue after a tool, or after an environment that
            acts as a user; or a tool's schema holds a special token.
    """
    from mgrpo.data.templates import find_template
    from mgrpo.data.tokenizer import special_token
    from mgrpo.environments.loop.bridge import Bridges
    from mgrpo.environments.loop.language import TemplateLanguage, stop_ids_of
    from mgrpo.environments.loop.program_language import LanguageSpec
    from mgrpo.environments.loop.stripping import find_stripping

    template = find_template(config.data.chat_template_name, tokenizer)
    format_of = partial(named, _format_name(config, toolset, template or ""), tokenizer=tokenizer)
    format = format_of(toolset.description.tools)
    all_stop_ids = [*stop_ids, *stop_ids_of(format, tokenizer)]

    def bridges_of(tools: Sequence[Tool]) -> Bridges:
        return Bridges(
            tokenizer,
            template or "",
            template_kwargs=json.loads(config.data.chat_template_kwargs),
            tools=tools if config.tools.pass_tools_to_chat_template else (),
            stop_token_ids=all_stop_ids,
        )

    longest = config.tools.max_observation_tokens or max(1, config.rollout.response_length // 4)
    if toolset.description.is_driven:
        spec = LanguageSpec(
            tokenizer=config.tokenizer_path,
            template=template or "",
            template_kwargs=json.loads(config.data.chat_template_kwargs),
            format=_format_name(config, toolset, template or ""),
            stop_ids=all_stop_ids,
            add_bos=config.data.add_bos,
            max_observation_tokens=longest,
            shows_tools=config.tools.pass_tools_to_chat_template,
            strips=toolset.description.is_agent and config.tools.thinking_history == "strip",
        )
        return spec.make(tokenizer)
    for tool in toolset.description.tools if config.tools.pass_tools_to_chat_template else ():
        if special := special_token(tokenizer, json.dumps(tool.schema, ensure_ascii=False)):
            raise ValueError(
                f"the description or the parameters of the tool {tool.name!r} hold the special token {special!r}, which would end a turn "
                "in the prompt or begin one; change the tool, or leave it out"
            )
    bridges = bridges_of(toolset.description.tools)
    if toolset.description.acts:
        bridges.check("user")
    if toolset.description.tools and format.tags is None:
        bridges.check("tool")
    strips = config.tools.thinking_history == "strip" and toolset.description.acts
    stripping = find_stripping(bridges) if strips else None
    return TemplateLanguage(
        tokenizer,
        format,
        bridges,
        max_observation_tokens=longest,
        stripping=stripping,
        is_thinking=any(some.prompt((0, 0)).text.rstrip().endswith("<think>") for some in prompts if some),
    )


def _format_name(config: Config, toolset: Toolset, template: str) -> str:
    name = config.tools.tool_parser_type
    if name != "auto":
        return name
    calls_nothing = toolset.description.acts and not toolset.description.tools
    return UNUSED_FORMAT if calls_nothing else detected(template)


def make_interaction(
    config: Config, toolset: Toolset, language: TemplateLanguage, *, opened: Opened, asked: Asked
) -> Interaction:
    """Build the environments and the episodes of completions in them.

    Args:
        opened: see `Interaction`.
        asked: returns the question of a prompt, for programs.
    """
    from mgrpo.environments.loop.driven import Driven
    from mgrpo.environments.loop.episodes import EpisodeBounds, Episodes
    from mgrpo.rollout.interaction import Interaction

    tools, is_agent = config.tools, toolset.description.is_agent
    environments = EnvironmentPool(
        toolset.specs,
        pool_size=tools.pool_size or UNLIMITED,
        num_workers=tools.env_workers or max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0)) - 1)),
        limits=WorkerLimits(
            tool_timeout_s=tools.tool_timeout,
            reset_timeout_s=tools.reset_timeout_s,
            acquire_timeout_s=_acquire_timeout(config),
        ),
        folders=_folders(),
        python=tools.env_python,
        variables=_variables(config),
    )
    return Interaction(
        environments,
        language,
        EpisodeBounds(
            max_model_length=config.max_model_length,
            max_prompt_length=config.data.max_prompt_token_length,
            max_calls=tools.max_tool_calls or UNLIMITED,
            max_calling_turns=tools.max_tool_calling_iterations or None,
            per_turn_max_tokens=tools.per_turn_max_tokens,
            trajectory_timeout_s=tools.trajectory_timeout,
            scored_text=tools.scored_text,
        ),
        episodes=_agents(config, language) if is_agent else Driven if toolset.description.is_program else Episodes,
        asked=asked if toolset.description.is_driven else None,
        opened=opened,
        hidden_columns=(config.data.ground_truths_key, config.data.ground_truths_key.partition(".")[0]),
        in_rounds=toolset.plays_in_rounds(config),
        run_seed=config.experiment.seed,
    )


def _agents(config: Config, language: TemplateLanguage) -> Callable[..., Agents]:
    """Factory of the trajectories of a run's agents."""
    from mgrpo.environments.agents.agent_episodes import AgentBounds, Agents
    from mgrpo.environments.agents.endpoint_link import Endpoints, EndpointSettings
    from mgrpo.environments.loop.program_language import ProgramLanguage

    assert isinstance(language, ProgramLanguage) and language.spec is not None
    own = config.agent
    are_remote = own.agent_kind == "remote"
    settings = EndpointSettings(
        language=language.spec,
        host=own.agent_endpoint_host,
        port=own.agent_endpoint_port,
        public_url=own.agent_endpoint_url,
        max_turns=own.agent_max_turns,
        worker_key=os.environ[WORKER_KEY] if are_remote else None,
        join=_address(own.agent_endpoint_join),
        join_secret=os.environ.get(JOIN_TOKEN, ""),
    )
    bounds = AgentBounds(
        limit_s=_agent_limit(config),
        # An agent with a check could write a reward and crash before the check.
        sets_reward=own.agent_sets_reward and own.agent_check is None,
        are_remote=are_remote,
        hidden=tuple(os.environ[name] for name in own.agent_env if name in os.environ),
    )
    return partial(Agents, endpoints=Endpoints(settings, count=own.agent_endpoints), own=bounds)


def _agent_limit(config: Config) -> float:
    return config.tools.trajectory_timeout or DEFAULT_TIMEOUT_S


def _variables(config: Config) -> tuple[str, ...]:
    """Environment variables for workers with an agent only: the agent's own, and those of its box opener."""
    return (*config.agent.agent_env, *VARIABLES) if config.agent.agent is not None else ()


def _acquire_timeout(config: Config) -> float:
    """Seconds to wait for a free environment: an agent may wait for whole trajectories of others."""
    least = _agent_limit(config) + ENDING_S if config.agent.agent is not None else 0.0
    return max(ACQUIRE_TIMEOUT_S, least)


def _address(text: str | None) -> tuple[str, int] | None:
    """Host and port."""
    host, _, port = (text or "").rpartition(":")
    return (host, int(port)) if port else None


def turn_rewards(config: Config) -> TurnRewards:
    """Rule that combines the rewards of a completion's turns."""
    tools = config.tools
    return TurnRewards(aggregator=tools.reward_aggregator, only_good_outputs=tools.only_reward_good_outputs)


def remarks(config: Config, toolset: Toolset, language: TemplateLanguage) -> list[str]:
    """Notes on tools for the user, before the run starts."""
    found: list[str] = []
    if language.stripping is not None:
        found.append(
            "thinking_history=strip: the chat template leaves thinking out of earlier turns, so a turn after such a one is trained "
            "on after a context of its own, and every such context is read anew"
        )
    elif config.tools.thinking_history == "strip":
        found.append(
            "thinking_history=strip changes nothing here: earlier turns lose their thinking only where an environment takes whole "
            "turns and the chat template leaves it out"
        )
    return [*found, *_not_repeatable(config, toolset)]


def _not_repeatable(config: Config, toolset: Toolset) -> list[str]:
    differ = [offer for offer in toolset.description.offers if not offer.is_repeatable]
    if not differ:
        return []
    with_settings = {spec.entry for spec in toolset.specs if spec.entry not in NAMES}
    advice = "; if it does not, set is_repeatable to true in its tool_configs"
    return [
        f"{' and '.join(offer.name for offer in differ)} may answer equal calls differently, so this run cannot be repeated to "
        "the bit, and completions go on as soon as their tools have answered"
        + (advice if any(offer.entry in with_settings for offer in differ) else "")
    ]


def _folders() -> list[str]:
    """Folders that may contain the user's own modules."""
    script = os.path.dirname(os.path.abspath(sys.argv[0])) if sys.argv[0] else os.getcwd()
    # With `python -m mgrpo` that is this package, whose types.py is not the standard library's.
    own = os.path.dirname(os.path.abspath(mgrpo.__file__))
    return [folder for folder in dict.fromkeys([os.getcwd(), script]) if folder != own]


def row_problems(toolset: Toolset, mixtures: Sequence[Mixture]) -> list[str]:
    """Problems of tools and environments in rows that the run lacks, or that cannot be combined."""
    found: dict[str, str] = {}
    for mixture in filter(len, mixtures):
        names_some = bool(ROW_COLUMNS.intersection(mixture.columns))
        for _, origin, columns in mixture.rows() if names_some else [("", "every row", {})]:
            try:
                toolset.description.choice(columns)
            except ValueError as err:
                found.setdefault(str(err), origin)
    return [f"{origin}: {problem}" for problem, origin in found.items()]
