"""Prompts of chats that are given as ids: vLLM's `kv_transfer_params.prompt_token_ids` and SGLang's `input_ids`."""

from collections.abc import Sequence
from typing import Any, Final

from proxy.simulator.errors import invalid_value
from proxy.simulator.model import Model
from proxy.simulator.options import Faults
from proxy.simulator.requests import Body

_PARAM: Final = "kv_transfer_params.prompt_token_ids"


def reused_ids(body: Body, model: Model, *, has_field: bool = False) -> list[int] | None:
    """Return the ids of a vLLM chat in place of its rendered messages; None if there are none.

    `has_field`: they may be in the field `prompt_token_ids`, which 0.32 ignores.
    They are ignored with `echo`, and if a message has content that is not text (vLLM 0.32, renderers/online_renderer.py,
    `_reused_prompt_token_ids`).

    Raises:
        RequestError: the ids are not a list of ids of the vocabulary, or the list is empty.
    """
    params = body.get("kv_transfer_params")
    ids = params.get("prompt_token_ids") if isinstance(params, dict) else None
    if has_field and ids is None:
        ids = body.get("prompt_token_ids")
    if ids is None or body.get("echo") or _has_other_than_text(body.get("messages")):
        return None
    if not isinstance(ids, list) or not ids or any(type(i) is not int or i < 0 for i in ids):
        message = "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative integers."
        raise invalid_value(message, _PARAM)
    model.check_ids(ids)
    return ids


def _has_other_than_text(messages: Any) -> bool:
    listed = messages if isinstance(messages, list) else []
    contents = [message.get("content") for message in listed if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type", "text") != "text" for part in parts)


def with_fault(ids: Sequence[int] | None, faults: Faults) -> Sequence[int] | None:
    """Return the ids that the engine uses in place of these: the same ones unless it has a fault.

    Raises:
        RequestError: the fault is that the engine rejects ids.
    """
    if not ids or faults.prompt_ids is None:
        return ids
    if faults.prompt_ids == "rejected":
        raise invalid_value("The engine does not accept prompts that are given as ids.")
    return None if faults.prompt_ids == "ignored" else [*ids[:-1], (ids[-1] + 1) % 256]
