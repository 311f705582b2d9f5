"""Requests to the configured engines for Atropos' proxy: models, texts of ids, rendered prompts.

Requests are sent to configured engines only, never to a URL from a request.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from proxy.api.context import Context
from proxy.config.addresses import base_url
from proxy.errors import BadRequest, EngineError, NotFound
from proxy.protocols.engines.tokenizer_api import template_fields
from proxy.upstream import Endpoint

_WITHIN_S: Final = 2
_RENDERS: Final = (
    "vllm",
    "sglang",
)  # /tokenize renders messages by the template that their chat does, /detokenize reverses


def endpoint_named(context: Context, url: str) -> Endpoint:
    """The configured engine of this base URL, with or without `/v1` and slashes. Raises NotFound, which lists them all."""
    known = {endpoint.settings.url: endpoint for endpoint in context.upstream.endpoints}
    try:
        return known[base_url(url)]
    except (KeyError, ValueError):
        raise NotFound(
            f"No server with base_url {url!r}. Available: {list(known)}. Only configured engines "
            "(engines.endpoints) can be used."
        ) from None


async def model_of(context: Context, endpoint: Endpoint) -> str | None:
    """The model that an engine serves; None if it does not say."""
    try:
        listed = await asyncio.wait_for(_told(context, endpoint, "GET", "/v1/models", None), _WITHIN_S)
        return str(listed["data"][0]["id"])
    except (EngineError, NotRendered, TimeoutError, KeyError, IndexError, TypeError):
        return None


class NotRendered(BadRequest):
    """A prompt that could not be rendered; the sentence says why."""

    def __init__(self, why: object) -> None:
        super().__init__(f"Failed to render prompt: {why}")


async def rendered(context: Context, endpoint: Endpoint, call: Mapping[str, Any]) -> tuple[str | None, list[int]]:
    """The prompt that a chat call has: its text, where it can be known, and its ids. Raises NotRendered.

    The engine itself is asked, with what decides its template in chat, so that it is the prompt that would be sampled from.
    """
    await context.upstream.ensure_detected(endpoint)
    if endpoint.kind not in _RENDERS:
        raise NotRendered(f"{endpoint.settings.public_label} ({endpoint.kind}) does not support /tokenize for messages")
    asked = {**({"model": call["model"]} if "model" in call else {}), **template_fields(endpoint.kind, call)}
    try:
        told = await _told(context, endpoint, "POST", "/tokenize", asked)
    except EngineError as fault:
        raise NotRendered(fault.public) from fault
    ids = told.get("tokens") if isinstance(told, dict) else None
    if not isinstance(ids, list) or set(map(type, ids)) - {int}:
        raise NotRendered("The engine's response to POST /tokenize has no token ids")
    return (await texts_of(context, endpoint, [ids]))[0], ids


async def texts_of(context: Context, endpoint: Endpoint, several: Sequence[Sequence[int]]) -> list[str | None]:
    """The texts of ids, special tokens spelt out: by the endpoint's tokenizer, else by the engine; None where neither can."""
    tokenizer = await context.tokenizers.get(endpoint.settings.label)
    if tokenizer is not None:
        return await asyncio.to_thread(lambda: [tokenizer.decode(ids) for ids in several])
    await context.upstream.ensure_detected(endpoint)
    if endpoint.kind not in _RENDERS:
        return [None] * len(several)
    return list(await asyncio.gather(*(_detokenized(context, endpoint, ids) for ids in several)))


async def _detokenized(context: Context, endpoint: Endpoint, ids: Sequence[int]) -> str | None:
    said = {"skip_special_tokens": False} if endpoint.kind == "sglang" else {}  # vLLM spells them out by itself
    try:
        told = await _told(context, endpoint, "POST", "/detokenize", {"tokens": list(ids), **said})
    except (EngineError, NotRendered):
        return None
    name = "text" if endpoint.kind == "sglang" else "prompt"
    text = told.get(name) if isinstance(told, dict) else None
    return text if isinstance(text, str) else None


async def _told(context: Context, endpoint: Endpoint, method: str, path: str, body: Any) -> Any:
    """The JSON that an engine answers. Raises EngineError, or NotRendered for an answer that is not 200."""
    headers = () if body is None else (("Content-Type", "application/json"),)
    text = None if body is None else orjson.dumps(body)
    async with context.upstream.send(endpoint, method, path, headers=headers, body=text) as answer:
        if answer.status == 200:
            return await answer.json()
        said = (await answer.read())[:300].decode("utf-8", "replace")
    raise NotRendered(f"{endpoint.settings.name or 'the engine'} returned status {answer.status}: {said}")
