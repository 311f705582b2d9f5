"""TokenTape's own headers, and the headers of clients that are not sent to engines."""

from typing import Final

from proxy.upstream.http_client import HOP_BY_HOP

ROLLOUT_HEADER: Final = "X-Rollout-Id"  # names the rollout, in requests and responses
GROUP_HEADER: Final = "X-Rollout-Group"
CONTINUATION_HEADER: Final = "X-Rollout-Continuation"  # the continuation mode of one call
AGENT_HEADER: Final = "X-Agent-Name"  # names the agent of a call, which is the name of its thread
STEP_HEADER: Final = "X-Step-Id"  # of responses

# API keys of TokenTape, which are never forwarded; what TokenTape sets itself; names of rollouts.
NOT_SENT: Final = HOP_BY_HOP | {
    "authorization", "x-api-key", "x-goog-api-key", "host", "content-length", "content-encoding", "accept-encoding", "expect",
    ROLLOUT_HEADER.lower(), GROUP_HEADER.lower(), CONTINUATION_HEADER.lower(), "x-reply-tokens", "x-reply-ids",
    AGENT_HEADER.lower(),
}  # fmt: skip
