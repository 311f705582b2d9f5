"""Requests to the configured engines for Atropos' proxy: models, texts of ids, rendered prompts.

Requests are sent to configured engines only, never to a URL from a request.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, Final

import orjson

from proxy.api.context import Context
from proxy.config.addresses import base_url
from proxy.errors import BadRequest, EngineError, NotFound
from proxy.protocols.engines.tokenizer_api import template_fields
from proxy.upstream import Endpoint
from proxy.upstream.client import body_of, json_of

_TIMEOUT_S: Final = 2
_RENDERS: Final = ("vllm", "sglang")  # engines whose /tokenize renders messages with the chat template


def endpoint_named(context: Context, url: str) -> Endpoint:
    """Return the configured engine with this base URL, with or without `/v1` and slashes. Raises NotFound, which lists all."""
    known = {endpoint.settings.url: endpoint for endpoint in context.upstream.endpoints}
    try:
        return known[base_url(url)]
    except (KeyError, ValueError):
        raise NotFound(
            f"No server with base_url {url!r}. Available: {list(known)}. Only configured engines "
            "(engines.endpoints) can be used."
        ) from None


async def served_model(context: Context, endpoint: Endpoint) -> str | None:
    """Return the model that an engine serves; None if it is unknown."""
    try:
        listed = await asyncio.wait_for(_fetch_json(context, endpoint, "GET", "/v1/models", None), _TIMEOUT_S)
        return str(listed["data"][0]["id"])
    except (EngineError, NotRendered, TimeoutError, KeyError, IndexError, TypeError):
        return None


class NotRendered(BadRequest):
    """A prompt could not be rendered; the message has the reason."""

    def __init__(self, reason: object) -> None:
        super().__init__(f"Failed to render prompt: {reason}")


async def rendered(context: Context, endpoint: Endpoint, call: Mapping[str, Any]) -> tuple[str | None, list[int]]:
    """Return the text (None if unknown) and the ids of a chat call's prompt. Raises NotRendered.

    They come from the engine's tokenize endpoint, which receives all fields that affect the chat template, so the prompt is the
    one that the engine would sample from.
    """
    await context.upstream.ensure_detected(endpoint)
    if endpoint.kind not in _RENDERS:
        raise NotRendered(f"{endpoint.settings.public_label} ({endpoint.kind}) does not support /tokenize for messages")
    body = {**({"model": call["model"]} if "model" in call else {}), **template_fields(endpoint.kind, call)}
    try:
        response = await _fetch_json(context, endpoint, "POST", "/tokenize", body)
    except EngineError as fault:
        raise NotRendered(fault.public) from fault
    ids = response.get("tokens") if isinstance(response, dict) else None
    if not isinstance(ids, list) or set(map(type, ids)) - {int}:
        raise NotRendered("The engine's response to POST /tokenize has no token ids")
    return (await detokenize(context, endpoint, [ids]))[0], ids


async def detokenize(context: Context, endpoint: Endpoint, id_lists: Sequence[Sequence[int]]) -> list[str | None]:
    """Return the texts of lists of ids, special tokens included, from the endpoint's tokenizer or else from the engine.

    A text is None if neither is available.
    """
    tokenizer = await context.tokenizers.get(endpoint.label)
    if tokenizer is not None:
        return await asyncio.to_thread(lambda: [tokenizer.decode(ids) for ids in id_lists])
    await context.upstream.ensure_detected(endpoint)
    if endpoint.kind not in _RENDERS:
        return [None] * len(id_lists)
    return list(await asyncio.gather(*(_detokenized(context, endpoint, ids) for ids in id_lists)))


async def _detokenized(context: Context, endpoint: Endpoint, ids: Sequence[int]) -> str | None:
    options = {"skip_special_tokens": False} if endpoint.kind == "sglang" else {}  # vLLM always includes them
    try:
        response = await _fetch_json(context, endpoint, "POST", "/detokenize", {"tokens": list(ids), **options})
    except (EngineError, NotRendered):
        return None
    name = "text" if endpoint.kind == "sglang" else "prompt"
    text = response.get(name) if isinstance(response, dict) else None
    return text if isinstance(text, str) else None


async def _fetch_json(context: Context, endpoint: Endpoint, method: str, path: str, body: Any) -> Any:
    """Send a request to an engine and return the JSON of its response.

    Raises EngineError, or NotRendered for a status other than 200.
    """
    headers = () if body is None else (("Content-Type", "application/json"),)
    text = None if body is None else orjson.dumps(body)
    with closing(await context.upstream.send(endpoint, method, path, headers=headers, body=text)) as response:
        if response.status == 200:
            return await json_of(response)
        error = (await body_of(response))[:300].decode("utf-8", "replace")
    raise NotRendered(f"{endpoint.settings.name or 'the engine'} returned status {response.status}: {error}")
