"""The tokenize and detokenize endpoints of each engine: their requests and responses."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from proxy.protocols.dialects.base import DialectName
from proxy.protocols.engines.base import FollowUpRequest
from proxy.protocols.number_lists import KnownPrompt
from proxy.trajectory.arrays import has_negative, pack_ids
from proxy.trajectory.step import Ids

_TOKENIZE_ROUTES: Final = {"vllm": "/tokenize", "sglang": "/v1/tokenize"}  # vLLM 0.32.0 verified, SGLang 0.5.23 read

# The fields of a chat body that determine its prompt.
_OF_TEMPLATES: Final = (
    "messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Counted:
    """The number of tokens of a prompt, and the size of the model's context window (prompt and completion)."""

    tokens: int
    window: int


def token_count_request(kind: str, dialect: DialectName, body: Mapping[str, Any]) -> FollowUpRequest | None:
    """Return the request that counts the tokens of a call's prompt; None if the engine has none for it."""
    path = _TOKENIZE_ROUTES.get(kind)
    if path is None:
        return None
    if dialect == "chat":
        return FollowUpRequest(path, template_fields(kind, body))
    prompt = body.get("prompt")
    special = {"add_special_tokens": body["add_special_tokens"]} if "add_special_tokens" in body else {}
    return FollowUpRequest(path, {"prompt": prompt, **special}) if isinstance(prompt, str) else None


def template_fields(kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a chat body that determine its prompt, for the tokenize endpoint of this kind of engine.

    vLLM's endpoint does not accept `reasoning_effort`, so it receives the template arguments that chat derives from it
    (vLLM 0.32.0: entrypoints/openai/chat_completion/protocol.py:621).
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


def read_count(response: Any) -> Counted | None:
    """Read the response of a token count; None if it is invalid."""
    if not isinstance(response, dict):
        return None
    tokens, window = response.get("count"), response.get("max_model_len")
    return Counted(tokens, window) if type(tokens) is int and type(window) is int else None


def render_request(kind: str, body: Mapping[str, Any], messages: Sequence[Any]) -> FollowUpRequest | None:
    """Return the request that renders messages with a generation prompt and the template fields of a chat body, as token ids.

    None if the engine has none.
    """
    path = _TOKENIZE_ROUTES.get(kind)
    fields = {**template_fields(kind, body), **_model_of(body), "messages": messages}
    return None if path is None else FollowUpRequest(path, fields)


def tokenize_request(kind: str, body: Mapping[str, Any], text: str) -> FollowUpRequest | None:
    """Return the request that converts text into ids, without special tokens at its beginning; None if the engine has none."""
    path = _TOKENIZE_ROUTES.get(kind)
    fields = {"prompt": text, "add_special_tokens": False, **_model_of(body)}
    return None if path is None else FollowUpRequest(path, fields)


def _model_of(body: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": body["model"]} if isinstance(body.get("model"), str) else {}


def read_ids(response: Any) -> "Ids | None":
    """Return the ids of a tokenize response; None if it is invalid."""
    tokens = response.get("tokens") if isinstance(response, dict) else None
    if isinstance(tokens, KnownPrompt):
        tokens = tokens.ids
    try:
        ids = pack_ids(tokens) if isinstance(tokens, list | array) else None
    except (ValueError, TypeError, OverflowError):
        return None
    return None if ids is None or has_negative(ids) else ids


def read_window(response: Any) -> int | None:
    """Return the size of the context window in a tokenize response; None if there is none."""
    window = response.get("max_model_len") if isinstance(response, dict) else None
    return window if type(window) is int and window > 0 else None


# vLLM 0.32.0 and llama.cpp 2026.10 verified, SGLang 0.5.23 read.
_DETOKENIZE_ROUTES: Final[dict[str, tuple[str, str]]] = {
    "vllm": ("/detokenize", "prompt"),
    "sglang": ("/v1/detokenize", "text"),
    "llamacpp": ("/detokenize", "content"),
}


def text_request(kind: str, ids: Sequence[int]) -> FollowUpRequest | None:
    """Return the request that converts ids into text; None if the engine has none."""
    route = _DETOKENIZE_ROUTES.get(kind)
    # Otherwise SGLang drops special tokens (run on 0.5.23), and the end of a turn is one.
    special = {"skip_special_tokens": False} if kind == "sglang" else {}
    return FollowUpRequest(route[0], {"tokens": list(ids), **special}) if route else None


def read_text(kind: str, response: Any) -> str | None:
    """Read the text of a response; None if there is none."""
    route = _DETOKENIZE_ROUTES.get(kind)
    text = response.get(route[1]) if route and isinstance(response, dict) else None
    return text if isinstance(text, str) else None
