"""Configured tokenizers, loaded at first use and in a thread (transformers, an optional extra).

Nothing that is recorded comes from a tokenizer: it can only guess what an engine did.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from proxy.config.engines import EndpointSettings
from proxy.errors import UnprocessableRequest


class Tokenizer:
    """One tokenizer. Its methods are slow: run them in a thread."""

    def __init__(self, loaded: Any) -> None:
        self._loaded = loaded

    def render(self, messages: Sequence[Any], tools: Sequence[Any] | None, *, reply: bool) -> list[int]:
        """Return the ids of a conversation by the chat template; with the start of a reply at its end, if `reply`.

        Raises:
            ValueError: The chat template rejects the messages.
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

        Raises:
            UnprocessableRequest: The vocabulary does not have these ids.
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

        Raises:
            UnprocessableRequest: It cannot be loaded.
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

    Raises:
        UnprocessableRequest: It cannot be loaded.
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
