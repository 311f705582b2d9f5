"""The token annotations that a client requests for its responses, by headers or by its rollout.

Headers take precedence. If the engine or its tokenizer cannot provide an annotation, the call is rejected before it is sent.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from proxy.api.context import Context
from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects import Dialect
from proxy.protocols.engines import ENGINES
from proxy.protocols.token_annotations import TokenAnnotations
from proxy.rollouts.rollout import Rollout
from proxy.upstream import Endpoint, choose

TOKENS: Final = "X-Reply-Tokens"
IDS: Final = "X-Reply-Ids"
_KNOWN: Final = {TOKENS: "pieces", IDS: "choices"}
_RETURNS_ALL: Final = tuple(kind for kind, engine in ENGINES.items() if engine.returns_prompt_ids)


async def read_token_annotations(
    context: Context,
    endpoints: Sequence[Endpoint],
    rollout: Rollout,
    headers: Mapping[str, str],
    dialect: Dialect,
    body: Mapping[str, Any],
) -> TokenAnnotations | None:
    """Return the token annotations that a call requests, None for none. `endpoints` are those that serve its model.

    Raises UnprocessableRequest if a value is unknown, or the engine or its tokenizer cannot provide the annotations.
    """
    tokens = headers.get(TOKENS) or rollout.reply.get("tokens")
    ids = headers.get(IDS) or rollout.reply.get("ids")
    if tokens is None and ids is None:
        return None
    for header, value in ((TOKENS, tokens), (IDS, ids)):
        if value not in (None, _KNOWN[header]):
            raise UnprocessableRequest(
                f"Invalid {header} {value!r}; the only valid value is {_KNOWN[header]!r}.", param=header
            )
    endpoint = choose(endpoints, rollout.rollout_id)
    fault = await context.upstream.ensure_detected(endpoint)
    if fault is None and endpoint.kind not in _RETURNS_ALL:
        raise UnprocessableRequest(
            f"{TOKENS} and {IDS} require an engine that returns all token ids "
            f"({' or '.join(_RETURNS_ALL)}); {endpoint.settings.public_label} is {endpoint.kind}.",
            param=IDS if tokens is None else TOKENS,
        )
    if tokens is None:
        return TokenAnnotations(ids=True)
    _check_pieces(endpoint, dialect, body)
    tokenizer = await context.tokenizers.get(endpoint.label)
    if tokenizer is None:
        raise UnprocessableRequest(
            f"{TOKENS} requires a tokenizer for {endpoint.settings.public_label}: set "
            "engines.endpoints[].tokenizer, and install transformers.",
            param=TOKENS,
        )
    return TokenAnnotations(tokenizer.pieces, ids=ids is not None)


def _check_pieces(endpoint: Endpoint, dialect: Dialect, body: Mapping[str, Any]) -> None:
    if dialect.name != "chat":
        raise UnprocessableRequest(
            f"{TOKENS} is supported for /v1/chat/completions only, not for {dialect.name}.", param=TOKENS
        )
    if not endpoint.engine.names_alternatives and body.get("top_logprobs"):
        raise UnprocessableRequest(
            f"{TOKENS} with top_logprobs requires vLLM; SGLang returns alternatives as text only.",
            param="top_logprobs",
        )
