"""Attempts: calls that are made again, by their client's own word.

Holds what an `Idempotency-Key` and a client's retry header come to: waiting for a call that is in flight, finding the
answer that was given already, and else what the step keeps of being a retry. Which attempt is trained is the tree's to say.

Rule 1: of one key of one rollout, one call at a time is on its way to the engine in this process; the others wait.
Rule 2: what was answered whole is answered from the store. Whatever else became of the earlier attempt (the engine failed,
        the client left, another process has it still), the call is made again and marked as its retry.
Rule 3: a key stands for one body, and is known within its rollout only.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

import orjson

from proxy.clock import Clock
from proxy.errors import NotValid
from proxy.protocols.dialects import DIALECTS
from proxy.protocols.dialects.base import is_on
from proxy.protocols.engines import ENGINES
from proxy.protocols.synthetic_stream import CONTENT_TYPE, replay_events
from proxy.protocols.translated_call import TRANSLATORS_BY_NAME, client_response_bytes
from proxy.rollouts.rollout import Rollout
from proxy.telemetry.logs import LOG
from proxy.trajectory.blocks import BlockReader
from proxy.trajectory.codec import UnreadableRecord, decode
from proxy.trajectory.step import Step
from storage.errors import RolloutDeleted
from storage.store import Store

KEY: Final = "Idempotency-Key"
COUNT: Final = "X-Stainless-Retry-Count"  # OpenAI's and Anthropic's clients: 0 in a first attempt (openai 2.x)
ATTEMPT_MARK: Final = "attempt:"
_MOST_ATTEMPTS: Final = 1000  # a client that says more is not counting attempts


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """An answer that was given already, to be given again, and the step it was recorded as."""

    step: Step
    content_type: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a call.

    `again` is the answer, if there is one already; else the call is to be made, as `step_id`, and its step keeps `extra`.
    `stored` is to be set once that step is stored: who waits for it need not wait for the client to read.
    """

    step_id: str
    extra: Mapping[str, Any]
    again: StoredAnswer | None = None
    stored: asyncio.Event = field(default_factory=asyncio.Event)
    marks: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Flight:
    request_key: str
    over: asyncio.Event


class IdempotencyKeys:
    """The attempts of one process. What it holds in memory is as much as there are keyed calls in flight."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._in_flight: dict[tuple[str, str, str], _Flight] = {}

    def __repr__(self) -> str:
        return f"<Attempts {len(self._in_flight)} in flight>"

    @asynccontextmanager
    async def attempt(
        self,
        rollout: Rollout,
        headers: Mapping[str, str],
        request_key: str,
        step_id: str,
        *,
        default_key: str | None = None,
    ) -> AsyncIterator[Attempt]:
        """The attempt that these headers make of a body, as this step; it is over when the context is left.

        Raises NotValid for a key that stands for another body, and StorageError.
        """
        key = headers.get(KEY) or default_key
        if not key:
            count = _count(headers.get(COUNT, ""))
            extra = {"request_key": request_key, **({"attempt": count} if count else {})}
            yield Attempt(step_id, extra)
            return
        raw = key.encode("utf-8", "surrogateescape")  # the bytes as they came: a header may have any
        name = (rollout.rollout_id, rollout.incarnation, blake2b(raw, digest_size=16).hexdigest())
        while (flight := self._in_flight.get(name)) is not None and not flight.over.is_set():
            _check_body(flight.request_key, request_key)
            await flight.over.wait()
        flight = self._in_flight[name] = _Flight(request_key, asyncio.Event())
        try:
            yield await self._next(rollout, name[2], flight, step_id)
        finally:
            flight.over.set()
            if self._in_flight.get(name) is flight:  # else another one has begun since this one's step was stored
                del self._in_flight[name]

    async def begin(self, rollout: Rollout, attempt: Attempt) -> None:
        """Note that the call is made: from now on, other processes know of it."""
        if not attempt.marks:
            return
        with suppress(RolloutDeleted):  # deleted meanwhile: the recorder will let its step go as well
            await self._store.mark(rollout.rollout_id, rollout.incarnation, attempt.marks, now_ms=self._clock.now_ms())

    async def _next(self, rollout: Rollout, digest: str, flight: _Flight, step_id: str) -> Attempt:
        """The next attempt under a key that nobody here has in flight."""
        mark = ATTEMPT_MARK + digest
        told = (await self._store.marks(rollout.rollout_id, [mark])).get(mark)
        number, extra = 0, {"request_key": flight.request_key}
        if told is not None:
            before = orjson.loads(told)
            _check_body(before["request_key"], flight.request_key)
            again = await self._again(rollout.rollout_id, before["step_id"])
            if again is not None:
                return Attempt(step_id, extra, again, flight.over)
            number = before["attempt"] + 1
            extra |= {"attempt": number, "retry_of": before["step_id"]}
        noted = {"step_id": step_id, "request_key": flight.request_key, "attempt": number}
        return Attempt(step_id, extra, None, flight.over, {mark: orjson.dumps(noted)})

    async def _again(self, rollout_id: str, step_id: str) -> StoredAnswer | None:
        """The answer of a step; None if the call is to be made again."""
        found = await self._store.find(rollout_id, step_id)
        if found is None:
            return None
        blocks = await self._store.blocks(rollout_id)
        try:
            return await asyncio.to_thread(_given, found[1], blocks)
        except UnreadableRecord as error:
            LOG.error("a call is made again: %s", error, extra={"fields": {"step_id": step_id}})
            return None


def _given(record: bytes, blocks: Mapping[bytes, bytes]) -> StoredAnswer | None:
    return given_answer(decode(record, BlockReader(blocks)))


def given_answer(step: Step) -> StoredAnswer | None:
    """What a step's client was answered; None if it was not answered whole, or not in a way that can be told again.

    A stream is told as `replay` tells one: a client cannot tell it from the engine's own, but its events may be fewer. Of
    generate's streams nobody can: they are asked again.
    """
    engine = ENGINES.get(step.engine.kind)
    if step.status != "complete" or step.response is None or engine is None:
        return None
    is_stream = is_on(step.request.get("stream"))
    if step.dialect in TRANSLATORS_BY_NAME:
        body = client_response_bytes(step)
        return None if body is None else StoredAnswer(step, CONTENT_TYPE if is_stream else "application/json", body)
    if not is_stream:
        return StoredAnswer(step, "application/json", orjson.dumps(step.response))
    if step.dialect == "generate":
        return None
    usage = DIALECTS[step.endpoint].response_options(step.request).usage
    try:
        events = replay_events(engine.shape, step.dialect, dict(step.response), usage=usage)
    except (TypeError, KeyError, AttributeError):
        return None
    return StoredAnswer(step, CONTENT_TYPE, events)


def _check_body(known: str, request_key: str) -> None:
    if known != request_key:
        raise NotValid(
            f"the {KEY} of this call was sent with another body before: a key stands for one body; "
            "send this one with a key of its own",
            param=KEY,
        )


def _count(value: str) -> int:
    """How many attempts came before, as the client counts; 0 for what is no such count."""
    return int(value) if value.isascii() and value.isdecimal() and len(value) < 5 and int(value) < _MOST_ATTEMPTS else 0
