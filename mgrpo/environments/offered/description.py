"""The offers of environments, as plain data: enough to check rows and to list the tools that a row's trajectories may call."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mgrpo.environments.environment import Tool
from mgrpo.environments.offered.row_columns import RowSettings, is_plain, row_settings

ACT = "act"
"""Name of the call that stands for a whole turn, for an environment without tools; its argument is "text"."""
_NAME = re.compile(r"[\w.:/@-]{1,128}")
_MAX_SCHEMA_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The offer of one environment: its tools and properties."""

    name: str
    """The environment's name in metrics and in rows."""
    entry: str
    """The user's entry for it, for errors."""
    tools: tuple[Tool, ...]
    """Tools under their call names; none: a turn as a whole is one action."""
    is_repeatable: bool
    gives_reward: bool
    """True if it decides the reward of a trajectory."""
    is_alternative: bool
    """True if a row's column `environment` may choose it."""
    is_program: bool = False
    """True if it is a program that drives the model with sampling requests."""
    is_agent: bool = False
    """True if it is an agent that drives the model through its address."""
    remarks: tuple[str, ...] = ()
    """Sentences for the user, before a run starts."""

    @property
    def names(self) -> frozenset[str]:
        """Names by which rows may refer to it or its tools."""
        return frozenset((self.name, *(tool.name for tool in self.tools)))


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferChoice:
    """The environments and tools of one row."""

    playing: tuple[str, ...]
    """Names of the environments that take part."""
    active: frozenset[str]
    """Names of the tools that may be called."""
    actor: str | None
    """Name of the environment that takes a turn as a whole, as the call `ACT`."""
    settings: RowSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Several environments that can go together."""

    offers: tuple[Offer, ...]

    @property
    def tools(self) -> tuple[Tool, ...]:
        """All tools, each once; alternatives may share one."""
        return tuple({tool.name: tool for offer in self.offers for tool in offer.tools}.values())

    @property
    def not_repeatable(self) -> tuple[str, ...]:
        """Names of environments that may answer differently in equal runs."""
        return tuple(offer.name for offer in self.offers if not offer.is_repeatable)

    @property
    def is_repeatable(self) -> bool:
        return not self.not_repeatable

    @property
    def acts(self) -> bool:
        """True if an environment takes a turn as a whole."""
        return not self.is_driven and not all(offer.tools for offer in self.offers)

    @property
    def is_program(self) -> bool:
        """True if a program drives the model; it is then the only entry."""
        return any(offer.is_program for offer in self.offers)

    @property
    def is_agent(self) -> bool:
        """True if an agent drives the model; it is then the only entry."""
        return any(offer.is_agent for offer in self.offers)

    @property
    def is_driven(self) -> bool:
        """True if a program or an agent drives the model."""
        return self.is_program or self.is_agent

    @property
    def names(self) -> frozenset[str]:
        """All names that rows may use."""
        return frozenset().union(*(offer.names for offer in self.offers))

    def choice(self, row: Mapping[str, Any]) -> OfferChoice:
        """The environments and tools of a row.

        Raises:
            ValueError: it has a name that does not exist, or names environments that cannot go together.
        """
        if self.is_driven:
            names = tuple(offer.name for offer in self.offers)
            return OfferChoice(playing=names, active=frozenset(), actor=None, settings=row_settings({}))
        settings = row_settings(row)
        if unknown := settings.names - self.names:
            raise ValueError(
                f"the row names {', '.join(sorted(unknown))}; the tools and environments are {', '.join(sorted(self.names))}"
            )
        playing = self._playing(settings)
        actors = [offer for offer in playing if not offer.tools]
        if len(actors) > 1:
            raise ValueError(f"{_listed(actors)} each take a turn as a whole; name one of them in the row's env_config")
        if len(rewarding := [offer for offer in playing if offer.gives_reward]) > 1:
            raise ValueError(f"{_listed(rewarding)} each decide the reward; name one of them in the row's tools")
        active = frozenset(
            tool.name
            for offer in playing
            for tool in offer.tools
            if settings.tools is None or settings.names & {tool.name, offer.name}
        )
        names = tuple(offer.name for offer in playing)
        return OfferChoice(playing=names, active=active, actor=actors[0].name if actors else None, settings=settings)

    def schemas(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Schemas of the tools that a row may call; raises as `choice` does."""
        active = self.choice(row).active
        return [tool.schema for tool in self.tools if tool.name in active]

    def refuse_clashes(self) -> None:
        """Raise ValueError for clashing names of environments or tools."""
        for number, offer in enumerate(self.offers):
            for other in self.offers[:number]:
                names = {offer.name} & {other.name} | _clashing(offer, other)
                if names:
                    raise ValueError(
                        f"{_listed([other, offer])} are both called {', '.join(sorted(names))}; give them different call names"
                    )
            if self.acts and any(tool.name == ACT for tool in offer.tools):
                raise ValueError(f"{offer.entry}: its tool {ACT} has the name of a turn as a whole; rename it")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Description:
        return cls(
            offers=tuple(
                Offer(
                    **{
                        **offer,
                        "tools": tuple(Tool(**tool) for tool in offer["tools"]),
                        "remarks": tuple(offer["remarks"]),
                    }
                )
                for offer in values["offers"]
            )
        )

    def _playing(self, settings: RowSettings) -> list[Offer]:
        alternatives = [offer.name for offer in self.offers if offer.is_alternative]
        if alternatives and settings.environment not in alternatives:
            raise ValueError(
                f"the row's environment is {settings.environment!r}, expected one of {', '.join(alternatives)}"
            )
        names_an_actor = any(offer.name in settings.settings and not offer.tools for offer in self.offers)

        def plays(offer: Offer) -> bool:
            if offer.is_alternative:
                return offer.name == settings.environment
            if names_an_actor and not offer.tools:
                return offer.name in settings.settings
            return settings.tools is None or bool(settings.names & offer.names)

        return [offer for offer in self.offers if plays(offer)]


def checked_tools(tools: Sequence[Tool]) -> Sequence[Tool]:
    """The tools of one environment, which a server may have described.

    Raises:
        ValueError: one has no plain name, or is no JSON, two look the same, or they are too long for any prompt.
    """
    alike: dict[str, str] = {}
    for tool in tools:
        if not isinstance(tool.name, str) or not _NAME.fullmatch(tool.name):
            raise ValueError(f"a tool has the name {tool.name!r:.80}, expected letters, digits and any of _ - . : / @")
        if other := alike.get(form := unicodedata.normalize("NFKC", tool.name)):
            raise ValueError(
                f"two tools have the names {other} and {tool.name}, which look the same; expected one of them"
            )
        alike[form] = tool.name
        if (
            not isinstance(tool.description, str)
            or not isinstance(tool.parameters, Mapping)
            or not is_plain(tool.schema)
        ):
            raise ValueError(
                f"the tool {tool.name} has a description or parameters that are no text and no JSON schema, or are nested "
                "too deeply"
            )
    if (size := len(json.dumps([tool.schema for tool in tools]))) > _MAX_SCHEMA_BYTES:
        raise ValueError(f"the schemas of {len(tools)} tools have {size} bytes, expected at most {_MAX_SCHEMA_BYTES}")
    return tools


def _clashing(offer: Offer, other: Offer) -> set[str]:
    """Tools of the same name; alternatives may have equal ones, since no trajectory has both."""
    tools = {tool.name: tool for tool in other.tools}
    may_share = offer.is_alternative and other.is_alternative
    return {tool.name for tool in offer.tools if tool.name in tools and not (may_share and tool == tools[tool.name])}


def _listed(offers: Sequence[Offer]) -> str:
    return " and ".join(offer.entry for offer in offers)
