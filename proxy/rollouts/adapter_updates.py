"""Updates of a policy by LoRA adapters: at all endpoints or at none, by one process at a time.

The announcement `adapters` of the policy has its loaded adapters by name, and the owner of the latest update with the end of
its lease. An owner that dies leaves calls paused, because engines may have different weights; the next update loads all
endpoints again.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from typing import Any, Final

import orjson

from proxy.clock import Clock, new_id
from proxy.errors import Conflict, EngineError, EngineTimeout, EngineUnreachable, UnprocessableRequest
from proxy.rollouts.policy import Announced, InFlight, Policy
from proxy.rollouts.rollout import announced_value, of_policy
from proxy.upstream.client import JSON, Upstream, body_of
from proxy.upstream.concurrency import BackgroundTasks
from proxy.upstream.endpoint import Endpoint
from storage.errors import StorageError
from storage.redis.store import Announcements

ADAPTERS_ANNOUNCEMENT: Final = "adapters"
_LEASE_MS: Final = 15_000
_RENEWAL_S: Final = 4.0
_LOAD_TIMEOUT_S: Final = 600.0
_LOAD: Final = "/v1/load_lora_adapter"
_UNLOAD: Final = "/v1/unload_lora_adapter"
_MAX_MESSAGE: Final = 500
_MAX_BYTES: Final = 2**16


@dataclass(frozen=True, slots=True)
class AdapterUpdate:
    """An adapter to load."""

    name: str  # at the engines
    path: str  # there
    version: str  # of the policy, which is announced with `run` and `new_epoch`
    mode: str  # of the pause meanwhile
    drain_s: float
    in_flight: InFlight
    run: str | None = None
    new_epoch: bool = False


@dataclass(frozen=True, slots=True)
class _Record:
    """The announcement."""

    loaded: Mapping[str, Mapping[str, str]]  # the path and version of each adapter by name
    owner: str = ""  # of the latest update
    until_ms: int = 0  # the end of its lease


class AdapterUpdates:
    """Loads adapters of a policy into the endpoints of every process. `close` cancels updates, as if the process died."""

    def __init__(self, announcements: Announcements, upstream: Upstream, policy: Policy, clock: Clock) -> None:
        self._announcements = announcements
        self._name = of_policy(ADAPTERS_ANNOUNCEMENT, policy.name)
        self._upstream = upstream
        self._pause = policy.pause
        self._version = policy.version
        self._clock = clock
        self._tasks = BackgroundTasks()

    async def close(self) -> None:
        """Cancel updates."""
        self._tasks.cancel()
        await self._tasks.wait()

    async def apply(self, update: AdapterUpdate) -> tuple[list[str], Announced]:
        """Load an adapter under a pause, announce its version, and resume.

        Return the labels of the endpoints, and what is announced.

        An update continues if its client disconnects. After an error, nothing is announced, and the endpoints have the
        adapter of before; if that cannot be loaded, calls stay paused.

        Raises:
            UnprocessableRequest: An endpoint is no vLLM, or no endpoint serves the adapter.
            Conflict: Another update is in progress, calls are in flight, or the path has the adapter of another version.
            LowerVersion: The version cannot be announced; nothing is loaded.
            EngineError: An endpoint did not load the adapter.
        """
        return await asyncio.shield(self._tasks.start(self._apply(update)))

    async def _apply(self, update: AdapterUpdate) -> tuple[list[str], Announced]:
        version, run, new_epoch = update.version, update.run, update.new_epoch
        await self._version.check(self._announcements, version, run=run, new_epoch=new_epoch)
        endpoints = await self._endpoints(update.name)
        async with self._owned(update) as owner:
            before = (await self._record(owner))[0].loaded
            try:
                await self._drain(update)
                await self._load_all(update, endpoints, before.get(update.name))
            except _Unrestored:
                raise
            except (Conflict, EngineError):
                await self._record(owner)  # the owner alone ends the pause
                await self._pause.announce(None)
                raise
            loaded = {"path": update.path, "version": update.version}
            await self._write(owner, {**before, update.name: loaded}, lease_ms=_LEASE_MS)
            announced = await self._version.announce(self._announcements, version, run=run, new_epoch=new_epoch)
            await self._pause.announce(None)
        return [endpoint.label for endpoint in endpoints], announced

    async def _drain(self, update: AdapterUpdate) -> None:
        """Pause calls and wait until none is in flight. Raises Conflict."""
        _, is_drained = await self._pause.drained(update.mode, drain_s=update.drain_s, in_flight=update.in_flight)
        if not is_drained:
            raise Conflict(
                f"Calls are in flight after {update.drain_s:g} s, or calls were paused or resumed meanwhile; nothing was "
                "loaded. Use a larger drain_s, or in_flight: resume or abort."
            )

    async def _endpoints(self, name: str) -> Sequence[Endpoint]:
        """Return the endpoints that serve an adapter. Raises UnprocessableRequest, EngineUnreachable."""
        endpoints = [
            endpoint for endpoint in self._upstream.endpoints if not endpoint.settings.models or endpoint.lists(name)
        ]
        if not endpoints:
            raise UnprocessableRequest(
                f"No endpoint serves the model {name!r} (engines.endpoints[].models).", param="name"
            )
        for endpoint in endpoints:
            fault = await self._upstream.ensure_detected(endpoint)
            if fault is not None:
                raise fault
            if not endpoint.engine.loads_adapters:
                message = f"Adapters are loaded into vLLM only, and engine {endpoint.label} is of kind {endpoint.kind}."
                raise UnprocessableRequest(message, param="name")
        return endpoints

    async def _load_all(
        self, update: AdapterUpdate, endpoints: Sequence[Endpoint], before: Mapping[str, str] | None
    ) -> None:
        """Load the adapter at all endpoints; if one fails, restore the others. Raises EngineError."""
        faults = await self._each(endpoints, update.name, update.path)
        if not faults:
            return
        reached = [endpoint for endpoint in endpoints if not isinstance(faults.get(endpoint.label), EngineUnreachable)]
        lost = await self._each(reached, update.name, None if before is None else before["path"])
        messages = " ".join(f"{fault.message}." for fault in faults.values())
        # An engine that is unreachable serves no calls with the new weights; after a restart it has no adapter.
        lost = {label: fault for label, fault in lost.items() if not isinstance(fault, EngineUnreachable)}
        if lost:
            left = " ".join(f"{fault.message}." for fault in lost.values())
            raise _Unrestored(f"{messages} The adapter of before could not be restored, and calls stay paused: {left}")
        raise EngineError(f"{messages} The version was not announced, and the endpoints have the adapter of before.")

    async def _each(self, endpoints: Sequence[Endpoint], name: str, path: str | None) -> dict[str, EngineError]:
        """Load (or unload, without a path) an adapter at endpoints; return the errors by endpoint."""

        async def change(endpoint: Endpoint) -> EngineError | None:
            try:
                async with asyncio.timeout(_LOAD_TIMEOUT_S):
                    if path is None:
                        await unload_adapter(self._upstream, endpoint, name)
                    else:
                        await load_adapter(self._upstream, endpoint, name, path)
            except EngineError as fault:
                return fault
            except TimeoutError:
                return EngineTimeout(f"Engine {endpoint.label} timed out after {_LOAD_TIMEOUT_S:g} s")
            return None

        changes = await asyncio.gather(*map(change, endpoints))
        return {endpoint.label: fault for endpoint, fault in zip(endpoints, changes, strict=True) if fault is not None}

    @asynccontextmanager
    async def _owned(self, update: AdapterUpdate) -> AsyncIterator[str]:
        """Own the updates of all processes meanwhile: lease them, and renew the lease until the end. Raises Conflict."""
        owner = new_id(self._clock)
        while True:
            record, number = await self._read()
            if record.owner == owner:
                break
            _refuse(update, record, self._clock.now_ms())
            await self._swap(_Record(record.loaded, owner, self._clock.now_ms() + _LEASE_MS), number)
        renewing = asyncio.get_running_loop().create_task(self._renew(owner))
        try:
            yield owner
        finally:
            renewing.cancel()
            await asyncio.wait([renewing])
            with suppress(StorageError, Conflict):  # else the lease expires
                await self._write(owner, None, lease_ms=0)

    async def _renew(self, owner: str) -> None:
        with suppress(Conflict):  # the next write of the owner raises it
            while True:
                await asyncio.sleep(_RENEWAL_S)
                with suppress(StorageError):
                    await self._write(owner, None, lease_ms=_LEASE_MS)

    async def _write(self, owner: str, loaded: Mapping[str, Mapping[str, str]] | None, *, lease_ms: int) -> None:
        """Write the loaded adapters (None: as they are) and the end of the lease. Raises Conflict if the lease is lost."""
        until_ms = self._clock.now_ms() + lease_ms if lease_ms else 0
        while True:
            record, number = await self._record(owner)
            if await self._swap(_Record(record.loaded if loaded is None else loaded, owner, until_ms), number):
                return

    async def _record(self, owner: str) -> tuple[_Record, int]:
        """Return the record and its number. Raises Conflict if another update has the lease."""
        record, number = await self._read()
        if record.owner != owner:
            raise Conflict("Another update of adapters began after the lease of this one expired.")
        return record, number

    async def _read(self) -> tuple[_Record, int]:
        announcement = (await self._announcements.read()).get(self._name)
        if announcement is None:
            return _Record({}), 0
        return announced_value(announcement, _Record, self._name, _Record({})), announcement.number

    async def _swap(self, record: _Record, number: int) -> bool:
        """Write the record if the present one has this number; return whether it did."""
        return await self._announcements.announce_if(self._name, orjson.dumps(record), number) is not None


class _Unrestored(EngineError):
    """An endpoint has neither the new adapter for certain, nor the one of before."""


def _refuse(update: AdapterUpdate, record: _Record, now_ms: int) -> None:
    """Raise Conflict if another update is in progress, or the path has the weights of another version."""
    if record.until_ms > now_ms:
        raise Conflict("Another update of adapters is in progress. Try again when it has ended.")
    loaded = record.loaded.get(update.name)
    if loaded is not None and loaded["path"] == update.path and loaded["version"] != update.version:
        raise Conflict(
            f"Version {loaded['version']!r} of adapter {update.name!r} was loaded from the same path. Write each version to a "
            "path of its own: vLLM's prefix cache distinguishes weights by their path.",
            param="path",
        )


async def load_adapter(upstream: Upstream, endpoint: Endpoint, name: str, path: str) -> None:
    """Load an adapter, in place of the one that has its name. Raises EngineError."""
    body = {"lora_name": name, "lora_path": path, "load_inplace": True}
    status, message = await _post(upstream, endpoint, _LOAD, body)
    if status == 400 and "already been loaded" in message:  # a vLLM without load_inplace, which ignores the field
        await unload_adapter(upstream, endpoint, name)
        status, message = await _post(upstream, endpoint, _LOAD, body)
    if status != 200:
        raise EngineError(f"Engine {endpoint.label} did not load the adapter: {message}")


async def unload_adapter(upstream: Upstream, endpoint: Endpoint, name: str) -> None:
    """Unload an adapter; one that is not loaded is no error. Raises EngineError."""
    status, message = await _post(upstream, endpoint, _UNLOAD, {"lora_name": name})
    if status not in (200, 404):
        raise EngineError(f"Engine {endpoint.label} did not unload the adapter: {message}")


async def _post(upstream: Upstream, endpoint: Endpoint, path: str, body: Mapping[str, Any]) -> tuple[int, str]:
    """Return the status and the message of the response; the models of the endpoint are listed again. Raises EngineError."""
    endpoint.models.forget()
    response = await upstream.send(
        endpoint, "POST", path, headers=JSON, body=orjson.dumps(body), new_connection=True, is_auxiliary=True
    )
    with closing(response):
        message = _message(bytes(await body_of(response, _MAX_BYTES)))
    endpoint.models.forget()  # a call may have listed them meanwhile
    return response.status, f"{path} returned {response.status}: {message}"


def _message(body: bytes) -> str:
    """Return the message of vLLM's error, with the reason if the route does not exist."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:_MAX_MESSAGE].decode("utf-8", "replace")
    error = answer.get("error", answer) if isinstance(answer, dict) else None
    if error == {"detail": "Not Found"}:
        return "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
    message = error.get("message") if isinstance(error, dict) else None
    return str(message if message is not None else answer)[:_MAX_MESSAGE]
