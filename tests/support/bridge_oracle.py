"""Which text a template writes after a turn, found by unique words in renderings: independent of the proxy's algorithm."""

import re
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import orjson
from tests.support.chat_templates import OTHER_STOP, CannotRender, Message, parse_arguments
from tests.support.continued_rollouts import Boundary
from tests.support.template_engine import TemplateEngine, common_beginning

SPOKEN = ("content", "reasoning", "reasoning_content")
MARKS, NEXT = (
    ("ж", "ѣ", "ѫ"),
    "ѯ",
)  # letters of no other text: for content, reasoning, the last call; and for new messages


def begins_with_the_recorded_ids(boundary: Boundary) -> bool:
    """Return whether a continued prompt begins with the prompt ids and the sampled ids of the turn."""
    turn, result = boundary.found.turn, boundary.result
    recorded = turn.prompt_ids + turn.ids
    return result.ids[: len(recorded)] == recorded and result.kept == len(recorded)


def ends_as_rendered(boundary: Boundary) -> bool:
    """Return whether the ids after them are an end of the rendering of the call's messages.

    In `append` the messages may have the tool calls of the reply alone.
    """
    match, rendered = boundary.found, [rendering(boundary)]
    if boundary.mode == "append" and match.reply.get("tool_calls"):
        calls = {**match.reply, **{name: "" for name in SPOKEN if match.reply.get(name)}}
        rendered += [ids for messages, ids in boundary.renderings if messages == [*match.history, calls, *match.new]]
    bridge = boundary.bridge
    return len(bridge) == boundary.result.bridge and any(ids[len(ids) - len(bridge) :] == bridge for ids in rendered)


def rendering(boundary: Boundary) -> "array[int]":
    """Return the rendering of the call's messages, which was requested first."""
    match = boundary.found
    messages, ids = boundary.renderings[0]
    assert messages == [*match.history, match.reply, *match.new]
    assert match.new == boundary.messages[len(match.history) + 1 :]
    return ids


def wrong_bridge(boundary: Boundary) -> str | None:
    """Return how the bridge of a continued call differs from what the template writes after the turn; None if it does not."""
    engine = boundary.engine
    if engine.detokenize(boundary.result.ids) == engine.detokenize(rendering(boundary)):
        return None  # the same text
    text = engine.detokenize(boundary.bridge)
    engine.day, day = boundary.day, engine.day
    try:
        expected = list(dict.fromkeys(_expected(boundary, text)))
    finally:
        engine.day = day
    return None if text in expected else f"the template writes {expected[:3]}, not {text!r}"


def keeps_the_history(boundary: Boundary) -> bool:
    """Return whether the messages before the turn, rendered, begin the rendering of the call's messages."""
    engine, tools = boundary.engine, boundary.tools
    engine.day, day = boundary.day, engine.day
    try:
        return engine.detokenize(rendering(boundary)).startswith(engine.text(boundary.found.history, tools))
    finally:
        engine.day = day


def not_shown(boundary: Boundary) -> list[str]:
    """Return the parts of a reply that the template does not show in the turn, apart from white space."""
    match, engine = boundary.found, boundary.engine
    before = engine.text(match.history, boundary.tools)
    full = engine.detokenize(rendering(boundary))
    shown = full[len(common_beginning(full, before)) : len(full) - len(engine.detokenize(boundary.bridge))]
    reply = match.reply
    parts = [reply.get("reasoning") or "", *re.split(r"</?think>", reply.get("content") or "")]
    parts += [call["function"]["name"] for call in reply.get("tool_calls") or ()]
    return [part for part in parts if _bare(part) not in _bare(shown)]


def _expected(boundary: Boundary, text: str) -> Iterator[str]:
    """Yield the texts that the template writes after the turn."""
    match, engine = boundary.found, boundary.engine
    assert match is not None
    turn = match.turn
    stop = None if turn.is_cut or turn.ids[-1] not in _stops(engine) else engine.detokenize(turn.ids[-1:])
    if boundary.mode == "append":
        yield from _with_other_forms(boundary, stop)
    calls = bool(match.reply.get("tool_calls"))
    if stop is None and (calls or not match.reply.get("content")):
        yield from _closed_by(boundary, text)
        last, sampled = engine.detokenize(turn.ids[-1:]), engine.detokenize(turn.ids)
        if calls and not turn.is_cut and last.endswith(">") and sampled.count(last) == 1:  # a tag that ends the calls
            yield from _after(_rest(boundary, _marked(match.reply)), last)
        return
    if stop is not None:
        yield from _after_equal_text(boundary, stop)
    is_located = False
    for reply in (_marked(match.reply), _marked(match.reply, in_place=True)):
        rest = _rest(boundary, reply)
        is_located |= rest is not None
        yield from _after(rest, stop)
        quoting = (rest or "").replace(MARKS[0], "").replace(MARKS[1], "")  # the template may quote the reply again
        yield from _after(quoting, stop)
    if not calls and not match.reply.get("content") and not match.reply.get("reasoning"):
        yield from _after(_after_history(boundary), stop)
    elif not is_located:  # the template shows no marked part
        rest = _rest(boundary, _renamed(match.reply) if calls else {**match.reply, "content": MARKS[0]})
        yield from _after((rest or "").replace(MARKS[2], ""), stop)  # results may contain the name


def _with_other_forms(boundary: Boundary, stop: str | None) -> Iterator[str]:
    """Yield what the template writes after the calls of the reply alone, and after a text in its place.

    A sampled stop token that the template does not write takes the place of the special token that ends messages.
    """
    reply = boundary.found.reply
    calls = reply.get("tool_calls") or []
    alone = {**reply, **dict.fromkeys(SPOKEN)}
    for form in (reply, alone, {**alone, "tool_calls": calls[:1]}) if calls else ():
        rest = _rest(boundary, _marked(form))
        yield from _after(rest, stop) if stop is not None else _from_close(boundary, rest)
    text = {"role": "assistant", "content": MARKS[0]}
    spoken = {name: value for name, value in reply.items() if name != "tool_calls"}
    for form in (text, _marked(spoken), _marked(spoken, in_place=True)):
        rest = _rest(boundary, form)
        yield from _after(rest, stop)
        close = None if stop is None or rest is None else _close_of_messages(boundary, text, stop)
        if close is not None:
            yield rest.removeprefix(close)


def _from_close(boundary: Boundary, rest: str | None) -> Iterator[str]:
    """Yield the end of a rendering from the first stop token on, if the limit cut the turn."""
    found = [rest.find(stop) for stop in boundary.engine.template.stops if stop in rest] if rest else []
    if found and boundary.found.turn.is_cut:
        yield rest[min(found) :]


def _close_of_messages(boundary: Boundary, text: Message, stop: str) -> str | None:
    """Return the special token with which the template ends messages of both roles in place of the sampled stop token."""
    engine = boundary.engine
    try:
        shown = engine.text([*boundary.found.history, text, {"role": "user", "content": NEXT}], boundary.tools)
    except CannotRender:
        return None
    between, _, after = shown.partition(MARKS[0])[2].partition(NEXT)
    if stop in between:
        return None
    return next((one for one in engine.template.specials if between.startswith(one) and after.startswith(one)), None)


def _stops(engine: TemplateEngine) -> set[int]:
    return {engine.encode(text)[0] for text in (*engine.template.stops, OTHER_STOP)}


def _after(rest: str | None, stop: str | None) -> Iterator[str]:
    if rest is not None and stop is None:
        yield rest
    elif rest is not None and stop in rest:
        yield rest.partition(stop)[2]


def _after_equal_text(boundary: Boundary, stop: str) -> Iterator[str]:
    """Yield what follows a stop token up to which the rendering equals what was sent, apart from white space."""
    engine, turn = boundary.engine, boundary.found.turn
    full, sent = engine.detokenize(rendering(boundary)), _bare(engine.detokenize(turn.prompt_ids + turn.ids))
    for found in re.finditer(re.escape(stop), full):
        if _bare(full[: found.end()]) == sent:
            yield full[found.end() :]


def _closed_by(boundary: Boundary, text: str) -> Iterator[str]:
    """Yield a bridge if it completes what was sampled to what the template writes, apart from white space."""
    rest = _after_history(boundary)
    sampled = boundary.engine.detokenize(boundary.found.turn.ids)
    if rest is not None and rest.endswith(text) and _bare(sampled + text) == _bare(rest):
        yield text


def _after_history(boundary: Boundary) -> str | None:
    """Return what the template writes after the history and the beginning of the turn; None if it rewrites the history."""
    match, engine = boundary.found, boundary.engine
    before = engine.text(match.history, boundary.tools)
    full = engine.text([*match.history, match.reply, *match.new], boundary.tools)
    return full[len(before) :] if full.startswith(before) else None


def _rest(boundary: Boundary, reply: Message) -> str | None:
    """Return what the template writes after the marks of a reply; None if a new message comes before the last one."""
    match, engine, tools = boundary.found, boundary.engine, boundary.tools
    try:
        shown = engine.text([*match.history, reply, *match.new], tools)
        renewed = engine.text([*match.history, reply, *_renewed(match.new)], tools)
    except CannotRender:
        return None
    ends = [shown.lower().find(mark) for mark in MARKS]
    end = max(ends)
    if end < 0 or 0 <= renewed.lower().find(NEXT) < end:
        return None
    return shown[end + 1 :]


def _renewed(messages: Sequence[Message]) -> list[Message]:
    """Return messages that begin with a mark."""
    return [{**message, "content": NEXT + str(message["content"] or "")} for message in messages]


def _marked(reply: Message, *, in_place: bool = False) -> Message:
    """Return a reply with a mark at the end of its content, reasoning and last call, added or in place of the last letters."""
    marked: dict[str, Any] = dict(reply)
    for name, mark in zip(("content", "reasoning"), MARKS, strict=False):
        text = marked.get(name)
        if text:
            marked[name] = text[: -len(mark)] + mark if in_place else text + mark
    calls = [dict(call) for call in marked.get("tool_calls") or ()]
    if calls:
        function = calls[-1]["function"]
        arguments = {**parse_arguments(function["arguments"]), "zz": MARKS[2]}
        calls[-1]["function"] = {**function, "arguments": orjson.dumps(arguments).decode()}
        marked["tool_calls"] = calls
    elif not marked.get("content") and not marked.get("reasoning"):
        marked["content"] = MARKS[0]
    return marked


def _renamed(reply: Message) -> Message:
    """Return a reply with a mark at the end of the name of its last call."""
    *calls, last = reply["tool_calls"]
    return {
        **reply,
        "tool_calls": [*calls, {**last, "function": {**last["function"], "name": last["function"]["name"] + MARKS[2]}}],
    }


def _bare(text: str) -> str:
    """Return a text without white space and without empty thoughts, which models write and templates drop."""
    return "".join(text.split()).replace("<think></think>", "")
