"""Token annotations that a client requests: tokens as pieces of the vocabulary, and ids on each choice.

Annotations are derived from the engine's ids; what is unknown is null or absent.

Marin's clients (a3109ee) look each token's string up in the vocabulary, and need pieces ("Ġhello") where engines return text
(" hello"); its vLLM context (004f4a5) reads `prompt_token_ids` and `response_token_ids` of a choice.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.protocols.dialects.base import Json
from proxy.protocols.engines.base import NAMED_BY_ID, Sampled, Tokens

Pieces = Callable[[Sequence[int]], Sequence[str | None]]


@dataclass(frozen=True, slots=True)
class TokenAnnotations:
    """The token annotations of one response."""

    # The vocabulary's strings of ids, None for an unknown one; without it, tokens are the engine's texts.
    pieces: Pieces | None = None
    ids: bool = False  # each choice has its token ids and its prompt ids

    def fields(self, body: Mapping[str, Any]) -> Json:
        """Return what to request from the engine: alternatives by their ids, since several ids may have the same text."""
        named = self.pieces is not None and bool(body.get("top_logprobs"))
        return {"return_tokens_as_token_ids": True} if named else {}

    def annotate(self, shown: Json, tokens: Tokens) -> Json:
        """Return an annotated copy of a response. Raises KeyError or TypeError for an invalid one."""
        sampled = {sampled_choice.index: sampled_choice for sampled_choice in tokens.choices}
        choices = [self._choice(choice, sampled[choice.get("index", 0)], tokens) for choice in shown["choices"]]
        return {**shown, "choices": choices}

    def _choice(self, choice: Json, sampled: Sampled, tokens: Tokens) -> Json:
        annotated = {**choice}
        prompt = tokens.prompt_ids if sampled.prompt_ids is None else sampled.prompt_ids
        if self.ids and prompt is not None and sampled.ids is not None:
            annotated |= {"prompt_token_ids": prompt, "response_token_ids": sampled.ids}
        logprobs = choice.get("logprobs")
        if self.pieces is not None and isinstance(logprobs, dict) and logprobs.get("content") is not None:
            content = _with_pieces(logprobs["content"], sampled.ids or (), self.pieces)
            # A token's text in place of its piece may be another token's piece.
            annotated["logprobs"] = None if content is None else {**logprobs, "content": content}
        return annotated


def _with_pieces(content: Sequence[Json], ids: Sequence[int], pieces: Pieces) -> list[Json] | None:
    """Return the entries with pieces in place of text; None if a piece or an id is missing."""
    if len(content) != len(ids):
        return None
    annotated_entries = []
    for entry, token in zip(content, ids, strict=True):
        others = entry.get("top_logprobs") or ()
        named = [_named(other) for other in others]
        if None in named:
            return None
        piece, *alternatives = pieces([token, *(name for name in named if name is not None)])
        if piece is None or None in alternatives:
            return None
        # vLLM 0.32.0 returns the bytes of "token_id:7" for an alternative.
        annotated = [{**other, "token": name, "bytes": None} for other, name in zip(others, alternatives, strict=True)]
        annotated_entries.append(
            {**entry, "token": piece} | ({"top_logprobs": annotated} if "top_logprobs" in entry else {})
        )
    return annotated_entries


def _named(entry: Json) -> int | None:
    name = entry["token"].removeprefix(NAMED_BY_ID)
    return int(name) if name != entry["token"] and name.isdecimal() else None
