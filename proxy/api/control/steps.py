"""The routes that return recorded steps, their tree, the texts of their tokens, and their images."""

import asyncio
import binascii
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from math import isfinite
from typing import Any, Final, Literal
from urllib.parse import unquote

from aiohttp import web

from proxy.api.context import CONTEXT, Context
from proxy.api.control.rollouts import shown_playback
from proxy.api.control.schemas import ListSteps, RequestModel, ShowTexts, ShowTree
from proxy.api.requests import json_response, named, query_from, rollout_from
from proxy.continuation.types import REASONS
from proxy.errors import BadRequest, NotFound, UnprocessableRequest
from proxy.export.containers import Ndjson, container_for
from proxy.rollouts.rollout import Rollout
from proxy.rollouts.steps import decode_records, facts_of, read_steps
from proxy.telemetry.logs import LOG
from proxy.trajectory.arrays import Ids
from proxy.trajectory.blocks import BlockReader, BrokenChain
from proxy.trajectory.drift import Drift
from proxy.trajectory.images import block_of
from proxy.trajectory.json_bytes import to_json_bytes
from proxy.trajectory.outline import outline
from proxy.trajectory.step import DEFAULT_POLICY, Choice, Step, describe_problems
from proxy.trajectory.thread_rules import KINDS_OF
from proxy.trajectory.threads import find_threads
from proxy.upstream.tokenizers import detokenize_at_engine, readable
from storage.errors import StorageError


async def list_steps(request: web.Request) -> web.Response:
    """`GET /rollouts/{id}/steps?after=&limit=`: complete steps in recording order; NDJSON if the client accepts it."""
    context = request.app[CONTEXT]
    asked = query_from(request, ListSteps)
    rollout = await rollout_from(request)
    start = 0 if asked.after is None else asked.after + 1
    records = await context.store.read(rollout.rollout_id, start, asked.limit)
    steps = await decode_records(context.store, rollout, records, start, whole=True)
    following = start + len(steps) - 1 if len(steps) == asked.limit else None
    container = container_for(request.headers.get("Accept"), None)

    def page() -> bytes:
        if container is Ndjson:
            return b"".join(to_json_bytes(step_json(step, rollout)) + b"\n" for step in steps)
        return to_json_bytes({"steps": [step_json(step, rollout) for step in steps], "after": following})

    return web.Response(body=await asyncio.to_thread(page), content_type=container.content_type)


async def show_step(request: web.Request) -> web.Response:
    """`GET /rollouts/{id}/steps/{step_id}`."""
    step, rollout = await step_from(request)
    body = await asyncio.to_thread(lambda: to_json_bytes(step_json(step, rollout)))
    return web.Response(body=body, content_type="application/json")


async def step_from(request: web.Request) -> tuple[Step, Rollout]:
    """Return the complete step that the path names, and its rollout. Raises NotFound."""
    context = request.app[CONTEXT]
    rollout = await rollout_from(request)
    step_id = unquote(request.raw_path.partition("?")[0].split("/")[4])
    found = await context.store.find(rollout.rollout_id, step_id)
    if found is None:
        raise NotFound(f"Rollout {rollout.rollout_id!r} has no step {step_id!r}.", param="step_id")
    index, record = found
    (step,) = await decode_records(context.store, rollout, [record], index, whole=True)
    return step, rollout


async def show_tree(request: web.Request) -> web.Response:
    """`GET /rollouts/{id}/tree?texts=`: with `texts=false`, drift is not explained with a tokenizer or the engine.

    Drift of a finished rollout that is explained here is also counted.
    """
    texts = query_from(request, ShowTree).texts
    rollout = await rollout_from(request)
    context = request.app[CONTEXT]
    steps = await read_steps(context.store, rollout, whole=True)
    drift = await context.finisher.drift.find(rollout, steps, texts="all" if texts else "none")
    if texts and rollout.is_finished:
        with suppress(StorageError):  # a later request counts it
            await context.finisher.drift.count(rollout, drift, len(steps))
    body = await asyncio.to_thread(lambda: to_json_bytes(_tree_json(context, rollout, steps, drift)))
    return web.Response(body=body, content_type="application/json")


def _tree_json(context: Context, rollout: Rollout, steps: Sequence[Step], drift: Sequence[Drift]) -> dict[str, Any]:
    """Return the tree with its threads, which are provisional until the rollout is finished."""
    threads, kinds = find_threads(steps, context.threads.rules), KINDS_OF[context.threads.default or "all"]

    def exports(step: Step) -> bool:
        return context.policies.exports(None, step.policy) and threads.of[step.step_id].kind in kinds

    tree = outline(steps, facts_of(rollout), drift, reasons=REASONS, exports=exports, threads=threads)
    rewards = rollout.thread_rewards
    shown = [
        {**thread, **({"reward": rewards[thread["name"]]} if thread["name"] in rewards else {})}
        for thread in tree["threads"]
    ]
    return {**tree, "threads": shown, "threads_final": rollout.is_finished, **shown_playback(rollout)}


def step_json(step: Step, rollout: Rollout) -> dict[str, Any]:
    """Return the JSON of a step. With several prompts `prompt_ids` is null, and `prompts` has them."""
    prompts = [prompt.tolist() for prompt in step.prompts]
    return {
        **named(step, "step_id", "rollout_id", "index", "dialect", "endpoint"),
        "engine": asdict(step.engine),
        "model": {"asked": step.model_asked, "served": step.model_served},
        **named(step, "request", "sent", "response"),
        "prompt_ids": prompts[0] if len(prompts) == 1 else None,
        **({"prompts": prompts} if len(prompts) > 1 else {}),
        "choices": [
            {
                **named(choice, "index", "prompt"),
                "ids": choice.ids.tolist(),
                "logprobs": [value if isfinite(value) else None for value in choice.logprobs],  # JSON has no NaN
                **named(choice, "finish_reason", "stop_reason"),
                "spans": [span.as_dict() for span in choice.spans],
            }
            for choice in step.choices
        ],
        **named(step, "usage", "sampling"),
        "timing": asdict(step.timing),
        **named(step, "status", "reason", "delivered", "late"),
        **({} if step.inherited is None else {"inherited": step.inherited._asdict()}),
        "reward": rollout.step_rewards.get(step.step_id),
        **({} if step.policy == DEFAULT_POLICY else {"policy": step.policy}),
        **named(step, "policy_version", "policy_version_end", *(("policy_epoch",) if step.policy_epoch else ())),
        "fidelity": {"exact": step.exact, "problems": list(step.problems), "why": describe_problems(step.problems)},
        "extra": step.extra,
    }


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
    """Return the texts of ids from the endpoint's tokenizer, or else from the engine that sampled, if it is configured."""
    name = step.engine.name
    known: Mapping[int, str | None] = {}
    try:
        tokenizer = await context.tokenizers.get(name)
    except UnprocessableRequest as error:
        LOG.warning("%s", error)
        tokenizer = None
    if tokenizer is not None:
        by_id = await asyncio.to_thread(_decoded, tokenizer.decode, ids)
        return [by_id.get(token) for token in ids], "tokenizer"
    if (endpoint := context.upstream.endpoint_named(name)) is not None:
        vocabulary = name, endpoint.settings.url, step.model_served or ""
        known = await context.token_texts.get(
            vocabulary, ids, lambda token: detokenize_at_engine(context.upstream, endpoint, [token])
        )
    return [known.get(token) for token in ids], "engine" if known else "none"


def _decoded(decode: Callable[[Sequence[int]], str], ids: Ids) -> dict[int, str | None]:
    found: dict[int, str | None] = {}
    for token in set(ids):
        with suppress(ValueError, LookupError, OverflowError):  # an id outside of the vocabulary
            found[token] = readable(decode([token]))
    return found


def recorded(step: Step, choice: Choice, start: int, limit: int) -> Texts | None:
    """Return the strings that the engine returned with the logprobs of a choice; None if the client requested none.

    There must be one string per id: otherwise they cannot be assigned to ids, and None is returned.
    """
    choices = (step.response or {}).get("choices")
    dicts = [each for each in choices if isinstance(each, dict)] if isinstance(choices, list) else []
    logprobs = next((each.get("logprobs") for each in dicts if each.get("index", 0) == choice.index), None)
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


_TYPES: Final = (  # the position of the bytes that identify a type
    (0, b"\x89PNG\r\n\x1a\n", "image/png"),
    (0, b"\xff\xd8\xff", "image/jpeg"),
    (0, b"GIF87a", "image/gif"),
    (0, b"GIF89a", "image/gif"),
    (8, b"WEBP", "image/webp"),
    (0, b"BM", "image/bmp"),
    (4, b"ftypavif", "image/avif"),
)
_OTHER: Final = "application/octet-stream"
_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; sandbox",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "private, max-age=3600, immutable",  # the name is a hash of the bytes
}


async def show_image(request: web.Request) -> web.Response:
    """`GET /rollouts/{id}/images/{image}`: the bytes. Raises NotFound, and UnprocessableRequest for data that is not base64."""
    query_from(request, RequestModel)
    rollout = await rollout_from(request)
    name = request.match_info["image"]
    block = block_of(name)
    blocks = {} if block is None else await request.app[CONTEXT].store.blocks(rollout.rollout_id, [block])
    missing = NotFound(f"Rollout {rollout.rollout_id!r} has no image {name[:100]!r}.", param="image")
    if block is None or block not in blocks:
        raise missing
    try:
        body = await asyncio.to_thread(lambda: binascii.a2b_base64(BlockReader(blocks).image(block), strict_mode=True))
    except BrokenChain:  # of another kind: a message, or ids
        raise missing from None
    except binascii.Error as error:
        raise UnprocessableRequest(f"The data of the image is not base64: {error}", param="image") from error
    content_type = type_of(body)
    headers = _HEADERS if content_type != _OTHER else {**_HEADERS, "Content-Disposition": "attachment"}
    return web.Response(body=body, content_type=content_type, headers=headers)


def type_of(body: bytes) -> str:
    """Return the content type of a raster image by its first bytes; for anything else, the type for unknown bytes."""
    found = (kind for start, magic, kind in _TYPES if body[start : start + len(magic)] == magic)
    return next(found, _OTHER)
