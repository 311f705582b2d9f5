"""One engine endpoint: its settings and what is known about the engine."""

import asyncio
from dataclasses import dataclass, field

from proxy.config.sections import EndpointSettings, EnginesSettings
from proxy.protocols.engines import ENGINES, Engine, Traits
from proxy.trajectory.step import EngineFacts
from proxy.upstream.ejection import EjectionState
from proxy.upstream.lookups import CachedAnswer, ModelList
from proxy.upstream.queue import FairQueue


@dataclass(slots=True, eq=False)
class Endpoint:
    """One engine endpoint: its settings and its state.

    `traits`: None until the engine is detected. `is_detected` is false again after a connection is lost, since another
    engine may be restarted at the URL. `window`: the context window in tokens, once it was needed. `models`: the models
    that it lists, once a response named another model than the request. `forces_usage`: as in `Traits`, from its
    streams.
    `merges_systems`: as in `TranslationOptions`, once it was needed.
    """

    settings: EndpointSettings
    health: EjectionState
    queue: FairQueue
    traits: Traits | None = None
    is_detected: bool = False
    faults: int = 0
    last_fault: str | None = None
    window: int | None = None
    models: ModelList = field(default_factory=ModelList)
    forces_usage: bool = False
    merges_systems: CachedAnswer[bool] = field(default_factory=CachedAnswer)
    detection: "asyncio.Task[None] | None" = field(default=None, repr=False)

    def change(self, settings: EndpointSettings) -> None:
        """Apply other settings of the same URL, and keep the state and the calls in flight."""
        self.settings = settings
        self.queue.limit = settings.max_in_flight
        self.queue.dispatch()

    @property
    def api_key(self) -> str | None:
        """The API key of the engine, if it requires one."""
        return self.settings.api_key.get_secret_value() if self.settings.api_key else None

    @property
    def engine(self) -> Engine:
        """The engine type, as configured or detected; text only until it is detected."""
        return ENGINES[self.kind] if self.kind != "auto" else ENGINES["plain"]

    @property
    def kind(self) -> str:
        """The name of the engine type; `auto` until it is detected."""
        if self.settings.kind != "auto" or self.traits is None:
            return self.settings.kind
        return self.traits.kind

    @property
    def version(self) -> str | None:
        """The engine version, as configured or detected."""
        return self.settings.version or (self.traits.version if self.traits else None)

    @property
    def known(self) -> Traits:
        """The traits of the engine, as configured or else as detected."""
        has_parser = self.traits.has_parser if self.traits else None
        return Traits(self.engine.kind, self.version, has_parser, self.forces_usage, self.sampling_defaults)

    @property
    def sampling_defaults(self) -> dict[str, float]:
        """The sampling parameters that the engine uses where a request has none.

        Configured values override detected ones.
        """
        shown = (self.traits.sampling_defaults if self.traits else None) or {}
        return shown | self.settings.sampling_defaults

    @property
    def facts(self) -> EngineFacts:
        """The description of the engine that steps record."""
        return EngineFacts(self.settings.label, self.kind, self.version, self.settings.url)


def make_endpoint(settings: EndpointSettings, engines: EnginesSettings) -> Endpoint:
    """Return an endpoint that is not detected yet."""
    health = EjectionState(engines.eject_after, engines.base_ejection_s, engines.max_ejection_s)
    queue = FairQueue(settings.max_in_flight, max_waiting=engines.max_queued, timeout_s=engines.queue_timeout_s)
    return Endpoint(settings, health, queue)
