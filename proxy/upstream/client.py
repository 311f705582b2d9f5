"""Requests to the endpoints, their detection and health checks; aiohttp's exceptions are translated."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, Final

import aiohttp
import orjson

from proxy.config.engines import EndpointSettings, EnginesSettings
from proxy.errors import (
    EngineDisconnected,
    EngineError,
    EngineResponseTooLarge,
    EngineTimeout,
    EngineUnreachable,
    failure_text,
)
from proxy.protocols.engines import ENGINES, PROBE_PATHS, identify_engine, model_names
from proxy.protocols.engines.base import ProbeResponse, Traits
from proxy.protocols.json_texts import KnownPrompt, cut_tokens, most_weight, repeated_tokens
from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import Metrics
from proxy.upstream.concurrency import LARGE_BYTES, BackgroundTasks, off_loop
from proxy.upstream.endpoint import UNAVAILABLE_STATUSES, Endpoint, can_fail_over, check_status, make_endpoint, serving
from proxy.upstream.http_client import HTTP_ERRORS, HttpClient, HttpResponse, end_to_end

SendProbe = Callable[..., Coroutine[Any, Any, ProbeResponse]]

_REQUEST_TIMEOUT_S: Final = 2  # of further traits: calls wait for it
_MAX_PAUSE_S: Final = 60  # between detections, as long as no connection is lost


async def detect(endpoint: Endpoint, send_probe: SendProbe) -> bool:
    """Probe an engine, first with the routes that only one engine type has; return whether it showed all traits in time.

    An unreachable engine keeps its last known type, and so does one behind a gateway that returns errors for it.
    """
    is_complete = True
    try:
        *specific, common = PROBE_PATHS
        answers = dict(zip(specific, await _probe_all(endpoint, specific, send_probe), strict=True))
        traits = identify_engine(answers)
        if not ENGINES[traits.kind].returns_ids:
            answers[common] = await send_probe(endpoint, common)
            traits = identify_engine(answers)
        has_errors = any(answer.status >= 500 for answer in answers.values())
        is_known = ENGINES[traits.kind].returns_ids
        if not is_known and has_errors and endpoint.traits is not None:
            traits = endpoint.traits
            _update(endpoint, traits, is_known=False)
            return True
        is_known = is_known or (answers[common].status == 200 and not has_errors)
        _update(endpoint, traits, is_known=is_known)
        endpoint.server = answers[specific[0]].server
        further, is_complete = await _with_further_traits(endpoint, traits, send_probe, _REQUEST_TIMEOUT_S)
        endpoint.describe(further)
        endpoint.is_detected = is_known and not endpoint.is_lost
    except EngineError as fault:
        endpoint.last_fault = fault.message
    finally:
        endpoint.detection = None
    return is_complete


def _update(endpoint: Endpoint, traits: Traits, *, is_known: bool) -> None:
    """Store the detected traits. An unknown engine is detected again, after a longer interval each time.

    A plain engine is unknown if its server returns errors or lists no models, as a gateway does while its engine loads. Caches
    are cleared, since a restarted engine may have other flags, unless detection only confirms the same engine.
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


async def _with_further_traits(
    endpoint: Endpoint, traits: Traits, send_probe: SendProbe, timeout_s: float
) -> tuple[Traits, bool]:
    """Add the traits that the engine shows on request, such as its sampling defaults; return whether all came in time."""
    is_complete = True
    for request in ENGINES[traits.kind].traits_requests(traits):
        try:
            async with asyncio.timeout(timeout_s):
                response = await send_probe(endpoint, request.path, body=request.body)
        except (EngineError, TimeoutError) as error:  # the type was detected
            is_complete = is_complete and not isinstance(error, TimeoutError)
            continue
        traits = replace(traits, **request.read(response))
    return traits, is_complete


async def _probe_all(endpoint: Endpoint, paths: Sequence[str], send_probe: SendProbe) -> list[ProbeResponse]:
    """Return the responses to concurrent requests. Raises EngineError if a request failed; the others are cancelled."""
    tasks = [asyncio.get_running_loop().create_task(send_probe(endpoint, path)) for path in paths]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


# uvicorn, under vLLM and SGLang, closes idle connections after 5 s. Closing them first avoids the race in which a
# request is written to a connection that the engine has just closed.
_KEEPALIVE_S = 3
_DETECTION_TIMEOUT_S = 5  # how long a call waits for the detection of its engine
_PROBES_TIMEOUT_S = 60  # of the detection: a busy engine may take many seconds
MAX_RESPONSE_BYTES: Final = 2**25
_MAX_WEIGHT: Final = 2**28  # of memory for a parsed auxiliary response: four million token ids
_MAX_PROBE_BYTES: Final = 2**22  # ten thousand models
_MAX_ERROR_BYTES: Final = 1000
JSON: Final = (("Content-Type", "application/json"),)


async def body_of(response: HttpResponse, most: int | None = None) -> bytearray:
    """Return the body of an auxiliary response (models, texts, token counts), of at most `most` bytes.

    `MAX_RESPONSE_BYTES` is more than a response with the prompt ids of any context window has. Raises EngineError if the
    body is incomplete or larger.
    """
    most = MAX_RESPONSE_BYTES if most is None else most
    body = bytearray()
    async for chunk in response.iter_bytes():
        body += chunk
        if len(body) > most:
            raise EngineResponseTooLarge(f"The engine returned more than {most} bytes")
    return body


async def json_of(response: HttpResponse, known: KnownPrompt | None = None) -> Any:
    """Return the parsed body of an auxiliary response; its `tokens` as a `KnownPrompt` if `known` is given.

    Raises EngineError if the body is incomplete, too large or not JSON.
    """
    body = await body_of(response)
    try:
        size = len(body) if known is None or not repeated_tokens(body, known) else len(body) - len(known.text)
        return await off_loop(size, LARGE_BYTES, _parsed, bytes(body), known)
    except ValueError as error:
        raise EngineDisconnected(f"The engine's response is not valid JSON: {error}") from None


def _parsed(body: bytes, known: KnownPrompt | None) -> Any:
    """Return the value of a JSON body. Raises ValueError if it is not JSON, or has too many values."""
    cut = None if known is None else cut_tokens(body, known)
    rest, tokens = cut or (body, None)
    if most_weight(rest) > _MAX_WEIGHT:
        raise ValueError("it has too many values")
    value = orjson.loads(rest)
    if tokens is None:
        return value
    if not isinstance(value, dict) or "tokens" not in value or value["tokens"] is not None:  # the ids are elsewhere
        return _parsed(body, None)
    return {**value, "tokens": tokens}


_CHECK_TIMEOUT_S: Final = 5  # SGLang 0.5.23 samples a token for GET /health, and takes a second or more (run)
_JITTER: Final = 0.2  # fraction of the interval, so that processes that started together do not check at the same time


class HealthChecker:
    """Checks endpoints in the event loop. `get_status` returns the status of an endpoint's `GET /health`."""

    def __init__(
        self, health_interval_s: float, metrics: Metrics, get_status: Callable[[Endpoint], Awaitable[int]]
    ) -> None:
        self._health_interval_s = health_interval_s
        self._metrics = metrics
        self._get_status = get_status
        self._random = Random()  # noqa: S311 - no secret; a separate generator, so that checks do not change other random numbers
        self._ejected: dict[Endpoint, asyncio.Event] = {}
        self._tasks: dict[Endpoint, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"<HealthChecker of {len(self._tasks)} endpoints>"

    def start(self, endpoint: Endpoint) -> None:
        """Start to check an endpoint. If it is checked already, only its name may have changed."""
        self._metrics.engine_healthy.labels(endpoint.label).set(not endpoint.health.is_ejected)
        self._metrics.begin("engine", endpoint.label)
        if endpoint not in self._tasks:
            self._ejected[endpoint] = asyncio.Event()
            self._tasks[endpoint] = asyncio.get_running_loop().create_task(self._run(endpoint))

    def stop(self, endpoint: Endpoint) -> None:
        """Stop checking an endpoint, which was removed."""
        del self._ejected[endpoint]
        self._tasks.pop(endpoint).cancel()

    async def close(self) -> None:
        """Stop all checks."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def check(self, endpoint: Endpoint) -> bool:
        """Return whether `GET /health` returns a status below 500. Engines without the route are healthy too."""
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT_S):
                status = await self._get_status(endpoint)
        except EngineError:
            return False  # `Upstream.translated` has counted it
        except TimeoutError:
            self.failed(endpoint, f"Engine {endpoint.label} did not respond to GET /health within {_CHECK_TIMEOUT_S} s")
            return False
        if status >= 500:
            self.failed(endpoint, f"Engine {endpoint.label} returned status {status} for GET /health")
            return False
        was_ejected = endpoint.health.is_ejected
        endpoint.health.passed(_now())
        self._report_change(endpoint, was_ejected=was_ejected)
        return True

    def failed(self, endpoint: Endpoint, why: str) -> None:
        """Count a failed call or health check of an endpoint."""
        was_ejected = endpoint.health.is_ejected
        endpoint.faults += 1
        endpoint.last_fault = why
        endpoint.health.failed(_now())
        self._report_change(endpoint, was_ejected=was_ejected)

    def answered(self, endpoint: Endpoint) -> None:
        """Reset the failures of an endpoint that answered a call completely."""
        was_ejected = endpoint.health.is_ejected
        endpoint.health.answered()
        self._report_change(endpoint, was_ejected=was_ejected)

    def _report_change(self, endpoint: Endpoint, *, was_ejected: bool) -> None:
        is_ejected, label = endpoint.health.is_ejected, endpoint.label
        if is_ejected == was_ejected or endpoint not in self._ejected:
            return
        self._metrics.engine_healthy.labels(label).set(not is_ejected)
        if is_ejected:
            self._metrics.ejections.labels(label).inc()
            self._ejected[endpoint].set()
            endpoint.queue.evict_waiters()
            LOG.warning("Engine %s ejected: %s", label, endpoint.last_fault)
        else:
            endpoint.lose()
            LOG.info("Engine %s recovered", label)

    async def _run(self, endpoint: Endpoint) -> None:
        pause_s = self._health_interval_s
        while True:
            await self._wait_until_due(endpoint, pause_s)
            is_healthy = await self.check(endpoint)
            # Check a failing endpoint sooner, so that it is ejected before many calls have tried it.
            pause_s = (
                self._health_interval_s if is_healthy else min(self._health_interval_s, endpoint.health.base_ejection_s)
            )

    async def _wait_until_due(self, endpoint: Endpoint, pause_s: float) -> None:
        """Wait until the next check: the interval, or the end of an ejection, which may begin while waiting."""
        ejected = self._ejected[endpoint]
        ejected.clear()
        if not endpoint.health.is_ejected:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s * self._random.uniform(1 - _JITTER, 1 + _JITTER)):
                    await ejected.wait()
        if endpoint.health.ejected_until is not None:
            await asyncio.sleep(max(endpoint.health.ejected_until - _now(), 0))


def ejected_for(endpoint: Endpoint) -> float | None:
    """Return the remaining seconds of an ejection; None if the endpoint is not ejected."""
    until = endpoint.health.ejected_until
    return None if until is None else max(until - _now(), 0)


def _now() -> float:
    return asyncio.get_running_loop().time()


class Upstream:
    """The engine endpoints and the sessions to them. Create it in the event loop and `close` it.

    `routes_by_model` is false with one endpoint that serves any model: then `endpoints_for` returns it.
    """

    def __init__(self, settings: EnginesSettings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        # True: aiohttp's shared context with the system's CA certificates. Creating a context takes 20 ms.
        tls = True if settings.ca_file is None else ssl.create_default_context(cafile=settings.ca_file)
        self._client, self._unpooled = (
            HttpClient(
                tls=tls,
                max_connections=settings.max_connections,
                keepalive_s=keepalive_s,
                connect_timeout_s=settings.connect_timeout_s,
                read_timeout_s=settings.read_timeout_s,
            )
            for keepalive_s in (_KEEPALIVE_S, None)
        )
        self.health_checker = HealthChecker(settings.health_interval_s, metrics, self._health_status)
        self.endpoints: list[Endpoint] = []
        self.routes_by_model = False
        self._lookups = BackgroundTasks()
        self.replace(settings.endpoints)

    def replace(self, endpoints: Sequence[EndpointSettings]) -> None:
        """Replace the endpoints. An endpoint with the same URL keeps its state and its calls in flight.

        Calls in flight at a removed endpoint finish there; queued calls that can fail over do so.
        """
        before = {endpoint.settings.url: endpoint for endpoint in self.endpoints}
        self.endpoints = [before.get(settings.url) or make_endpoint(settings, self._settings) for settings in endpoints]
        self.routes_by_model = len(endpoints) > 1 or any(settings.models for settings in endpoints)
        for endpoint, settings in zip(self.endpoints, endpoints, strict=True):
            endpoint.change(settings)
            self.health_checker.start(endpoint)
            self._start_detection(endpoint)  # in the background: the engine may be unreachable
        for endpoint in before.values():
            if endpoint not in self.endpoints:
                self.health_checker.stop(endpoint)
                endpoint.queue.evict_waiters()
                if endpoint.detection is not None:
                    endpoint.detection.cancel()

    async def send(
        self,
        endpoint: Endpoint,
        method: str,
        path: str,
        *,
        headers: Sequence[tuple[str, str]],
        body: bytes | None,
        new_connection: bool = False,
        is_auxiliary: bool = False,
    ) -> HttpResponse:
        """Send a request and return the response, which has to be closed, once its headers have arrived.

        Closing it before the end of its body closes the connection, by which an engine learns that the request is aborted. Its
        `iter_bytes` raises EngineDisconnected if the connection was lost before the end of the body, and EngineTimeout if no
        bytes arrived for `engines.read_timeout_s`.

        `new_connection`: do not use a pooled connection. llama.cpp 2026.10 closes the connection of a stream without
        `Connection: close`, and a request that is sent right after the stream would be lost.
        `is_auxiliary`: the request belongs to no call (texts, token counts). Its failure does not count towards
        ejection, since a gateway may have no route for it.

        Raises:
            EngineUnreachable: The connection failed; nothing was sent.
            EngineTimeout: The engine did not respond in time.
            EngineDisconnected: The connection was lost before the response.
        """
        client = self._unpooled if new_connection else self._client
        sent = end_to_end(headers, endpoint.not_sent) + endpoint.headers
        try:
            response = await client.request(method, endpoint.settings.url + path, headers=sent, body=body)
        except HTTP_ERRORS as error:
            raise self.translated(error, endpoint, is_auxiliary=is_auxiliary) from error
        if not 200 <= response.status <= 599:
            response.close()
            raise EngineDisconnected(f"Engine {endpoint.label} returned invalid status {response.status}")
        if response.status in UNAVAILABLE_STATUSES and method == "POST" and not is_auxiliary:  # a call
            self.health_checker.failed(endpoint, f"Engine {endpoint.label} returned status {response.status}")
        elif endpoint.server is not None and response.headers.get("Server", "") != endpoint.server:
            self._redetect(endpoint)
        response.on_end = partial(self._body_ended, endpoint, status=response.status, is_auxiliary=is_auxiliary)
        return response

    def _body_ended(
        self, endpoint: Endpoint, error: Exception | None, *, status: int, is_auxiliary: bool
    ) -> EngineError | None:
        """Translate the error of a body; after a complete one reset the failures of the endpoint."""
        if error is not None:
            return self.translated(error, endpoint, is_auxiliary=is_auxiliary)
        health = endpoint.health
        if (health.faults or health.ejections) and not is_auxiliary and status not in UNAVAILABLE_STATUSES:
            self.health_checker.answered(endpoint)
        return None

    async def post_json(
        self,
        endpoint: Endpoint,
        path: str,
        body: bytes,
        *,
        new_connection: bool = False,
        is_auxiliary: bool = True,
        known: KnownPrompt | None = None,
    ) -> tuple[int, Any]:
        """POST a JSON body; return the status, and the parsed response (see `json_of`) if the status is 200, else None.

        Raises EngineError if the request failed, as in `send`.
        """
        response = await self.send(
            endpoint, "POST", path, headers=JSON, body=body, new_connection=new_connection, is_auxiliary=is_auxiliary
        )
        with closing(response):
            return response.status, await json_of(response, known) if response.status == 200 else None

    def endpoint_named(self, label: str) -> Endpoint | None:
        """Return the endpoint with this label, if one is configured."""
        return next((endpoint for endpoint in self.endpoints if endpoint.label == label), None)

    async def wait_for_slot(self, endpoint: Endpoint, rollout_id: str, *, can_fail_over: bool) -> None:
        """Wait in the queue of an endpoint for a slot, which `endpoint.queue.release` returns.

        Raises:
            EngineBusy: The queue is full, or waiting timed out.
            EngineUnreachable: The endpoint was ejected or removed, and the call `can_fail_over`.
        """
        label, metrics = endpoint.label, self._metrics
        with metrics.queued_calls.labels(label).track_inprogress(), metrics.queue_duration_seconds.time():
            is_acquired = await endpoint.queue.acquire(rollout_id, can_fail_over=can_fail_over)
        if not is_acquired:
            raise EngineUnreachable(f"Engine {label} is not available: {endpoint.last_fault or 'it was removed'}")

    @asynccontextmanager
    async def send_to_any(
        self,
        endpoints: Sequence[Endpoint],
        method: str,
        path: str,
        *,
        headers: Sequence[tuple[str, str]],
        body: bytes | None,
    ) -> AsyncIterator[HttpResponse]:
        """Send to the first endpoint, and to the next ones while they are unavailable: at most `engines.max_attempts` in total.

        Raises:
            EngineError: The last endpoint failed, as in `send`.
            EngineBusy: The queue of an endpoint is full, or waiting timed out.
        """
        left = list(endpoints[: self._settings.max_attempts])
        with ExitStack() as stack:
            while True:
                endpoint = left.pop(0)
                try:
                    if not endpoint.queue.acquire_free():
                        await self.wait_for_slot(endpoint, path, can_fail_over=bool(left))
                    stack.callback(endpoint.queue.release)
                    response = await self.send(endpoint, method, path, headers=headers, body=body)
                    stack.callback(response.close)
                    check_status(endpoint, response.status, is_last=not left)
                except EngineError as fault:
                    if not (left and can_fail_over(fault)):
                        raise
                else:
                    yield response
                    return
                stack.close()

    def translated(self, error: Exception, endpoint: Endpoint, *, is_auxiliary: bool = False) -> EngineError:
        """Translate one of `HTTP_ERRORS` into an `EngineError`, and count it unless the request is auxiliary."""
        # aiohttp's errors are in cycles, which would keep the request until they are collected.
        error.__traceback__ = None
        fault = self._engine_error(endpoint.label, error)
        if not is_auxiliary:
            endpoint.lose()
            self.health_checker.failed(endpoint, fault.message)
            self._metrics.engine_faults.labels(endpoint.label, fault.fault).inc()
        return fault

    def _engine_error(self, label: str, error: Exception) -> EngineError:
        if isinstance(error, aiohttp.ConnectionTimeoutError | aiohttp.ClientConnectorError):
            return EngineUnreachable(f"Engine {label} is unreachable: {failure_text(error)}")
        if isinstance(error, TimeoutError):
            return EngineTimeout(f"Engine {label} timed out after {self._settings.read_timeout_s} s")
        return EngineDisconnected(f"Engine {label} disconnected: {failure_text(error)}")

    async def detect_all(self) -> None:
        """Detect the engine type of every endpoint. An unreachable endpoint keeps its last known type."""
        await asyncio.gather(*map(self.ensure_detected, self.endpoints))

    async def ensure_detected(self, endpoint: Endpoint) -> EngineError | None:
        """Detect what an engine is, unless it is known; return the error if it was never detected and is unreachable.

        Concurrent callers share one detection.
        """
        if (detection := self._start_detection(endpoint)) is not None:
            await asyncio.wait([detection], timeout=_DETECTION_TIMEOUT_S)
        if endpoint.traits is not None or endpoint.settings.kind != "auto":
            return None
        return EngineUnreachable(f"Engine {endpoint.label} is unreachable: {endpoint.last_fault or 'no response'}")

    async def endpoints_for(self, model: str | None) -> Sequence[Endpoint]:
        """Return the endpoints that may serve a model (its name at the engine); all of them if a request names none.

        The models of an engine are requested again for each name that it does not list, at most once a minute. A call waits
        for engines with unknown models, and for all engines if no endpoint lists its model. Raises NotFound if no endpoint
        serves the model.
        """
        if not self.routes_by_model or model is None:
            return self.endpoints
        due = [
            endpoint
            for endpoint in self.endpoints
            if not endpoint.settings.models and not endpoint.health.is_ejected and endpoint.models.is_due(model)
        ]
        if due:
            is_listed = any(endpoint.lists(model) for endpoint in self.endpoints)
            lookups = [(endpoint, self._lookups.start(self.served_models(endpoint, model))) for endpoint in due]
            awaited = [lookup for endpoint, lookup in lookups if endpoint.models.names is None or not is_listed]
            if awaited:
                await asyncio.wait(awaited)
        return serving(self.endpoints, model)

    async def served_models(self, endpoint: Endpoint, name: str) -> frozenset[str] | None:
        """Return the models that an endpoint lists, by id, root and alias; None if it lists none.

        A name that is not listed is looked up again at intervals, because adapters are loaded at run time.
        """
        return await endpoint.models.updated_for(name, lambda: self._fetch_models(endpoint))

    async def list_models(self, endpoint: Endpoint) -> None:
        """List the models of an endpoint again."""
        await endpoint.models.update(lambda: self._fetch_models(endpoint))

    async def _fetch_models(self, endpoint: Endpoint) -> frozenset[str] | None:
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(_DETECTION_TIMEOUT_S):
                names = model_names((await self._probe(endpoint, "/v1/models", new_connection=True)).body)
            if endpoint.models.names is not None and names != endpoint.models.names:
                self._redetect(endpoint)
            return names
        return endpoint.models.names

    def _start_detection(self, endpoint: Endpoint) -> "asyncio.Task[None] | None":
        """Return the running detection, which is started if it is due; None if there is none."""
        if not endpoint.is_detected and endpoint.detection is None:
            loop = asyncio.get_running_loop()
            if not endpoint.detections or loop.time() >= endpoint.detect_at:
                endpoint.detection = loop.create_task(self._detect(endpoint))
        return endpoint.detection

    async def _detect(self, endpoint: Endpoint) -> None:
        returned = endpoint.returns_ids
        try:
            async with asyncio.timeout(_PROBES_TIMEOUT_S):
                if not await detect(endpoint, self._probe):
                    self._lookups.start(self._add_traits(endpoint))
        except TimeoutError:  # the next call begins another one
            endpoint.last_fault = f"Engine {endpoint.label} did not respond to probes within {_PROBES_TIMEOUT_S} s"
        if endpoint.returns_ids is not returned:
            self._show_ids(endpoint)

    async def _add_traits(self, endpoint: Endpoint) -> None:
        """Request traits again that an engine did not show in time: vLLM's first /openapi.json takes a busy machine seconds."""
        if (known := endpoint.traits) is not None:
            further, _ = await _with_further_traits(endpoint, known, self._probe, _PROBES_TIMEOUT_S)
            if endpoint.traits is known:  # else it was detected again
                endpoint.describe(further)

    def _redetect(self, endpoint: Endpoint) -> None:
        """Detect an engine again, at most once a minute: responses show that it may have been replaced."""
        if endpoint.is_detected and asyncio.get_running_loop().time() >= endpoint.detect_at:
            endpoint.is_detected = False
            self._start_detection(endpoint)

    def note_ids(self, endpoint: Endpoint, *, returned: bool) -> None:
        """Note whether the last step of an endpoint has token ids."""
        if not returned:
            self._redetect(endpoint)
        if endpoint.returns_ids is not returned:
            endpoint.returns_ids = returned
            self._show_ids(endpoint)

    def _show_ids(self, endpoint: Endpoint) -> None:
        self._metrics.engine_token_ids.labels(endpoint.label).set(endpoint.returns_ids is True)
        if not endpoint.returns_ids:
            LOG.warning(
                "Engine %s (%s) returns no token ids: its calls are recorded as text, and none can be exported for training. "
                "Run `tokentape check`.",
                endpoint.label,
                endpoint.kind,
            )

    async def _probe(
        self, endpoint: Endpoint, path: str, *, body: Mapping[str, Any] | None = None, new_connection: bool = False
    ) -> ProbeResponse:
        """Send an auxiliary request: GET, or POST with a JSON body."""
        method, headers = ("GET", ()) if body is None else ("POST", JSON)
        payload = None if body is None else orjson.dumps(body)
        response = await self.send(
            endpoint,
            method,
            path,
            headers=headers,
            body=payload,
            new_connection=new_connection,
            is_auxiliary=body is not None,
        )
        with closing(response):
            text = await body_of(response, _MAX_PROBE_BYTES)
        try:
            read = (
                await off_loop(len(text), LARGE_BYTES, _parsed, bytes(text), None) if response.status == 200 else None
            )
        except ValueError:
            read = None
        error = "" if response.status == 200 else text[:_MAX_ERROR_BYTES].decode(errors="replace")
        return ProbeResponse(response.status, response.headers.get("Server", ""), read, error)

    async def _health_status(self, endpoint: Endpoint) -> int:
        with closing(await self.send(endpoint, "GET", "/health", headers=(), body=None)) as response:
            if response.status < 500:
                self._start_detection(endpoint)  # if it is due, so that the engine is known before the next call
            return response.status

    async def close(self) -> None:
        """Close all connections."""
        await self.health_checker.close()
        self._lookups.cancel()
        await self._lookups.wait()
        tasks = [endpoint.detection for endpoint in self.endpoints if endpoint.detection is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._client.close()
        await self._unpooled.close()
