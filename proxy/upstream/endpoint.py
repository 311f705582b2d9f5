"""One engine: its settings, and what is known of it now.

Holds values and what follows from them. It sends nothing and decides nothing.
"""

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
    """One engine: its settings, and what is known of it now.

    `traits` are None until the server has been met; `is_known` is false again once it broke off, since it may come back
    as another. `window` is its model's, in tokens, once somebody had to know. `models` are those that it
    lists, once an answer named another than the request. `forces_usage`: see `Traits`; its streams show it.
    `merges_systems`: see `Ways`; None until somebody had to know.
    """

    settings: EndpointSettings
    health: EjectionState
    turns: FairQueue
    traits: Traits | None = None
    is_known: bool = False
    faults: int = 0
    last_fault: str | None = None
    window: int | None = None
    models: ModelList = field(default_factory=ModelList)
    forces_usage: bool = False
    merges_systems: CachedAnswer[bool] = field(default_factory=CachedAnswer)
    asking: "asyncio.Task[None] | None" = field(default=None, repr=False)

    def change(self, settings: EndpointSettings) -> None:
        """Let other settings of the same URL hold for it: what is known of it, and its calls, stay."""
        self.settings = settings
        self.turns.limit = settings.max_in_flight
        self.turns.go_on()

    @property
    def api_key(self) -> str | None:
        """The key that the engine wants, if it wants one."""
        return self.settings.api_key.get_secret_value() if self.settings.api_key else None

    @property
    def engine(self) -> Engine:
        """Its kind: as configured, or as found out; text only while nobody knows."""
        return ENGINES[self.kind] if self.kind != "auto" else ENGINES["plain"]

    @property
    def kind(self) -> str:
        """The name of its kind; `auto` while nobody knows."""
        if self.settings.kind != "auto" or self.traits is None:
            return self.settings.kind
        return self.traits.kind

    @property
    def version(self) -> str | None:
        """Its version, if configured or found out."""
        return self.settings.version or (self.traits.version if self.traits else None)

    @property
    def known(self) -> Traits:
        """What is known of the server: found out, or configured, which wins."""
        has_parser = self.traits.has_parser if self.traits else None
        return Traits(self.engine.kind, self.version, has_parser, self.forces_usage, self.sampling_defaults)

    @property
    def sampling_defaults(self) -> dict[str, float]:
        """What it samples with where a request leaves a field out; configured values win over what the server shows."""
        shown = (self.traits.sampling_defaults if self.traits else None) or {}
        return shown | self.settings.sampling_defaults

    @property
    def facts(self) -> EngineFacts:
        """What a step says of the engine."""
        return EngineFacts(self.settings.label, self.kind, self.version, self.settings.url)


def make_endpoint(settings: EndpointSettings, engines: EnginesSettings) -> Endpoint:
    """An endpoint that nobody has met."""
    health = EjectionState(engines.eject_after, engines.base_ejection_s, engines.max_ejection_s)
    turns = FairQueue(settings.max_in_flight, max_waiting=engines.max_queued, timeout_s=engines.queue_timeout_s)
    return Endpoint(settings, health, turns)
