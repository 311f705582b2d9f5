"""`GET /v1beta/models` and `GET /v1beta/models/{model}` in Google's format."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from proxy.protocols.dialects.translation import Json

_METHODS: Final = ["generateContent", "countTokens"]


def models(entries: Iterable[Mapping[str, Any]]) -> Json:
    """Return all models, on one page."""
    return {"models": [model(entry) for entry in entries]}


def model(entry: Mapping[str, Any]) -> Json:
    """Return one model; its limits are those of its context window, if it is known."""
    name, longest = str(entry.get("id")), entry.get("max_model_len")
    limits = {"inputTokenLimit": longest, "outputTokenLimit": longest} if type(longest) is int else {}
    return {"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": _METHODS, **limits}
