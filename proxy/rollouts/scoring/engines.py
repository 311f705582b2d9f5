"""The engines of one scorer: which of them scores a sequence, for how long, and when the next one is tried."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar
from weakref import WeakKeyDictionary

from proxy.errors import EngineError, EngineTimeout, NotFound, UnprocessableRequest
from proxy.rollouts.scoring.requests import (
    NO_MASKS,
    SCORING_KINDS,
    Kept,
    NotScored,
    OtherVocabulary,
    Scorer,
    TokenScores,
    TooLong,
    find_scorer,
    sender,
)
from proxy.upstream import Endpoint, Upstream, least_loaded

T = TypeVar("T")

_LANE: Final = "rescore"  # in the fair queues of endpoints, as if all requests were of one rollout
_KNOWN_S: Final = 60  # the models and the context window of an engine are read again after this time


@dataclass(frozen=True, slots=True)
class ScoringLimits:
    """The limits of a scorer's requests."""

    timeout_s: float = 300  # of one request, with its time in the queue of the endpoint
    configured: int | None = None  # requests of one process at the same time; None: 8, and at an engine with adapters 1
    max_attempts: int = 2

    @property
    def at_once(self) -> int:
        """How many requests a scorer gets at the same time at most."""
        return self.configured or 8


class ScoringEngines:
    """The endpoints of one scorer.

    `model` is the name of its model, None for the first one that an engine lists; `version` is the configured version of its
    weights. `is_policy`: the endpoints are those of the calls, and the model is that of a row.
    """

    def __init__(
        self,
        upstream: Upstream,
        limits: ScoringLimits,
        *,
        model: str | None = None,
        version: str | None = None,
        is_policy: bool = False,
    ) -> None:
        self.upstream = upstream
        self.model = model
        self.version = version
        self.is_policy = is_policy
        self.slots = asyncio.Semaphore(limits.at_once)
        self.limits = limits
        self._known: dict[tuple[Endpoint, str | None], tuple[float, Scorer]] = {}
        self._turns: WeakKeyDictionary[Endpoint, asyncio.Lock] = WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"<ScoringEngines {[endpoint.label for endpoint in self.upstream.endpoints]}>"

    async def find_model(self) -> str | None:
        """Return the model that is scored by default, from an engine that responds now.

        Raises:
            EngineError: No engine is reachable.
            UnprocessableRequest: The reachable engines cannot score ids, or do not serve the model.
        """
        faults: list[Exception] = []
        for endpoint in least_loaded(self.upstream.endpoints, _LANE):
            self._known.pop((endpoint, self.model), None)
            try:
                scorer = await self._in_time(self._scorer(endpoint, self.model), endpoint, "list its models")
            except NotScored as error:
                message = f"Engine {endpoint.label} cannot score token ids: {error}."
                faults.append(UnprocessableRequest(message, param="rescore"))
            except EngineError as error:
                faults.insert(0, error)
            else:
                return None if self.is_policy else scorer.model
        raise faults[0]

    async def score(
        self,
        model: str | None,
        ids: Sequence[int],
        positions: Sequence[int],
        top_k: int,
        masks: Mapping[int, Kept] = NO_MASKS,
    ) -> tuple[Endpoint, TokenScores]:
        """Score a sequence at the endpoint with the least load, or at the next ones while they fail.

        Raises:
            EngineError: The last endpoint failed, exceeded the timeout, or returned no scores.
            EngineBusy: The queue of an endpoint is full, or waiting timed out.
            TooLong: The sequence exceeds the context window.
            OtherVocabulary: An id is not in the vocabulary.
            UnprocessableRequest: No endpoint serves the model.
        """
        try:
            serving = await self.upstream.endpoints_for(model) if self.is_policy else self.upstream.endpoints
        except NotFound as error:
            raise UnprocessableRequest(f"No engine scores {model!r}: {error.message}", param="rescore") from None
        able = [endpoint for endpoint in serving if endpoint.kind in (*SCORING_KINDS, "auto")]
        left = least_loaded(able or serving, _LANE)[: self.limits.max_attempts]

        def work(scorer: Scorer) -> Awaitable[TokenScores]:
            return scorer.score_at(ids, positions, top_k, masks)

        while True:
            endpoint = left.pop(0)
            try:
                request = self._request(endpoint, model, work, can_fail_over=bool(left))
                return endpoint, await self._in_time(request, endpoint, f"score {len(ids)} tokens")
            except (TooLong, OtherVocabulary):
                raise
            except NotScored as error:
                if not left:
                    raise EngineError(f"Engine {endpoint.label} did not score {len(ids)} tokens: {error}") from None
            except EngineError:
                if not left:
                    raise

    async def _request(
        self, endpoint: Endpoint, model: str | None, work: Callable[[Scorer], Awaitable[T]], *, can_fail_over: bool
    ) -> T:
        if not endpoint.queue.acquire_free():
            await self.upstream.wait_for_slot(endpoint, _LANE, can_fail_over=can_fail_over)
        try:
            scorer = await self._scorer(endpoint, model)
            if not scorer.has_adapters or self.limits.configured:
                return await work(scorer)
            async with self._turns.setdefault(endpoint, asyncio.Lock()):
                return await work(scorer)
        finally:
            endpoint.queue.release()

    async def _scorer(self, endpoint: Endpoint, model: str | None) -> Scorer:
        """Return the scorer of a model at an endpoint. Its requests do not count towards the ejection of the endpoint."""
        now, key = asyncio.get_running_loop().time(), (endpoint, model)
        if key not in self._known or now - self._known[key][0] > _KNOWN_S:
            if len(self._known) > len(self.upstream.endpoints) * 100:  # endpoints were replaced, or models are many
                self._known.clear()
            kind = None if endpoint.kind == "auto" else endpoint.kind
            listed = None if self.is_policy else model  # calls may name a model that the engine does not list
            found = await find_scorer(sender(self.upstream, endpoint, is_auxiliary=True), kind, listed)
            self._known[key] = now, replace(found, model=model or found.model)
        return self._known[key][1]

    async def _in_time(self, work: Awaitable[T], endpoint: Endpoint, what: str) -> T:
        timeout_s = self.limits.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await work
        except TimeoutError:
            message = f"Engine {endpoint.label} did not {what} within {timeout_s:g} s (rescore.timeout_s)"
            raise EngineTimeout(message) from None
