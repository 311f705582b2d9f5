"""The policies: the models whose calls belong to each, its announced version, and the pause of its calls."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

import orjson

from proxy.errors import LowerVersion, NotFound, UnprocessableRequest
from proxy.rollouts.pause import Pause, announcement_name
from proxy.rollouts.stored_fields import announced_value
from proxy.telemetry.logs import LOG
from proxy.trajectory.facts import number_of
from proxy.trajectory.step import DEFAULT_POLICY
from storage.store import Announcements
from storage.types import Announcement, newer

POLICY_ANNOUNCEMENT: Final = "policy"
_MAX_LOGGED: Final = 100  # models that no policy lists
_MAX_NAME: Final = 100  # characters of a model's name in the log


@dataclass(frozen=True, slots=True)
class Announced:
    """What is announced of a policy: its version, its epoch, and the ID of the run that trains it, if that is known.

    Versions are compared within an epoch. A new one begins when a run continues from an earlier version, and 0 is the first;
    `highest` is the highest number that was announced in the epoch.
    """

    version: str | None = None
    epoch: int = 0
    run: str | None = None
    highest: int | None = None

    @classmethod
    def read(cls, announcement: Announcement | None, name: str, otherwise: "Announced | None" = None) -> "Announced":
        """Return the value of an announcement, `otherwise` if it is damaged. The version alone is that of the first epoch."""
        if announcement is None:
            return NOTHING
        value = announced_value(announcement, Announced | str | int | None, name, otherwise)
        if isinstance(value, Announced):
            return value
        version = str(value) if isinstance(value, int) else value
        return cls(version, highest=number_of(version))

    def written(self) -> bytes:
        """Return the value to announce: the version alone if there is no more."""
        is_plain = self == Announced(self.version, highest=number_of(self.version))
        return orjson.dumps(self.version if is_plain else self)

    def advanced(self, version: str, *, run: str | None = None, new_epoch: bool = False) -> "Announced":
        """Return what is announced after this, in a new epoch if that is requested or the run is another one.

        Raises:
            LowerVersion: The number is lower than one that was announced in the epoch.
        """
        number = number_of(version)
        if new_epoch or (run not in (None, self.run) and self.version is not None):
            return Announced(version, self.epoch + 1, run, number)
        if number is not None and self.highest is not None and number < self.highest:
            raise LowerVersion(
                f"Version {version} is lower than {self.highest}, which was announced before; nothing was announced. If the "
                "run continues from an earlier version, send new_epoch: true or the ID of another run; groups sampled before "
                "are then dropped. If an old request was repeated, nothing needs to be done.",
                param="version",
            )
        return Announced(version, self.epoch, run or self.run, self.highest if number is None else number)

    def staleness(self, version: str | None, epoch: int) -> int | None:
        """Return how many versions a token is behind, below 0 if its engine reported a version before its announcement.

        It is None if the token is of another epoch, or a version is not a number.
        """
        number, own = number_of(version), number_of(self.version)
        return None if epoch != self.epoch or number is None or own is None else own - number

    @property
    def warning(self) -> str | None:
        """Why the staleness of groups of this version is unknown, or None."""
        return unknown_staleness(self.version)


NOTHING: Final = Announced()


def unknown_staleness(version: str | None) -> str | None:
    """Return a warning if a version is not a number."""
    if version is None or number_of(version) is not None:
        return None
    return (
        f"Version {version[:_MAX_NAME]!r} is not a number of at most 18 digits: the staleness of its groups is unknown, and "
        "claims with max_staleness do not take them."
    )


def read_announced(announcements: Mapping[str, Announcement], policy: str = DEFAULT_POLICY) -> Announced:
    """Return what is announced of a policy."""
    name = announcement_name(POLICY_ANNOUNCEMENT, policy)
    return Announced.read(announcements.get(name), name)


class PolicyVersion:
    """The latest version of a policy that this process knows; calls compare it at their start and end."""

    __slots__ = ("_name", "_number", "announced")

    def __init__(self, policy: str = DEFAULT_POLICY) -> None:
        self.announced = NOTHING
        self._name = announcement_name(POLICY_ANNOUNCEMENT, policy)
        self._number = -1

    def __repr__(self) -> str:
        return f"<PolicyVersion {self.announced!r}>"

    def apply(self, announcements: Mapping[str, Announcement]) -> None:
        """Apply a newer announcement."""
        announcement = newer(announcements, self._name, self._number)
        if announcement is not None:
            self.announced = Announced.read(announcement, self._name, self.announced)
            self._number = announcement.number

    async def check(
        self, announcements: Announcements, version: str, *, run: str | None = None, new_epoch: bool = False
    ) -> None:
        """Raise LowerVersion if the version cannot be announced now."""
        Announced.read((await announcements.read()).get(self._name), self._name).advanced(
            version, run=run, new_epoch=new_epoch
        )

    async def announce(
        self, announcements: Announcements, version: str, *, run: str | None = None, new_epoch: bool = False
    ) -> Announced:
        """Announce the version of all calls that begin afterwards, in all processes of the store; return what is announced.

        It follows what is announced when it is written, so that of concurrent announcements none is lost. Also what is
        announced already is written again: an interrupted announcement may have reached some buckets only.

        Raises:
            LowerVersion: The number is lower than one that was announced in the epoch.
        """
        following, value = NOTHING, b""
        while True:
            present = (await announcements.read()).get(self._name)
            if present is None or present.value != value:  # equal: written by an attempt whose response was lost
                following = Announced.read(present, self._name).advanced(version, run=run, new_epoch=new_epoch)
                value = following.written()
            number = 0 if present is None else present.number
            announcement = await announcements.announce_if(self._name, value, number)
            if announcement is not None:
                break
        self.apply({self._name: announcement})
        if following.warning is not None:
            LOG.warning(following.warning, extra={"fields": {"announcement": self._name}})
        return following


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy. `models` are names of models at the engine, with `*` for any characters."""

    name: str
    models: tuple[str, ...]
    is_trained: bool
    version: PolicyVersion
    pause: Pause

    def has(self, model: str) -> bool:
        """Return whether calls of this model belong to the policy."""
        return any(fnmatchcase(model, pattern) for pattern in self.models)


class Policies:
    """The configured policies and the default one, to which the models of no other policy belong.

    `logs_unlisted`: whether calls of the default policy are unexpected, and each of their models is logged once.
    """

    def __init__(self, policies: Iterable[Policy], *, logs_unlisted: bool = False) -> None:
        self._policies = {policy.name: policy for policy in policies}
        self.default = self._policies[DEFAULT_POLICY]
        self.only = self.default if len(self._policies) == 1 else None  # no other policy is configured
        self._named = [policy for policy in self._policies.values() if policy.models]
        self._unlisted: set[str | None] | None = set() if logs_unlisted else None

    def __repr__(self) -> str:
        return f"<Policies {', '.join(self._policies)}>"

    def __iter__(self) -> Iterator[Policy]:
        return iter(self._policies.values())

    async def start(self) -> "Policies":
        """Read versions and pauses, and start the heartbeats. Raises StorageError."""
        await asyncio.gather(*(policy.pause.start() for policy in self))
        return self

    async def close(self) -> None:
        """Stop the heartbeats."""
        await asyncio.gather(*(policy.pause.close() for policy in self))

    @property
    def has_named(self) -> bool:
        """Whether there are other policies than the default one."""
        return bool(self._named)

    @property
    def trained(self) -> tuple[str, ...]:
        """The names of the policies that are trained."""
        return tuple(policy.name for policy in self if policy.is_trained)

    def of(self, model: str | None) -> Policy:
        """Return the first policy to which a model belongs. `model`: its name at the engine; None if the call names none."""
        if model is not None:
            for policy in self._named:
                if policy.has(model):
                    return policy
        return self.default

    def of_call(self, model: str | None) -> Policy:
        """Return the policy of a call as `of` does, and log a model that no policy lists once."""
        policy = self.of(model)
        if policy is self.default and self._unlisted is not None:
            name = model and model[:_MAX_NAME]
            if name not in self._unlisted and len(self._unlisted) < _MAX_LOGGED:  # clients choose the names
                self._unlisted.add(name)
                LOG.warning(
                    "No policy lists the model of a call: its policy is default (policies.*.models)",
                    extra={"fields": {"model": name}},
                )
        return policy

    def named(self, name: str) -> Policy:
        """Return the policy with this name. Raises NotFound."""
        policy = self._policies.get(name)
        if policy is None:
            raise NotFound(f"Policy {name!r} not found. The policies are {', '.join(self._policies)}.", param="policy")
        return policy

    def exports(self, name: str | None, policy: str) -> bool:
        """Return whether an export has the steps of a policy: the named one, or else any that is not excluded from training."""
        if name is not None:
            return policy == name
        known = self._policies.get(policy)
        return known is None or known.is_trained

    def claimed(self, name: str | None) -> Policy:
        """Return the policy whose groups a claim takes: the named one, or the only one that is trained.

        Raises:
            NotFound: No policy has this name.
            UnprocessableRequest: The policy is not trained, or none is named and not exactly one is trained.
        """
        if name is None:
            trained = self.trained
            if len(trained) == 1:
                return self._policies[trained[0]]
            raise UnprocessableRequest(
                f"Several policies are trained: {', '.join(trained)}. Name one of them in policy."
                if trained
                else "No policy is trained (policies.*.train).",
                param="policy",
            )
        policy = self.named(name)
        if not policy.is_trained:
            raise UnprocessableRequest(
                f"Policy {name!r} is not trained (policies.{name}.train); its groups cannot be claimed.", param="policy"
            )
        return policy

    def apply(self, announcements: Mapping[str, Announcement]) -> None:
        """Apply newer announcements of versions and pauses."""
        for policy in self._policies.values():
            policy.version.apply(announcements)
            policy.pause.apply(announcements)
