"""The route that returns the texts of a step's tokens.

Texts come from the first source that has them: the strings that the engine recorded with its logprobs, the tokenizer of the
endpoint, or the engine's detokenizer, one id at a time. A text is null if no source has it, or if the token alone is not valid
UTF-8.
"""

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal

from aiohttp import web

from proxy.api.context import CONTEXT, Context
from proxy.api.control.schemas import ShowTexts
from proxy.api.control.steps import step_from
from proxy.api.http import json_response
from proxy.api.query import query_from
from proxy.errors import BadRequest, UnprocessableRequest
from proxy.telemetry.logs import LOG
from proxy.trajectory.step import Choice, Ids, Step
from proxy.upstream.token_text import detokenize_at_engine, readable

Source = Literal["recorded", "tokenizer", "engine", "none"]
Texts = Sequence[str | None]

_ID_PREFIX: Final = "token_id:"  # vLLM 0.32.0 with --return-tokens-as-token-ids returns ids in place of strings


async def show_texts(request: web.Request) -> web.Response:
    """`GET /rollouts/{id}/steps/{step_id}/texts?choice=&start=&limit=`.

    Returns a part of the choice's row, which is its prompt and its completion. `sources` names where the texts come from.
    """
    asked = query_from(request, ShowTexts)
    index, start = asked.choice, asked.start
    step, _ = await step_from(request)
    choice = next((choice for choice in step.choices if choice.index == index), None)
    if choice is None:
        raise BadRequest(f"The step has no choice {index}.", param="choice")
    prompt = step.prompts[choice.prompt][:] if choice.prompt < len(step.prompts) else array("i")
    ids = (prompt + choice.ids)[start : start + asked.limit]
    prompt_part = ids[: max(0, len(prompt) - start)]
    written = recorded(step, choice, max(0, start - len(prompt)), len(ids) - len(prompt_part))
    texts, source = await _find_texts(request.app[CONTEXT], step, ids if written is None else prompt_part)
    sources = ({source} if written is None or prompt_part else set()) | (set() if written is None else {"recorded"})
    payload = {
        "choice": index,
        "start": start,
        "total": len(prompt) + len(choice.ids),
        "sources": sorted(sources),
        "texts": [*texts, *(written or ())],
    }
    return json_response(payload)


async def _find_texts(context: Context, step: Step, ids: Ids) -> tuple[Texts, Source]:
    """Return the texts of ids from the endpoint's tokenizer, or else from the engine."""
    try:
        tokenizer = await context.tokenizers.get(step.engine.name)
    except UnprocessableRequest as error:
        LOG.warning("%s", error)
        tokenizer = None
    if tokenizer is not None:
        by_id = await asyncio.to_thread(_decoded, tokenizer.decode, ids)
        return [by_id.get(token) for token in ids], "tokenizer"
    known = await _engine_texts(context, step, ids)
    return [known.get(token) for token in ids], "engine" if known else "none"


def _decoded(decode: Callable[[Sequence[int]], str], ids: Ids) -> dict[int, str | None]:
    found: dict[int, str | None] = {}
    for token in set(ids):
        with suppress(ValueError, LookupError, OverflowError):  # an id outside of the vocabulary
            found[token] = readable(decode([token]))
    return found


async def _engine_texts(context: Context, step: Step, ids: Ids) -> Mapping[int, str | None]:
    """Return the texts from the engine that sampled; empty if it is not configured any more or has no detokenizer."""
    name = step.engine.name
    endpoint = next((endpoint for endpoint in context.upstream.endpoints if endpoint.label == name), None)
    if endpoint is None:
        return {}

    async def detokenize(token: int) -> str | None:
        return await detokenize_at_engine(context.upstream, endpoint, [token])

    return await context.token_texts.get((name, endpoint.settings.url, step.model_served or ""), ids, detokenize)


def recorded(step: Step, choice: Choice, start: int, limit: int) -> Texts | None:
    """Return the strings that the engine returned with the logprobs of a choice; None if the client requested none.

    There must be one string per id: otherwise they cannot be assigned to ids, and None is returned.
    """
    choices = _dicts((step.response or {}).get("choices"))
    found = next((candidate for candidate in choices if candidate.get("index", 0) == choice.index), {})
    logprobs = found.get("logprobs")
    entries = logprobs.get("content" if step.dialect == "chat" else "tokens") if isinstance(logprobs, dict) else None
    if not isinstance(entries, list) or len(entries) != len(choice.ids):
        return None
    texts = [_entry_text(entry) for entry in entries[start : start + limit]]
    return texts if any(text is not None for text in texts) else None


def _entry_text(entry: Any) -> str | None:
    if isinstance(entry, str):
        return None if entry.startswith(_ID_PREFIX) else readable(entry)
    if not isinstance(entry, dict):
        return None
    try:
        text = bytes(entry.get("bytes") or ()).decode()
    except (TypeError, ValueError):
        text = ""
    token = entry.get("token")
    return readable(text) or (_entry_text(token) if isinstance(token, str) else None)


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
