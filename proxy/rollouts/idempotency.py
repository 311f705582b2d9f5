"""Idempotency keys: retries of a call wait for it, get its stored response, or are recorded as retries.

Rule 1: per key and rollout, this process sends one call at a time to the engine; the others wait.
Rule 2: a call with a complete response is answered from the store. After any other outcome of the earlier attempt (the engine
        failed, the client disconnected, another process still runs it), the call is sent again and recorded as its retry.
Rule 3: a key belongs to one request body, and to one rollout.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import orjson
from msgspec import Struct

from proxy.clock import Clock
from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects import DIALECTS
from proxy.protocols.dialects.base import EVENT_STREAM, GENERATES, CallIdentity, is_on
from proxy.protocols.engines import ENGINES
from proxy.protocols.plan import client_response_bytes, translator_of
from proxy.protocols.whole_response import replay_events
from proxy.rollouts.rollout import Rollout, value_or
from proxy.telemetry.logs import LOG
from proxy.trajectory.blocks import BlockReader
from proxy.trajectory.codec import UnreadableRecord, decode
from proxy.trajectory.step import Step
from storage.errors import RolloutDeleted
from storage.redis.store import Store

KEY: Final = "Idempotency-Key"
COUNT: Final = "X-Stainless-Retry-Count"  # OpenAI's and Anthropic's clients: 0 in a first attempt (openai 2.x)
ATTEMPT_MARK: Final = "attempt:"
_MAX_ATTEMPTS: Final = 1000  # larger values do not count attempts


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """The stored response of an earlier attempt, and the step that recorded it."""

    step: Step
    content_type: str
    body: bytes
    status: int = 200


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a call: its stored response, or how its step is recorded."""

    step_id: str
    extra: Mapping[str, Any]  # of the step
    stored_answer: StoredAnswer | None = None  # if there is none, the call is sent
    # The caller sets it once the step is stored: retries that wait do not wait for the client to read.
    stored: asyncio.Event = field(default_factory=asyncio.Event)
    marks: Mapping[str, bytes] = field(default_factory=dict)


class _Flight(NamedTuple):
    request_key: str
    over: asyncio.Event


class IdempotencyKeys:
    """The attempts of one process. Memory grows with the calls in flight that have a key."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._in_flight: dict[tuple[str, str, str], _Flight] = {}

    @asynccontextmanager
    async def attempt(self, rollout: Rollout, key: str, request_key: str, step_id: str) -> AsyncIterator[Attempt]:
        """Return the attempt for a request with this idempotency key; it ends when the context exits.

        `request_key` is a digest of the request body.

        Raises:
            UnprocessableRequest: The key was used with another body.
            StorageError: The store failed.
        """
        raw = key.encode("utf-8", "surrogateescape")  # the raw bytes: a header may have any
        name = (rollout.rollout_id, rollout.incarnation, blake2b(raw, digest_size=16).hexdigest())
        while (flight := self._in_flight.get(name)) is not None and not flight.over.is_set():
            _check_body(flight.request_key, request_key)
            await flight.over.wait()
        flight = self._in_flight[name] = _Flight(request_key, asyncio.Event())
        try:
            yield await self._next(rollout, name[2], flight, step_id)
        finally:
            flight.over.set()
            if self._in_flight.get(name) is flight:  # else another attempt has begun since this one's step was stored
                del self._in_flight[name]

    async def begin(self, rollout: Rollout, attempt: Attempt) -> None:
        """Record in the store that the call is sent, for other processes."""
        with suppress(RolloutDeleted):  # deleted meanwhile: the recorder will discard its step as well
            await self._store.mark(rollout.rollout_id, rollout.incarnation, attempt.marks, now_ms=self._clock.now_ms())

    async def _next(self, rollout: Rollout, digest: str, flight: _Flight, step_id: str) -> Attempt:
        """Return the next attempt for a key with no call in flight in this process."""
        mark = ATTEMPT_MARK + digest
        noted = (await self._store.marks(rollout.rollout_id, [mark])).get(mark)
        number, extra = 0, dict[str, Any](request_key=flight.request_key)
        before: _NotedAttempt | None = None  # a damaged one counts as none: the call is then sent again
        if noted is not None:
            before = value_or(None, noted, _NotedAttempt, "attempt of rollout", rollout.rollout_id)
        if before is not None:
            _check_body(before.request_key, flight.request_key)
            stored = await self._stored_answer(rollout.rollout_id, before.step_id)
            if stored is not None:
                return Attempt(step_id, extra, stored, flight.over)
            number = before.attempt + 1
            extra |= {"attempt": number, "retry_of": before.step_id}
        mark_fields = {"step_id": step_id, "request_key": flight.request_key, "attempt": number}
        return Attempt(step_id, extra, None, flight.over, {mark: orjson.dumps(mark_fields)})

    async def _stored_answer(self, rollout_id: str, step_id: str) -> StoredAnswer | None:
        """Return the response of a step; None if the call must be sent again."""
        found = await self._store.find(rollout_id, step_id)
        if found is None:
            return None
        blocks = await self._store.blocks(rollout_id)
        try:
            return await asyncio.to_thread(lambda: stored_answer_from(decode(found[1], BlockReader(blocks))))
        except UnreadableRecord as error:
            LOG.error(
                "Stored step is unreadable; the call is repeated: %s", error, extra={"fields": {"step_id": step_id}}
            )
            return None


class _NotedAttempt(Struct):
    step_id: str
    request_key: str
    attempt: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


def stored_answer_from(step: Step) -> StoredAnswer | None:
    """Return the response to a step's client; None if it was incomplete, or cannot be rendered again.

    Streams are rendered by `replay_events`: equal to the engine's for a client, with possibly fewer events. Streams of
    generate routes cannot be rendered: those calls are sent again.
    """
    engine = ENGINES.get(step.engine.kind)
    if step.status != "complete" or step.response is None or engine is None:
        return None
    is_stream = is_on(step.request.get("stream"))
    if (translator := translator_of(step)) is not None:
        body = client_response_bytes(step)
        if body is None:
            return None
        renderer = translator.renderer(step.request, CallIdentity.of(step))
        return StoredAnswer(step, renderer.stream_format.content_type if is_stream else "application/json", body)
    dialect = DIALECTS[step.endpoint]
    if not is_stream:
        return StoredAnswer(step, "application/json", orjson.dumps(dialect.write_body(step.response)))
    if step.dialect in GENERATES:
        return None
    usage = dialect.response_options(step.request).usage
    try:
        events = replay_events(engine.shape, step.dialect, dict(step.response), usage=usage)
    except (TypeError, KeyError, AttributeError):
        return None
    return StoredAnswer(step, EVENT_STREAM.content_type, events)


def _check_body(known: str, request_key: str) -> None:
    if known != request_key:
        raise UnprocessableRequest(
            f"This {KEY} was already used with a different request body. Use a new key for each body.",
            param=KEY,
        )


def retry_fields(value: str) -> dict[str, int]:
    """Return the field for the step of a retry without a key, from the client's count; nothing for 0 or an invalid value."""
    is_count = value.isascii() and value.isdecimal() and len(value) < 5 and 0 < int(value) < _MAX_ATTEMPTS
    return {"attempt": int(value)} if is_count else {}
