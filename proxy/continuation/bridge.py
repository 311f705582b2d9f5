"""The prompt that continues a turn: its prompt ids, its sampled ids, and the template's own ids for what is new.

The functions are generators: they yield lookups for the engine and receive their results, so that they need no I/O. Rules A
to G are those of the design; each is necessary for some chat template.
"""

import re
from array import array
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

from proxy.continuation.matching import Match
from proxy.continuation.shown import comparable, what_is_missing
from proxy.continuation.turns import Turn, end_of_rendering, own_rendering
from proxy.continuation.twins import OTHER_WORD, WORD, other_forms, other_texts, repeats_a_part, stand_in
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

_BRACKETS = frozenset("<>[]")
_TAGS = re.compile(r"<[^<>]*>|\[[^\[\]]*\]")
_OPENING_IDS = 64  # ids in which a template begins its first message
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
    `seam`: the text of the history that the ids from `start` on begin with. `text`: the text of the sampled ids. `is_cut`:
    they have no stop token. `stops`: ids that are known to close turns.
    """

    mode: Mode
    stops: Collection[int]
    full: Ids
    start: int | None
    seam: str
    text: str
    is_cut: bool


@dataclass(frozen=True, slots=True)
class _Twins:
    """Renderings with a stand-in for a reply.

    `one`: the first of them; the stand-in is in its ids from `begin` to `start`. `end`: what follows, up to the first text of
    the new messages. `renewed`: the same with `word` in place of each new text.
    """

    one: Ids
    begin: int
    start: int
    end: Ids
    renewed: Ids
    word: str


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
    if isinstance(turn.stop_reason, str):
        if mode == "faithful" and not (yield from _stops_between_tokens(match.reply, turn.ids, turn.stop_reason)):
            raise Refused("stop_string")
        reason = "stop_string"
    is_cut = turn.is_cut or (yield from _is_cut(turn, stops))
    read = _Turn(mode, stops, full, start, seam, (yield from _text(turn.ids)), is_cut)
    bridge = yield from _bridge_by_reading(match, read)
    if bridge is None:
        if turn.is_hidden or (mode == "faithful" and _shows_nothing(match)):
            raise Refused("hidden_output")
        bridge = yield from _bridge_by_twins(match, read)
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


def _stops_between_tokens(reply: Message, ids: Ids, stop: str) -> Lookups[bool]:
    """Return whether the visible text of a turn that ended with this stop string ends where a sampled token does."""
    if text_of(reply).endswith(stop):  # the client includes it
        return (yield from _text(ids)).endswith(stop)
    # The fewest last tokens with the stop string, by bisection: each text is a request to the engine.
    least, most, shortest = 1, min(len(stop.encode()) + 1, len(ids)), ""
    while least <= most:
        count = (least + most) // 2
        text = yield from _text(ids[-count:])
        if stop in text:
            most, shortest = count - 1, text
        else:
            least = count + 1
    return shortest.startswith(stop)


def _is_cut(turn: Turn, stops: Collection[int]) -> Lookups[bool]:
    """Return whether the limit ended a turn whose engine returns `tool_calls` instead (vLLM 0.32, not for streams)."""
    last = turn.ids[-1]
    if not turn.is_full or turn.is_closed or last in stops:
        return False
    text = yield from _text([last])
    return bool(text) and not _is_tag(text)


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


def _bridge_by_twins(match: Match, read: _Turn) -> Lookups[Ids]:
    """Return what the template writes after a turn, from renderings that differ in the reply, or in what is new (rule D).

    A short history is tried first. In `append` the sampled ids stay, also if the template does not show them: the end of the
    turn is then located with the calls alone, and with a text in place of the reply. Raises Refused.
    """
    reply, whole = match.reply, match.history
    users = [index for index, message in enumerate(whole) if message.get("role") == "user"]
    attempts = [(reply, whole[: users[0] + 1])] if users and users[0] + 1 < len(whole) else []
    attempts += [(form, whole) for form in [reply, *(other_forms(reply) if read.mode == "append" else ())]]
    reason: Reason = "close"
    for form, history in attempts:
        shaped, full = replace(match, reply=form), read.full
        if form is not reply and calls_tools(form):  # the template may write content after the results of calls
            full = (yield from _render([*whole, form, *match.new])) or full
        try:
            bridge = yield from _common_end(shaped, history, replace(read, full=full))
            if history is not whole:
                yield from _check_place(match, read, bridge)
        except Refused as refused:
            reason = refused.reason if form is reply else reason
        else:
            return bridge
    raise Refused(reason)


def _common_end(match: Match, history: list[Message], read: _Turn) -> Lookups[Ids]:
    """Return what follows the first stop token after the reply, or the whole end of the turn if none was sampled (rule C)."""
    turn, full = match.turn, read.full
    twins = yield from _twins(match, history)
    start, stop = twins.start, turn.ids[-1]
    if turn.is_closed or (not read.is_cut and (stop in read.stops or (yield from _ends_once(turn.ids, twins)))):
        if stop in twins.end:
            start += twins.end.index(stop)
        elif read.mode == "faithful" or not (yield from _closes_messages(match, twins)):
            raise Refused("other_stop")
        bridge = twins.one[start + 1 :]
    else:
        start += yield from _close_of_cut(match, read, twins)
        bridge = twins.one[start:]
    if full[start - len(twins.one) :] != twins.one[start:]:
        raise Refused("close")
    return bridge


def _twins(match: Match, history: list[Message]) -> Lookups[_Twins]:
    """Return renderings with stand-ins. Raises Refused if a new text precedes the end of the reply (rule A)."""
    word, new = other_texts(match.new)
    one = yield from _render([*history, stand_in(match.reply, WORD), *match.new])
    other = yield from _render([*history, stand_in(match.reply, OTHER_WORD), *match.new])
    renewed = yield from _render([*history, stand_in(match.reply, WORD), *new])
    if not word or one is None or other is None or renewed is None:
        raise Refused("twin")
    common = _common_suffix(one, other)
    begin, start, first_new = first_difference(one, other), len(one) - common, first_difference(one, renewed)
    if not 0 < common < min(len(one), len(other)) or start > first_new:
        raise Refused("close")
    # A template that writes a part again, such as a quotation in the next message, has the turn's end before that.
    if repeats_a_part((yield from _text(one[max(begin - _SEAM_IDS, 0) : start]))):
        raise Refused("close")
    return _Twins(one, begin, start, one[start:first_new], renewed, word)


def _ends_once(ids: Ids, twins: _Twins) -> Lookups[bool]:
    """Return whether the last sampled id is a tag that occurs once, in the sampled turn and in the rendered one.

    With `tool_calls` an engine may hide a limit or a stop string. If that cut the turn after such a tag, what the template
    writes after the tag ends the turn as well.
    """
    last, shown = ids[-1], twins.one[twins.begin : twins.start] + twins.end
    return ids.count(last) == shown.count(last) == 1 and _is_tag((yield from _text([last])))


def _closes_messages(match: Match, twins: _Twins) -> Lookups[bool]:
    """Return whether the first id after a text is the tag with which the template ends each message.

    The sampled stop token then takes its place: the model of gpt-oss ends turns with <|return|>, and its template with <|end|>.
    """
    before = twins.one[: twins.start]
    if calls_tools(match.reply) or not twins.end:
        return False
    first = twins.end[0]
    close = yield from _text([first])
    if not _is_tag(close) or not (yield from _text(before[-_SEAM_IDS:])).endswith(WORD):
        return False
    opening = before[:_OPENING_IDS]
    opened = yield from _text(opening[: opening.index(first)] if first in opening else opening)
    if not _TAGS.sub("", opened).strip():
        return False  # it begins messages
    texts = bare((yield from _text(twins.renewed[twins.start :]))).split(twins.word)[1:]
    return bool(texts) and all(text.startswith(bare(close)) for text in texts)


def _is_tag(text: str) -> bool:
    """Return whether the text of a token is a word in brackets, which tokenizers have for special tokens only."""
    return bool(text) and {text[0], text[-1]} <= _BRACKETS and any(map(str.isalnum, text))


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
    begins = len(end) == len(bridge) if read.is_cut else stop in end and len(end) - end.index(stop) - 1 == len(bridge)
    if not begins:
        raise Refused("close")


def _close_of_cut(match: Match, read: _Turn, twins: _Twins) -> Lookups[int]:
    """Return the index in the end of the twins at which the bridge of a turn without a stop token begins. Raises Refused."""
    reply, turn, one = match.reply, match.turn, twins.one
    if read.is_cut and text_of(reply) and not calls_tools(reply):
        if (yield from _text(one[max(twins.start - _SEAM_IDS, 0) : twins.start])).endswith(WORD):
            return 0
    elif read.start is not None and bare((yield from _text(turn.ids[-1:]))):  # else the engine drops special tokens
        shown = yield from _text(read.full[read.start :])
        if bare(read.seam + read.text) + bare((yield from _text(one[twins.start :]))) == bare(shown):
            return 0
    closes = [index for index, token in enumerate(twins.end) if token in read.stops]
    if closes and read.mode == "append" and read.is_cut and calls_tools(reply):
        return closes[0]  # the template would write the rest of the last call before
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
