"""Detection of the engine type, version and sampling defaults, by harmless requests to the engine."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Final

from proxy.errors import EngineError
from proxy.protocols.engines.base import Traits
from proxy.protocols.engines.detection import PROBE_PATHS, ProbeResponse, identify_engine
from proxy.protocols.engines.sampling_defaults import read_rendered, sampling_defaults_request
from proxy.telemetry.logs import LOG
from proxy.upstream.endpoint import Endpoint

SendProbe = Callable[..., Coroutine[Any, Any, ProbeResponse]]

_DEFAULTS_TIMEOUT_S: Final = 2


async def detect(endpoint: Endpoint, send_probe: SendProbe) -> None:
    """Probe an engine, first with the routes that only one engine type has.

    An unreachable engine keeps its last known type.
    """
    try:
        *specific, common = PROBE_PATHS
        answers = dict(zip(specific, await _probe_all(endpoint, specific, send_probe), strict=True))
        traits = identify_engine(answers)
        if traits.kind == "plain":
            answers[common] = await send_probe(endpoint, common)
            traits = identify_engine(answers)
        _update(endpoint, traits, is_loading=any(seen.status == 503 for seen in answers.values()))
        endpoint.traits = await _with_defaults(endpoint, traits, send_probe)
    except EngineError as fault:
        endpoint.last_fault = fault.message
    finally:
        endpoint.detection = None


def _update(endpoint: Endpoint, traits: Traits, *, is_loading: bool) -> None:
    """Store the detected traits and clear what was cached: the engine may have been restarted with other flags."""
    if endpoint.settings.kind not in {"auto", traits.kind}:
        LOG.warning("Engine %s is configured as %s but was detected as %s", endpoint.label, endpoint.kind, traits.kind)
    endpoint.traits, endpoint.is_detected = traits, not (is_loading and traits.kind == "plain")
    endpoint.forget()


async def _with_defaults(endpoint: Endpoint, traits: Traits, send_probe: SendProbe) -> Traits:
    """Add the sampling defaults if the engine shows them within the timeout; calls wait for it."""
    lookup = sampling_defaults_request(traits.kind)
    if lookup is None:
        return traits
    try:
        async with asyncio.timeout(_DEFAULTS_TIMEOUT_S):
            rendered = await send_probe(endpoint, lookup.path, body=lookup.body)
    except (EngineError, TimeoutError):
        return traits  # the type was detected
    return replace(traits, sampling_defaults=read_rendered(rendered.body))


async def _probe_all(endpoint: Endpoint, paths: Sequence[str], send_probe: SendProbe) -> list[ProbeResponse]:
    """Return the responses to concurrent requests.

    Raises:
        EngineError: A request failed; the others are cancelled.
    """
    tasks = [asyncio.get_running_loop().create_task(send_probe(endpoint, path)) for path in paths]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
