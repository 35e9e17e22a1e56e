"""The server of a judge: address, name and key, from the settings and, for keys, from the environment alone."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, urlsplit, urlunsplit

from mgrpo.config.schema import Reward

if TYPE_CHECKING:
    import openai

OPENAI = "https://api.openai.com/v1"
AZURE_API_VERSION = "2024-12-01-preview"
RUBRIC_JUDGE = "gpt-4.1"
SPARE_TOKENS = 100
"""Allowance for the chat template around a prompt, whose length only the server can count."""
FEWEST_TOKENS = 64
"""Least room for question and answer; with less, judging is pointless."""
_COMPLETIONS = "/chat/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A server of OpenAI's chat completions, and the model to call there."""

    base_url: str
    """The address without `/chat/completions`."""
    model: str
    """Its name on that server."""
    query: Mapping[str, str] = field(default_factory=dict)
    """Parameters that the address carries."""
    key: str | None = field(default=None, repr=False)
    azure_version: str | None = None
    """Version of Azure's API; None for every other server."""
    is_openai: bool = False
    """OpenAI's own servers or Azure's, which accept only the newer names of parameters."""

    def client(self, most_bytes: int) -> openai.AsyncOpenAI:
        """A client without time limit and retries, which does not follow redirects. `close` it.

        Args:
            most_bytes: bound on the bytes read of a reply of any status (`BoundedClient`).
        """
        import openai

        from mgrpo.rewards.judges.bounded import BoundedClient

        settings: dict[str, Any] = {
            "base_url": self.base_url,
            "default_query": self.query,
            "timeout": None,
            "max_retries": 0,
            "http_client": BoundedClient(most_bytes, follow_redirects=False),
        }
        if self.azure_version:
            return openai.AsyncAzureOpenAI(api_key=self.key, api_version=self.azure_version, **settings)
        # The library insists on a key; `headers` leaves it out.
        return openai.AsyncOpenAI(api_key=self.key or "none", **settings)

    def headers(self) -> dict[str, Any]:
        """Headers of each request in place of the library's own."""
        import openai

        # No compression: a few bytes could become gigabytes.
        headers: dict[str, Any] = {"Accept-Encoding": "identity"}
        if not self.key:
            headers["Authorization"] = openai.Omit()
        if not self.is_openai:
            headers |= dict.fromkeys(("OpenAI-Organization", "OpenAI-Project"), openai.Omit())
        return headers


def problems(settings: Reward, verifiers: Iterable[str] = ("general-quality",)) -> list[str]:
    """Reasons why the judges among `verifiers` cannot be called, one sentence each; other verifiers are ignored."""
    names = {name.lower() for name in verifiers}
    finders: list[Callable[[Reward], Endpoint]] = []
    if any(name.startswith("general-") for name in names):
        finders.append(judge_endpoint)
    if "rubric" in names:
        finders.append(rubric_endpoint)
        if settings.apply_evolving_rubric_reward:
            finders.append(proposing_endpoint)
    found = []
    for find in finders:
        try:
            find(settings)
        except ValueError as err:
            found.append(str(err))
    room = settings.llm_judge_max_context_length - settings.llm_judge_max_tokens - SPARE_TOKENS
    if finders and room < FEWEST_TOKENS:
        found.append(
            f"llm_judge_max_context_length={settings.llm_judge_max_context_length} leaves no room for a prompt beside "
            f"llm_judge_max_tokens={settings.llm_judge_max_tokens}; raise the one or lower the other"
        )
    return list(dict.fromkeys(found))


def judge_endpoint(settings: Reward) -> Endpoint:
    """The judge of the `general-` verifiers; ValueError where settings and environment lack something."""
    if not settings.llm_judge_model:
        raise ValueError(
            "llm_judge_model is none, but verifiers named general-... ask a language model; name one, for example "
            "llm_judge_model=hosted_vllm/Qwen/Qwen3-8B with llm_judge_base_url=http://localhost:8000/v1"
        )
    return find_endpoint(settings.llm_judge_model, settings.llm_judge_base_url, setting="llm_judge_model")


def rubric_endpoint(settings: Reward) -> Endpoint:
    """The judge of rubrics: RUBRIC_JUDGE_MODEL, else llm_judge_model, else gpt-4.1."""
    return _first(settings, _rubric_judges(settings))


def proposing_endpoint(settings: Reward) -> Endpoint:
    """The model that proposes criteria: RUBRIC_GENERATION_MODEL, else the judge of rubrics."""
    own = {"RUBRIC_GENERATION_MODEL": _environment("RUBRIC_GENERATION_MODEL")}
    return _first(settings, own | _rubric_judges(settings))


def _rubric_judges(settings: Reward) -> dict[str, str | None]:
    """Models by the setting or variable that names them; the first that is set is called."""
    return {
        "RUBRIC_JUDGE_MODEL": _environment("RUBRIC_JUDGE_MODEL"),
        "llm_judge_model": settings.llm_judge_model,
        "RUBRIC_JUDGE_MODEL (by default)": RUBRIC_JUDGE,
    }


def _first(settings: Reward, models: Mapping[str, str | None]) -> Endpoint:
    setting, model = next((setting, model) for setting, model in models.items() if model)
    return find_endpoint(model, settings.llm_judge_base_url, setting=setting)


def find_endpoint(model: str, base_url: str | None, *, setting: str) -> Endpoint:
    """The endpoint of a model, named as LiteLLM names it: azure/DEPLOYMENT, hosted_vllm/NAME, or as the server names it.

    Raises:
        ValueError: settings and environment lack the address or the key, or hold an unusable one.
    """
    provider, _, name = model.partition("/")
    if provider == "azure" and name:
        base, source = _base(base_url, "AZURE_API_BASE", setting=f"{setting}={model}")
        url, query = _address(base, source, azure_deployment=name)
        version = _environment("AZURE_API_VERSION") or AZURE_API_VERSION
        key = _key("AZURE_API_KEY", needed_for=f"{setting}={model}")
        return Endpoint(base_url=url, model=name, query=query, key=key, azure_version=version, is_openai=True)
    if provider == "hosted_vllm" and name:
        base, source = _base(base_url, "HOSTED_VLLM_API_BASE", setting=f"{setting}={model}")
        url, query = _address(base, source)
        return Endpoint(base_url=url, model=name, query=query, key=_key("HOSTED_VLLM_API_KEY"))
    if base_url or _environment("OPENAI_BASE_URL"):
        base, source = _base(base_url, "OPENAI_BASE_URL", setting=f"{setting}={model}")
    else:
        base, source = OPENAI, "OpenAI's address"
    url, query = _address(base, source)
    if urlsplit(url).hostname != urlsplit(OPENAI).hostname:
        return Endpoint(base_url=url, model=model, query=query, key=_key("OPENAI_API_KEY"))
    if "/" in model.removeprefix("openai/"):
        raise ValueError(
            f"{setting}={model} is not a name that OpenAI's own server knows; give the address of its server: "
            f"llm_judge_base_url, or OPENAI_BASE_URL in the environment, or hosted_vllm/{model} with HOSTED_VLLM_API_BASE"
        )
    key = _key("OPENAI_API_KEY", needed_for=f"{setting}={model} at {OPENAI} (llm_judge_base_url is none)")
    return Endpoint(base_url=url, model=model.removeprefix("openai/"), query=query, key=key, is_openai=True)


def _environment(variable: str) -> str:
    return os.environ.get(variable, "").strip()


def _base(base_url: str | None, variable: str, *, setting: str) -> tuple[str, str]:
    """The base address and where it was found."""
    if base_url:
        return base_url, "llm_judge_base_url"
    if base := _environment(variable):
        return base, f"{variable} in the environment"
    raise ValueError(f"{setting} needs an address: set llm_judge_base_url, or {variable} in the environment")


def _address(base: str, source: str, *, azure_deployment: str | None = None) -> tuple[str, dict[str, str]]:
    """The address without `/chat/completions`, and its parameters; a base without a path gets the usual /v1."""
    parts = urlsplit(base.strip())
    if parts.username or parts.password:
        raise ValueError(f"{source} holds a user name or password; keys come from the environment, see docs/judges.md")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{source}={base!r} is not an address; expected for example http://localhost:8000/v1")
    path = parts.path.rstrip("/")
    if path.endswith(_COMPLETIONS):
        path = path.removesuffix(_COMPLETIONS)
    elif azure_deployment:
        path += f"/openai/deployments/{quote(azure_deployment)}"
    else:
        path = path or "/v1"
    return urlunsplit((parts.scheme, parts.netloc, path, "", "")), dict(parse_qsl(parts.query))


def _key(variable: str, *, needed_for: str | None = None) -> str | None:
    key = _environment(variable)
    if needed_for and not key:
        raise ValueError(f"{needed_for} needs a key: set {variable} in the environment")
    if key and not re.fullmatch(r"[!-~]+", key):
        raise ValueError(f"{variable} in the environment holds white space or other characters that no key has")
    return key or None
