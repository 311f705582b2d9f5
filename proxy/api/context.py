"""The services of one process, created at start-up and used by every route."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from proxy.api.api_keys import KeyRing
from proxy.api.in_flight import InFlightBytes, StartPacing
from proxy.clock import Clock
from proxy.config.settings import Settings
from proxy.protocols.dialects.base import TranslationOptions
from proxy.protocols.sampling import Sampling
from proxy.rollouts.adapter_updates import AdapterUpdates
from proxy.rollouts.admission import Admission
from proxy.rollouts.finishing import Finisher
from proxy.rollouts.idempotency import IdempotencyKeys
from proxy.rollouts.playback import ServedTapes, Tapes
from proxy.rollouts.policy import Policies
from proxy.rollouts.prompt_continuation import PromptContinuation
from proxy.rollouts.recorder import Recorder
from proxy.rollouts.rollout import LiveRollouts
from proxy.rollouts.scoring.rescoring import Rescorers
from proxy.telemetry.metrics import Metrics
from proxy.telemetry.multiprocess import WorkerMetrics
from proxy.trajectory.thread_rules import ThreadOptions
from proxy.upstream.client import Upstream
from proxy.upstream.registry import EndpointRegistry
from proxy.upstream.tokenizers import Tokenizers, TokenTexts
from storage.redis.store import Store


@dataclass(frozen=True, slots=True)
class Context:
    """The services of one process.

    `translation`: the options of the dialects that are translated to chat.
    `secret` is the store's secret, which verifies minted keys.
    `stopping` is set when the shutdown begins: no new call is accepted from then on. `start_trace` returns the trace of a call
    (`model.call_trace`); None if traces are not exported.
    """

    settings: Settings
    clock: Clock
    metrics: Metrics
    store: Store
    upstream: Upstream
    recorder: Recorder
    memory_limit: InFlightBytes
    idempotency_keys: IdempotencyKeys
    agent_keys: KeyRing
    control_keys: KeyRing
    secret: bytes
    sampling: Sampling
    translation: TranslationOptions
    tokenizers: Tokenizers
    token_texts: TokenTexts
    registry: EndpointRegistry
    worker_metrics: WorkerMetrics
    rollouts: LiveRollouts
    admission: Admission
    policies: Policies
    threads: ThreadOptions
    adapter_updates: Mapping[str, AdapterUpdates]
    finisher: Finisher
    continuation: PromptContinuation
    tapes: Tapes
    rescorers: Rescorers
    stopping: asyncio.Event
    start_trace: Callable[[Any], Any] | None = None
    served_tapes: ServedTapes | None = None  # in place of engines
    pacing: StartPacing = field(default_factory=StartPacing)


CONTEXT = web.AppKey("context", Context)
