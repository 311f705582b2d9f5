"""Rollouts with replies that are equal in part, drawn with hypothesis, on an engine with ids that decode to the messages.

A message is written as `<role> thoughts | content | calls <end>`, one token for each character; a sampled character has one of
two tokens, so that equal texts have different ids.
"""

from array import array
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
from hypothesis import strategies as st
from tests.support.forests import make_choice
from tests.support.turns import assistant, chat_step, tool_call

from proxy.continuation.bridge import continue_turn
from proxy.continuation.turns import Match, Sampler, Turns, match
from proxy.continuation.types import Continuation, Detokenize, Render

BEGIN, THOUGHTS, CONTENT, CALLS, END = "\x01\x02\x03\x04\x05"
OTHER = 2**20  # added to the token of a character: another token of the same text
AGENTS = (None, "a", "b")


def decode(ids) -> str:
    """Return the text of ids."""
    return "".join(chr(token % OTHER) for token in ids)


def render(messages) -> "array[int]":
    """Return the ids of messages with a generation prompt."""
    return array("i", map(ord, "".join(map(_text, messages)) + f"{BEGIN}assistant{THOUGHTS}"))


def _text(message) -> str:
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or ()]
    return f"{BEGIN}{message['role']}{_turn(message, calls)}"


def _turn(message, calls) -> str:
    written = orjson.dumps(calls).decode()
    return f"{THOUGHTS}{message.get('reasoning') or ''}{CONTENT}{message.get('content') or ''}{CALLS}{written}{END}"


def parse(text: str) -> list[dict[str, Any]]:
    """Return the messages of a text."""
    found = []
    for part in text.split(BEGIN)[1:-1]:
        role, rest = part.removesuffix(END).split(THOUGHTS)
        thoughts, rest = rest.split(CONTENT)
        content, calls = rest.split(CALLS)
        read = [[name, orjson.loads(arguments)] for name, arguments in orjson.loads(calls)]
        found.append({"role": role, "reasoning": thoughts, "content": content.strip(), "calls": read})
    return found


@dataclass(frozen=True)
class Move:
    """A call that follows a recorded reply, or none. `choices`: the thoughts, text, call and split of each that is sampled."""

    follows: int
    new: str
    agent: str | None
    mode: str
    choices: tuple[tuple[str, str, str | None, bool], ...]
    repeats_call_ids: bool
    is_delivered: bool
    drops: frozenset[int]
    edits: frozenset[int]
    renames: bool
    rewrites: bool


@dataclass(frozen=True)
class Sent:
    """A call that was continued, or not: its messages, the turn that was found, and the result."""

    messages: list[dict[str, Any]]
    found: Any
    result: Continuation | None


@dataclass
class Siblings:
    """A rollout. `replies`: for each recorded choice, its history with the reply, as a client that keeps all has it."""

    turns: Turns = field(default_factory=Turns)
    replies: list[list[dict[str, Any]]] = field(default_factory=list)
    steps: int = 0

    def make(self, move: Move) -> Sent:
        """Make a call and record its step."""
        before = self.replies[move.follows % len(self.replies)] if self.replies and move.follows >= 0 else []
        whole = [*before, *self._new(before, move)]
        messages = [_sent_back(message, at, move) for at, message in enumerate(deepcopy(whole))]
        body = {"model": "policy", "messages": messages}
        found = match(self.turns, body, Sampler("vllm", "policy", agent=move.agent), mode=move.mode)
        result = _continued(found, move.mode) if isinstance(found, Match) else None
        facts: dict[str, Any] = {} if not isinstance(found, Match) else {"step_id": found.turn.step_id}
        if isinstance(found, Match):
            facts["choice"] = found.turn.choice
        prompt = render(messages)
        if result is not None and result.ids is not None:
            prompt = result.ids
            facts |= {"kept": result.kept, "bridge": result.bridge}
            if rendering := result.rendering:
                facts |= {
                    "rendered": rendering.length,
                    "rendered_digest": rendering.digest,
                    "rendered_last": rendering.last,
                }
        self._record(body, prompt, whole, facts, move)
        return Sent(messages, found, result)

    def _new(self, before, move: Move) -> list[dict[str, Any]]:
        calls = before[-1].get("tool_calls") if before else None
        if calls:
            return [{"role": "tool", "tool_call_id": call["id"], "content": move.new} for call in calls]
        return [{"role": "user", "content": move.new}]

    def _record(self, body, prompt, whole, facts, move: Move) -> None:
        step_id, answers, choices = f"s{self.steps}", [], []
        for index, (thoughts, text, arguments, is_split) in enumerate(move.choices):
            call_id = "f:0" if move.repeats_call_ids else f"call-{self.steps}-{index}"
            reply = assistant(text, reasoning=thoughts or None)
            if arguments is not None:
                reply["tool_calls"] = [tool_call(arguments, "f", call_id)]
            calls = [["f", arguments]] if arguments is not None else []
            ids = array(
                "i", [ord(char) + (OTHER if is_split and char.isalpha() else 0) for char in _turn(reply, calls)]
            )
            finish = "tool_calls" if arguments is not None else "stop"
            choices.append(make_choice(index, ids[1:], finish_reason=finish))
            answers.append({"index": index, "message": reply, "finish_reason": finish})
            self.replies.append([*whole, {name: value for name, value in reply.items() if value is not None}])
        extra = {"continuation": facts} if facts else {}
        if move.agent is not None:
            extra["agent"] = move.agent
        step = chat_step(step_id, body["messages"], None, [1], [1], index=self.steps, extra=extra)
        response = {"id": f"r{self.steps}", "choices": answers}
        sampled = {"prompts": (prompt,), "choices": tuple(choices), "response": response}
        self.turns.add(replace(step, delivered=move.is_delivered, **sampled))
        self.steps += 1


def _sent_back(message, at: int, move: Move):
    if message["role"] == "assistant":
        if at in move.drops:
            message.pop("reasoning", None)
        if at in move.edits:
            message["reasoning"] = "C"
    if move.rewrites:
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = call["function"]["arguments"].replace(":", "  :  ")
    if move.renames:
        for call in message.get("tool_calls") or ():
            call["id"] = f"own-{call['id']}"
        if "tool_call_id" in message:
            message["tool_call_id"] = f"own-{message['tool_call_id']}"
    return message


def _continued(found: Match, mode) -> Continuation:
    lookups = continue_turn(found, mode=mode, stops=())
    result: Any = None
    while True:
        try:
            lookup = lookups.send(result)
        except StopIteration as stop:
            return stop.value
        result = decode(lookup.ids) if isinstance(lookup, Detokenize) else render(lookup.messages)
        assert isinstance(lookup, Detokenize | Render)


_PLACES = st.frozensets(st.integers(0, 6), max_size=4)
MOVES = st.builds(
    Move,
    follows=st.integers(-1, 40),
    new=st.sampled_from(["go", "on"]),
    agent=st.sampled_from(AGENTS),
    mode=st.sampled_from(["faithful", "append"]),
    choices=st.lists(
        st.tuples(
            st.sampled_from(["", "A", "B"]),
            st.sampled_from(["yes", "no", " yes"]),
            st.sampled_from([None, None, '{"x":1}', '{"x": 1}', '{"x":1.0}', '{"x":true}']),
            st.booleans(),
        ),
        min_size=1,
        max_size=3,
    ).map(tuple),
    repeats_call_ids=st.booleans(),
    is_delivered=st.booleans(),
    drops=_PLACES,
    edits=st.one_of(st.just(frozenset()), st.just(frozenset()), _PLACES),
    renames=st.sampled_from([False, False, False, True]),
    rewrites=st.booleans(),
)
ROLLOUTS = st.lists(MOVES, min_size=2, max_size=14)
