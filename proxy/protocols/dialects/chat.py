"""OpenAI's chat completions, forwarded without translation."""

from collections.abc import Collection, Mapping
from typing import Any

from proxy.protocols.accumulators import ChatAccumulator
from proxy.protocols.dialects.base import (
    DialectName,
    OpenAIBodies,
    ResponseOptions,
    is_on,
    requested_usage,
    sample_count,
)


class Chat(OpenAIBodies):
    """`POST /v1/chat/completions`: one prompt, `n` choices."""

    name: DialectName = "chat"
    accumulator = ChatAccumulator
    prompt_field = "messages"

    def response_options(self, body: Mapping[str, Any]) -> ResponseOptions:
        """Read the options; `logprobs` is a boolean."""
        samples = sample_count(body)
        return ResponseOptions(
            token_ids=is_on(body.get("return_token_ids")),
            logprobs=is_on(body.get("logprobs")),
            usage=requested_usage(body)[0],
            samples=samples,
            choices=samples,
        )

    def sampling(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the body: the parameters are on its top level."""
        return body

    def prompt_ids(self, body: Mapping[str, Any]) -> list[list[int]] | None:
        """Return None: messages are text."""
        return None

    def place_sampling(
        self, body: Mapping[str, Any], fields: Mapping[str, Any], unset: Collection[str]
    ) -> tuple[dict[str, Any], set[str]]:
        """Return the fields of the body's top level."""
        return dict(fields), set(unset)
