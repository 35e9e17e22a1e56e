"""Where a judge lives: address, name and headers, from the settings and the environment, which alone holds keys."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit, urlunsplit

from mgrpo.config.schema import Reward

OPENAI = "https://api.openai.com/v1"
AZURE_API_VERSION = "2024-12-01-preview"
RUBRIC_JUDGE = "gpt-4.1"
SPARE_TOKENS = 100
"""For the chat template around a prompt, of which only the server knows the length."""
FEWEST_TOKENS = 64
"""With less room than this for question and answer there is nothing to judge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An OpenAI-compatible `.../chat/completions` and the model to ask for there."""

    url: str
    model: str
    """Its name on that server."""
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    secret: str | None = field(default=None, repr=False)
    """The key that `headers` carry, to be kept out of messages."""
    is_openai: bool = False
    """OpenAI's own servers or Azure's, which know the newer names of parameters only."""


def problems(settings: Reward, verifiers: Iterable[str] = ("general-quality",)) -> list[str]:
    """What keeps the judges among `verifiers` from being asked, a sentence each; other verifiers are no matter here."""
    names = {name.lower() for name in verifiers}
    finders = []
    if any(name.startswith("general-") for name in names):
        finders.append(judge_endpoint)
    if "rubric" in names:
        finders.append(rubric_endpoint)
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
    """The judge of the `general-` verifiers; ValueError where settings and environment do not say enough."""
    if not settings.llm_judge_model:
        raise ValueError(
            "llm_judge_model is none, but verifiers named general-... ask a language model; name one, for example "
            "llm_judge_model=hosted_vllm/Qwen/Qwen3-8B with llm_judge_base_url=http://localhost:8000/v1"
        )
    return find_endpoint(settings.llm_judge_model, settings.llm_judge_base_url, setting="llm_judge_model")


def rubric_endpoint(settings: Reward) -> Endpoint:
    """The judge of rubrics: rubric_judge_model, else RUBRIC_JUDGE_MODEL, else llm_judge_model, else gpt-4.1."""
    names = {
        "rubric_judge_model": settings.rubric_judge_model,
        "RUBRIC_JUDGE_MODEL": _environment("RUBRIC_JUDGE_MODEL"),
        "llm_judge_model": settings.llm_judge_model,
        "rubric_judge_model (by default)": RUBRIC_JUDGE,
    }
    setting, model = next((setting, model) for setting, model in names.items() if model)
    return find_endpoint(model, settings.llm_judge_base_url, setting=setting)


def find_endpoint(model: str, base_url: str | None, *, setting: str) -> Endpoint:
    """The endpoint of a model called as LiteLLM calls them: azure/DEPLOYMENT, hosted_vllm/NAME, or as the server does."""
    provider, _, name = model.partition("/")
    if provider == "azure" and name:
        base, source = _base(base_url, "AZURE_API_BASE", setting=f"{setting}={model}")
        url = _address(base, source, f"/openai/deployments/{quote(name)}/chat/completions")
        version = _environment("AZURE_API_VERSION") or AZURE_API_VERSION
        key = _key("AZURE_API_KEY", needed_for=f"{setting}={model}")
        return Endpoint(
            url=f"{url}?api-version={quote(version)}",
            model=name,
            headers={"api-key": str(key)},
            secret=key,
            is_openai=True,
        )
    if provider == "hosted_vllm" and name:
        base, source = _base(base_url, "HOSTED_VLLM_API_BASE", setting=f"{setting}={model}")
        return _compatible(_address(base, source, "/chat/completions"), name, _key("HOSTED_VLLM_API_KEY"))
    if base_url or _environment("OPENAI_BASE_URL"):
        base, source = _base(base_url, "OPENAI_BASE_URL", setting=f"{setting}={model}")
    else:
        base, source = OPENAI, "OpenAI's address"
    url = _address(base, source, "/chat/completions")
    if urlsplit(url).hostname != urlsplit(OPENAI).hostname:
        return _compatible(url, model, _key("OPENAI_API_KEY"))
    if "/" in model.removeprefix("openai/"):
        raise ValueError(
            f"{setting}={model} is no name that OpenAI's own server knows; say where it is served: llm_judge_base_url, or "
            f"OPENAI_BASE_URL in the environment, or hosted_vllm/{model} with HOSTED_VLLM_API_BASE"
        )
    key = _key("OPENAI_API_KEY", needed_for=f"{setting}={model} at {OPENAI} (llm_judge_base_url is none)")
    return Endpoint(
        url=url,
        model=model.removeprefix("openai/"),
        headers={"Authorization": f"Bearer {key}"},
        secret=key,
        is_openai=True,
    )


def _compatible(url: str, model: str, key: str | None) -> Endpoint:
    return Endpoint(url=url, model=model, headers={"Authorization": f"Bearer {key}"} if key else {}, secret=key)


def _environment(variable: str) -> str:
    return os.environ.get(variable, "").strip()


def _base(base_url: str | None, variable: str, *, setting: str) -> tuple[str, str]:
    """The base address and where it was found."""
    if base_url:
        return base_url, "llm_judge_base_url"
    if base := _environment(variable):
        return base, f"{variable} in the environment"
    raise ValueError(f"{setting} needs an address: set llm_judge_base_url, or {variable} in the environment")


def _address(base: str, source: str, path: str) -> str:
    """The whole address; a base without a path gets the usual /v1."""
    parts = urlsplit(base.strip())
    if parts.username or parts.password:
        raise ValueError(f"{source} holds a user name or password; keys come from the environment, see docs/rewards.md")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{source}={base!r} is no address; expected something like http://localhost:8000/v1")
    start = parts.path.rstrip("/")
    if not start and not path.startswith("/openai/"):
        start = "/v1"
    whole = start if start.endswith("/chat/completions") else start + path
    return urlunsplit((parts.scheme, parts.netloc, whole, parts.query, ""))


def _key(variable: str, *, needed_for: str | None = None) -> str | None:
    key = _environment(variable)
    if needed_for and not key:
        raise ValueError(f"{needed_for} needs a key: set {variable} in the environment")
    if key and not re.fullmatch(r"[!-~]+", key):
        raise ValueError(f"{variable} in the environment holds white space or other characters that no key has")
    return key or None
