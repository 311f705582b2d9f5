"""Texts of ids and of messages, as far as a tokenizer is at hand. They are told to people; nodes are not joined by them."""

from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]


class Translator:
    """Remembers which raw text was parsed into which tool calls, to render a replayed reply as it was sampled."""

    __slots__ = ("_raw",)

    def __init__(self) -> None:
        self._raw: dict[tuple[str, ...], str] = {}

    def learn(self, reply: Any, step: Mapping[str, Any], tokenizer: Any) -> None:
        """Remember a reply whose tool calls the engine parsed. All their ids name it, not the first alone."""
        if tokenizer is None or not step["fidelity"]["exact"]:
            return
        for choice, recorded in zip(reply.choices, step["choices"], strict=True):
            if choice.message.tool_calls:
                ids = tuple(call["id"] for call in choice.message.tool_calls)
                self._raw[ids] = tokenizer.decode(recorded["ids"], skip_special_tokens=True)

    def convert_messages_for_template(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages; those with tool calls that were sampled here have their raw text for content instead."""
        return [self._converted(message) for message in messages]

    def _converted(self, message: Message) -> dict[str, Any]:
        raw = self._raw.get(tuple(str(call.get("id")) for call in message.get("tool_calls") or ()))
        if raw is None:
            return dict(message)
        return {**{name: value for name, value in message.items() if name != "tool_calls"}, "content": raw}


def render(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Message] | None) -> str:
    """The messages by the tokenizer's chat template, asking for a reply unless the last one is; without one, as lines."""
    if not hasattr(tokenizer, "apply_chat_template"):
        return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in messages)
    asks = not messages or messages[-1].get("role") != "assistant"
    told = {"tools": tools} if tools else {}
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks, **told))


def text_behind(tokenizer: Any, prompt: Sequence[int], ids: Sequence[int], told: str) -> str:
    """What sampled ids say behind their prompt, special tokens too; without a tokenizer, what the engine told."""
    if tokenizer is None:
        return told
    before, whole = tokenizer.decode(list(prompt)), tokenizer.decode([*prompt, *ids])
    return str(whole[len(before) :] if whole.startswith(before) else tokenizer.decode(list(ids)))


def begins_with_bos(tokenizer: Any, text: str) -> bool:
    """Whether a text spells the beginning of sequence itself, so that an engine is not to add one."""
    bos = getattr(tokenizer, "bos_token", None)
    return bool(bos) and text.startswith(str(bos))


def dummy_text(messages: Sequence[Message], reply: str | None) -> str:
    """A conversation where nothing but text is known."""
    said = [f"{message.get('role')}:{message.get('content')}" for message in messages]
    return "\n\n".join([*said, f"assistant:{reply or ''}"])
