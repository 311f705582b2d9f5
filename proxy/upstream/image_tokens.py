"""The placeholder tokens of images in an engine's prompts: as configured, or else looked up by name at its tokenizer.

vLLM repeats such a token for each patch of an image; the names are those of the models that it serves (vLLM 0.32). Models that
write an image as several runs (Pixtral's rows) have none here.
"""

import asyncio
from typing import Final

import orjson

from proxy.errors import EngineError
from proxy.protocols.engines.tokenizer_api import read_ids, tokenize_request
from proxy.protocols.plan import Plan, with_image_tokens
from proxy.telemetry.logs import LOG
from proxy.upstream.client import Upstream
from proxy.upstream.endpoint import Endpoint

NAMES: Final = (
    "<|image_pad|>",  # Qwen-VL
    "<image>",  # LLaVA, PaliGemma
    "<|image|>",  # GLM-V
    "<image_soft_token>",  # Gemma 3
    "<IMG_CONTEXT>",  # InternVL
    "<|media_pad|>",  # Kimi-VL
)
_TIMEOUT_S: Final = 2  # a call waits for it


async def with_placeholders(upstream: Upstream, endpoint: Endpoint, plan: Plan) -> Plan:
    """Return the plan of a call with images, with the placeholder tokens that its prompt may have."""
    tokens = endpoint.settings.image_tokens
    if tokens is None:
        model = plan.model_served or ""
        tokens = await endpoint.image_tokens.get(model, lambda: _looked_up(upstream, endpoint, plan.model_served))
    return with_image_tokens(plan, tokens or ())


async def _looked_up(upstream: Upstream, endpoint: Endpoint, model: str | None) -> list[int] | None:
    """Return the ids of the names that are single tokens; None if the engine does not tokenize."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            found = await asyncio.gather(*(_id_of(upstream, endpoint, model, name) for name in NAMES))
    except (EngineError, TimeoutError) as error:
        LOG.warning("Engine %s did not tokenize placeholders of images: %s", endpoint.label, str(error) or "timed out")
        return None
    known = [ids for ids in found if ids is not None]
    return [ids[0] for ids in known if len(ids) == 1] if known else None


async def _id_of(upstream: Upstream, endpoint: Endpoint, model: str | None, name: str) -> "list[int] | None":
    """Return the ids of a name; None if the engine does not return them."""
    request = tokenize_request(endpoint.engine, {"model": model}, name)
    if request is None:
        return None
    status, body = await upstream.post_json(endpoint, request.path, orjson.dumps(request.body))
    ids = read_ids(body) if status == 200 else None
    return None if ids is None else ids.tolist()
