"""Detection of what an engine does with system and developer messages of translated dialects.

vLLM 0.32 and SGLang 0.5.23 move system messages of the Messages API to the beginning where the chat template accepts a
system message in the first position only (Qwen3.5's). They expose neither the template nor the decision, but their
token counts do: if a system message between two turns has as many tokens as the same text at the end of the first one,
it is moved.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import orjson

from proxy.errors import EngineError
from proxy.protocols.dialects.translation import TranslationOptions
from proxy.protocols.sampling import served_as
from proxy.protocols.translated_call import TranslatedCall, engine_options
from proxy.telemetry.logs import LOG
from proxy.upstream import Endpoint, Upstream

_COUNT: Final = "/v1/messages/count_tokens"
_COUNT_TIMEOUT_S: Final = 2  # a call waits for it

# Roles alternate, as some templates require.
_TEXT: Final = "Answer in one word."
_QUESTION: Final = {"role": "user", "content": "Is it so?"}
_SYSTEM: Final = {"role": "system", "content": _TEXT}
_REPLY: Final = {"role": "assistant", "content": "Yes."}


def expected_options(options: TranslationOptions, endpoints: Sequence[Endpoint]) -> TranslationOptions:
    """Return the translation options for the engine that is expected to serve a call: the first one."""
    if not endpoints:
        return options
    return engine_options(options, endpoints[0].kind, has_developers=has_developers(endpoints[0]))


def has_developers(endpoint: Endpoint) -> bool:
    """Return whether the engine's chat accepts developer messages."""
    return endpoint.engine.accepts_developers(endpoint.version)


async def with_engine_traits(
    upstream: Upstream, endpoint: Endpoint, call: TranslatedCall, models: Mapping[str, str]
) -> TranslatedCall:
    """Return the call with what this engine does with its system and developer messages."""
    if call.has_developers != has_developers(endpoint):
        call = replace(call, has_developers=not call.has_developers)
    if not endpoint.engine.counts_messages or call.translation.name != "messages" or not _has_inline(call.body):
        return call
    model = str(call.body.get("model") or "")
    served, joint = served_as(model, models) or model, call.options_for(endpoint.kind).system_joint
    merges = await endpoint.merges_systems.get(served, lambda: _merges(upstream, endpoint, served, joint))
    return replace(call, merges_systems=bool(merges))


def _has_inline(chat: Mapping[str, Any]) -> bool:
    return any(message["role"] == "system" for message in chat["messages"][1:])


async def _merges(upstream: Upstream, endpoint: Endpoint, model: str, joint: str) -> bool | None:
    """Compare the token counts of both prompts; None if the engine does not count them."""
    apart = {"system": _TEXT, "messages": [_QUESTION, _SYSTEM, _REPLY, _QUESTION]}
    merged = {"system": joint.join((_TEXT, _TEXT)), "messages": [_QUESTION, _REPLY, _QUESTION]}
    counts = []
    for prompt in (apart, merged):
        try:
            body = orjson.dumps({"model": model, **prompt})
            async with asyncio.timeout(_COUNT_TIMEOUT_S):
                _, counted = await upstream.post_json(endpoint, _COUNT, body)
        except (EngineError, TimeoutError) as error:
            LOG.warning("Engine %s did not count the tokens of a prompt: %s", endpoint.label, str(error) or "timed out")
            return None
        counts.append(counted.get("input_tokens") if isinstance(counted, dict) else None)
        if type(counts[-1]) is not int:
            return None
    return counts[0] == counts[1]
