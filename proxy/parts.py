"""What the shells of one process share: made by `app`, used by every route.

Holds one frozen record of long-lived things and the key under which an application carries it.
"""

from collections import Counter
from dataclasses import dataclass, field

from aiohttp import web
from prometheus_client import CollectorRegistry

from proxy.attempts import Attempts
from proxy.clock import Clock
from proxy.config import Settings
from proxy.keys import KeyRing
from proxy.metrics import Metrics
from proxy.pause import Pause
from proxy.policy import Policy
from proxy.recorder import Recorder
from proxy.tokenizers import Tokenizers
from proxy.upstream import Upstream
from proxy.wire.plan import Sampling
from storage.store import Store


@dataclass(frozen=True, slots=True)
class Parts:
    """The long-lived things of one process.

    `secret` is the store's: minted keys are proved by it. `in_flight` counts the calls in flight of each rollout.
    """

    settings: Settings
    clock: Clock
    registry: CollectorRegistry
    metrics: Metrics
    store: Store
    upstream: Upstream
    recorder: Recorder
    attempts: Attempts
    agent_keys: KeyRing
    control_keys: KeyRing
    secret: bytes
    sampling: Sampling
    tokenizers: Tokenizers
    pause: Pause
    policy: Policy = field(default_factory=Policy)
    in_flight: Counter[str] = field(default_factory=Counter)


PARTS = web.AppKey("parts", Parts)
SHOWN = web.RequestKey("shown", bool)  # set once a byte of an answer is written: no other answer can be given then
