"""The turn that a call continues, found by the messages of the call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from proxy.continuation.turns import Turn, Turns, options_of
from proxy.continuation.types import Message, Mode, Reason
from proxy.trajectory.conversation import change, text_of
from proxy.trajectory.step import DEFAULT_POLICY

_OWN_IDS: Final = ("prompt_token_ids", "input_ids")
_REPLY_FIELDS: Final = ("role", "content", "reasoning", "reasoning_content", "tool_calls")


@dataclass(frozen=True, slots=True)
class Match:
    """A turn that a call continues.

    `history`: the messages before the reply, as the turn's step rendered them. `reply`: the reply as the engine returned it.
    `new`: the messages after it.
    """

    turn: Turn
    history: list[Message]
    reply: Message
    new: list[Message]


@dataclass(frozen=True, slots=True)
class Sampler:
    """What samples a call: the kind of its engine, the name of the model there, and the policy of the model."""

    kind: str
    model: str | None
    policy: str = DEFAULT_POLICY


def match(turns: Turns, body: Mapping[str, Any], sampler: Sampler, *, mode: Mode) -> Match | Reason | None:
    """Return the turn that a chat call continues, the reason why it continues none, or None if it is a first call.

    `body` is the body that is sent to the engine. Several turns match: the one after most messages, then the one of the call's
    policy, then the one that the agent sends back unchanged, then the youngest.
    """
    messages = body.get("messages")
    if not len(turns) or not isinstance(messages, list):
        return None
    replies = [position for position, message in enumerate(messages) if _role(message) == "assistant"]
    if not replies:
        return None
    if (problem := call_problem(body)) or (problem := _messages_problem(messages)):
        return problem
    chain = turns.newest.chain(messages)
    options = options_of(body)
    reason: Reason = "edited"
    for position in reversed(replies):
        turn = _turn_at(turns, chain, position, messages[position], mode, sampler.policy) if position else None
        if turn is None:
            continue
        refused = turn_problem(turn, options, sampler)
        if refused is None:
            return _match(turn, messages, position)
        reason = refused if reason == "edited" else reason  # the reason of the longest match
    return reason


def call_problem(body: Mapping[str, Any]) -> Reason | None:
    """Return why a call of any dialect cannot be continued, by its options."""
    params = body.get("kv_transfer_params")
    if any(body.get(name) is not None for name in _OWN_IDS) or (isinstance(params, Mapping) and params):
        return "own_ids"
    if body.get("echo"):
        return "echo"
    if body.get("truncate_prompt_tokens") is not None:
        return "options"  # the engine may cut ids as well, and would then return others than were sent
    if body.get("continue_final_message") or body.get("add_generation_prompt") is False:
        return "prefill"
    return None


def _messages_problem(messages: Sequence[Any]) -> Reason | None:
    if not all(isinstance(message, Mapping) and _is_text(message.get("content")) for message in messages):
        return "content"
    if _role(messages[-1]) == "assistant":
        return "prefill"
    return None if any(_role(message) == "user" for message in messages) else "no_user"


def _is_text(content: Any) -> bool:
    if content is None or isinstance(content, str):
        return True
    return isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    )


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _turn_at(
    turns: Turns, chain: Sequence[bytes], position: int, sent_back: Message, mode: Mode, policy: str
) -> Turn | None:
    """Return the turn whose messages these begin with, and whose reply the agent sends back at this position."""
    candidates = turns.by_messages.get((position, chain[position - 1]), ())
    ranked = [
        (turn.policy == policy, rank, turn.problem is None, turn.index, turn)
        for turn in candidates
        if (rank := _equality(turn.reply, sent_back, mode)) is not None
    ]
    return max(ranked, key=lambda entry: entry[:4])[4] if ranked else None


def _equality(reply: Message, sent_back: Message, mode: Mode) -> int | None:
    """Return how equal a message is to a reply: 2 unchanged, 1 formatted differently, 0 without its reasoning; None: edited."""
    changed = change(reply, sent_back)
    if changed is None:
        return 2
    if changed in {"tool_call_rewritten", "whitespace"}:
        return 1 if text_of(reply).strip() == text_of(sent_back).strip() else None
    # The template decides what is shown in `faithful`, but the agent itself removed this.
    return 0 if changed == "reasoning_stripped" and mode == "append" else None


def turn_problem(turn: Turn, options: bytes, sampler: Sampler) -> Reason | None:
    """Return why a turn cannot be continued by a call with these options and this sampler."""
    if turn.problem is not None:
        return turn.problem
    if (turn.kind, turn.model, turn.policy) != (sampler.kind, sampler.model, sampler.policy):
        return "model"
    if turn.options != options:
        return "options"
    return None if turn.ids else "empty"


def _match(turn: Turn, messages: Sequence[Message], position: int) -> Match:
    restored = turn.restored
    history = [
        restore(restored[index], message) if index in restored else message
        for index, message in enumerate(messages[:position])
    ]
    return Match(turn, history, restore(turn.reply, messages[position]), list(messages[position + 1 :]))


def restore(reply: Message, sent_back: Message) -> Message:
    """Return a reply as the engine returned it, as a message of a request.

    Tool calls have the ids that the agent sends back, because its tool messages refer to them.
    """
    message = {name: reply[name] for name in _REPLY_FIELDS if reply.get(name) not in (None, [], "")}
    message.setdefault("content", reply.get("content"))
    calls, theirs = message.get("tool_calls"), sent_back.get("tool_calls")
    if isinstance(calls, list) and isinstance(theirs, list) and len(calls) == len(theirs):
        message["tool_calls"] = [
            {**call, "id": sent["id"]} if isinstance(sent, Mapping) and sent.get("id") else call
            for call, sent in zip(calls, theirs, strict=True)
        ]
    return message
