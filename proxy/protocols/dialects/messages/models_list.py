"""`GET /v1/models` and `GET /v1/models/{id}` in Anthropic's format."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from proxy.protocols.dialects.translation import Json


def models(listing: Mapping[str, Any]) -> Json:
    """Return all models, on one page."""
    told = [model(each) for each in listing.get("data") or () if isinstance(each, Mapping)]
    ids = [each["id"] for each in told]
    return {
        "data": told,
        "has_more": False,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
    }


def model(given: Mapping[str, Any]) -> Json:
    """Return one model. Unknown values are null; an unknown creation time is the epoch."""
    name, created, longest = str(given.get("id")), given.get("created"), given.get("max_model_len")
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
