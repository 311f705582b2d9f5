"""Tokenizing: where each engine counts the tokens of a prompt, and by which names.

Holds the table, and the reading of an answer. It asks nothing itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from proxy.protocols.dialects.base import DialectName
from proxy.protocols.engines.base import FollowUpRequest

_TOKENIZE_ROUTES: Final = {"vllm": "/tokenize", "sglang": "/v1/tokenize"}  # vLLM 0.32.0 seen, SGLang 0.5.23 read

# What decides the prompt that a chat call has; the rest of its body does not.
_OF_TEMPLATES: Final = (
    "messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Counted:
    """How many tokens a prompt has, and how many the model's window has for prompt and completion together."""

    tokens: int
    window: int


def token_count_request(kind: str, dialect: DialectName, body: Mapping[str, Any]) -> FollowUpRequest | None:
    """What to ask an engine of this kind for the tokens of a call's prompt; None if it cannot be asked."""
    path = _TOKENIZE_ROUTES.get(kind)
    if path is None:
        return None
    if dialect == "chat":
        return FollowUpRequest(path, template_fields(kind, body))
    prompt = body.get("prompt")
    special = {"add_special_tokens": body["add_special_tokens"]} if "add_special_tokens" in body else {}
    return FollowUpRequest(path, {"prompt": prompt, **special}) if isinstance(prompt, str) else None


def template_fields(kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a chat body that decide its prompt, as an engine of this kind takes them where it counts.

    vLLM's route knows no `reasoning_effort`, so it gets what chat makes of it (vLLM 0.32.0:
    entrypoints/openai/chat_completion/protocol.py:621).
    """
    fields = {name: body[name] for name in _OF_TEMPLATES if body.get(name) is not None}
    effort = body.get("reasoning_effort")
    if effort is None:
        return fields
    if kind != "vllm":
        return {**fields, "reasoning_effort": effort}
    own = fields.get("chat_template_kwargs")
    own = own if isinstance(own, Mapping) else {}
    return {
        **fields,
        "chat_template_kwargs": {"enable_thinking": effort != "none", **own, "reasoning_effort": effort},
    }


def read_count(answer: Any) -> Counted | None:
    """What an engine answered; None if it cannot be read."""
    if not isinstance(answer, dict):
        return None
    tokens, window = answer.get("count"), answer.get("max_model_len")
    return Counted(tokens, window) if type(tokens) is int and type(window) is int else None


# vLLM 0.32.0 and llama.cpp 2026.10 seen, SGLang 0.5.23 read.
_DETOKENIZE_ROUTES: Final[dict[str, tuple[str, str]]] = {
    "vllm": ("/detokenize", "prompt"),
    "sglang": ("/v1/detokenize", "text"),
    "llamacpp": ("/detokenize", "content"),
}


def text_request(kind: str, ids: Sequence[int]) -> FollowUpRequest | None:
    """What to ask an engine of this kind for the text of ids; None if it cannot be asked."""
    route = _DETOKENIZE_ROUTES.get(kind)
    return FollowUpRequest(route[0], {"tokens": list(ids)}) if route else None


def read_text(kind: str, answer: Any) -> str | None:
    """The text in its answer; None if there is none."""
    route = _DETOKENIZE_ROUTES.get(kind)
    text = answer.get(route[1]) if route and isinstance(answer, dict) else None
    return text if isinstance(text, str) else None
