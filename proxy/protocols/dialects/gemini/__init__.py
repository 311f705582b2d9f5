"""Google's Gemini API, translated to chat, and its paths: a model and a method, or the models.

A model's name may contain slashes and colons, encoded or not: `models/org/name:7b:generateContent`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

import orjson

from proxy.errors import BadRequest, ProxyError
from proxy.protocols.dialects.base import CallIdentity, DialectName, Json, References, Translator, engine_message
from proxy.protocols.dialects.gemini.contents import call_ids_from
from proxy.protocols.dialects.gemini.renderer import GeminiRenderer, error_for, error_object
from proxy.protocols.dialects.gemini.request import read, shows_thoughts
from proxy.protocols.dialects.validation import an_object, at, optional, refusal

_PREFIXES: Final = ("/v1beta/", "/v1alpha/")  # the versions of Google's API
_V1: Final = "/v1/models"  # version 1 of Google's API; OpenAI's list of models has the same path
_CLIENT: Final = ("x-goog-api-client", "x-goog-api-key")  # headers of its clients
GENERATE: Final = ":generateContent"
STREAM: Final = ":streamGenerateContent"  # as server-sent events, with `alt=sse`
STREAM_ARRAY: Final = ":streamGenerateContent?alt=json"  # as a JSON array
COUNT: Final = ":countTokens"
METHODS: Final = (GENERATE, STREAM, COUNT)
_WHOLE: Final = "generateContentRequest"  # of a request that counts tokens


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
    return is_of_google(headers) or unquote(endpoint).endswith(METHODS)


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
    return Target(model, method) if collection == "models" and (model or not method) else None


def alt_from(query: Mapping[str, str]) -> str:
    """Return the requested format of a response, which may be unknown.

    Google's older clients send `$alt=json;enum-encoding=int`.
    """
    return (query.get("alt") or query.get("$alt") or "json").partition(";")[0].lower()


def check_alt(alt: str, method: str) -> None:
    """Raise BadRequest for a format that the method does not have."""
    known = ("json", "sse") if method == STREAM else ("json",)
    if alt not in known:
        raise BadRequest(f"alt: must be {' or '.join(known)}, not {alt[:40]!r}.", param="alt")


def bound_fields(target: Target, alt: str) -> dict[str, Any]:
    """Return the fields of a request that its URL has, with which it is recorded.

    `model` is a field of Google's request message, too, and a path has its value; the API key of a URL is no field. A field
    `stream` of a body has no effect.
    """
    streamed = {"stream": True, "alt": alt} if target.method == STREAM else {"stream": False}
    return {"model": target.model, **streamed}


def body_to_count(body: Json, target: Target) -> Json:
    """Return the request of which the tokens are counted: contents, or a whole request. Raises InvalidValue for both."""
    whole = optional(an_object, body, _WHOLE)
    if whole is not None and at(body, "contents")[0] is not None:
        raise refusal(_WHOLE, "must not be present together with contents")
    return {**(body if whole is None else whole), **bound_fields(target, "json")}


class Gemini(Translator):
    """`generateContent` and `streamGenerateContent`. `is_array`: an error is in an array, as chunks of such a stream are."""

    name: DialectName = "gemini"
    read = staticmethod(read)

    def __init__(self, *, is_array: bool = False) -> None:
        self._is_array = is_array

    def references(self, body: Mapping[str, Any]) -> References:
        """Return the ids of function calls: the client's copies lack the sampled text of their arguments."""
        return References(calls=call_ids_from(body))

    def renderer(self, body: Mapping[str, Any], identity: CallIdentity) -> GeminiRenderer:
        return GeminiRenderer(identity, is_array=body.get("alt") != "sse", shows_thoughts=shows_thoughts(body))

    def error(self, error: ProxyError) -> bytes:
        return self._written(error_for(error))

    def engine_error(self, status: int, text: str) -> bytes:
        return self._written(error_object(status, engine_message(text)))

    def _written(self, error: Json) -> bytes:
        return orjson.dumps([error] if self._is_array else error)

    def is_spoken(self, endpoint: str, headers: Mapping[str, str]) -> bool:
        return is_of_google(headers)

    def models(self, entries: Sequence[Json]) -> Json:
        return {"models": [self.model(entry) for entry in entries]}

    def model(self, entry: Json) -> Json:
        """Return one model, with its context window as both limits if it is known."""
        name, longest = str(entry.get("id")), entry.get("max_model_len")
        limits = {"inputTokenLimit": longest, "outputTokenLimit": longest} if type(longest) is int else {}
        methods = ["generateContent", "countTokens"]
        return {"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": methods, **limits}


GEMINI: Final = Gemini()
GEMINI_ARRAY: Final = Gemini(is_array=True)
