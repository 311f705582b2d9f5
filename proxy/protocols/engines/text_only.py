"""Any other OpenAI-compatible endpoint, without token ids.

Calls are recorded as text and flagged `no_token_ids`. Nothing is added to a request, since unknown servers may refuse unknown
fields, and no placeholder is used for an id.
"""

from collections.abc import Collection, Mapping
from typing import Any

from proxy.protocols.dialects.base import DialectName
from proxy.protocols.engines.base import (
    CallOptions,
    FollowUpRequest,
    Injection,
    Json,
    Sampled,
    StreamShape,
    StripRules,
    Tokens,
    has_grammar,
    index_of,
)


class TextOnly:
    """An endpoint that returns text only."""

    kind = "plain"
    logprobs_mode: str | None = None  # unknown
    always_sends_usage = False
    sums_usage = True
    verifies_renderings = False
    unnamed_model: str | None = None
    headers_read: Collection[str] = ()
    shape = StreamShape(
        head=frozenset({"id", "object", "created", "model", "system_fingerprint"}),
        role={"role": "assistant", "content": ""},
        delta={},
        call_delta={},
    )

    def inject(self, dialect: DialectName, body: Mapping[str, Any], options: CallOptions) -> Injection:
        """Inject nothing."""
        return Injection({}, StripRules())

    def constrains(self, sampling: Mapping[str, Any], logprobs_mode: str | None) -> bool:
        """Return whether the request has a grammar; logprobs without ids are not used anyway."""
        return has_grammar(sampling, ())

    def can_replay(self, dialect: DialectName, body: Mapping[str, Any]) -> bool:
        """Return true: it is unknown what such a server refuses."""
        return True

    def strip(self, dialect: DialectName, response: Json, rules: StripRules) -> Json:
        """Return the response: nothing was injected."""
        return response

    def strip_chunk(self, dialect: DialectName, chunk: Json, rules: StripRules) -> Json | None:
        """Return the chunk: nothing was injected."""
        return chunk

    def prompt_ids_fields(self, dialect: DialectName, ids: Any) -> Json | None:
        """Return None: unknown servers accept none."""
        return None

    def must_send_usage(self, dialect: DialectName, finish: Json) -> bool:
        """Return false: unknown."""
        return False

    def follow_up(self, dialect: DialectName, body: Mapping[str, Any], response: Json) -> FollowUpRequest | None:
        """Return None: there is no tokenizer endpoint."""
        return None

    def tokens(self, dialect: DialectName, body: Mapping[str, Any], response: Json, found: Any = None) -> Tokens:
        """Return how each choice ended, without ids or logprobs."""
        choices = response.get("choices") or ()
        return Tokens(None, tuple(_sampled(choice) for choice in choices))


def _sampled(choice: Json) -> Sampled:
    return Sampled(
        index=index_of(choice),
        prompt_ids=None,
        ids=None,
        logprobs=None,
        finish_reason=choice.get("finish_reason"),
        stop_reason=None,
    )
