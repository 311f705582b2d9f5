"""The model's window: how many tokens a call may still sample beside its prompt.

Holds the counting of prompts by the engine that is to answer them, where it matters: for `cap: {max_tokens: auto}`, and for
clients that ask for a count. Nothing is ever guessed: what an engine does not count stays as the client asked.
"""

from collections.abc import Mapping
from typing import Any, Final

import orjson

from proxy.errors import EngineFault
from proxy.protocols.dialects import Dialect
from proxy.protocols.engines.tokenizer_api import Counted, read_count, token_count_request
from proxy.protocols.plan import CallOptions, edit
from proxy.protocols.sampling import bound_of
from proxy.telemetry.logs import LOG
from proxy.upstream import Endpoint, Upstream
from proxy.upstream.concurrency import off_loop

# A token is at least a byte of a body, which spells out all that a template is given; what templates add of their own
# (how to call tools, today's date) is less than this.
_OF_TEMPLATES: Final = 4096


async def count_prompt(
    upstream: Upstream, endpoint: Endpoint, dialect: Dialect, body: Mapping[str, Any], *, body_bytes: int
) -> Counted | None:
    """Return the number of tokens in the prompt of a call, counted by its engine; None if the engine cannot count it."""
    lookup = token_count_request(endpoint.kind, dialect.name, body)
    if lookup is None:
        return None
    text = await off_loop(body_bytes, orjson.dumps, lookup.body)
    try:
        status, counted = await upstream.post_json(endpoint, lookup.path, text)
        return read_count(counted) if status == 200 else None
    except EngineFault as error:
        LOG.warning("%s could not count a prompt: %s", endpoint.settings.label, error)
        return None


async def tokens_left(
    upstream: Upstream,
    endpoint: Endpoint,
    terms: CallOptions,
    dialect: Dialect,
    body: dict[str, Any],
    *,
    body_bytes: int,
) -> int | None:
    """What the window leaves for a call whose bound on tokens is capped by that.

    None where it needs no cap: it surely fits, it has no bound (engines then take what is left), nothing is left (the
    engine says so better), or the engine cannot count.
    """
    if not terms.sampling.caps_by_window:
        return None
    fields, unset = edit(body, terms, dialect)
    edited = {key: value for key, value in body.items() if key not in unset} | fields
    bound = bound_of(dialect.sampling(edited))
    if bound is None or (endpoint.window is not None and bound + body_bytes + _OF_TEMPLATES <= endpoint.window):
        return None
    counted = await count_prompt(upstream, endpoint, dialect, edited, body_bytes=body_bytes)
    if counted is None:
        return None
    endpoint.window = counted.window
    left = counted.window - counted.tokens
    return left if left > 0 else None
