"""What the shells of one process share: made by `app`, used by every route.

Holds one frozen record of long-lived things and the key under which an application carries it.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from aiohttp import web

from proxy.attempts import Attempts
from proxy.clock import Clock
from proxy.config import Settings
from proxy.dialects.translated import Ways
from proxy.fleet import Fleet
from proxy.keys import KeyRing
from proxy.lifetimes import Lifetimes
from proxy.metrics import Metrics
from proxy.pause import Pause
from proxy.places import Places
from proxy.policy import Policy
from proxy.pressure import Pressure
from proxy.recorder import Recorder
from proxy.remembered import Remembered
from proxy.settling import Settling
from proxy.token_texts import TokenTexts
from proxy.tokenizers import Tokenizers
from proxy.totals import Totals
from proxy.upstream import Upstream
from proxy.wire.plan import Sampling
from storage.store import Store

_LOOKS_AT_ONCE: Final = 16


@dataclass(frozen=True, slots=True)
class Parts:
    """The long-lived things of one process.

    `secret` is the store's: minted keys are proved by it. `in_flight` counts the calls in flight of each rollout.
    `looks` bounds how many look-ups of texts of drift are under way at once, and `settling` completes the drift of rollouts.
    `remembered` is filled where a journal stands in for the store. `stopping` is set once we were told to stop: no new
    call is taken from then on.
    """

    settings: Settings
    clock: Clock
    metrics: Metrics
    store: Store
    upstream: Upstream
    recorder: Recorder
    pressure: Pressure
    attempts: Attempts
    agent_keys: KeyRing
    control_keys: KeyRing
    secret: bytes
    sampling: Sampling
    tokenizers: Tokenizers
    pause: Pause
    fleet: Fleet
    totals: Totals
    places: Places
    lifetimes: Lifetimes
    policy: Policy = field(default_factory=Policy)
    in_flight: Counter[str] = field(default_factory=Counter)
    remembered: Remembered = field(default_factory=Remembered)
    token_texts: TokenTexts = field(default_factory=TokenTexts)
    looks: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_LOOKS_AT_ONCE))
    settling: Settling = field(default_factory=Settling)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ways(self) -> Ways:
        """How dialects by way of chat are translated."""
        return Ways(**dict(self.settings.dialects))


PARTS = web.AppKey("parts", Parts)
SHOWN = web.RequestKey("shown", bool)  # set once a byte of an answer is written: no other answer can be given then
