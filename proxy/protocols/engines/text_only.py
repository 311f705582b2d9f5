"""Any other OpenAI-compatible endpoint, without token ids.

Calls are recorded as text and flagged `no_token_ids`. Nothing is added to a request, since unknown servers may refuse unknown
fields, and no placeholder is used for an id.
"""

from collections.abc import Mapping
from typing import Any

from proxy.protocols.dialects.base import DialectName, Json
from proxy.protocols.engines.base import BOTH, Engine, Quirk, Sampled, StreamShape, Tokens, always, index_of


class TextOnly(Engine):
    """An endpoint that returns text only."""

    kind = "plain"
    quirks = (Quirk(BOTH, "always", "No ids.", ("no_token_ids",), "by definition", always),)
    returns_ids = False
    always_sends_usage = False
    shape = StreamShape(frozenset({"id", "object", "created", "model", "system_fingerprint"}))

    def tokens(self, dialect: DialectName, body: Mapping[str, Any], response: Json, found: Any = None) -> Tokens:
        """Return how each choice ended, without ids or logprobs."""
        choices = response.get("choices") or ()
        return Tokens(None, tuple(Sampled(index_of(it), finish_reason=it.get("finish_reason")) for it in choices))
