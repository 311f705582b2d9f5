"""The ids of responses and items, which contain the step id, so that an id identifies its step."""

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from typing import Any, Final

RESPONSE: Final = "resp"
MESSAGE: Final = "msg"
REASONING: Final = "rs"
FUNCTION_CALL: Final = "fc"
CUSTOM_CALL: Final = "ctc"
INPUT: Final = "in"
CALL: Final = "call"  # for calls to which the engine assigned no id

# A step id is a ULID (proxy/clock.py). Ids of items have a number after it.
_STEP: Final = "([0-9A-HJKMNP-TV-Z]{26})"
_NAME: Final = re.compile(rf"resp_{_STEP}(?:\.([A-Za-z0-9_-]+))?|(?:msg|rs|fc|ctc|in)_{_STEP}_\d{{1,9}}")


def response_name(step_id: str, rollout_id: str = "") -> str:
    """Return the id of a step's response. It contains the rollout id, since clients send the response id without it."""
    token = rollout_id_to_token(rollout_id)
    return f"{RESPONSE}_{step_id}.{token}" if token else f"{RESPONSE}_{step_id}"


def item_name(kind: str, step_id: str, number: int) -> str:
    """Return the id of a step's item; `number` counts items of the same kind from 0."""
    return f"{kind}_{step_id}_{number}"


def step_of(name: object) -> str | None:
    """Return the step id in the id of a response or an item; None for a foreign id."""
    found = _NAME.fullmatch(name) if isinstance(name, str) else None
    return found and (found[1] or found[3])


def repeated_steps(body: Mapping[str, Any]) -> frozenset[str]:
    """Return the steps that a body of this dialect refers to, by the id of a response or of an item."""
    entries = body.get("input")
    items = [item.get("id") for item in entries if isinstance(item, Mapping)] if isinstance(entries, list) else []
    found = {name: step_of(name) for name in (body.get("previous_response_id"), *items) if isinstance(name, str)}
    return frozenset(step for name, step in found.items() if step and not name.startswith(f"{INPUT}_"))


def rollout_of(name: object) -> str | None:
    """Return the rollout id in the id of a response; None if it contains none."""
    found = _NAME.fullmatch(name) if isinstance(name, str) else None
    return None if found is None or found[2] is None else rollout_id_from_token(found[2])


def rollout_id_to_token(rollout_id: str) -> str:
    """Return a rollout id as a token of a URL or of a key: base64url without padding."""
    return urlsafe_b64encode(rollout_id.encode()).rstrip(b"=").decode()


def rollout_id_from_token(token: str) -> str | None:
    """Return the rollout id of a token; None for a token that is not base64url of UTF-8."""
    try:
        return urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode()
    except ValueError:
        return None
