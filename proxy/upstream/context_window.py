"""Requests to an engine before a call: token counts, space in its context window, system messages, image tokens.

Prompts are counted for `cap: {max_tokens: auto}` and for clients that request a count. If an engine cannot count, the
request is sent unchanged.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import orjson

from proxy.errors import EngineError
from proxy.protocols.dialects.base import Dialect, TranslationOptions
from proxy.protocols.engines.base import (
    CallOptions,
    Counted,
    read_count,
    read_ids,
    token_count_request,
    tokenize_request,
)
from proxy.protocols.plan import Plan, TranslatedCall, edit, with_image_tokens
from proxy.protocols.sampling import bound_of, served_as
from proxy.telemetry.logs import LOG
from proxy.upstream.client import Upstream
from proxy.upstream.concurrency import LARGE_BYTES, off_loop
from proxy.upstream.endpoint import Endpoint

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
    """Return the number of tokens that the context window leaves for a completion, to cap its maximum.

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


NAMES: Final = (
    "<|image_pad|>",  # Qwen-VL
    "<image>",  # LLaVA, PaliGemma
    "<|image|>",  # GLM-V
    "<image_soft_token>",  # Gemma 3
    "<IMG_CONTEXT>",  # InternVL
    "<|media_pad|>",  # Kimi-VL
)
_TIMEOUT_S: Final = 2  # a call waits for it


async def with_placeholders(upstream: Upstream, endpoint: Endpoint, plan: Plan) -> Plan:
    """Return the plan of a call with images, with the placeholder tokens that its prompt may have."""
    tokens = endpoint.settings.image_tokens
    if tokens is None:
        model = plan.model_served or ""
        tokens = await endpoint.image_tokens.get(model, lambda: _looked_up(upstream, endpoint, plan.model_served))
    return with_image_tokens(plan, tokens or ())


async def _looked_up(upstream: Upstream, endpoint: Endpoint, model: str | None) -> list[int] | None:
    """Return the ids of the names that are single tokens; None if the engine does not tokenize."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            found = await asyncio.gather(*(_id_of(upstream, endpoint, model, name) for name in NAMES))
    except (EngineError, TimeoutError) as error:
        LOG.warning("Engine %s did not tokenize placeholders of images: %s", endpoint.label, str(error) or "timed out")
        return None
    known = [ids for ids in found if ids is not None]
    return [ids[0] for ids in known if len(ids) == 1] if known else None


async def _id_of(upstream: Upstream, endpoint: Endpoint, model: str | None, name: str) -> "list[int] | None":
    """Return the ids of a name; None if the engine does not return them."""
    request = tokenize_request(endpoint.engine, {"model": model}, name)
    if request is None:
        return None
    status, body = await upstream.post_json(endpoint, request.path, orjson.dumps(request.body))
    ids = read_ids(body) if status == 200 else None
    return None if ids is None else ids.tolist()


_COUNT: Final = "/v1/messages/count_tokens"
_COUNT_TIMEOUT_S: Final = 2  # a call waits for it

# Roles alternate, as some templates require.
_TEXT: Final = "Answer in one word."
_QUESTION: Final = {"role": "user", "content": "Is it so?"}
_SYSTEM: Final = {"role": "system", "content": _TEXT}
_REPLY: Final = {"role": "assistant", "content": "Yes."}


def expected_options(options: TranslationOptions, endpoints: Sequence[Endpoint]) -> TranslationOptions:
    """Return the translation options for the engine that is expected to serve a call: the first one."""
    return endpoints[0].engine.translation_options(options, endpoints[0].version) if endpoints else options


async def options_for(
    upstream: Upstream, endpoint: Endpoint, call: TranslatedCall, models: Mapping[str, str]
) -> TranslationOptions:
    """Return the options for this engine, with what it does with the system and developer messages of a call."""
    options = endpoint.engine.translation_options(call.options, endpoint.version)
    has_inline = call.translation.has_system_turns and any(it["role"] == "system" for it in call.body["messages"][1:])
    if not endpoint.engine.counts_messages or not has_inline:
        return options
    model = str(call.body.get("model") or "")
    served = served_as(model, models) or model
    merges = await endpoint.merges_systems.get(
        served, lambda: _merges(upstream, endpoint, served, options.system_joint)
    )
    return replace(options, merges_systems=bool(merges))


async def _merges(upstream: Upstream, endpoint: Endpoint, model: str, joint: str) -> bool | None:
    """Compare the token counts of both prompts; None if the engine does not count them."""
    apart = {"system": _TEXT, "messages": [_QUESTION, _SYSTEM, _REPLY, _QUESTION]}
    merged = {"system": joint.join((_TEXT, _TEXT)), "messages": [_QUESTION, _REPLY, _QUESTION]}
    counts = []
    for prompt in (apart, merged):
        try:
            body = orjson.dumps({"model": model, **prompt})
            async with asyncio.timeout(_COUNT_TIMEOUT_S):
                _, counted = await upstream.post_json(endpoint, _COUNT, body)
        except (EngineError, TimeoutError) as error:
            LOG.warning("Engine %s did not count the tokens of a prompt: %s", endpoint.label, str(error) or "timed out")
            return None
        counts.append(counted.get("input_tokens") if isinstance(counted, dict) else None)
        if type(counts[-1]) is not int:
            return None
    return counts[0] == counts[1]
