"""The prompt that continues a turn: its prompt ids, its sampled ids, and the template's own ids for what is new.

The functions are generators: they yield lookups for the engine and receive their results, so that they need no I/O. Rules A
to G are those of the design; each is necessary for some chat template.
"""

from array import array
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from proxy.continuation.matching import Match
from proxy.continuation.shown import comparable, what_is_missing
from proxy.continuation.turns import end_of_rendering, own_rendering
from proxy.continuation.twins import OTHER_WORD, WORD, other_texts, repeats_a_part, stand_in
from proxy.continuation.types import (
    Continuation,
    Detokenize,
    Lookup,
    LookupFailed,
    LookupResult,
    Message,
    Mode,
    Reason,
    Render,
    rendering_of,
)
from proxy.trajectory.conversation import bare, calls_tools, text_of
from proxy.trajectory.drift import first_difference
from proxy.trajectory.step import Ids

T = TypeVar("T")
Lookups: TypeAlias = Generator[Lookup, LookupResult, T]

_SEAM_IDS = 8  # ids that are read where a token merges or splits at the end of the history


class Refused(Exception):
    """The call is sent unchanged, for this reason."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


@dataclass(frozen=True, slots=True)
class _Turn:
    """The turn of a reply in the rendering of the call.

    `full`: the rendering. `start`: the index at which the turn begins; None if the template renders the history differently.
    `seam`: the text of the history that the ids from `start` on begin with. `text`: the text of the sampled ids.
    """

    full: Ids
    start: int | None
    seam: str
    text: str


def continue_turn(match: Match, *, mode: Mode, stops: Collection[int]) -> Lookups[Continuation]:
    """Return the prompt ids of a call that continues a turn, or the reason for sending it unchanged.

    `stops` are ids that are known to close turns of this model. Raises LookupFailed as the caller throws it in.
    """
    try:
        return (yield from _continued(match, mode, stops))
    except Refused as refused:
        return Continuation(None, refused.reason)


def _continued(match: Match, mode: Mode, stops: Collection[int]) -> Lookups[Continuation]:
    turn = match.turn
    full = yield from _render([*match.history, match.reply, *match.new])
    if full is None or not full:
        raise LookupFailed("the engine cannot render the messages")
    recorded = turn.prompt_ids + turn.ids
    if full[: len(recorded)] == recorded:
        return Continuation(full, kept=len(recorded), bridge=len(full) - len(recorded), is_unchanged=True)
    reason: Reason | None = None
    start, seam = yield from _end_of_history(full, match)
    if start is None:
        again = None if mode == "faithful" else (yield from _render(match.history))
        if not again or rendering_of(again) != own_rendering(turn):
            raise Refused("history")
        reason = "history"
    read = _Turn(full, start, seam, (yield from _text(turn.ids)))
    bridge = yield from _bridge_by_reading(match, read)
    if bridge is None:
        if turn.is_hidden or _shows_nothing(match):
            raise Refused("hidden_output")
        bridge = yield from _bridge_by_twins(match, read, stops)
        if mode == "faithful":
            yield from _check_shown(match, read, bridge)
    return Continuation(recorded + bridge, reason, kept=len(recorded), bridge=len(bridge), rendering=rendering_of(full))


def _end_of_history(full: Ids, match: Match) -> Lookups[tuple[int | None, str]]:
    """Return the index at which the reply begins in a rendering, and the text of the history after that index.

    Rule F: the rendering begins with that of the history, except that its last token may be merged or split if the texts
    agree. The index is None if the template renders the history differently.
    """
    found = end_of_rendering(match.turn, full)
    if found is None:
        return None, ""
    last, last_id = found
    if full[last] == last_id:
        return last + 1, ""
    seam = yield from _text([last_id])
    text = yield from _text(full[last : last + _SEAM_IDS])
    return (last, seam) if text.startswith(seam) else (None, "")


def _bridge_by_reading(match: Match, read: _Turn) -> "Lookups[Ids | None]":
    """Return what follows the first stop token after the history, if the text up to it is that of the sampled ids.

    None if it is not, or if the turn has no stop token.
    """
    turn = match.turn
    if turn.is_cut or read.start is None:
        return None
    stop = turn.ids[-1]
    try:
        end = read.full.index(stop, read.start)
    except ValueError:
        return None
    if not bare((yield from _text([stop]))):
        return None  # this engine drops special tokens from texts, so that equal texts prove nothing
    shown = yield from _text(read.full[read.start : end + 1])
    return read.full[end + 1 :] if comparable(shown) == comparable(read.seam + read.text) else None


def _bridge_by_twins(match: Match, read: _Turn, stops: Collection[int]) -> Lookups[Ids]:
    """Return what the template writes after a turn, from renderings that differ in the reply, or in what is new (rule D).

    Raises Refused.
    """
    users = [index for index, message in enumerate(match.history) if message.get("role") == "user"]
    beginnings = [match.history[: users[0] + 1]] if users and users[0] + 1 < len(match.history) else []
    reason: Reason = "close"
    for history in (*beginnings, match.history):
        try:
            bridge = yield from _common_end(match, history, read, stops)
            if history is not match.history:
                yield from _check_place(match, read, bridge)
        except Refused as refused:
            reason = refused.reason
        else:
            return bridge
    raise Refused(reason)


def _common_end(match: Match, history: list[Message], read: _Turn, stops: Collection[int]) -> Lookups[Ids]:
    turn, full = match.turn, read.full
    new = other_texts(match.new)
    if new is None:
        raise Refused("twin")
    one = yield from _render([*history, stand_in(match.reply, WORD), *match.new])
    other = yield from _render([*history, stand_in(match.reply, OTHER_WORD), *match.new])
    renewed = yield from _render([*history, stand_in(match.reply, WORD), *new])
    if one is None or other is None or renewed is None:
        raise Refused("twin")
    common = _common_suffix(one, other)
    if not 0 < common < min(len(one), len(other)):
        raise Refused("close")
    # A template that writes a part again, such as a quotation in the next message, has the turn's end before that.
    first = max(first_difference(one, other) - _SEAM_IDS, 0)
    if repeats_a_part((yield from _text(one[first : len(one) - common]))):
        raise Refused("close")
    first_new = first_difference(one, renewed)
    if turn.is_closed or (not turn.is_cut and turn.ids[-1] in stops):
        return _after_stop(full, one, len(one) - common, turn.ids[-1], first_new)
    start = len(one) - common
    end = one[start:]
    if start > first_new or full[-common:] != end:
        raise Refused("close")
    yield from _check_cut(match, read, one[:start], end)
    return end


def _after_stop(full: Ids, twin: Ids, start: int, stop: int, first_new: int) -> Ids:
    """Return the ids after the first stop token of the common suffix, which begins at `start` (rules A and C).

    Rule A: the stop token comes before the first text of the new messages, at `first_new`.
    """
    try:
        end = twin.index(stop, start)
    except ValueError:
        raise Refused("other_stop") from None
    tail = twin[end:]
    if end + 1 > first_new or full[-len(tail) :] != tail:
        raise Refused("close")
    return tail[1:]


def _check_place(match: Match, read: _Turn, bridge: Ids) -> Lookups[None]:
    """Raise Refused if a bridge that was found with a short history may not begin directly after the turn.

    The rendering of the whole conversation may end like the short one by chance, after another message. It does not if the
    bridge begins at the first stop token that follows the reply in the rendering with a stand-in for it.
    """
    full = read.full
    twin = yield from _render([*match.history, stand_in(match.reply, WORD), *match.new])
    if twin is None:
        raise Refused("twin")
    end = full[len(full) - _common_suffix(twin, full) :]
    stop = full[-len(bridge) - 1]
    begins = (
        len(end) == len(bridge) if match.turn.is_cut else stop in end and len(end) - end.index(stop) - 1 == len(bridge)
    )
    if not begins:
        raise Refused("close")


def _check_cut(match: Match, read: _Turn, before: Ids, end: Ids) -> Lookups[None]:
    """Raise Refused if the common suffix may not begin directly after the reply, whose turn has no stop token."""
    reply, turn = match.reply, match.turn
    is_simple = bool(text_of(reply)) and not calls_tools(reply) and turn.is_cut
    if is_simple:
        if not (yield from _text(before[-_SEAM_IDS:])).endswith(WORD):
            raise Refused("close")
        return
    if read.start is None:
        raise Refused("close")
    shown = yield from _text(read.full[read.start :])
    if bare(read.seam + read.text) + bare((yield from _text(end))) != bare(shown):
        raise Refused("close")


def _check_shown(match: Match, read: _Turn, bridge: Ids) -> Lookups[None]:
    """Raise Refused if the template drops a part of the reply (rule B)."""
    shown = yield from _text(read.full[read.start or 0 : len(read.full) - len(bridge)])
    missing = what_is_missing(match.reply, shown.removeprefix(read.seam))
    if missing is not None:
        raise Refused(missing)


def _shows_nothing(match: Match) -> bool:
    """Return whether more was sampled than a stop token, but the message is empty."""
    reply = match.reply
    is_empty = (
        not text_of(reply)
        and not calls_tools(reply)
        and not reply.get("reasoning")
        and not reply.get("reasoning_content")
    )
    return is_empty and len(match.turn.ids) > (0 if match.turn.is_cut else 1)


def _common_suffix(left: Ids, right: Ids) -> int:
    return first_difference(left[::-1], right[::-1])


def _render(messages: list[Message]) -> "Lookups[Ids | None]":
    """Return the ids of messages; None if the template cannot render them."""
    result: Any = yield Render(messages)
    if result is None or isinstance(result, array):
        return result
    return array("i", result)


def _text(ids: Sequence[int]) -> Lookups[str]:
    """Return the text of ids. Raises LookupFailed if the engine has none."""
    if not len(ids):
        return ""
    result: Any = yield Detokenize(ids)
    if not isinstance(result, str):
        raise LookupFailed("the engine cannot detokenize")
    return result
