"""The continuation of recorded steps by ids: the turns of rollouts, and the engine's renderings.

Every failure on the way sends the call unchanged.
"""

import asyncio
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Any, Final, TypeVar, cast, get_args

import orjson

from proxy.clock import Clock
from proxy.continuation.bridge import continue_text, continue_turn
from proxy.continuation.turns import (
    BOUNDS,
    Ambiguous,
    Match,
    Sampler,
    Turn,
    Turns,
    match,
    match_text,
    own_rendering,
)
from proxy.continuation.types import (
    Continuation,
    Detokenize,
    Lookup,
    LookupFailed,
    LookupResult,
    Message,
    Mode,
    Reason,
    Render,
    rendering_of,
)
from proxy.errors import BadRequest, DamagedStep, EngineDisconnected, EngineError, NotFound
from proxy.protocols.dialects.responses.request import repeated_steps
from proxy.protocols.engines.base import (
    FollowUpRequest,
    read_ids,
    read_text,
    read_window,
    render_request,
    text_request,
    tokenize_request,
)
from proxy.protocols.json_texts import KnownPrompt, prompt_of
from proxy.protocols.plan import Plan, with_continuation
from proxy.rollouts.admission import Admitted
from proxy.rollouts.rollout import (
    DELIVERED_MARK,
    UNDELIVERED_MARK,
    KnownTurns,
    LiveRollout,
    LiveRollouts,
    Rollout,
    read_marks,
)
from proxy.rollouts.steps import decode_records
from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import Metrics
from proxy.trajectory.json_bytes import size_of
from proxy.trajectory.step import Step, answers_of
from proxy.trajectory.thread_rules import agent_of
from proxy.upstream.client import Upstream
from proxy.upstream.concurrency import LARGE_BYTES, LONG_IDS, PLAIN_BYTES, BackgroundTasks, off_loop
from proxy.upstream.endpoint import MISSES, PAUSE_S, UNAVAILABLE_STATUSES, Endpoint
from proxy.upstream.http_client import CONTINUATION_HEADER
from storage.errors import StorageError
from storage.redis.store import Store
from storage.types import Appended

T = TypeVar("T")

_PAGE: Final = 200  # records per read from the store
_BYTES_PER_TOKEN: Final = 4  # of text
_BYTES_PER_COMPARISON: Final = 256  # of a body: reading them takes as long as comparing one reply
_WEIGHT_OF_STEP: Final = 4  # an estimate: bytes of memory for each byte of the request and the response of a step
_MAX_STOPS: Final = 4096
_BYTES_PER_ID: Final = 6  # in JSON
_KEPT_IDS: Final = 8  # the texts of at most so many ids are kept
PER_TEXT_TOKEN: Final = 4  # ids, which are compared in C, take as long as one token of text


class PromptLookups:
    """Serve the lookups of a continuation at one endpoint. `body` is the chat or completions body that would be sent.

    `known`: ids with which renderings may begin. `rendered`: the newest rendering. `fault`: why the endpoint serves none, once
    a lookup has shown that.
    """

    def __init__(
        self,
        upstream: Upstream,
        endpoint: Endpoint,
        body: Mapping[str, Any],
        body_bytes: int,
        rollout_id: str,
        known: KnownPrompt | None = None,
    ) -> None:
        self._upstream = upstream
        self._endpoint = endpoint
        self._body = body
        self._body_bytes = body_bytes
        self._rollout_id = rollout_id
        self._model = str(body.get("model"))
        self._known = known
        self.rendered: KnownPrompt | None = None
        self.fault: Reason | None = None

    async def run(self, lookups: Generator[Lookup, LookupResult, T], length: int) -> T:
        """Run a continuation to its result; `length`: about how many tokens its texts have, and its ids count a quarter.

        Raises:
            LookupFailed: The engine could not serve a lookup.
            EngineError: A request failed.
        """
        result: LookupResult = None
        while True:
            more = 0 if result is None else len(result)
            size = length + (more if isinstance(result, str) else more // PER_TEXT_TOKEN)
            lookup, value = await off_loop(size, LONG_IDS, _advance, lookups, result)
            if lookup is None:
                return cast("T", value)
            result = await self.get(lookup)

    async def get(self, lookup: Lookup) -> LookupResult:
        """Return the result of a lookup; None if the engine rejects messages. Raises LookupFailed, EngineError."""
        if not isinstance(lookup, Detokenize):
            return await self._ids(lookup)
        # Stop tokens, and the ends of prompts, which are the template's.
        is_kept, texts, key = (
            len(lookup.ids) <= _KEPT_IDS,
            self._endpoint.token_texts,
            (self._model, *lookup.ids[:_KEPT_IDS]),
        )
        if is_kept and (known := texts.get(key)) is not None:
            return known
        request = text_request(self._endpoint.engine, lookup.ids)
        body = await self._post(request, _BYTES_PER_ID * len(lookup.ids))
        text = read_text(self._endpoint.engine, body)
        if text is None:
            raise LookupFailed("the engine returned no text for token ids")
        if is_kept:
            texts.put(key, text)
        return text

    async def _ids(self, lookup: Lookup) -> LookupResult:
        engine = self._endpoint.engine
        request = (
            render_request(engine, self._body, lookup.messages)
            if isinstance(lookup, Render)
            else tokenize_request(engine, self._body, lookup.text)  # type: ignore[union-attr]
        )
        # The history contains the engine's own replies, which may be longer than what the agent sends back.
        texts = lookup.messages if isinstance(lookup, Render) else [lookup.text]  # type: ignore[union-attr]
        known = self._known if isinstance(lookup, Render) else None
        body = await self._post(request, self._body_bytes + size_of(texts, PLAIN_BYTES), known)
        if body is None:
            return None
        tokens = body.get("tokens") if isinstance(body, dict) else None
        if isinstance(tokens, KnownPrompt):
            self.rendered = tokens
        ids = await off_loop(len(tokens) if isinstance(tokens, list) else 0, LONG_IDS, read_ids, body)
        if ids is None:
            raise LookupFailed("the engine returned no token ids for messages")
        if window := read_window(body):
            self._endpoint.windows.put(self._model, window)
        return ids

    async def _post(self, request: FollowUpRequest | None, size: int, known: KnownPrompt | None = None) -> Any:
        """Return the body of a response; None for a request that the engine rejects."""
        if request is None:
            self.fault = "unsupported"
            raise LookupFailed("the engine has no tokenizer API")
        text = await off_loop(size, PLAIN_BYTES, orjson.dumps, request.body)
        status, body = await self._upstream.post_json(self._endpoint, request.path, text, known=known)
        if status == 200:
            return body
        if status in UNAVAILABLE_STATUSES:
            raise EngineDisconnected(f"POST {request.path} returned {status}")
        if status in {405, 501} or (status == 404 and not await self._serves(request)):
            self.fault = "unsupported"
            self._endpoint.continuation_fault.show(self._rollout_id, "unsupported")
        if status in {400, 422}:
            return None
        raise LookupFailed(f"POST {request.path} returned {status}")

    async def _serves(self, request: FollowUpRequest) -> bool:
        """Return whether an endpoint that returned 404 has this route: vLLM 0.32 returns it for an unknown model, too."""
        if "model" not in request.body:
            return False
        status, _ = await self._upstream.post_json(self._endpoint, request.path, b'{"prompt": "a"}')
        return status == 200


def _advance(lookups: Generator[Lookup, LookupResult, T], result: LookupResult) -> "tuple[Lookup | None, Any]":
    """Return the next lookup, or None and the value of the generator."""
    try:
        return lookups.send(result), None
    except StopIteration as end:
        return None, end.value


class PromptContinuation:
    """Continue the calls of rollouts. `offer` follows the recorder; call `close` at the end."""

    def __init__(
        self,
        store: Store,
        upstream: Upstream,
        clock: Clock,
        metrics: Metrics,
        rollouts: LiveRollouts,
        *,
        mode: Mode,
        timeout_s: float,
    ) -> None:
        self._store = store
        self._upstream = upstream
        self._clock = clock
        self._metrics = metrics
        self._rollouts = rollouts
        self._default = mode
        self._timeout_s = timeout_s
        self._stops: set[tuple[str, str | None, int]] = set()  # engine kind, model and stop token
        self._tasks = BackgroundTasks()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<PromptContinuation {self._default}>"

    async def close(self) -> None:
        """Wait until the steps that are being added are; later ones are ignored."""
        self._is_closed = True
        await self._tasks.wait()

    def offer(self, step: Step, live: LiveRollout, appended: Appended, body_bytes: int) -> None:
        """Keep a stored step for the next call of its rollout that sends a reply back, which adds it to the turns.

        Many rollouts have no such call, so that hashing the messages of their steps would be for nothing.
        """
        known = live.known
        if known is None and appended.position == 0 and self._default != "off":
            known = live.known = KnownTurns()
        if known is None or self._is_closed or appended.position != known.count:
            return  # the predecessors are unknown: the step is read from the store with them
        if known.pending and not known.turns.indexes:
            live.known = None  # one step takes more memory than its turns: no second one is kept
            return
        if known.pending:  # of a rollout that continues its steps, and has other calls in between
            asyncio.get_running_loop().call_soon(self._add_pending, live, known)
        known.pending.append((appended.position, step))
        known.pending_bytes += _WEIGHT_OF_STEP * body_bytes
        known.count += 1

    async def continued(
        self,
        plan: Plan,
        call: Admitted,
        endpoint: Endpoint,
        headers: Mapping[str, str],
        work_bytes: int,
    ) -> Plan:
        """Return the plan with prompt ids that continue an earlier step, if the call continues one; else the plan.

        The header sets the mode, else the rollout, else the default. Raises BadRequest.
        """
        rollout, header = call.rollout, headers.get(CONTINUATION_HEADER)
        mode = (rollout.continuation or self._default) if header is None else mode_of(header)
        if mode == "off" or not rollout.counts.get("steps") or not _may_continue(plan):
            return plan
        started = self._clock.monotonic()
        found, known = None, call.live.prompt
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await self._find(plan, call, endpoint, mode, work_bytes)
                if found is None:
                    return plan
                turn, result, rendered = await self._continue(plan, endpoint, mode, found, work_bytes, known)
                known = rendered or known
        except TimeoutError:
            turn, result = None, Continuation(None, "timeout")
            if found is not None and endpoint.missed_renderings.add():  # otherwise the store was slow
                LOG.warning(
                    "Engine %s did not render %d calls in a row within continuation.timeout_s; it is not asked for %d s",
                    endpoint.label,
                    MISSES,
                    PAUSE_S,
                )
        except Exception:  # noqa: BLE001 - a call is never lost for its continuation
            LOG.exception("Call sent unchanged", extra={"fields": {"step_id": plan.step_id}})
            turn, result = None, Continuation(None, "internal")
        self._metrics.continuation_duration_seconds.observe(self._clock.monotonic() - started)
        if not _fits(result, endpoint.windows.get(str(plan.model_served)), plan.body):
            result = Continuation(None, "window")
        self.count(result)
        prompt = None if result.ids is None else prompt_of(result.ids, known)
        return with_continuation(plan, prompt, _facts(turn, result))

    async def sampled_calls(self, call: Admitted, call_ids: Sequence[str]) -> dict[str, Message]:
        """Return the name and the arguments of earlier tool calls as sampled, by the ids that the client sends back.

        A call that is not known, or not read in time, has the arguments that the client sends.
        """
        rollout = call.rollout
        if not call_ids or not rollout.counts.get("steps"):
            return {}
        try:
            async with asyncio.timeout(self._timeout_s):
                known = await self._complete(call.live, rollout)
        except (StorageError, DamagedStep, NotFound, TimeoutError) as error:
            fields = {"rollout_id": rollout.rollout_id, "error": repr(error)}
            LOG.warning("Sampled arguments of tool calls not read", extra={"fields": fields})
            return {}
        found = {call_id: known.turns.sampled_call(call_id) for call_id in call_ids}
        return {call_id: function for call_id, function in found.items() if function is not None}

    def refused(self, plan: Plan) -> Plan:
        """Return the plan to send a call again unchanged, after the engine rejected its prompt ids."""
        result = Continuation(None, "refused_ids")
        self.count(result)
        return with_continuation(plan, None, _facts(None, result))

    def count(self, result: Continuation) -> None:
        """Count a continuation, or the reason for a refusal."""
        outcome = "refused" if result.ids is None else "unchanged" if result.is_unchanged else "continued"
        self._metrics.continuations.labels(outcome, result.reason or "none").inc()

    def refuse(self, endpoint: Endpoint, rollout_id: str, reason: Reason) -> None:
        """Send no more prompt ids of this rollout to an endpoint, and none at all once several rollouts have shown it."""
        if endpoint.continuation_fault.show(rollout_id, reason):
            LOG.warning("Engine %s accepts no prompt ids (%s); calls are sent unchanged", endpoint.label, reason)

    async def _find(
        self, plan: Plan, call: Admitted, endpoint: Endpoint, mode: Mode, work_bytes: int
    ) -> Match | Turn | Reason | None:
        """Return the turn that a call continues, or why it continues none; None for the first call of a conversation."""
        found: Match | Turn | Ambiguous | Reason | None
        rollout = call.rollout
        try:
            known = await self._complete(call.live, rollout)
        except (StorageError, DamagedStep, NotFound) as error:
            LOG.warning("Steps not read: %s", error, extra={"fields": {"rollout_id": rollout.rollout_id}})
            return "store"
        async with known.lock:
            turns = known.turns
            size = work_bytes + _BYTES_PER_COMPARISON * len(turns) + turns.longest
            found = await off_loop(size, LARGE_BYTES, _search, turns, plan, endpoint.engine.kind, mode)
            if isinstance(found, Ambiguous):
                try:
                    undelivered = await self._undelivered(rollout, found)
                except StorageError:
                    return "store"
                found = await off_loop(size, LARGE_BYTES, _search, turns, plan, endpoint.engine.kind, mode, undelivered)
        if isinstance(found, Ambiguous):
            return "ambiguous"
        if isinstance(found, str) or found is None:
            return found
        if plan.engine.prompt_ids_fields(plan.dialect.name, []) is None:
            return "unsupported"
        if endpoint.missed_renderings.is_paused:
            return "timeout"
        return endpoint.continuation_fault.for_rollout(rollout.rollout_id) or found

    async def _undelivered(self, rollout: Rollout, found: Ambiguous) -> frozenset[str]:
        """Return the steps of turns that were marked as undelivered after they were added. Raises StorageError."""
        steps = {turn.step_id for turn in found.turns}
        names = [mark + step for mark in (UNDELIVERED_MARK, DELIVERED_MARK) for step in steps]
        return read_marks(await self._store.marks(rollout.rollout_id, names)).undelivered

    async def _continue(
        self,
        plan: Plan,
        endpoint: Endpoint,
        mode: Mode,
        found: "Match | Turn | Reason",
        work_bytes: int,
        known: KnownPrompt | None,
    ) -> tuple[Turn | None, Continuation, KnownPrompt | None]:
        """Return the turn, the result, and the newest rendering."""
        if isinstance(found, str):
            return None, Continuation(None, found), None
        turn = found.turn if isinstance(found, Match) else found
        lookups = PromptLookups(self._upstream, endpoint, plan.body, work_bytes, plan.rollout_id, known)
        try:
            if isinstance(found, Match) and not await self._is_verified(endpoint, plan.rollout_id, found, lookups):
                return turn, Continuation(None, "unverified"), None
            stops = {stop for kind, model, stop in self._stops if (kind, model) == (turn.kind, turn.model)}
            generator = (
                continue_turn(found, mode=mode, stops=stops)
                if isinstance(found, Match)
                else continue_text(found, str(plan.body["prompt"]))
            )
            texts = work_bytes + size_of([turn.reply], _BYTES_PER_TOKEN * LONG_IDS)
            ids = len(turn.prompt) + len(turn.ids)
            result = await lookups.run(generator, ids // PER_TEXT_TOKEN + texts // _BYTES_PER_TOKEN)
        except (LookupFailed, EngineError) as error:
            LOG.info("Call sent unchanged: %s", error, extra={"fields": {"step_id": plan.step_id}})
            return turn, Continuation(None, lookups.fault or "tokenize"), None
        endpoint.missed_renderings.forget()
        return turn, result, lookups.rendered

    async def _is_verified(self, endpoint: Endpoint, rollout_id: str, found: Match, lookups: PromptLookups) -> bool:
        """Return whether the endpoint is known to render messages as it does for calls.

        After `MISSES` turns that it renders otherwise, no rendering is requested for a while: each costs as much as in a call.
        """
        verified, unverified = endpoint.verified_rendering, endpoint.unverified_renderings
        if not endpoint.engine.verifies_renderings or verified.for_rollout(rollout_id):
            return True
        if (failures := unverified.for_rollout(rollout_id) or 0) >= MISSES:
            return False
        rendered: Any = await lookups.get(Render(found.history))
        is_equal = bool(rendered) and rendering_of(rendered) == own_rendering(found.turn)
        if is_equal:
            verified.show(rollout_id, what=True)
            unverified.oppose()
        else:
            verified.oppose()
            unverified.show(rollout_id, failures + 1)
        return is_equal

    async def _complete(self, live: LiveRollout, rollout: Rollout) -> KnownTurns:
        """Return the turns of a rollout, including the turns of steps that other processes stored.

        Raises StorageError, DamagedStep, NotFound.
        """
        known = live.known = live.known or KnownTurns()
        if (adding := self._add_pending(live, known)) is not None:
            await asyncio.shield(adding)  # a timeout must not release the lock while a thread adds
        count = rollout.counts.get("steps", 0)
        if len(known.turns.indexes) < count:
            # The reading continues after a timeout, so that the next call finds the steps.
            await asyncio.shield(self._tasks.start(self._read(live, known, rollout, count)))
        return known

    async def _read(self, live: LiveRollout, known: KnownTurns, rollout: Rollout, count: int) -> None:
        """Add the steps from the first unknown one on. Raises StorageError, DamagedStep, NotFound."""
        async with known.lock:
            indexes = known.turns.indexes
            first = next((index for index in range(count) if index not in indexes), count)
            # Each page is added before the next one is read, so that a damaged step does not hide those before it.
            while first < count and (records := await self._store.read(rollout.rollout_id, first, _PAGE)):
                steps = await decode_records(self._store, rollout, records, first, whole=True)
                await asyncio.to_thread(_add_all, known.turns, list(enumerate(steps, first)))
                self._account(live, known)
                first += len(records)
                known.count = max(known.count, first)

    def _add_pending(self, live: LiveRollout, known: KnownTurns) -> "asyncio.Task[None] | None":
        """Add the offered steps at once, or return a task that adds them if that takes long or others are being added."""
        pending = known.pending
        if pending and (known.lock.locked() or not _are_short(pending)):
            return self._tasks.start(self._add_in_thread(live, known))
        if pending:
            known.pending, known.pending_bytes = [], 0
            _add_all(known.turns, pending)
            self._account(live, known)
        return None

    async def _add_in_thread(self, live: LiveRollout, known: KnownTurns) -> None:
        async with known.lock:
            pending, known.pending, known.pending_bytes = known.pending, [], 0
            await asyncio.to_thread(_add_all, known.turns, pending)
        self._account(live, known)

    def _account(self, live: LiveRollout, known: KnownTurns) -> None:
        """Count the memory of turns that were added, and note their stop tokens."""
        if len(self._stops) < _MAX_STOPS:
            self._stops |= known.turns.stops
        self._rollouts.keep(live)


def mode_of(header: str) -> Mode:
    """Return the mode that a header names. Raises BadRequest."""
    modes: tuple[Mode, ...] = get_args(Mode)
    for mode in modes:
        if header.strip().lower() == mode:
            return mode
    raise BadRequest(
        f"{CONTINUATION_HEADER} must be one of {', '.join(modes)}, not {header[:100]!r}.", param=CONTINUATION_HEADER
    )


def _search(
    turns: Turns, plan: Plan, kind: str, mode: Mode, undelivered: Collection[str] = ()
) -> Match | Turn | Ambiguous | Reason | None:
    """Return the turn that a call continues, as `match` and `match_text`."""
    agent = agent_of(plan.extra, plan.request)
    if plan.dialect.name != "chat":
        sampler = Sampler(kind, plan.model_served, plan.policy, agent)
        return match_text(turns, plan.body, sampler, undelivered=undelivered)
    steps = repeated_steps(plan.request) if plan.translation is not None else ()
    sampler = Sampler(kind, plan.model_served, plan.policy, agent, steps)
    return match(turns, plan.body, sampler, mode=mode, undelivered=undelivered)


def _add_all(turns: Turns, steps: Sequence[tuple[int, Step]]) -> None:
    """Add steps with their indexes; one that cannot be added is not continued, and nothing else depends on it."""
    for index, step in steps:
        try:
            turns.add(step, index)
        except Exception:  # noqa: BLE001 - messages and responses may have any shape
            LOG.exception("Step not added to the continuation", extra={"fields": {"step_id": step.step_id}})


def _may_continue(plan: Plan) -> bool:
    """Return whether a call sends a reply back, or has a text prompt."""
    messages = plan.body.get("messages")
    if plan.dialect.name != "chat" or not isinstance(messages, list):
        return plan.dialect.name == "completions"
    for message in messages:  # noqa: SIM110 - on the way of every call
        if isinstance(message, dict) and message.get("role") == "assistant":
            return True
    return False


def _are_short(steps: Sequence[tuple[int, Step]]) -> bool:
    """Return whether steps have few tokens, little text and few values, so that adding them takes about a millisecond."""
    ids = 0
    values: list[Any] = []
    for _, step in steps:
        ids += sum(map(len, step.prompts))
        values += (step.request, step.sent)
        for answer in answers_of(step).values():  # replies without their logprobs
            values += (answer.get("message"), answer.get("text"))
    most = _BYTES_PER_TOKEN * (LONG_IDS - ids)
    return most >= 0 and size_of(values, most) <= most


def _fits(result: Continuation, window: int | None, body: Mapping[str, Any]) -> bool:
    """Return whether prompt ids fit into the context window, with the completion if the rendering would fit with it."""
    if result.ids is None or window is None:
        return True
    if len(result.ids) >= window:
        return False
    left = window - max((body[name] for name in BOUNDS if type(body.get(name)) is int), default=0)
    return len(result.ids) <= left or result.rendering is None or result.rendering.length > left


def _facts(turn: Turn | None, result: Continuation) -> dict[str, Any]:
    """Return what is recorded with the step."""
    facts: dict[str, Any] = {} if turn is None else {"step_id": turn.step_id, "choice": turn.choice}
    if result.ids is not None:
        facts |= {"kept": result.kept, "bridge": result.bridge}
    if result.rendering is not None:
        rendering = result.rendering
        facts |= {
            "rendered": rendering.length,
            "rendered_digest": rendering.digest,
            "rendered_last": rendering.last,
        }
    return facts if result.reason is None else {**facts, "reason": result.reason}
