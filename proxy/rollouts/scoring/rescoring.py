"""The scores of exported rows: each row is scored once, and cached in the store.

Rule 1: scores are of one set of weights. Scores of a policy are computed again if, meanwhile, its version was announced, or a
        pause began or ended.
Rule 2: a cached value belongs to the ids, the trained positions, the model, and the epoch and version of the weights. Scores
        are not cached without a version, nor during a pause of the policy: its weights may be newer than the version.
Rule 3: an error of an engine ends the export or the claim. Rows that are scored before it are cached for the next one. A row
        that no engine can score is refused like one that the format cannot express.
"""

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import chain
from typing import Final, NamedTuple, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import orjson

from proxy.errors import BadRequest, Conflict, EngineBusy, EngineError, EngineTimeout, NotFound, UnprocessableRequest
from proxy.rollouts.policy import PAUSE_ANNOUNCEMENT, POLICY_ANNOUNCEMENT, read_announced
from proxy.rollouts.rollout import announced_value, of_policy
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
from proxy.rollouts.steps import aside, weights_of
from proxy.trajectory.arrays import Ids
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.images import recorded
from proxy.trajectory.sequence import Options, Role, Row, Scores, are_logprobs, decode_scores, encode_scores, sequences
from proxy.trajectory.step import Step
from proxy.upstream.client import Upstream
from proxy.upstream.concurrency import off_loop, run_all
from proxy.upstream.endpoint import Endpoint, least_loaded
from proxy.upstream.tokenizers import TokenTexts, detokenize_at_engine
from storage.errors import StorageError
from storage.redis.store import Store

T = TypeVar("T")
TextOf: TypeAlias = Callable[[Sequence[int]], Awaitable[str | None]]
ReadText = Callable[[str, Sequence[int]], Awaitable[str | None]]  # of ids at the engine with this name

POLICY: Final = "policy"  # the engines of the policy that sampled a row
_ATTEMPTS: Final = 3  # while the weights change
_MANY: Final = 20_000  # values that are checked in some milliseconds
_COMPARED: Final = 16  # ids, evenly distributed over a row: another vocabulary differs in nearly all of its ids
_FEW: Final = 20  # scores of fewer tokens are no evidence
_NATS: Final = 10.0  # a teacher that gives each token e^-10 of its probability teaches nothing
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
    weights. `is_policy`: the endpoints that serve calls score each row, with the model that sampled it.
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
                scorer = await self.in_time(self._scorer(endpoint, self.model), endpoint, "list its models")
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
                return endpoint, await self.in_time(request, endpoint, f"score {len(ids)} tokens")
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

    async def in_time(self, work: Awaitable[T], endpoint: Endpoint, what: str) -> T:
        """Return the result of a request. Raises EngineTimeout."""
        timeout_s = self.limits.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await work
        except TimeoutError:
            message = f"Engine {endpoint.label} did not {what} within {timeout_s:g} s (rescore.timeout_s)"
            raise EngineTimeout(message) from None


class _Weights(NamedTuple):
    version: str | None
    is_known: bool  # the version identifies the weights in its epoch
    changes: tuple[int, ...] = ()  # numbers that differ after any change of the weights
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class ScoreCache:
    """The cache of scores."""

    store: Store
    lifetime_s: int  # of a value
    limit: int  # of all values, in bytes

    async def get(self, name: str) -> Scores | None:
        """Return scores, or None."""
        encoded = await self.store.cache.get(name)
        return None if encoded is None else decode_scores(encoded)

    async def put(self, name: str, scores: Scores) -> None:
        """Keep scores, if the store accepts them."""
        with suppress(StorageError):
            await self.store.cache.put(name, encode_scores(scores), lifetime_s=self.lifetime_s, limit=self.limit)


class Rescorers:
    """The scorers of one process by name: `policy`, and the configured ones."""

    def __init__(self, scorers: Mapping[str, ScoringEngines], cache: ScoreCache, read_text: ReadText) -> None:
        self._scorers = scorers
        self._cache = cache
        self._read_text = read_text

    def __repr__(self) -> str:
        return f"<Rescorers {', '.join(self._scorers)}>"

    def role(self, name: str) -> Role:
        """Return what the scores of a scorer are for. Raises BadRequest for an unknown one."""
        if name not in self._scorers:
            known = ", ".join(self._scorers)
            raise BadRequest(f"Unknown scorer {name!r}; use one of {known} (rescore.scorers).", param="rescore")
        return "proximal" if name == POLICY else "teacher"

    async def begin(self, name: str, top_k: int) -> "Rescoring":
        """Return the scoring of one export or claim. Raises as `ScoringEngines.find_model`."""
        engines = self._scorers[name]
        return Rescoring(name, engines, await engines.find_model(), top_k, self._cache, self._read_text)

    async def close(self) -> None:
        """Close the connections to the engines that are only scorers."""
        for engines in self._scorers.values():
            if not engines.is_policy:
                await engines.upstream.close()


class Rescoring:
    """The scoring of one export or claim."""

    def __init__(
        self, name: str, engines: ScoringEngines, model: str | None, top_k: int, cache: ScoreCache, read_text: ReadText
    ) -> None:
        self._name = name
        self._engines = engines
        self._model = model
        self._top_k = top_k
        self._cache = cache
        self._read_text = read_text
        self._compared: dict[tuple[str, Endpoint], bool] = {}
        self._comparing = asyncio.Lock()

    async def score(self, facts: RolloutFacts, steps: Sequence[Step], options: Options) -> list[Scores]:
        """Return the scores of each row of a rollout, in their order.

        Raises:
            Conflict: A row cannot be scored, because of its length or its values.
            EngineError: The engines failed, or exceeded the timeout.
            EngineBusy: The queue of an engine is full, or the weights changed repeatedly.
            UnprocessableRequest: The engine has another vocabulary.
            StorageError: The store failed.
        """
        found = await aside(weights_of(steps).packed, lambda: sequences(steps, facts, options))
        rows = zip(found.branches, found.each(), strict=True)  # made one by one, so that few are in memory
        works = (partial(self._score, branch.path[-1].step, row) for branch, row in rows)
        return await run_all(works, at_once=min(len(found.branches), self._engines.limits.at_once))

    async def _score(self, leaf: Step, row: Row) -> Scores:
        """Return the scores of a row, from the cache or from an engine."""
        ids, positions = row.ids[: row.trained.rfind(1) + 1], [at for at, bit in enumerate(row.trained) if bit]
        if positions[0] == 0:
            raise _refused(row, "it has no prompt before its first sampled token")
        if recorded(leaf):
            raise _refused(row, "it has images, without which its ids are another prompt")
        model = leaf.model_served if self._engines.is_policy else self._model
        for _ in range(_ATTEMPTS):
            weights = await self._weights(leaf)
            name = self._cache_name(leaf, row, ids, model, weights) if weights.is_known else None
            if name is not None and (cached := await self._cache.get(name)) is not None:
                return cached
            endpoint, scored = await self._at_engine(leaf, row, ids, positions, model)
            if weights == await self._weights(leaf):
                count = len(scored.logprobs) + len(scored.top_logprobs)
                found = await off_loop(count, _MANY, self._read, row, endpoint, scored, model, weights.version)
                if name is not None:
                    await self._cache.put(name, found)
                return found
        raise EngineBusy("The weights of the policy changed while its rows were scored. Repeat the request.")

    async def _at_engine(
        self, leaf: Step, row: Row, ids: Ids, positions: Sequence[int], model: str | None
    ) -> tuple[Endpoint, TokenScores]:
        try:
            async with self._engines.slots:
                masks = kept_tokens(row) if self._engines.is_policy else NO_MASKS
                endpoint, scored = await self._engines.score(model, ids, positions, self._top_k, masks)
        except TooLong as error:
            raise _refused(row, str(error)) from None
        except OtherVocabulary as error:
            raise self._other_vocabulary(leaf, str(error)) from None
        if scored.uncertain:
            why = f"the engine did not return enough of the tokens that sampling kept, at {scored.uncertain} positions"
            raise _refused(row, why)
        if not self._engines.is_policy:
            await self._check_vocabulary(endpoint, leaf, row, scored)
        return endpoint, scored

    async def _weights(self, leaf: Step) -> _Weights:
        """Return the weights that a request would use now."""
        if not self._engines.is_policy:
            version = self._engines.version
            return _Weights(version, is_known=version is not None)
        announced = await self._cache.store.announcements.read()
        policy = read_announced(announced, leaf.policy)
        names = [of_policy(name, leaf.policy) for name in (POLICY_ANNOUNCEMENT, PAUSE_ANNOUNCEMENT)]
        numbers = tuple(announced[name].number if name in announced else 0 for name in names)
        pause = announced.get(names[1])
        is_paused = pause is not None and announced_value(pause, str | None, names[1], "damaged") is not None
        return _Weights(policy.version, policy.version is not None and not is_paused, numbers, policy.epoch)

    def _cache_name(self, leaf: Step, row: Row, ids: Ids, model: str | None, weights: _Weights) -> str:
        policy = leaf.policy if self._engines.is_policy else None
        known = [self._name, policy, model, weights.version, self._top_k, len(ids)]
        digest = blake2b(orjson.dumps([*known, weights.epoch] if weights.epoch else known), digest_size=20)
        digest.update(ids.tobytes())
        digest.update(row.trained[: len(ids)])
        if self._engines.is_policy:
            for start, mask in row.masks:
                digest.update(b"%d:" % start + mask.ids.tobytes() + mask.offsets.tobytes())
        return digest.hexdigest()

    def _read(
        self, row: Row, endpoint: Endpoint, scored: TokenScores, model: str | None, version: str | None
    ) -> Scores:
        """Return the scores as float32, with the version that the engine reports, or else the announced one."""
        if not are_logprobs(scored.logprobs) or not are_logprobs(scored.top_logprobs):
            raise _refused(row, f"engine {endpoint.label} returned a value that is no finite logprob")
        reported = scored.weight_version if self._engines.is_policy else None
        return Scores(
            engine=endpoint.label,
            model=model,
            policy_version=version if reported in (None, "default") else reported,
            logprobs=array("f", scored.logprobs),
            top_k=self._top_k,
            top_ids=array("i", scored.top_ids),
            top_logprobs=array("f", scored.top_logprobs),
        )

    async def _check_vocabulary(self, endpoint: Endpoint, leaf: Step, row: Row, scored: TokenScores) -> None:
        """Raise UnprocessableRequest if the engine has other tokens than the engine that sampled a row."""
        key = leaf.engine.name, endpoint
        async with self._comparing:
            if key not in self._compared:
                comparing = self._has_equal_texts(endpoint, leaf, row)
                what = f"return texts to compare with those of engine {leaf.engine.name}"
                self._compared[key] = await self._engines.in_time(comparing, endpoint, what)
        recorded = list(chain.from_iterable(part for _, part in row.logged))
        if not self._compared[key] and is_unlikely(recorded, scored.logprobs):
            raise self._other_vocabulary(leaf, "it gives the recorded tokens next to no probability")

    async def _has_equal_texts(self, endpoint: Endpoint, leaf: Step, row: Row) -> bool:
        """Return whether ids have the same texts at both engines; False if they cannot be compared."""
        upstream = self._engines.upstream
        await upstream.ensure_detected(endpoint)
        try:
            differing = await differing_id(
                row.ids,
                partial(self._read_text, leaf.engine.name),
                partial(detokenize_at_engine, upstream, endpoint),
            )
        except LookupError:
            return False
        if differing is not None:
            token, own, other = differing
            raise self._other_vocabulary(leaf, f"id {token} is {other!r} there, and {own!r} where it was sampled")
        return True

    def _other_vocabulary(self, leaf: Step, why: str) -> UnprocessableRequest:
        message = f"Scorer {self._name!r} has another vocabulary than engine {leaf.engine.name}: {why}."
        return UnprocessableRequest(message, param="rescore")


def kept_tokens(row: Row) -> dict[int, Kept]:
    """Return the tokens of the sampling masks of a row by position, where its logprobs are over these."""
    return {
        position: Kept(ids, span.temperature or 1)
        for span in row.spans
        if span.logprobs_over == "mask"
        for position, ids in enumerate(row.sampling_mask[span.start : span.end], span.start)
        if ids
    }


def _refused(row: Row, why: str) -> Conflict:
    """Return the error for a row that no engine can score. A claim refuses its group for this reason."""
    conflict = Conflict(f"A row of rollout {row.facts.rollout_id!r} cannot be scored: {why}.", param="rescore")
    conflict.reason = "not_scored"
    return conflict


async def differing_id(ids: Ids, own: TextOf, other: TextOf) -> tuple[int, str, str] | None:
    """Return an id that has different texts, with both; None if the compared ids have the same.

    Ids mean nothing to an engine with another vocabulary, and it scores most of them all the same. Parts of characters are not
    compared, nor spaces around a text, which some decoders remove. Raises LookupError if no id could be compared.
    """
    distinct = sorted(set(ids))
    chosen = distinct[:: max(1, len(distinct) // _COMPARED)]
    texts = [await TokenTexts(0).get((), chosen, partial(_text_of, text_of)) for text_of in (own, other)]
    compared = 0
    for token in chosen:
        first, second = (known.get(token) for known in texts)
        if first is None or second is None:
            continue
        compared += 1
        if first.strip() != second.strip():
            return token, first, second
    if not compared:
        raise LookupError("no texts to compare")
    return None


async def _text_of(text_of: TextOf, token: int) -> str | None:
    return await text_of([token])


def is_unlikely(recorded: Sequence[float], scored: Sequence[float]) -> bool:
    """Return whether scores are so far below recorded logprobs that the engine cannot have read the same tokens."""
    return len(scored) >= _FEW and len(recorded) == len(scored) and sum(recorded) - sum(scored) > _NATS * len(scored)
