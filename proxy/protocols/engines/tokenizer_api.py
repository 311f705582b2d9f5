"""The tokenize and detokenize endpoints of engines: their requests and responses. vLLM 0.32.0 verified, SGLang 0.5.23 read."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.protocols.dialects.base import DialectName
from proxy.protocols.engines.base import Engine, FollowUpRequest
from proxy.protocols.number_lists import KnownPrompt
from proxy.trajectory.arrays import Ids, has_negative, pack_ids


@dataclass(frozen=True, slots=True)
class Counted:
    """The number of tokens of a prompt, and the size of the model's context window (prompt and completion)."""

    tokens: int
    window: int


def token_count_request(engine: Engine, dialect: DialectName, body: Mapping[str, Any]) -> FollowUpRequest | None:
    """Return the request that counts the tokens of a call's prompt; None if the engine cannot count them."""
    path = engine.tokenize_path
    if path is None:
        return None
    if dialect == "chat":
        return FollowUpRequest(path, engine.template_fields(body))
    prompt = body.get("prompt")
    special = {"add_special_tokens": body["add_special_tokens"]} if "add_special_tokens" in body else {}
    return FollowUpRequest(path, {"prompt": prompt, **special}) if isinstance(prompt, str) else None


def read_count(response: Any) -> Counted | None:
    """Read the response of a token count; None if it is invalid."""
    if not isinstance(response, dict):
        return None
    tokens, window = response.get("count"), response.get("max_model_len")
    return Counted(tokens, window) if type(tokens) is int and type(window) is int else None


def render_request(engine: Engine, body: Mapping[str, Any], messages: Sequence[Any]) -> FollowUpRequest | None:
    """Return the request that renders messages with a generation prompt and the template fields of a chat body, as token ids.

    None if the engine has none.
    """
    fields = {**engine.template_fields(body), **_model_of(body), "messages": messages}
    return None if engine.tokenize_path is None else FollowUpRequest(engine.tokenize_path, fields)


def tokenize_request(engine: Engine, body: Mapping[str, Any], text: str) -> FollowUpRequest | None:
    """Return the request that converts text into ids, without special tokens at its beginning; None if the engine cannot."""
    fields = {"prompt": text, "add_special_tokens": False, **_model_of(body)}
    return None if engine.tokenize_path is None else FollowUpRequest(engine.tokenize_path, fields)


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


def text_request(engine: Engine, ids: Sequence[int]) -> FollowUpRequest | None:
    """Return the request that converts ids into text; None if the engine cannot."""
    path = engine.detokenize_path
    return None if path is None else FollowUpRequest(path, {"tokens": list(ids), **engine.detokenize_fields})


def read_text(engine: Engine, response: Any) -> str | None:
    """Read the text of a response; None if there is none."""
    text = response.get(engine.detokenized_field) if isinstance(response, dict) else None
    return text if isinstance(text, str) else None
