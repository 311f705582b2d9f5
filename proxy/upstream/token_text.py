"""The texts of single tokens, from a tokenizer or an engine, with a bounded cache.

The texts are for display only: nothing that is recorded or exported contains them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Final, TypeAlias

import orjson

from proxy.errors import EngineError, UnprocessableRequest
from proxy.protocols.engines.tokenizer_api import read_text, text_request
from proxy.telemetry.logs import LOG
from proxy.upstream import Endpoint, Upstream
from proxy.upstream.tokenizers import Tokenizers

_MAX_TEXTS: Final = 300_000  # two large vocabularies
_CONCURRENCY: Final = 8
_TIMEOUT_S: Final = 3.0
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"  # decoders write it for bytes that are not valid UTF-8

Vocabulary: TypeAlias = tuple[str, ...]  # endpoint and model


class TokenTexts:
    """A cache of token texts by vocabulary and id. The value is None for a token that is only a part of a character."""

    def __init__(self, max_texts: int = _MAX_TEXTS) -> None:
        self._max_texts = max_texts
        self._known: dict[tuple[Vocabulary, int], str | None] = {}

    def __len__(self) -> int:
        return len(self._known)

    async def get(
        self, vocabulary: Vocabulary, ids: Collection[int], ask: Callable[[int], Awaitable[str | None]]
    ) -> Mapping[int, str | None]:
        """Return the texts of these ids; ids are missing if `ask` returned None or timed out.

        After the first None no further id is requested: the engine has no detokenizer or is unreachable.
        """
        missing = [token for token in dict.fromkeys(ids) if token >= 0 and (vocabulary, token) not in self._known]
        found: dict[int, str | None] = {}
        remaining = iter(missing)

        async def worker() -> None:
            for token in remaining:  # one iterator for all workers
                text = await ask(token)
                if text is None:
                    missing.clear()  # ends all workers
                else:
                    found[token] = readable(text)

        with suppress(TimeoutError):
            async with asyncio.timeout(_TIMEOUT_S), asyncio.TaskGroup() as group:
                for _ in range(min(_CONCURRENCY, len(missing))):
                    group.create_task(worker())
        known = {token: self._known[vocabulary, token] for token in ids if (vocabulary, token) in self._known}
        self._keep(vocabulary, found)
        return {**known, **found}

    def _keep(self, vocabulary: Vocabulary, found: Mapping[int, str | None]) -> None:
        for token, text in found.items():
            self._known[vocabulary, token] = text
        while len(self._known) > self._max_texts:
            del self._known[next(iter(self._known))]


def readable(text: str) -> str | None:
    """Return a token's text; None if it is empty or part of a character."""
    return text if text and _REPLACEMENT not in text else None


async def detokenize_at_engine(
    upstream: Upstream, endpoint: Endpoint, ids: Sequence[int], *, new_connection: bool = False
) -> str | None:
    """Return the text of ids from the engine; None if it cannot detokenize them."""
    lookup = text_request(endpoint.engine, ids)
    if lookup is None:
        return None
    try:
        status, body = await upstream.post_json(
            endpoint, lookup.path, orjson.dumps(lookup.body), new_connection=new_connection
        )
        return read_text(endpoint.engine, body) if status == 200 else None
    except EngineError:
        return None


async def text_from_ids(
    upstream: Upstream, tokenizers: Tokenizers, engine: str, ids: Sequence[int], *, new_connection: bool
) -> str | None:
    """Return the text of ids from the tokenizer of the endpoint, or else from the engine."""
    try:
        tokenizer = await tokenizers.get(engine)
    except UnprocessableRequest as error:
        LOG.warning("%s", error)
        tokenizer = None
    if tokenizer is not None:
        try:
            return await asyncio.to_thread(tokenizer.decode, ids)
        except UnprocessableRequest as error:
            LOG.warning("Tokenizer of engine %s: %s", engine, error)
    endpoint = upstream.endpoint_named(engine)
    return (
        None if endpoint is None else await detokenize_at_engine(upstream, endpoint, ids, new_connection=new_connection)
    )
