"""The token annotations that a client requests for its responses, by headers or by its rollout.

Headers take precedence. A call whose annotations the engine or its tokenizer cannot provide is rejected before it is sent.
"""

from collections.abc import Mapping
from typing import Any, Final

from proxy.api.context import Context
from proxy.errors import NotValid
from proxy.protocols.dialects import Dialect
from proxy.protocols.token_annotations import TokenAnnotations
from proxy.rollouts.rollout import Rollout
from proxy.upstream import Endpoint, choose

TOKENS: Final = "X-Reply-Tokens"
IDS: Final = "X-Reply-Ids"
_KNOWN: Final = {TOKENS: "pieces", IDS: "choices"}
_TELL_ALL: Final = ("vllm", "sglang")  # engines whose replies have every id, of prompts too


async def read_token_reply(
    context: Context, rollout: Rollout, headers: Mapping[str, str], dialect: Dialect, body: Mapping[str, Any]
) -> TokenAnnotations | None:
    """What this call's client wants; None if nothing beside the usual. Raises NotValid for what cannot be told."""
    tokens = headers.get(TOKENS) or rollout.reply.get("tokens")
    ids = headers.get(IDS) or rollout.reply.get("ids")
    if tokens is None and ids is None:
        return None
    for header, said in ((TOKENS, tokens), (IDS, ids)):
        if said not in (None, _KNOWN[header]):
            raise NotValid(f"{header} is {said!r}, and can be {_KNOWN[header]!r} only", param=header)
    endpoint = choose(context.upstream.endpoints, rollout.rollout_id)
    fault = await context.upstream.ensure_detected(endpoint)
    if fault is None and endpoint.kind not in _TELL_ALL:
        raise NotValid(
            f"{TOKENS} and {IDS} need an engine whose replies have all ids ({' or '.join(_TELL_ALL)}), and "
            f"{endpoint.settings.public_label} is {endpoint.kind}",
            param=IDS if tokens is None else TOKENS,
        )
    if tokens is None:
        return TokenAnnotations(ids=True)
    _check_pieces(endpoint, dialect, body)
    tokenizer = await context.tokenizers.get(endpoint.settings.label)
    if tokenizer is None:
        raise NotValid(
            f"{TOKENS} needs a tokenizer for {endpoint.settings.public_label}: set `tokenizer` of its endpoint in the "
            "configuration to its folder or its name on the hub, and pip install 'tokentape[tokenizer]'",
            param=TOKENS,
        )
    return TokenAnnotations(tokenizer.pieces, ids=ids is not None)


def _check_pieces(endpoint: Endpoint, dialect: Dialect, body: Mapping[str, Any]) -> None:
    if dialect.name != "chat":
        raise NotValid(f"{TOKENS} is for /v1/chat/completions; this is a call of {dialect.name}", param=TOKENS)
    if endpoint.kind == "sglang" and body.get("top_logprobs"):
        raise NotValid(
            f"SGLang names alternatives by their text alone: {TOKENS} goes with top_logprobs on vLLM only",
            param="top_logprobs",
        )
