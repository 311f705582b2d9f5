"""Configured tokenizers: text of ids, and ids of text, where no engine tells them.

Holds the loading of them (transformers, an optional extra, loaded at first use and in a thread) and nothing of what they
are used for. Nothing that is recorded ever comes from here: a tokenizer can only guess what an engine did.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from proxy.config.sections import EndpointSettings
from proxy.errors import NotValid


class Configured:
    """One tokenizer. Slow: to be used in a thread. Raises ValueError for what it cannot tell."""

    def __init__(self, loaded: Any) -> None:
        self._loaded = loaded

    def render(self, messages: Sequence[Any], tools: Sequence[Any] | None, *, reply: bool) -> list[int]:
        """The ids of a conversation by its chat template; with the opening of a reply at its end, if `reply`."""
        try:
            text = self._loaded.apply_chat_template(
                list(messages), tools=list(tools) if tools else None, add_generation_prompt=reply, tokenize=False
            )
        except Exception as error:  # a template is its author's program, and may fail in any way
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, special tokens in it read as such, and none added."""
        ids: list[int] = self._loaded.encode(text, add_special_tokens=False)
        return ids

    def pieces(self, ids: Sequence[int]) -> list[str | None]:
        """The vocabulary's own strings of ids, such as "Ġhello"; None for an id that it has not."""
        found: list[str | None] = self._loaded.convert_ids_to_tokens(list(ids))
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with special tokens. Raises NotValid for ids that it does not have."""
        try:
            text: str = self._loaded.decode(list(ids), skip_special_tokens=False)
        except (IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise NotValid(f"it cannot decode the ids: {error}", param="tokenizer") from error
        return text


class Tokenizers:
    """The tokenizers of the endpoints that have one configured, by the endpoint's name."""

    def __init__(self, endpoints: Iterable[EndpointSettings]) -> None:
        self._loaded: dict[str, Configured] = {}
        self._loading = asyncio.Lock()
        self.replace(endpoints)

    def replace(self, endpoints: Iterable[EndpointSettings]) -> None:
        """From now on these are the endpoints; a tokenizer that was loaded stays."""
        self._paths = {endpoint.label: endpoint.tokenizer for endpoint in endpoints if endpoint.tokenizer}

    def __bool__(self) -> bool:
        return bool(self._paths)

    async def of(self, name: str) -> Configured | None:
        """The tokenizer of an endpoint; None if it has none configured.

        Raises NotValid, saying what to do, if it cannot be loaded.
        """
        path = self._paths.get(name)
        if path is None:
            return None
        async with self._loading:
            if path not in self._loaded:
                self._loaded[path] = await asyncio.to_thread(load, path)
        return self._loaded[path]


def load(path: str) -> Configured:
    """A tokenizer from a folder, or by its name on the hub. Raises NotValid."""
    try:
        from transformers import AutoTokenizer  # noqa: PLC0415 - optional, and slow to import
    except ImportError:
        raise NotValid(
            f"the tokenizer {path!r} is configured, and transformers is not installed: pip install 'tokentape[tokenizer]'",
            param="tokenizer",
        ) from None
    try:
        return Configured(AutoTokenizer.from_pretrained(path))
    except (OSError, ValueError) as error:
        raise NotValid(f"the tokenizer {path!r} cannot be loaded: {error}", param="tokenizer") from error
