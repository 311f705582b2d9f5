"""Token counts of prompts and the space that they leave in the context window, counted by the engine.

Prompts are counted for `cap: {max_tokens: auto}` and for clients that request a count. If an engine cannot count, the
request is sent unchanged.
"""

from collections.abc import Mapping
from typing import Any, Final

import orjson

from proxy.errors import EngineError
from proxy.protocols.dialects import Dialect
from proxy.protocols.engines import CallOptions
from proxy.protocols.engines.tokenizer_api import Counted, read_count, token_count_request
from proxy.protocols.plan import edit
from proxy.protocols.sampling import bound_of
from proxy.telemetry.logs import LOG
from proxy.upstream import Endpoint, Upstream
from proxy.upstream.concurrency import LARGE_BYTES, off_loop

# A token has at least one byte of the body, which contains all input of the chat template. Templates add less than this
# many tokens (instructions for tools, the date).
_TEMPLATE_TOKENS: Final = 4096


async def count_prompt(
    upstream: Upstream, endpoint: Endpoint, dialect: Dialect, body: Mapping[str, Any], *, body_bytes: int
) -> Counted | None:
    """Return the number of tokens in the prompt of a call, counted by its engine; None if the engine cannot count it."""
    lookup = token_count_request(endpoint.engine, dialect.name, body)
    if lookup is None:
        return None
    text = await off_loop(body_bytes, LARGE_BYTES, orjson.dumps, lookup.body)
    try:
        status, counted = await upstream.post_json(endpoint, lookup.path, text)
        return read_count(counted) if status == 200 else None
    except EngineError as error:
        LOG.warning("Engine %s did not count the tokens of a prompt: %s", endpoint.label, error)
        return None


async def tokens_left(
    upstream: Upstream,
    endpoint: Endpoint,
    options: CallOptions,
    dialect: Dialect,
    body: dict[str, Any],
    *,
    body_bytes: int,
) -> int | None:
    """Return the number of tokens that the context window leaves for a completion whose maximum is capped by it.

    None if no cap is needed: the completion fits in any case, it has no maximum (engines then use what is left),
    nothing is left (the engine rejects the request with its own message), or the engine cannot count.
    """
    fields, unset = edit(body, options, dialect)
    edited = {key: value for key, value in body.items() if key not in unset} | fields
    bound, model = bound_of(dialect.sampling(edited)), str(edited.get("model"))
    window = endpoint.windows.get(model)
    if bound is None or (window is not None and bound + body_bytes + _TEMPLATE_TOKENS <= window):
        return None
    counted = await count_prompt(upstream, endpoint, dialect, edited, body_bytes=body_bytes)
    if counted is None:
        return None
    endpoint.windows.put(model, counted.window)
    left = counted.window - counted.tokens
    return left if left > 0 else None
