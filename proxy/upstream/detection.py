"""Detection of the engine type, version and sampling defaults, by harmless requests to the engine."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Final

from proxy.errors import EngineError
from proxy.protocols.engines import ENGINES, PROBE_PATHS, ProbeResponse, Traits, identify_engine
from proxy.telemetry.logs import LOG
from proxy.upstream.endpoint import Endpoint

SendProbe = Callable[..., Coroutine[Any, Any, ProbeResponse]]

_REQUEST_TIMEOUT_S: Final = 2
_MAX_PAUSE_S: Final = 60  # between detections, as long as no connection is lost


async def detect(endpoint: Endpoint, send_probe: SendProbe) -> None:
    """Probe an engine, first with the routes that only one engine type has.

    An unreachable engine keeps its last known type, and so does one behind a gateway that returns errors for it.
    """
    try:
        *specific, common = PROBE_PATHS
        answers = dict(zip(specific, await _probe_all(endpoint, specific, send_probe), strict=True))
        traits = identify_engine(answers)
        if traits.kind == "plain":
            answers[common] = await send_probe(endpoint, common)
            traits = identify_engine(answers)
        has_errors = any(answer.status >= 500 for answer in answers.values())
        if traits.kind == "plain" and has_errors and endpoint.traits is not None:
            traits = endpoint.traits
            _update(endpoint, traits, is_known=False)
            return
        is_known = traits.kind != "plain" or (answers[common].status == 200 and not has_errors)
        _update(endpoint, traits, is_known=is_known)
        endpoint.server = answers[specific[0]].server
        endpoint.describe(await _with_further_traits(endpoint, traits, send_probe))
        endpoint.is_detected = is_known and not endpoint.is_lost
    except EngineError as fault:
        endpoint.last_fault = fault.message
    finally:
        endpoint.detection = None


def _update(endpoint: Endpoint, traits: Traits, *, is_known: bool) -> None:
    """Store the detected traits. An engine that is not known is detected again, later each time.

    It is unknown if it is plain and its server returns errors or lists no models: a gateway does so while its engine loads.
    What was cached is cleared, since a restarted engine may have other flags, unless it was only detected again to make sure.
    """
    if endpoint.settings.kind not in {"auto", traits.kind}:
        LOG.warning("Engine %s is configured as %s but was detected as %s", endpoint.label, endpoint.kind, traits.kind)
    if endpoint.is_lost or endpoint.traits is None or _identity(traits) != _identity(endpoint.traits):
        endpoint.forget()
        endpoint.returns_ids = ENGINES[traits.kind].returns_ids
    endpoint.describe(traits)
    endpoint.is_lost = False
    endpoint.detections = 0 if is_known else endpoint.detections + 1
    pause_s = _MAX_PAUSE_S if is_known else min(2 ** min(endpoint.detections, 6) - 2, _MAX_PAUSE_S)
    endpoint.detect_at = asyncio.get_running_loop().time() + pause_s


def _identity(traits: Traits) -> tuple[Any, ...]:
    return traits.kind, traits.version, traits.has_parser, traits.model


async def _with_further_traits(endpoint: Endpoint, traits: Traits, send_probe: SendProbe) -> Traits:
    """Add the traits that the engine shows on request within the timeout, such as its sampling defaults; calls wait for it."""
    for request in ENGINES[traits.kind].traits_requests(traits):
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                response = await send_probe(endpoint, request.path, body=request.body)
        except (EngineError, TimeoutError):
            continue  # the type was detected
        traits = replace(traits, **request.read(response))
    return traits


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
