"""The meeting of an engine: what it is, found out by a few harmless questions.

Holds the order of the questions and what becomes known. How they are sent is given; how answers are read is `recognition`'s.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Final

from proxy.errors import EngineFault
from proxy.protocols.engines.base import Traits
from proxy.protocols.engines.detection import PROBE_PATHS, ProbeResponse, identify_engine
from proxy.protocols.engines.sampling_defaults import read_rendered, sampling_defaults_request
from proxy.telemetry.logs import LOG
from proxy.upstream.endpoint import Endpoint

Ask = Callable[..., Coroutine[Any, Any, ProbeResponse]]

_DEFAULTS_WITHIN_S: Final = 2


async def detect(endpoint: Endpoint, ask: Ask) -> None:
    """Ask the questions, first those that only one kind of engine answers. An engine that is away stays what it was."""
    try:
        *theirs, common = PROBE_PATHS
        answers = dict(zip(theirs, await _all_seen(endpoint, theirs, ask), strict=True))
        traits = identify_engine(answers)
        if traits.kind == "plain":
            answers[common] = await ask(endpoint, common)
            traits = identify_engine(answers)
        _note(endpoint, traits, is_loading=any(seen.status == 503 for seen in answers.values()))
        endpoint.traits = await _with_defaults(endpoint, traits, ask)
    except EngineFault as fault:
        endpoint.last_fault = fault.message
    finally:
        endpoint.asking = None


def _note(endpoint: Endpoint, traits: Traits, *, is_loading: bool) -> None:
    """Keep what was found out, and forget what may not hold any more: it may have been started anew, with other flags."""
    if endpoint.settings.kind not in {"auto", traits.kind}:
        LOG.warning("%s is configured as %s and looks like %s", endpoint.settings.label, endpoint.kind, traits.kind)
    endpoint.traits, endpoint.is_known = traits, not (is_loading and traits.kind == "plain")
    endpoint.window, endpoint.forces_usage = None, False
    endpoint.models.forget()
    endpoint.merges_systems.forget()


async def _with_defaults(endpoint: Endpoint, traits: Traits, ask: Ask) -> Traits:
    """Add the sampling defaults, where the engine shows them when asked, and in time: calls wait for it."""
    lookup = sampling_defaults_request(traits.kind)
    if lookup is None:
        return traits
    try:
        async with asyncio.timeout(_DEFAULTS_WITHIN_S):
            rendered = await ask(endpoint, lookup.path, body=lookup.body)
    except (EngineFault, TimeoutError):
        return traits  # what it is has been found out
    return replace(traits, sampling_defaults=read_rendered(rendered.body))


async def _all_seen(endpoint: Endpoint, paths: Sequence[str], ask: Ask) -> list[ProbeResponse]:
    """The answers to all questions, asked at once. Raises EngineFault with the first fault; none is left asked then."""
    asking = [asyncio.get_running_loop().create_task(ask(endpoint, path)) for path in paths]
    try:
        return await asyncio.gather(*asking)
    finally:
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
