"""Any other OpenAI-compatible endpoint, without token ids.

Calls are recorded as text and flagged `no_token_ids`. Nothing is added to a request, since unknown servers may refuse unknown
fields, and no placeholder is used for an id.
"""

from collections.abc import Mapping
from typing import Any

from proxy.protocols.dialects.base import DialectName
from proxy.protocols.engines.base import Engine, Json, Quirk, Sampled, StreamShape, Tokens, index_of
from proxy.protocols.engines.quirks import BOTH, always


class TextOnly(Engine):
    """An endpoint that returns text only."""

    kind = "plain"
    quirks = (Quirk(BOTH, "always", "No ids.", ("no_token_ids",), "by definition", always),)
    returns_ids = False
    always_sends_usage = False
    shape = StreamShape(
        head=frozenset({"id", "object", "created", "model", "system_fingerprint"}),
        role={"role": "assistant", "content": ""},
        delta={},
        call_delta={},
    )

    def tokens(self, dialect: DialectName, body: Mapping[str, Any], response: Json, found: Any = None) -> Tokens:
        """Return how each choice ended, without ids or logprobs."""
        return Tokens(None, tuple(_sampled(choice) for choice in response.get("choices") or ()))


def _sampled(choice: Json) -> Sampled:
    return Sampled(
        index=index_of(choice),
        prompt_ids=None,
        ids=None,
        logprobs=None,
        finish_reason=choice.get("finish_reason"),
        stop_reason=None,
    )
