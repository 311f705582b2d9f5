"""`GET /v1/models` and `GET /v1/models/{id}` in Anthropic's format."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from proxy.protocols.dialects.translation import Json


def models(listing: Mapping[str, Any]) -> Json:
    """Return all models, on one page."""
    data = [model(entry) for entry in listing.get("data") or () if isinstance(entry, Mapping)]
    ids = [entry["id"] for entry in data]
    return {
        "data": data,
        "has_more": False,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
    }


def model(entry: Mapping[str, Any]) -> Json:
    """Return one model. Unknown values are null; an unknown creation time is the epoch."""
    name, created, longest = str(entry.get("id")), entry.get("created"), entry.get("max_model_len")
    moment = datetime.fromtimestamp(created if type(created) is int and 0 <= created < 1 << 37 else 0, UTC)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": longest if type(longest) is int else None,
        "max_tokens": longest if type(longest) is int else None,
    }
