"""TokenTape's own headers, and the headers that are forwarded in each direction.

Headers that describe the framing of a body are dropped.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final

ROLLOUT_HEADER: Final = "X-Rollout-Id"  # names the rollout, in requests and responses
GROUP_HEADER: Final = "X-Rollout-Group"
CONTINUATION_HEADER: Final = "X-Rollout-Continuation"  # the continuation mode of one call
STEP_HEADER: Final = "X-Step-Id"  # of responses

# Of one connection, not of the message (RFC 9110, 7.6.1).
_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
     "transfer-encoding", "upgrade"}
)  # fmt: skip
# API keys of TokenTape, which are never forwarded; what TokenTape sets itself; names of rollouts.
_NOT_UPSTREAM = _HOP_BY_HOP | {
    "authorization", "x-api-key", "host", "content-length", "content-encoding", "accept-encoding", "expect",
    ROLLOUT_HEADER.lower(), GROUP_HEADER.lower(), CONTINUATION_HEADER.lower(), "x-reply-tokens", "x-reply-ids",
}  # fmt: skip
_NOT_DOWNSTREAM = _HOP_BY_HOP | {
    "content-length", "content-encoding", "date", ROLLOUT_HEADER.lower(), STEP_HEADER.lower(),
}  # fmt: skip

# Invalid in header values (RFC 9110, 5.5): aiohttp's server refuses to write them.
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


def upstream(headers: Iterable[tuple[str, str]], *, api_key: str | None) -> list[tuple[str, str]]:
    """Return the client's headers as they are sent to the engine, with the engine's API key."""
    sent = _passing(headers, _NOT_UPSTREAM)
    # identity: every byte is parsed here, and compression on a local network delays the first token
    sent.append(("Accept-Encoding", "identity"))
    return [*sent, ("Authorization", f"Bearer {api_key}")] if api_key else sent


def downstream(headers: Mapping[str, str], *, rollout_id: str | None, step_id: str | None) -> list[tuple[str, str]]:
    """Return the engine's headers as they are sent to the client, with the ids of the rollout and the step."""
    ours = ((ROLLOUT_HEADER, rollout_id), (STEP_HEADER, step_id))
    sent = [(name, value) for name, value in headers.items() if not _CONTROL.search(name + value)]
    shown = _passing(sent, _NOT_DOWNSTREAM)
    return [*shown, *((name, value) for name, value in ours if value is not None)]


def _passing(headers: Iterable[tuple[str, str]], dropped: frozenset[str]) -> list[tuple[str, str]]:
    """Return the headers that are neither dropped by name nor listed in a `Connection` header, and can be written.

    aiohttp accepts control characters in the headers of a response, and refuses to write them.
    """
    headers = [pair for pair in headers if pair[1].isprintable() or not _CONTROL.search(pair[1])]
    named = {
        token.strip().lower() for name, value in headers if name.lower() == "connection" for token in value.split(",")
    }
    return [(name, value) for name, value in headers if name.lower() not in dropped and name.lower() not in named]
