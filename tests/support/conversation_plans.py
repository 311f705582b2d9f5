"""Random rollouts, drawn with hypothesis: what models write, what agents send back, and what changes between two calls."""

import json
from dataclasses import replace
from functools import cache
from typing import Any

from hypothesis import strategies as st
from tests.support.chat_templates import OTHER_STOP, Message, hostile, originals, template
from tests.support.continued_rollouts import TOOLS, USER, Plan, Turn
from tests.support.template_engine import Call, Reply

NAMES = tuple(one.name for one in (*originals(), *hostile()))
WORDS = (
    "The",
    "cat",
    "sees",
    "seven",
    "red",
    "birds",
    "over",
    "Paris",
    "naïve",
    "你好",
    "🙂🙃",
    "1024",
    "ok",
    "x",
    "user",
    "q",
)
SPACES = (" ", " ", " ", " ", "\n", "\n\n", ", ", ". ", "  ")
STOP_STRINGS = ("\n", " lake", "And", "user", "\nObservation:", "</tool_call>", "<")
CONTENTS = (
    "<think>hm</think>Yes.",
    "<think>\nTwo\nlines\n</think>\n\nFour.",
    "unopened</think>Yes.",
    " leading and trailing \n",
    "\n",
    "Wolf",
    "Quartz",
    "melody",
    '{"x": "Quartz"}',
    "<tool_call>no call</tool_call>",
    "x" * 40,
    "The cat sees. " * 30,
    "Qzuser:\n\n### assistant\n",
)
TEXTS = (
    "Quote: {stop} and on",
    "{stop}",
    "{stop}\n<|im_start|>assistant\nHi",
    "",
    " \n ",
    "Kiwi",
    "<think>no</think>",
    "assistant",
    "<tool_call>\n[]\n</tool_call>",
    "word " * 100,
)
VALUES = (
    "",
    'say "hi"',
    "a\nb",
    "</tool_call>",
    "日本",
    7,
    -0.5,
    True,
    None,
    [],
    [1, [2]],
    {"k": {}},
    {"z": [1]},
    "red birds",
)
STYLES: tuple[dict[str, Any], ...] = ({}, {"separators": (",", ":")}, {"indent": 2}, {"separators": (" , ", ":  ")})
ENDINGS: tuple[dict[str, Any], ...] = (
    *[{}] * 16,
    {"ending": "length"},
    {"ending": "length", "kept": 0.5},
    {"ending": "length", "kept": 0.0},
    {"ending": "hidden_length"},
    {"stop_token": OTHER_STOP},
    *({"ending": "stop_string", "stop": stop} for stop in STOP_STRINGS),
    {"ending": "client_stop", "stop": "\n"},
    {"ending": "client_stop", "stop": "birds"},
    {"shown_calls": 1},
)
EVENTS = ("others", "tools", "day", "as_it_came", "rollback", *[""] * 14)

# Strategies are made once: making them costs more than drawing from them.
_SENTENCE = st.lists(st.sampled_from([word + space for word in WORDS for space in SPACES]), min_size=1, max_size=6).map(
    lambda words: "".join(words).strip()
)
_ARGUMENTS = st.builds(
    lambda values, style, ascii_only: json.dumps(values, ensure_ascii=ascii_only, **style),
    st.dictionaries(st.sampled_from(["x", "path", "naïve", "k"]), st.sampled_from(VALUES), max_size=3),
    st.sampled_from(STYLES),
    st.booleans(),
)
_CALLS = st.lists(st.builds(Call, st.sampled_from(["look_up", "run"]), _ARGUMENTS), max_size=3)
_CONTENT = st.one_of(_SENTENCE, _SENTENCE, st.sampled_from(("", *CONTENTS)))
_ENDING = st.sampled_from(ENDINGS)
_REPLY = st.builds(
    Reply,
    content=_CONTENT,
    reasoning=st.one_of(st.just(""), _SENTENCE),
    splits=st.sampled_from([0.0, 0.2, 0.6]),
    parsed=st.sampled_from([True, True, False]),
    trims=st.booleans(),
)
_SMALL = st.integers(0, 15)
_EVENT = st.sampled_from(EVENTS)
_BOOLEAN = st.booleans()


@cache
def _texts(name: str) -> st.SearchStrategy[str]:
    """Return the texts of messages that are not the model's; some quote the template's stop tokens."""
    quotes = [text.format(stop=stop) for text in TEXTS for stop in template(name).stops]
    return st.one_of(_SENTENCE, _SENTENCE, st.sampled_from(quotes))


@st.composite
def _replies(draw: st.DrawFn, tools: bool, number: int) -> Reply:
    """Draw what a model writes in a turn."""
    reply = draw(_REPLY)
    if tools:
        calls = tuple(replace(call, id=f"call_{number}_{index}") for index, call in enumerate(draw(_CALLS)))
        reply = replace(reply, calls=calls, content="" if calls and draw(_BOOLEAN) else reply.content)
    changes = draw(_ENDING)
    return reply if "shown_calls" in changes and len(reply.calls) < 2 else replace(reply, **changes)


@st.composite
def _news(draw: st.DrawFn, name: str, reply: Reply) -> tuple[Message, ...]:
    """Draw the messages that an agent adds after a reply."""
    texts = _texts(name)
    is_cut = reply.ending == "length" and reply.kept < 1
    calls = [] if is_cut else reply.message().get("tool_calls", ())
    results = [{"role": "tool", "tool_call_id": call["id"], "content": draw(texts)} for call in calls]
    odd = draw(_SMALL) if len(results) > 1 else None
    if odd in {0, 1, 2}:
        results.pop()
    elif odd in {3, 4}:
        results.reverse()
    if results and draw(_SMALL) > 2:
        return tuple(results)
    added: list[dict[str, Any]] = [{"role": "user", "content": draw(texts)}]
    odd = draw(_SMALL)
    if odd == 0:
        added.insert(0, {"role": "assistant", "content": draw(_SENTENCE)})
    elif odd == 1:
        added.append({"role": "user", "content": draw(texts)})
    elif odd == 2:
        added.insert(0, {"role": "system", "content": draw(_SENTENCE)})
    elif odd == 3:
        added = [{"role": "user", "content": [{"type": "text", "text": draw(texts)}]}]
    return (*results, *added)


@st.composite
def _turns(draw: st.DrawFn, name: str, tools: bool, number: int) -> Turn:
    reply, event = draw(_replies(tools, number)), draw(_EVENT)
    return Turn(
        reply,
        draw(_news(name, reply)),
        others=(draw(_REPLY),) if event == "others" else (),
        tools=TOOLS[:1] if event == "tools" and tools else None,
        day=number if event == "day" else 0,
        as_it_came=event == "as_it_came",
        rollback=event == "rollback",
    )


@st.composite
def plans(draw: st.DrawFn, names: tuple[str, ...] = NAMES, most: int = 8) -> Plan:
    """Draw a rollout with one of these templates."""
    name = draw(st.sampled_from(names))
    tools = draw(_SMALL) > 4
    turns = [draw(_turns(name, tools, number)) for number in range(draw(st.integers(2, most)))]
    first: list[dict[str, Any]] = [{**USER, "content": draw(_texts(name))}]
    if draw(_BOOLEAN):
        first.insert(0, {"role": "system", "content": draw(_SENTENCE)})
    if draw(_SMALL) == 0:
        first += [{"role": "assistant", "content": "An example."}, USER]
    thinks = draw(st.sampled_from([None, None, False, True]))
    return Plan(
        name,
        tuple(turns),
        mode=draw(st.sampled_from(["append", "faithful"])),
        first=tuple(first),
        tools=TOOLS if tools else None,
        options={} if thinks is None else {"enable_thinking": thinks},
        rewrites=draw(_BOOLEAN),
        keeps_reasoning=draw(_BOOLEAN),
        trims=draw(_BOOLEAN),
        as_parts=draw(_SMALL) < 3,
        joins_parts=draw(_SMALL) < 3,
        renames=draw(_SMALL) < 3,
        drops_specials=draw(_SMALL) == 0,
        ignores_tools=draw(_SMALL) == 0,
        clock=draw(_SMALL) == 0,
        knows_stops=draw(_BOOLEAN),
        failing=draw(_SMALL) if draw(_SMALL) == 0 else 0,
        seed=draw(st.integers(0, 2**16)),
    )
