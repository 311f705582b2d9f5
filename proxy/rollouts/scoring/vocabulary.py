"""Whether an engine has the same token at each id as the engine that sampled them.

Ids mean nothing to an engine with another vocabulary, and it scores most of them all the same. So the texts of some ids of a
row are compared. Where one of the engines has no texts, the scores themselves are: an engine that reads other tokens than were
sampled gives each of them next to no probability.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, TypeAlias

from proxy.trajectory.step import Ids
from proxy.upstream.token_text import TokenTexts

TextOf: TypeAlias = Callable[[Sequence[int]], Awaitable[str | None]]

_COMPARED: Final = 16  # ids, evenly distributed over those of a row: a vocabulary differs in nearly all of its ids
_FEW: Final = 20  # tokens whose scores are no evidence
_NATS: Final = 10.0  # a teacher that gives each token e^-10 of its probability teaches nothing


async def differing_id(ids: Ids, own: TextOf, other: TextOf) -> tuple[int, str, str] | None:
    """Return an id that has different texts, with both; None if the compared ids have the same.

    Parts of characters are not compared, nor spaces around a text, which some decoders remove.

    Raises:
        LookupError: No id could be compared.
    """
    distinct = sorted(set(ids))
    chosen = distinct[:: max(1, len(distinct) // _COMPARED)]
    texts = [await _texts(chosen, text_of) for text_of in (own, other)]
    compared = 0
    for token in chosen:
        first, second = (known.get(token) for known in texts)
        if first is None or second is None:
            continue
        compared += 1
        if first.strip() != second.strip():
            return token, first, second
    if not compared:
        raise LookupError("no texts to compare")
    return None


async def _texts(ids: Sequence[int], text_of: TextOf) -> Mapping[int, str | None]:
    return await TokenTexts().get((), ids, lambda token: text_of([token]))


def is_unlikely(recorded: Sequence[float], scored: Sequence[float]) -> bool:
    """Return whether scores are so far below recorded logprobs that the engine cannot have read the same tokens."""
    return len(scored) >= _FEW and len(recorded) == len(scored) and sum(recorded) - sum(scored) > _NATS * len(scored)
