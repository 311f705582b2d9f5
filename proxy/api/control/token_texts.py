"""`GET /rollouts/{id}/steps/{step_id}/texts`: what a step's tokens read, for people.

Holds the route, and the order in which texts are sought: the strings that the engine recorded in its logprobs, then the
tokenizer of its endpoint, then the engine's own detokenizer, each id by itself. Nothing is made up: what none of them tells is
null, and so is a piece that is no UTF-8 by itself.
"""

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal

import orjson
from aiohttp import web

from proxy.api.context import CONTEXT, Context
from proxy.api.control.steps import step_of
from proxy.api.query import int_param, reject_unknown_params
from proxy.errors import BadCall, NotValid
from proxy.telemetry.logs import LOG
from proxy.trajectory.step import Choice, Ids, Step
from proxy.upstream.token_text import detokenize_at_engine, readable

Source = Literal["recorded", "tokenizer", "engine", "none"]
Texts = Sequence[str | None]

_SHOWN: Final = 500
_MOST_SHOWN: Final = 2000
_RENAMED: Final = "token_id:"  # vLLM 0.32.0 with --return-tokens-as-token-ids tells ids where strings would be


async def show_texts(request: web.Request) -> web.Response:
    """`GET /rollouts/{id}/steps/{step_id}/texts?choice=&start=&limit=`.

    A stretch of the choice's whole row: its prompt, then what was sampled. `sources` names who told.
    """
    reject_unknown_params(request, ("choice", "start", "limit"))
    index = int_param(request, "choice", 0, least=0) or 0
    start = int_param(request, "start", 0, least=0) or 0
    limit = int_param(request, "limit", _SHOWN, least=1, most=_MOST_SHOWN) or _SHOWN
    step, _ = await step_of(request)
    choice = next((one for one in step.choices if one.index == index), None)
    if choice is None:
        raise BadCall(f"the step has no choice {index}", param="choice")
    prompt = step.prompts[choice.prompt][:] if choice.prompt < len(step.prompts) else array("i")
    ids = (prompt + choice.ids)[start : start + limit]
    given = ids[: max(0, len(prompt) - start)]
    written = recorded(step, choice, max(0, start - len(prompt)), len(ids) - len(given))
    texts, source = await _sought(request.app[CONTEXT], step, ids if written is None else given)
    sources = ({source} if written is None or given else set()) | (set() if written is None else {"recorded"})
    told = {
        "choice": index,
        "start": start,
        "total": len(prompt) + len(choice.ids),
        "sources": sorted(sources),
        "texts": [*texts, *(written or ())],
    }
    return web.Response(body=orjson.dumps(told), content_type="application/json")


async def _sought(context: Context, step: Step, ids: Ids) -> tuple[Texts, Source]:
    """The texts of ids by the endpoint's tokenizer, else by the engine itself."""
    try:
        tokenizer = await context.tokenizers.of(step.engine.name)
    except NotValid as error:
        LOG.warning("%s", error)
        tokenizer = None
    if tokenizer is not None:
        by_id = await asyncio.to_thread(_decoded, tokenizer.decode, ids)
        return [by_id.get(one) for one in ids], "tokenizer"
    known = await _asked(context, step, ids)
    return [known.get(one) for one in ids], "engine" if known else "none"


def _decoded(decode: Callable[[Sequence[int]], str], ids: Ids) -> dict[int, str | None]:
    found: dict[int, str | None] = {}
    for one in set(ids):
        with suppress(ValueError, LookupError, OverflowError):  # an id that the vocabulary has not
            found[one] = readable(decode([one]))
    return found


async def _asked(context: Context, step: Step, ids: Ids) -> Mapping[int, str | None]:
    """What the engine that sampled tells; nothing if it is gone, or tells none."""
    name = step.engine.name
    endpoint = next((one for one in context.upstream.endpoints if one.settings.label == name), None)
    if endpoint is None:
        return {}

    async def ask(one: int) -> str | None:
        return await detokenize_at_engine(context.upstream, endpoint, [one])

    return await context.token_texts.told((name, endpoint.settings.url, step.model_served or ""), ids, ask)


def recorded(step: Step, choice: Choice, start: int, limit: int) -> Texts | None:
    """What the engine wrote beside each logprob of a choice, where the client asked for these; None if it wrote none.

    Strings without a logprob each, as many as ids, cannot be told apart: they are none.
    """
    answers = (step.response or {}).get("choices")
    answer = next((one for one in _dicts(answers) if one.get("index", 0) == choice.index), {})
    logprobs = answer.get("logprobs")
    entries = logprobs.get("content" if step.dialect == "chat" else "tokens") if isinstance(logprobs, dict) else None
    if not isinstance(entries, list) or len(entries) != len(choice.ids):
        return None
    texts = [_entry_text(entry) for entry in entries[start : start + limit]]
    return texts if any(text is not None for text in texts) else None


def _entry_text(entry: Any) -> str | None:
    if isinstance(entry, str):
        return None if entry.startswith(_RENAMED) else readable(entry)
    if not isinstance(entry, dict):
        return None
    try:
        text = bytes(entry.get("bytes") or ()).decode()
    except (TypeError, ValueError):
        text = ""
    token = entry.get("token")
    return readable(text) or (_entry_text(token) if isinstance(token, str) else None)


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
