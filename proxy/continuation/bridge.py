"""The prompt that continues a turn: its prompt ids, its sampled ids, and the template's own ids for what is new.

The functions are generators: they yield lookups for the engine and receive their results, so that they need no I/O. Each
of the rules A to G is necessary for some chat template.
"""

import re
from array import array
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, TypeVar

import orjson

from proxy.continuation.turns import Match, Turn, own_rendering
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
    Tokenize,
    digest_of,
    rendering_of,
)
from proxy.trajectory.arrays import Ids
from proxy.trajectory.blocks import count_equal
from proxy.trajectory.conversations import THOUGHTS, bare, calls_of, calls_tools, text_of, thoughts_of

_EMPTY_THOUGHTS: Final = re.compile(r"<think>\s*</think>")
_OPENS: Final = "<think>"
_CLOSES: Final = "</think>"
# Both differ in their first and their last letter, so that the common suffix of two renderings begins after them.
WORD: Final = "Quartz"
OTHER_WORD: Final = "melody"
_REPLACEMENTS: Final = (
    "Kiwi", "Bolt", "Ufer", "Xeno", "Jade", "Wolf", "Amber", "Nile", "0range", "7even", "Zebra", "Yarn", "Echo",
)  # fmt: skip
T = TypeVar("T")
Lookups: TypeAlias = Generator[Lookup, LookupResult, T]
_BRACKETS = frozenset("<>[]")
_TAGS = re.compile(r"<[^<>]*>|\[[^\[\]]*\]")
_OPENING_IDS = 64  # ids in which a template begins its first message
_SEAM_IDS = 8  # ids that are read where a token merges or splits at the end of the history


def comparable(text: str) -> str:
    """Return a text without whitespace and without empty thoughts, which templates add and drop."""
    return bare(text).replace("<think></think>", "")


def what_is_missing(reply: Message, shown: str) -> Reason | None:
    """Return the part of a reply that a rendered turn does not contain, apart from whitespace; None if it is complete.

    Thoughts within the content, and the names of calls, must be in the order of the reply: each is searched after the one
    before it, so that the time is linear however many there are.
    """
    text = bare(shown)
    thoughts, answer = _split(_EMPTY_THOUGHTS.sub("", text_of(reply)))
    if bare(thoughts_of(reply)) not in text or not _are_in_order(thoughts, text, overlap=True):
        return "reasoning_stripped"
    # Some templates write the opening tag in the prompt, so that the reply has only the closing one.
    before, closed, after = answer.rpartition(_CLOSES)
    if closed and bare(before) not in text:
        return "reasoning_stripped"
    if bare(after if closed else answer) not in text:
        return "content_stripped"
    return None if _are_in_order(_names(reply), text, overlap=False) else "tool_calls_stripped"


def _split(content: str) -> tuple[list[str], str]:
    """Return the thoughts in a content, and the rest of it. A thought ends with the first closing tag after its opening one."""
    thoughts: list[str] = []
    rest: list[str] = []
    end = 0
    while (start := content.find(_OPENS, end)) >= 0:
        closed = content.find(_CLOSES, start + len(_OPENS))
        if closed < 0:
            break
        rest.append(content[end:start])
        thoughts.append(content[start + len(_OPENS) : closed])
        end = closed + len(_CLOSES)
    return thoughts, "".join((*rest, content[end:]))


def _are_in_order(parts: Sequence[str], text: str, *, overlap: bool) -> bool:
    """Return whether a bare text has these parts in their order; with `overlap`, one may begin where the one before it does."""
    start = 0
    for part in map(bare, parts):
        found = text.find(part, start)
        if found < 0:
            return False
        start = found if overlap else found + len(part)
    return True


def _names(reply: Message) -> list[str]:
    functions = [call.get("function") for call in calls_of(reply)]
    return [str(function.get("name")) for function in functions if isinstance(function, dict)]


def stand_in(reply: Message, word: str) -> Message:
    """Return a message of the same structure as a reply, with this word as its content, reasoning and arguments.

    The word of each part but the content has another number before it.
    """
    message: dict[str, Any] = dict(reply)
    text = text_of(reply)
    if text:
        message["content"] = f"<think>\n1{word}\n</think>\n\n{word}" if _OPENS in text and _CLOSES in text else word
    for name in THOUGHTS:
        if message.get(name):
            message[name] = f"2{word}"
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        message["tool_calls"] = [_call(call, f"{number}{word}") for number, call in enumerate(calls, 3)]
    elif not text and not message.get("reasoning") and not message.get("reasoning_content"):
        message["content"] = word
    return message


def repeats_a_part(text: str) -> bool:
    """Return whether a rendering of a stand-in contains the word of one of its parts twice."""
    words = re.findall(rf"(?<!\d)\d*{WORD}", text, re.IGNORECASE)  # each run of digits is read once
    return len(words) > len(set(words))


def other_forms(reply: Message) -> list[Message]:
    """Return a reply with its calls alone, if it has more, and with a text alone, unless it is one."""
    text = {"role": reply["role"], "content": WORD}
    parts = [name for name in ("content", *THOUGHTS) if reply.get(name)]
    if not calls_tools(reply):
        return [text] if parts != ["content"] else []
    calls = {name: "" if name in parts else value for name, value in reply.items()}
    return [calls, text] if parts else [text]


def other_texts(new: Sequence[Message]) -> tuple[str, list[Message]]:
    """Return a word, and messages with it in place of each text.

    The word begins with another letter than all texts. It is empty if no word does.
    """
    first = {text.lstrip()[:1].lower() for message in new for text in _texts(message)}
    word = next((word for word in _REPLACEMENTS if word[0].lower() not in first), "")
    return word, [_with_word(message, word) for message in new]


def _call(call: Any, word: str) -> Any:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    return {**call, "function": {**call["function"], "arguments": orjson.dumps({"x": word}).decode()}}


def _texts(message: Message) -> list[str]:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    texts = (
        [content]
        if isinstance(content, str)
        else [str(part.get("text")) for part in parts if isinstance(part, Mapping)]
    )
    return texts + [str(message[name]) for name in THOUGHTS if message.get(name)]


def _with_word(message: Message, word: str) -> Message:
    """Return a message with all its texts replaced; the structure of its content stays."""
    changed: dict[str, Any] = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        changed["content"] = [{**part, "text": word} for part in content]
    elif content is not None or not message.get("tool_calls"):
        changed["content"] = word
    for name in THOUGHTS:
        if message.get(name):
            changed[name] = word
    if isinstance(message.get("tool_calls"), list):
        changed["tool_calls"] = [_call(call, word) for call in message["tool_calls"]]
    return changed


class Refused(Exception):
    """The call is sent unchanged, for this reason."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


@dataclass(frozen=True, slots=True)
class _Turn:
    """The turn of a reply in the rendering of the call."""

    mode: Mode
    stops: Collection[int]  # ids that are known to close turns
    full: Ids  # the rendering
    start: int | None  # the index at which the turn begins; None if the template renders the history differently
    seam: str  # the text of the history that the ids from `start` on begin with
    text: str  # of the sampled ids
    is_cut: bool  # they have no stop token


@dataclass(frozen=True, slots=True)
class _Twins:
    """Renderings with a stand-in for a reply."""

    one: Ids
    begin: int  # the stand-in is in the ids of `one` from `begin` to `start`
    start: int
    end: Ids  # what follows, up to the first text of the new messages
    renewed: Ids  # `one` with `word` in place of each new text
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

    Rule F: the rendering begins with the history's rendering; only the last token of the history may be merged or split, if the
    texts agree. The index is None if the template renders the history differently.
    """
    rendering = match.turn.rendering
    if rendering is None:  # it is the prompt: comparing ids takes a quarter of the time of two digests
        prompt = match.turn.prompt_ids
        last, last_id = len(prompt) - 1, prompt[-1]
        begins = full[:last] == prompt[:last]
    else:
        last, last_id = rendering.length - 1, rendering.last
        begins = digest_of(full[:last]) == rendering.digest
    if not begins or len(full) <= last:
        return None, ""
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
    """Return whether the token limit ended a turn with finish reason `tool_calls` (vLLM 0.32, not for streams)."""
    last = turn.ids[-1]
    if not turn.is_full or turn.is_closed or last in stops:
        return False
    text = yield from _text([last])
    return bool(text) and not _is_tag(text)


def _bridge_by_reading(match: Match, read: _Turn) -> "Lookups[Ids | None]":
    """Return what follows the first stop token after the history, if the text up to it equals the text of the sampled ids.

    None if the texts differ, or if the turn has no stop token.
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
    begin, start, first_new = count_equal(one, other), len(one) - common, count_equal(one, renewed)
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
    shows = text_of(reply) or calls_tools(reply) or reply.get("reasoning") or reply.get("reasoning_content")
    return not shows and len(match.turn.ids) > (0 if match.turn.is_cut else 1)


def _common_suffix(left: Ids, right: Ids) -> int:
    return count_equal(left[::-1], right[::-1])


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


def continue_text(turn: Turn, prompt: str) -> Lookups[Continuation]:
    """Return the prompt ids of a text prompt that continues a turn, or the reason for sending it unchanged.

    The text of the sampled ids, which includes stop tokens, must follow the text of the earlier prompt; the rest is tokenized.
    """
    text: Any = yield Detokenize(turn.ids)
    if not isinstance(text, str):
        raise LookupFailed("the engine cannot detokenize")
    if not text or not prompt.startswith(text, turn.text_start):
        return Continuation(None, "close")
    rest = prompt[turn.text_start + len(text) :]
    tokenized: Any = (yield Tokenize(rest)) if rest else []
    if tokenized is None or isinstance(tokenized, str):
        raise LookupFailed("the engine cannot tokenize")
    recorded = turn.prompt_ids + turn.ids
    return Continuation(recorded + array("i", tokenized), kept=len(recorded), bridge=len(tokenized))
