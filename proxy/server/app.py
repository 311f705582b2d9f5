"""The composition root: makes the applications, and opens and closes the services that they share."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from operator import attrgetter
from typing import Any, Protocol, TypeVar

from aiohttp import web
from prometheus_client import CollectorRegistry

from proxy.api.api_keys import KeyRing
from proxy.api.auth import CALL_PATHS, ORIGINS, OTHER_PATHS, origin_check, require_control_key
from proxy.api.compat import CALL_ROUTES
from proxy.api.compat.atropos_sessions import SESSION_CALL_ROUTES, SESSION_HEALTH, SESSION_ROUTES
from proxy.api.compat.osmosis import MODEL_ROUTES as OSMOSIS_ROUTES
from proxy.api.compat.osmosis import ROLLOUT_SERVERS, RolloutServers
from proxy.api.context import CONTEXT, Context
from proxy.api.failures import answer_failures
from proxy.api.in_flight import InFlightBytes, SurplusCalls
from proxy.api.model.routes import CALLS, MODEL_ROUTES, OTHERS, answer
from proxy.api.openapi import CONTROLLING
from proxy.api.requests import served
from proxy.clock import Clock, SystemClock, new_id
from proxy.config.engines import EndpointSettings, PolicySettings, with_default
from proxy.config.sections import AgentsSettings, ArchiveSettings, TapeSettings
from proxy.config.settings import Settings, TracingSettings
from proxy.protocols.dialects.base import TranslationOptions
from proxy.protocols.sampling import Sampling
from proxy.rollouts.adapter_updates import AdapterUpdates
from proxy.rollouts.admission import Activity, Admission, Lifetimes
from proxy.rollouts.archive.archiver import ArchiveOptions, Archiver, BackgroundArchive
from proxy.rollouts.archive.dataset import Dataset
from proxy.rollouts.drift import DriftReporter, DriftWatch
from proxy.rollouts.finishing import Deadlines, Finisher
from proxy.rollouts.idempotency import IdempotencyKeys
from proxy.rollouts.outages import Journal
from proxy.rollouts.playback import ServedTapes, Tapes
from proxy.rollouts.policy import Heartbeats, Pause, Policies, Policy, PolicyVersion
from proxy.rollouts.prompt_continuation import PromptContinuation
from proxy.rollouts.recorder import Recorder
from proxy.rollouts.rollout import LiveRollouts
from proxy.rollouts.scoring.audit import BackgroundAudit
from proxy.rollouts.scoring.rescoring import POLICY, Rescorers, ScoreCache, ScoringEngines, ScoringLimits
from proxy.telemetry.metrics import Metrics, make_metrics
from proxy.telemetry.multiprocess import WorkerMetrics, WorkerSlot
from proxy.trajectory.step import DEFAULT_POLICY
from proxy.trajectory.thread_rules import ThreadOptions, ThreadRule, rules_of
from proxy.upstream.client import Upstream
from proxy.upstream.registry import EndpointRegistry
from proxy.upstream.tokenizers import Tokenizers, TokenTexts, text_from_ids
from storage import open_store
from storage.redis.store import Store
from storage.types import Announcement

_ABORT_MARGIN_S = 0.05
_WEIGHTS_CHANGED = "the call was aborted because the weights changed"
_ANY_PATH = r"{path:[\s\S]*}"  # also one with an encoded newline
_SECRET = "minting-secret"  # noqa: S105 - the name of a constant in the store


def make_app(
    settings: Settings, store: Store | None = None, clock: Clock | None = None, slot: WorkerSlot | None = None
) -> web.Application:
    """Return the application with both APIs, or with the model API alone if the control API has its own port.

    The caller closes a `store` that it passes. Services are opened at start-up, which raises StorageError or ValueError on
    failure.
    """
    app = _new_app(settings, settings.listen, serves_model=True, serves_control=settings.control.listen is None)
    app[CALLS] = CALL_ROUTES
    app[OTHERS] = {**MODEL_ROUTES, **OSMOSIS_ROUTES}
    app.cleanup_ctx.append(_context_lifespan(settings, store, clock or SystemClock(), slot))
    for path in CALL_PATHS:  # first, because routes are compared with a path in their order
        app.router.add_route("*", path.replace("{path}", _ANY_PATH), answer)
    if settings.control.listen is None:
        app.add_routes(_control_routes(settings))
    if settings.atropos.enabled:
        app.add_routes(served(SESSION_CALL_ROUTES))
    app.router.add_route("*", OTHER_PATHS.replace("{path}", _ANY_PATH), answer)
    return app


def make_control_app(settings: Settings, app: web.Application) -> web.Application:
    """Return the control API alone, which shares the services of a started application."""
    listen = settings.control.listen or settings.listen
    control = _new_app(settings, listen, serves_model=False, serves_control=True)
    control[CONTEXT] = app[CONTEXT]
    control[ROLLOUT_SERVERS] = app[ROLLOUT_SERVERS]
    control.add_routes(_control_routes(settings))
    return control


def _control_routes(settings: Settings) -> list[web.RouteDef]:
    of_sessions = (SESSION_HEALTH, *SESSION_ROUTES) if settings.atropos.enabled else ()
    return served((*of_sessions, *CONTROLLING))


def _new_app(settings: Settings, listen: str, *, serves_model: bool, serves_control: bool) -> web.Application:
    app = web.Application(middlewares=[answer_failures, require_control_key])
    check = origin_check(settings, listen, serves_model=serves_model, serves_control=serves_control)
    if check is not None:
        app[ORIGINS] = check
    return app


def _context_lifespan(
    settings: Settings, store: Store | None, clock: Clock, slot: WorkerSlot | None
) -> Callable[[web.Application], AsyncIterator[None]]:
    async def lifespan(app: web.Application) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            context = await _make_context(stack, settings, store, clock, slot)
            app[ROLLOUT_SERVERS] = _kept(
                stack, RolloutServers(settings.osmosis)
            )  # closed before the recorder, which it uses
            watch = _kept(stack, DriftWatch(context.finisher.drift))
            _kept(stack, Deadlines(context.finisher)).start()
            for policy in context.policies:
                of_policy = (policy.name, _WEIGHTS_CHANGED)
                policy.pause.abort_calls = partial(context.memory_limit.stop_sampled, *of_policy)
                policy.pause.interrupt_calls = partial(context.memory_limit.interrupt_sampled, *of_policy)
            context.recorder.followers += [context.continuation.offer, watch.offer]
            context.recorder.late_followers.append(context.finisher.drift.settle_late)
            context.metrics.oldest_call_age_seconds.set_function(
                lambda: context.memory_limit.oldest_s(context.clock.monotonic())
            )
            context.metrics.plan_cache_bytes.set_function(
                lambda: sum(endpoint.plans.size for endpoint in context.upstream.endpoints)
            )
            context.metrics.text_cache_bytes.set_function(lambda: context.token_texts.size)
            context.metrics.waiting_calls.set_function(lambda: context.pacing.waiting)
            app[CONTEXT] = context
            app.on_shutdown.append(_begin_shutdown)
            if settings.agents.cut_surplus_calls:
                _kept(stack, SurplusCalls(context.store, context.memory_limit.calls, context.metrics).start())
            if settings.archive.url is not None:
                _kept(stack, _archive(context, settings.archive, settings.archive.url)).start()
            settling = context.recorder.tasks.start(context.finisher.settle_all())
            yield
            settling.cancel()  # the next start completes what is left

    return lifespan


async def _make_context(
    stack: AsyncExitStack, settings: Settings, store: Store | None, clock: Clock, slot: WorkerSlot | None
) -> Context:
    """Make the services in the order of their dependencies; the stack closes them in reverse."""
    metrics, tokenizers = make_metrics(collectors := CollectorRegistry()), Tokenizers(settings.engines.endpoints)
    await (worker_metrics := _kept(stack, WorkerMetrics(collectors, metrics, slot))).start()
    opened = store or _kept(stack, await open_store(settings.store.url, settings.store.options()))
    secret = await opened.set_once(_SECRET, clock.entropy(32))  # first: a start without a store fails here
    upstream = _kept(stack, Upstream(settings.engines, metrics))
    rollouts = LiveRollouts(settings.agents.rollout_cache_bytes, metrics)
    _kept(stack, Lifetimes(opened, metrics, rollouts)).start()
    journal = Journal(settings.store.spool_path) if settings.store.on_failure == "spool" else None
    recorder = _kept(stack, Recorder(opened, metrics, clock, journal, rollouts))
    if settings.audit.sample_rate:
        audit = BackgroundAudit(settings.audit.sample_rate, upstream, metrics, clock)
        recorder.followers.append(_kept(stack, audit).start().offer)
    registry = _registry(opened, settings, metrics, [upstream.replace, tokenizers.replace])
    policies = await _kept(stack, _policies(opened, clock, metrics, settings, registry.apply)).start()
    drift = DriftReporter(opened, clock, metrics, upstream, tokenizers, recorder.tasks, stopping := asyncio.Event())
    tapes, tracer = Tapes(opened), _tracer(stack, settings.tracing, metrics, clock)
    finisher = Finisher(opened, clock, metrics, drift, tapes, policies.trained, tracer and tracer.rollout_ended)
    activity = _kept(stack, Activity(opened, clock, metrics, recorder.tasks.start).start())
    continuation = PromptContinuation(opened, upstream, clock, metrics, rollouts, **dict(settings.continuation))
    update_of = partial(AdapterUpdates, opened.announcements, upstream, clock=clock)
    return Context(
        settings=settings,
        clock=clock,
        metrics=metrics,
        store=opened,
        upstream=upstream,
        recorder=recorder,
        memory_limit=_kept(stack, _memory_limit(settings.agents, metrics, recorder)),
        idempotency_keys=IdempotencyKeys(opened, clock),
        secret=secret,
        tokenizers=tokenizers,
        registry=registry,
        worker_metrics=worker_metrics,
        rollouts=rollouts,
        admission=Admission(opened, clock, metrics, recorder, rollouts, policies, activity, finisher, registry),
        policies=policies,
        adapter_updates={policy.name: _kept(stack, update_of(policy)) for policy in policies},
        continuation=_kept(stack, continuation),
        tapes=tapes,
        rescorers=_kept(stack, _rescorers(settings, opened, upstream, tokenizers, metrics)),
        finisher=finisher,
        stopping=stopping,
        start_trace=tracer,
        served_tapes=await _served_tapes(settings.tape, tapes, opened, clock),
        **_configured(settings),
    )


def _configured(settings: Settings) -> dict[str, Any]:
    """Return the fields of the context that follow from the settings alone."""
    threads = settings.threads
    rules = rules_of(threads.presets, (ThreadRule(**dict(rule)) for rule in threads.rules))
    return {
        "agent_keys": KeyRing(key.get_secret_value() for key in settings.agents.api_keys),
        "control_keys": KeyRing(key.get_secret_value() for key in settings.control.api_keys),
        "sampling": Sampling(**dict(settings.sampling)),
        "translation": TranslationOptions(**dict(settings.dialects)),
        "token_texts": TokenTexts(settings.engines.text_cache_bytes),
        "threads": ThreadOptions(rules, threads.default),
    }


async def _served_tapes(settings: TapeSettings, tapes: Tapes, store: Store, clock: Clock) -> ServedTapes | None:
    if settings.file is None:
        return None
    terms = {"ignore": settings.ignore, "presets": settings.presets}
    return ServedTapes(tapes, store, clock, [name async for name in store.names()], terms)


def _tracer(stack: AsyncExitStack, settings: TracingSettings, metrics: Metrics, clock: Clock) -> Any:
    """Return the `CallTracer`; None without a collector. Raises ValueError if the packages of the export are not installed."""
    if settings.endpoint is None:
        return None
    try:
        from proxy.api.model.call_trace import CallTracer  # noqa: PLC0415 - optional packages
        from proxy.telemetry.tracing import start_tracing  # noqa: PLC0415

        tracing = start_tracing(settings.endpoint, settings.protocol, metrics, content=settings.content)
    except ImportError as error:
        grpc = ", opentelemetry-exporter-otlp-proto-grpc" if settings.protocol == "grpc" else ""
        raise ValueError(
            "tracing.endpoint (or OTEL_EXPORTER_OTLP_ENDPOINT) is set, and a package is missing: install "
            f"tokentape[otel]{grpc}, or set OTEL_TRACES_EXPORTER=none ({error})"
        ) from error
    _kept(stack, tracing)
    return CallTracer(tracing, clock, content=settings.content)


def _rescorers(
    settings: Settings, store: Store, upstream: Upstream, tokenizers: Tokenizers, metrics: Metrics
) -> Rescorers:
    return Rescorers(
        scoring_engines(settings, upstream, metrics),
        ScoreCache(store, settings.rescore.cache_s, settings.rescore.cache_bytes),
        partial(text_from_ids, upstream, tokenizers, new_connection=False),
    )


def scoring_engines(settings: Settings, policy: Upstream, metrics: Metrics) -> dict[str, ScoringEngines]:
    """Return the scorers by name: `policy`, with the engines of calls, and the names in `rescore.scorers`.

    The caller closes the upstreams of `rescore.scorers`. The limits of `engines` apply to them, except the read timeout.
    """
    chosen = settings.rescore
    limits = ScoringLimits(chosen.timeout_s, chosen.max_in_flight, settings.engines.max_attempts)
    scorers = {POLICY: ScoringEngines(policy, limits, is_policy=True)}
    for name, scorer in chosen.scorers.items():
        engines = settings.engines.model_copy(update={"endpoints": scorer.endpoints, "read_timeout_s": None})
        upstream = Upstream(engines, metrics)
        scorers[name] = ScoringEngines(upstream, limits, model=scorer.model, version=scorer.version)
    return scorers


def _policies(
    store: Store,
    clock: Clock,
    metrics: Metrics,
    settings: Settings,
    follower: Callable[[Mapping[str, Announcement]], None],
) -> Policies:
    heartbeats, agents = Heartbeats(store.announcements, new_id(clock), [follower]), settings.agents

    def new_policy(name: str, policy: PolicySettings) -> Policy:
        version = PolicyVersion(name)
        heartbeats.followers.append(version.apply)
        pause = Pause(heartbeats, policy=name, max_waiting=agents.max_paused, timeout_s=agents.pause_timeout_s)
        return Policy(name, tuple(policy.models), policy.train, version, pause)

    policies = Policies(
        (new_policy(name, policy) for name, policy in with_default(settings.policies).items()),
        heartbeats,
        logs_unlisted=bool(settings.policies) and DEFAULT_POLICY not in settings.policies,
    )
    metrics.reward_windows.announced = lambda: {
        policy.name: (policy.version.announced.epoch, policy.version.announced.version) for policy in policies
    }
    for policy in policies:
        metrics.begin_policy(policy.name)
        metrics.policy_epoch.labels(policy.name).set_function(partial(attrgetter("announced.epoch"), policy.version))
    return policies


def _archive(context: Context, settings: ArchiveSettings, url: str) -> BackgroundArchive:
    options = ArchiveOptions(
        settings.when,
        settings.older_than_s,
        settings.delete,
        settings.rollouts_per_file,
        settings.memory_share,
        settings.buffer_bytes,
    )
    archiver = Archiver(context.store, context.clock, context.metrics, Dataset(url), options)
    return BackgroundArchive(archiver, process_id=new_id(context.clock), interval_s=settings.interval_s)


def _registry(
    store: Store,
    settings: Settings,
    metrics: Metrics,
    followers: Sequence[Callable[[Sequence[EndpointSettings]], None]],
) -> EndpointRegistry:
    def keep_metrics(endpoints: Sequence[EndpointSettings]) -> None:
        metrics.keep_engines({endpoint.label for endpoint in endpoints})

    return EndpointRegistry(store.announcements, settings.engines.endpoints, [*followers, keep_metrics])


def _memory_limit(agents: AgentsSettings, metrics: Metrics, recorder: Recorder) -> InFlightBytes:
    return InFlightBytes(agents.max_bytes_in_flight, agents.client_stall_timeout_s, metrics, recorder)


class _Closing(Protocol):
    async def close(self) -> None: ...


_Kept = TypeVar("_Kept", bound=_Closing)


def _kept(stack: AsyncExitStack, thing: _Kept) -> _Kept:
    stack.push_async_callback(thing.close)
    return thing


async def _begin_shutdown(app: web.Application) -> None:
    """Mark the process as stopping: no connections are accepted, and calls in flight continue."""
    context = app[CONTEXT]
    context.stopping.set()

    def abort_calls() -> None:
        for call in tuple(context.memory_limit.calls):
            call.stop("the proxy shut down")

    # Just before aiohttp cancels the remaining calls, so that their steps record the reason.
    asyncio.get_running_loop().call_later(max(context.settings.drain_timeout_s - _ABORT_MARGIN_S, 0), abort_calls)
