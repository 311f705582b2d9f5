"""Systems and developers in dialects by way of chat: what the engine at hand does with them.

Holds how that is found out, and when. What a call then says is the dialect's.

vLLM 0.32 and SGLang 0.5.23 move systems between other turns of Messages to the beginning where the model's template takes a
system message in the first place alone (Qwen3.5's), and show neither the template nor what they decided. Their own counting of
tokens shows it: if a system between two turns counts as much as the same text at the end of the first system, it is moved.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import orjson

from proxy.errors import EngineFault
from proxy.protocols.engines.quirks import version_numbers
from proxy.protocols.sampling import served_as
from proxy.protocols.translated_call import TranslatedCall
from proxy.telemetry.logs import LOG
from proxy.upstream import Endpoint, Upstream

_COUNT: Final = "/v1/messages/count_tokens"
_KINDS: Final = ("vllm", "sglang")
# vLLM since then shows developers' messages to templates that know no developer (renderers/hf.py:804). Earlier ones may
# drop them (Qwen3's template does); from when on is not known (PR #43590 came after 0.22).
_DEVELOPERS: Final = (0, 32)
_COUNTED_WITHIN_S: Final = 2  # a call waits for it

# Turns take turns, as some templates want it.
_TEXT: Final = "Answer in one word."
_ASKED: Final = {"role": "user", "content": "Is it so?"}
_SYSTEM: Final = {"role": "system", "content": _TEXT}
_REPLY: Final = {"role": "assistant", "content": "Yes."}


async def with_engine_traits(
    upstream: Upstream, endpoint: Endpoint, form: TranslatedCall, models: Mapping[str, str]
) -> TranslatedCall:
    """The call, knowing what this engine does with its systems and developers."""
    if endpoint.kind == "vllm" and version_numbers(endpoint.version or "") >= _DEVELOPERS:
        form = replace(form, has_developers=True)
    if endpoint.kind not in _KINDS or form.translation.name != "messages" or not _has_inline(form.body):
        return form
    model = str(form.body.get("model") or "")
    served, joint = served_as(model, models) or model, form.options_for(endpoint.kind).system_joint
    merges = await endpoint.merges_systems.get(served, lambda: _merges(upstream, endpoint, served, joint))
    return replace(form, merges_systems=bool(merges))


def _has_inline(chat: Mapping[str, Any]) -> bool:
    return any(message["role"] == "system" for message in chat["messages"][1:])


async def _merges(upstream: Upstream, endpoint: Endpoint, model: str, joint: str) -> bool | None:
    """Ask the engine; None if it does not say, as of a model that it does not serve."""
    apart = {"system": _TEXT, "messages": [_ASKED, _SYSTEM, _REPLY, _ASKED]}
    merged = {"system": joint.join((_TEXT, _TEXT)), "messages": [_ASKED, _REPLY, _ASKED]}
    counts = []
    for question in (apart, merged):
        try:
            body = orjson.dumps({"model": model, **question})
            async with asyncio.timeout(_COUNTED_WITHIN_S):
                _, counted = await upstream.post_json(endpoint, _COUNT, body)
        except (EngineFault, TimeoutError) as error:
            LOG.warning("%s did not count a prompt: %s", endpoint.settings.label, str(error) or "it was silent")
            return None
        counts.append(counted.get("input_tokens") if isinstance(counted, dict) else None)
        if type(counts[-1]) is not int:
            return None
    return counts[0] == counts[1]
