"""The turn that a call continues, found by the messages of the call."""

from array import array
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from proxy.continuation.turns import Turn, Turns, has_own_ids, options_of
from proxy.continuation.types import (
    Continuation,
    Detokenize,
    Lookup,
    LookupFailed,
    LookupResult,
    Message,
    Mode,
    Reason,
    Tokenize,
)
from proxy.trajectory.step import DEFAULT_POLICY

_TEXT_FIELDS: Final = 2  # type and text
_MEDIA: Final = ("image", "video", "audio", "file", "embeds")
_REPLY_FIELDS: Final = ("role", "content", "reasoning", "reasoning_content", "tool_calls", "function_call")


@dataclass(frozen=True, slots=True)
class Match:
    """A turn that a call continues."""

    turn: Turn
    history: list[Message]  # before the reply, as the turn's step rendered them
    reply: Message  # as the engine returned it
    new: list[Message]  # after it


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """Turns with different ids that a call may continue; nothing in the call distinguishes them. The oldest is first."""

    turns: Sequence[Turn]


@dataclass(frozen=True, slots=True)
class Sampler:
    """The engine, model and policy that sample a call, and the agent that sends it."""

    kind: str  # of the engine
    model: str | None
    policy: str = DEFAULT_POLICY
    agent: str | None = None
    steps: Collection[str] = ()  # the call names their responses by id


def match(
    turns: Turns, body: Mapping[str, Any], sampler: Sampler, *, mode: Mode, undelivered: Collection[str] = ()
) -> Match | Ambiguous | Reason | None:
    """Return the turn that a chat call continues, the reason why it continues none, or None if it is a first call.

    `body` is the body that is sent to the engine. If several turns match, the one after most messages is chosen; of equal ones,
    the one that `Conversations.follow` finds nearest. `undelivered`: steps that were marked as undelivered after they were
    added.
    """
    messages = body.get("messages")
    if not len(turns) or not isinstance(messages, list):
        return None
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    if "assistant" not in roles:
        return None
    if (problem := call_problem(body)) or (problem := _messages_problem(messages, roles)):
        return problem
    options = options_of(body)
    reason: Reason = "edited"
    for position, replies in turns.conversations.follow(
        messages,
        lambda turn: _fits(turn, options, sampler) is None,
        agent=sampler.agent,
        steps=sampler.steps,
        drops_thoughts=mode == "append",  # in `faithful` the template decides, but the agent removed these
    ):
        if not replies:
            if mode == "append":
                return "edited"
            continue
        turn = nearest(replies, undelivered)
        if turn is None:
            return Ambiguous(replies)
        refused = turn_problem(turn, options, sampler)
        if refused is None:
            restored = turn.restored
            history = [
                restore(restored[index], message) if index in restored else message
                for index, message in enumerate(messages[:position])
            ]
            return Match(turn, history, restore(turn.reply, messages[position]), messages[position + 1 :])
        reason = refused if reason == "edited" else reason  # the reason of the longest match
    return reason


def nearest(turns: Sequence[Turn], undelivered: Collection[str] = ()) -> Turn | None:
    """Return the youngest of turns with equal ids, the delivered ones if there are any; None if their ids differ."""
    turns = [turn for turn in turns if turn.step_id not in undelivered] or turns
    youngest = max(turns, key=lambda turn: turn.index)
    return youngest if all(turn is youngest or _has_ids_of(turn, youngest) for turn in turns) else None


def _has_ids_of(turn: Turn, other: Turn) -> bool:
    # The choices of a step share their prompt, which may be long.
    is_shared = turn.prompt is other.prompt and turn.prompt_length == other.prompt_length
    return turn.ids == other.ids and (is_shared or turn.prompt_ids == other.prompt_ids)


def call_problem(body: Mapping[str, Any]) -> Reason | None:
    """Return why a call of any dialect cannot be continued, by its options."""
    if has_own_ids(body):
        return "own_ids"
    if body.get("echo"):
        return "echo"
    if body.get("truncate_prompt_tokens") is not None:
        return "options"  # the engine may cut ids as well, and would then return others than were sent
    if body.get("continue_final_message") or body.get("add_generation_prompt") is False:
        return "prefill"
    return None


def _messages_problem(messages: Sequence[Any], roles: Sequence[Any]) -> Reason | None:
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else 0
        if content is not None and not isinstance(content, str) and not _are_texts(content):
            return "content"
    if roles[-1] == "assistant":
        return "prefill"
    return None if "user" in roles else "no_user"


def _are_texts(content: Any) -> bool:
    return isinstance(content, list) and all(
        isinstance(part, Mapping)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
        # With a field of a medium, even null, vLLM (0.32.0) ignores prompt ids.
        and (len(part) == _TEXT_FIELDS or not any(word in name for name in part for word in _MEDIA))
        for part in content
    )


def turn_problem(turn: Turn, options: bytes, sampler: Sampler) -> Reason | None:
    """Return why a turn cannot be continued by a call with these options and this sampler."""
    if turn.problem is not None:
        return turn.problem
    return _fits(turn, options, sampler) or (None if turn.ids else "empty")


def _fits(turn: Turn, options: bytes, sampler: Sampler) -> Reason | None:
    """Return why a turn does not fit: another engine, model or policy sampled it, or its call had other options."""
    if (turn.kind, turn.model, turn.policy) != (sampler.kind, sampler.model, sampler.policy):
        return "model"
    return "options" if turn.options != options else None


def restore(reply: Message, sent_back: Message) -> Message:
    """Return a reply as the engine returned it, as a message of a request.

    If the reply has no text, its content is null or empty, as the agent sent it. Tool calls have the ids that the agent sends
    back, because its tool messages refer to them; the name is the agent's.
    """
    message = {name: reply[name] for name in _REPLY_FIELDS if reply.get(name) not in (None, [], "")}
    nothing = sent_back.get("content")  # null and "" differ for some templates: what the call has is rendered
    message.setdefault("content", nothing if nothing in (None, "") else reply.get("content"))
    if sent_back.get("name") is not None:
        message["name"] = sent_back["name"]
    calls, theirs = message.get("tool_calls"), sent_back.get("tool_calls")
    if isinstance(calls, list) and isinstance(theirs, list) and len(calls) == len(theirs):
        message["tool_calls"] = [
            {**call, "id": sent["id"]} if isinstance(sent, Mapping) and sent.get("id") else call
            for call, sent in zip(calls, theirs, strict=True)
        ]
    return message


def match_text(
    turns: Turns, body: Mapping[str, Any], sampler: Sampler, *, undelivered: Collection[str] = ()
) -> Turn | Ambiguous | Reason | None:
    """Return the turn that a text prompt continues, the reason why it continues none, or None if it is a first prompt.

    If several turns match, the longest text decides; after it the same agent, then whether the turn was delivered.
    """
    prompt = body.get("prompt")
    if not len(turns) or not isinstance(prompt, str):
        return None
    options = options_of(body)
    reason: Reason | None = None
    for equal in turns.of_text(prompt):
        problems = {turn: call_problem(body) or turn_problem(turn, options, sampler) for turn in equal}
        usable = [turn for turn, problem in problems.items() if problem is None]
        if usable:
            usable = [turn for turn in usable if turn.agent == sampler.agent] or usable
            usable = [turn for turn in usable if turn.is_delivered] or usable
            return nearest(usable, undelivered) or Ambiguous(usable)
        reason = reason or problems[equal[-1]]
    return reason


def continue_text(turn: Turn, prompt: str) -> Generator[Lookup, LookupResult, Continuation]:
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
