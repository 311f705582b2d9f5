"""The paths of the Gemini API: a model and a method, or the models.

A model's name may contain slashes and colons, encoded or not: `models/org/name:7b:generateContent`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from proxy.errors import BadRequest

_PREFIXES: Final = ("/v1beta/", "/v1alpha/")  # the versions of Google's API
_V1: Final = "/v1/models"  # version 1 of Google's API; OpenAI's list of models has the same path
_CLIENT: Final = ("x-goog-api-client", "x-goog-api-key")  # headers of its clients
GENERATE: Final = ":generateContent"
STREAM: Final = ":streamGenerateContent"  # as server-sent events, with `alt=sse`
STREAM_ARRAY: Final = ":streamGenerateContent?alt=json"  # as a JSON array
COUNT: Final = ":countTokens"

_MODELS: Final = "models"
_ALTS: Final = ("json", "sse")


@dataclass(frozen=True, slots=True)
class Target:
    """A path of the Gemini API. `model` is empty for the list of models, `method` empty for a model itself."""

    model: str
    method: str


def is_gemini(endpoint: str, headers: Mapping[str, str]) -> bool:
    """Return whether a path, still encoded, is one of the Gemini API."""
    if endpoint.startswith(_PREFIXES):
        return True
    if not endpoint.startswith(_V1):
        return False
    return is_of_google(headers) or unquote(endpoint).endswith((GENERATE, STREAM, COUNT))


def is_of_google(headers: Mapping[str, str]) -> bool:
    """Return whether a request is of one of Google's clients."""
    return any(name in headers for name in _CLIENT)


def read_target(endpoint: str, http_method: str) -> Target | None:
    """Return the target of a path, still encoded; None for a resource that is not a model."""
    resource = unquote(endpoint.partition("/")[2].partition("/")[2])
    method = ""
    if http_method == "POST":
        resource, colon, name = resource.rpartition(":")
        method = colon + name
    collection, _, model = resource.partition("/")
    if collection == "tunedModels" and model:
        return Target(resource, method)
    return Target(model, method) if collection == _MODELS and (model or not method) else None


def alt_from(query: Mapping[str, str]) -> str:
    """Return the requested format of a response, which may be unknown.

    Google's older clients send `$alt=json;enum-encoding=int`.
    """
    return (query.get("alt") or query.get("$alt") or "json").partition(";")[0].lower()


def check_alt(alt: str, method: str) -> None:
    """Raise BadRequest for a format that the method does not have."""
    if alt not in _ALTS or (alt == "sse" and method != STREAM):
        known = "json or sse" if method == STREAM else "json"
        raise BadRequest(f"alt: must be {known}, not {alt[:40]!r}.", param="alt")


def bound_fields(target: Target, alt: str) -> dict[str, Any]:
    """Return the fields of a request that its URL has, with which it is recorded.

    `model` is a field of Google's request message, too, and a path has its value; the API key of a URL is no field. A field
    `stream` of a body has no effect.
    """
    streamed = {"stream": True, "alt": alt} if target.method == STREAM else {"stream": False}
    return {"model": target.model, **streamed}
