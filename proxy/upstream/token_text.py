"""The texts of single tokens, remembered: asked for once, by whoever knows the vocabulary.

Holds the bounded memory and the asking within bounds of time and of questions at once. Who is asked, the tokenizer or the
engine, is the caller's to say. For people to read: nothing that is recorded or exported comes from here.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Final, TypeAlias

import orjson

from proxy.errors import EngineFault, NotValid
from proxy.protocols.engines.tokenizer_api import read_text, text_request
from proxy.telemetry.logs import LOG
from proxy.upstream import Endpoint, Upstream
from proxy.upstream.tokenizers import Tokenizers

_MOST: Final = 300_000  # two large vocabularies
_AT_ONCE: Final = 8
_WITHIN_S: Final = 3.0
_BROKEN: Final = "\N{REPLACEMENT CHARACTER}"  # what decoders write for bytes that are no UTF-8 by themselves

Vocabulary: TypeAlias = tuple[str, ...]  # the endpoint and the model that it served


class TokenTexts:
    """What was learnt of vocabularies, by id; None for a piece that is no text by itself."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._known: dict[tuple[Vocabulary, int], str | None] = {}

    def __len__(self) -> int:
        return len(self._known)

    async def told(
        self, vocabulary: Vocabulary, ids: Collection[int], ask: Callable[[int], Awaitable[str | None]]
    ) -> Mapping[int, str | None]:
        """The texts of these ids as far as they can be had: what is missing was not told, or not in time.

        Whoever tells none for one id is asked for no other: it has no detokenizer, or is away.
        """
        missing = [one for one in dict.fromkeys(ids) if one >= 0 and (vocabulary, one) not in self._known]
        found: dict[int, str | None] = {}
        turns = iter(missing)

        async def asking() -> None:
            for one in turns:  # shared: each of the askers takes the next
                text = await ask(one)
                if text is None:
                    missing.clear()  # ends the turns of all
                else:
                    found[one] = readable(text)

        with suppress(TimeoutError):
            async with asyncio.timeout(_WITHIN_S), asyncio.TaskGroup() as group:
                for _ in range(min(_AT_ONCE, len(missing))):
                    group.create_task(asking())
        known = {one: self._known[vocabulary, one] for one in ids if (vocabulary, one) in self._known}
        self._keep(vocabulary, found)
        return {**known, **found}

    def _keep(self, vocabulary: Vocabulary, found: Mapping[int, str | None]) -> None:
        for one, text in found.items():
            self._known[vocabulary, one] = text
        while len(self._known) > self._most:
            del self._known[next(iter(self._known))]


def readable(text: str) -> str | None:
    """A token's text; None for none, and for part of a character."""
    return text if text and _BROKEN not in text else None


async def detokenize_at_engine(
    upstream: Upstream, endpoint: Endpoint, ids: Sequence[int], *, alone: bool = False
) -> str | None:
    """The text of ids, by the engine; None if it tells none."""
    lookup = text_request(endpoint.kind, ids)
    if lookup is None:
        return None
    try:
        status, body = await upstream.post_json(endpoint, lookup.path, orjson.dumps(lookup.body), alone=alone)
        return read_text(endpoint.kind, body) if status == 200 else None
    except EngineFault:
        return None


async def text_from_ids(
    upstream: Upstream, tokenizers: Tokenizers, engine: str, ids: Sequence[int], *, alone: bool
) -> str | None:
    """The text of ids: by the tokenizer of that endpoint, else by the engine itself."""
    try:
        tokenizer = await tokenizers.of(engine)
    except NotValid as error:
        LOG.warning("%s", error)
        tokenizer = None
    if tokenizer is not None:
        try:
            return await asyncio.to_thread(tokenizer.decode, ids)
        except NotValid as error:
            LOG.warning("the tokenizer of %s: %s", engine, error)
    endpoint = upstream.endpoint_named(engine)
    return None if endpoint is None else await detokenize_at_engine(upstream, endpoint, ids, alone=alone)
