"""Plain: any OpenAI-compatible endpoint. It gives no ids, so there is nothing to ask and nothing to hide.

Holds the engine of last resort: calls are recorded as text and flagged `no_token_ids`. Nothing is added to a body, since
unknown servers may refuse what they do not know, and no placeholder is ever made up for an id.
"""

from collections.abc import Mapping
from typing import Any

from proxy.protocols.dialects.base import DialectName
from proxy.protocols.engines.base import (
    FollowUpRequest,
    Injection,
    InjectionRequest,
    Json,
    Sampled,
    StreamShape,
    StripRules,
    Tokens,
    index_of,
)
from proxy.protocols.engines.constraints import has_grammar


class TextOnly:
    """Text only."""

    kind = "plain"
    logprobs_mode: str | None = None  # nobody says what a server like this means by them
    unbounded: frozenset[str] = frozenset()
    always_sends_usage = False
    shape = StreamShape(
        head=frozenset({"id", "object", "created", "model", "system_fingerprint"}),
        role={"role": "assistant", "content": ""},
        delta={},
        call_delta={},
    )

    def inject(self, request: InjectionRequest) -> Injection:
        """Nothing."""
        return Injection({}, StripRules())

    def constrains(self, sampling: Mapping[str, Any], logprobs_mode: str | None) -> bool:
        """A grammar may be in them; it has no logprobs of ids in any case."""
        return has_grammar(sampling, ())

    def can_replay(self, dialect: DialectName, body: Mapping[str, Any]) -> bool:
        """Nobody knows what such a server refuses."""
        return True

    def strip(self, dialect: DialectName, response: Json, rules: StripRules) -> Json:
        """Nothing was asked."""
        return response

    def strip_chunk(self, dialect: DialectName, chunk: Json, rules: StripRules) -> Json | None:
        """Nothing was asked."""
        return chunk

    def must_send_usage(self, dialect: DialectName, finish: Json) -> bool:
        """Nobody knows."""
        return False

    def follow_up(self, dialect: DialectName, body: Mapping[str, Any], response: Json) -> FollowUpRequest | None:
        """Nothing: there is nobody to ask."""
        return None

    def tokens(self, dialect: DialectName, body: Mapping[str, Any], response: Json, found: Any = None) -> Tokens:
        """How each choice ended; no ids, and logprobs of no ids are of no use."""
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
