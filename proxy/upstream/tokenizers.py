"""Configured tokenizers, loaded at first use and in a thread (transformers, an optional extra).

Nothing that is recorded comes from a tokenizer: it can only guess what an engine did.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias

import orjson

from proxy.config.engines import EndpointSettings
from proxy.errors import EngineError, UnprocessableRequest
from proxy.protocols.engines.base import read_text, text_request
from proxy.telemetry.logs import LOG
from proxy.upstream.client import Upstream
from proxy.upstream.endpoint import Endpoint


class Tokenizer:
    """One tokenizer. Its methods are slow: run them in a thread."""

    def __init__(self, loaded: Any) -> None:
        self._loaded = loaded

    def render(self, messages: Sequence[Any], tools: Sequence[Any] | None, *, reply: bool) -> list[int]:
        """Return the ids of a conversation by the chat template; with the start of a reply at its end, if `reply`.

        Raises ValueError if the chat template rejects the messages.
        """
        try:
            text = self._loaded.apply_chat_template(
                list(messages), tools=list(tools) if tools else None, add_generation_prompt=reply, tokenize=False
            )
        except Exception as error:  # a template is a program, and may raise anything
            raise ValueError(f"the chat template failed: {error}") from error
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. Special tokens in it are parsed, and none are added."""
        ids: list[int] = self._loaded.encode(text, add_special_tokens=False)
        return ids

    def pieces(self, ids: Sequence[int]) -> list[str | None]:
        """Return the vocabulary's strings of ids, such as "Ġhello"; None for an unknown id."""
        found: list[str | None] = self._loaded.convert_ids_to_tokens(list(ids))
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with special tokens.

        Raises UnprocessableRequest if the vocabulary does not have these ids.
        """
        try:
            text: str = self._loaded.decode(list(ids), skip_special_tokens=False)
        except (IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise UnprocessableRequest(
                f"The tokenizer cannot decode the token ids: {error}", param="tokenizer"
            ) from error
        return text


class Tokenizers:
    """The tokenizers of the endpoints that have one configured, by the endpoint's name."""

    def __init__(self, endpoints: Iterable[EndpointSettings]) -> None:
        self._loaded: dict[str, Tokenizer] = {}
        self._loading = asyncio.Lock()
        self.replace(endpoints)

    def replace(self, endpoints: Iterable[EndpointSettings]) -> None:
        """Replace the endpoints; loaded tokenizers stay loaded."""
        self._paths = {endpoint.label: endpoint.tokenizer for endpoint in endpoints if endpoint.tokenizer}

    def __bool__(self) -> bool:
        return bool(self._paths)

    async def get(self, name: str) -> Tokenizer | None:
        """Return the tokenizer of an endpoint; None if it has none configured.

        Raises UnprocessableRequest if it cannot be loaded.
        """
        path = self._paths.get(name)
        if path is None:
            return None
        async with self._loading:
            if path not in self._loaded:
                self._loaded[path] = await asyncio.to_thread(load, path)
        return self._loaded[path]


def load(path: str) -> Tokenizer:
    """Return a tokenizer from a folder, or by its name on Hugging Face.

    Raises UnprocessableRequest if it cannot be loaded.
    """
    try:
        from transformers import AutoTokenizer  # noqa: PLC0415 - optional, and slow to import
    except ImportError:
        raise UnprocessableRequest(
            f"Tokenizer {path!r} requires transformers: pip install 'transformers>=4.57,<6' jinja2.",
            param="tokenizer",
        ) from None
    try:
        return Tokenizer(AutoTokenizer.from_pretrained(path))
    except (OSError, ValueError) as error:
        raise UnprocessableRequest(f"Tokenizer {path!r} cannot be loaded: {error}", param="tokenizer") from error


_BYTES_PER_TEXT: Final = 200  # an estimate: the objects of an id and its text
_CONCURRENCY: Final = 8
_TIMEOUT_S: Final = 3.0
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"  # decoders write it for bytes that are not valid UTF-8

Vocabulary: TypeAlias = tuple[str, ...]  # endpoint and model


class TokenTexts:
    """A cache of token texts by vocabulary and id. The value is None for a token that is only a part of a character.

    `size`: its approximate memory in bytes, at most about `max_bytes`.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._known: dict[tuple[Vocabulary, int], str | None] = {}
        self.size = 0

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
            if (vocabulary, token) not in self._known:  # a request at the same time has the same text
                self._known[vocabulary, token] = text
                self.size += _BYTES_PER_TEXT + len(text or "")
        while self.size > self._max_bytes:
            self.size -= _BYTES_PER_TEXT + len(self._known.pop(next(iter(self._known))) or "")


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
