"""The engine's renderings and texts for the continuation of one call."""

from collections.abc import Generator, Mapping
from typing import Any, Final, TypeVar, cast

import orjson

from proxy.continuation.types import Detokenize, Lookup, LookupFailed, LookupResult, Reason, Render
from proxy.protocols.engines.base import (
    FollowUpRequest,
    read_ids,
    read_text,
    read_window,
    render_request,
    text_request,
    tokenize_request,
)
from proxy.protocols.json_texts import KnownPrompt
from proxy.trajectory.json_bytes import size_of
from proxy.upstream.client import Upstream
from proxy.upstream.concurrency import LONG_IDS, PLAIN_BYTES, off_loop
from proxy.upstream.endpoint import Endpoint

T = TypeVar("T")

_BYTES_PER_ID: Final = 6  # in JSON
_KEPT_IDS: Final = 8  # the texts of at most so many ids are kept
PER_TEXT_TOKEN: Final = 4  # ids, which are compared in C, take as long as one token of text


class PromptLookups:
    """Serve the lookups of a continuation at one endpoint. `body` is the chat or completions body that would be sent.

    `known`: ids with which renderings may begin. `rendered`: the newest rendering. `fault`: why the endpoint serves none, once
    a lookup has shown that.
    """

    def __init__(
        self,
        upstream: Upstream,
        endpoint: Endpoint,
        body: Mapping[str, Any],
        body_bytes: int,
        rollout_id: str,
        known: KnownPrompt | None = None,
    ) -> None:
        self._upstream = upstream
        self._endpoint = endpoint
        self._body = body
        self._body_bytes = body_bytes
        self._rollout_id = rollout_id
        self._model = str(body.get("model"))
        self._known = known
        self.rendered: KnownPrompt | None = None
        self.fault: Reason | None = None

    async def run(self, lookups: Generator[Lookup, LookupResult, T], length: int) -> T:
        """Run a continuation to its result; `length`: about how many tokens its texts have, and its ids count a quarter.

        Raises:
            LookupFailed: The engine could not serve a lookup.
            EngineError: A request failed.
        """
        result: LookupResult = None
        while True:
            more = 0 if result is None else len(result)
            size = length + (more if isinstance(result, str) else more // PER_TEXT_TOKEN)
            lookup, value = await off_loop(size, LONG_IDS, _advance, lookups, result)
            if lookup is None:
                return cast("T", value)
            result = await self.get(lookup)

    async def get(self, lookup: Lookup) -> LookupResult:
        """Return the result of a lookup; None if the engine rejects messages. Raises LookupFailed, EngineError."""
        if not isinstance(lookup, Detokenize):
            return await self._ids(lookup)
        # Stop tokens, and the ends of prompts, which are the template's.
        is_kept, texts, key = (
            len(lookup.ids) <= _KEPT_IDS,
            self._endpoint.token_texts,
            (self._model, *lookup.ids[:_KEPT_IDS]),
        )
        if is_kept and (known := texts.get(key)) is not None:
            return known
        request = text_request(self._endpoint.engine, lookup.ids)
        body = await self._post(request, _BYTES_PER_ID * len(lookup.ids))
        text = read_text(self._endpoint.engine, body)
        if text is None:
            raise LookupFailed("the engine returned no text for token ids")
        if is_kept:
            texts.put(key, text)
        return text

    async def _ids(self, lookup: Lookup) -> LookupResult:
        engine = self._endpoint.engine
        request = (
            render_request(engine, self._body, lookup.messages)
            if isinstance(lookup, Render)
            else tokenize_request(engine, self._body, lookup.text)  # type: ignore[union-attr]
        )
        # The history contains the engine's own replies, which may be longer than what the agent sends back.
        texts = lookup.messages if isinstance(lookup, Render) else [lookup.text]  # type: ignore[union-attr]
        known = self._known if isinstance(lookup, Render) else None
        body = await self._post(request, self._body_bytes + size_of(texts, PLAIN_BYTES), known)
        if body is None:
            return None
        tokens = body.get("tokens") if isinstance(body, dict) else None
        if isinstance(tokens, KnownPrompt):
            self.rendered = tokens
        ids = await off_loop(len(tokens) if isinstance(tokens, list) else 0, LONG_IDS, read_ids, body)
        if ids is None:
            raise LookupFailed("the engine returned no token ids for messages")
        if window := read_window(body):
            self._endpoint.windows.put(self._model, window)
        return ids

    async def _post(self, request: FollowUpRequest | None, size: int, known: KnownPrompt | None = None) -> Any:
        """Return the body of a response; None for a request that the engine rejects."""
        if request is None:
            self.fault = "unsupported"
            raise LookupFailed("the engine has no tokenizer API")
        text = await off_loop(size, PLAIN_BYTES, orjson.dumps, request.body)
        status, body = await self._upstream.post_json(self._endpoint, request.path, text, known=known)
        if status == 200:
            return body
        if status in {405, 501} or (status == 404 and not await self._serves(request)):
            self.fault = "unsupported"
            self._endpoint.continuation_fault.show(self._rollout_id, "unsupported")
        if status in {400, 422}:
            return None
        raise LookupFailed(f"POST {request.path} returned {status}")

    async def _serves(self, request: FollowUpRequest) -> bool:
        """Return whether an endpoint that returned 404 has this route: vLLM 0.32 returns it for an unknown model, too."""
        if "model" not in request.body:
            return False
        status, _ = await self._upstream.post_json(self._endpoint, request.path, b'{"prompt": "a"}')
        return status == 200


def _advance(lookups: Generator[Lookup, LookupResult, T], result: LookupResult) -> "tuple[Lookup | None, Any]":
    """Return the next lookup, or None and the value of the generator."""
    try:
        return lookups.send(result), None
    except StopIteration as end:
        return None, end.value
