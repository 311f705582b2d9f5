"""The policies: the models whose calls belong to each, its announced version, and the pause of its calls."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

import orjson

from proxy.errors import NotFound, UnprocessableRequest
from proxy.rollouts.pause import Pause, announcement_name
from proxy.telemetry.logs import LOG
from proxy.trajectory.step import DEFAULT_POLICY
from storage.store import Announcements
from storage.types import Announcement, newer

POLICY_ANNOUNCEMENT: Final = "policy"
_MAX_LOGGED: Final = 100  # models that no policy lists
_MAX_NAME: Final = 100  # characters of a model's name in the log


def read_version(announcements: Mapping[str, Announcement], policy: str = DEFAULT_POLICY) -> str | None:
    """Return the announced version of a policy, or None."""
    announcement = announcements.get(announcement_name(POLICY_ANNOUNCEMENT, policy))
    version: str | None = None if announcement is None else orjson.loads(announcement.value)
    return version


class PolicyVersion:
    """The latest version of a policy that this process knows; calls compare it at their start and end."""

    __slots__ = ("_name", "_number", "current")

    def __init__(self, policy: str = DEFAULT_POLICY) -> None:
        self.current: str | None = None
        self._name = announcement_name(POLICY_ANNOUNCEMENT, policy)
        self._number = -1

    def __repr__(self) -> str:
        return f"<PolicyVersion {self.current!r}>"

    def apply(self, announcements: Mapping[str, Announcement]) -> None:
        """Apply a newer announcement."""
        announcement = newer(announcements, self._name, self._number)
        if announcement is not None:
            self.current, self._number = orjson.loads(announcement.value), announcement.number

    async def announce(self, announcements: Announcements, version: str) -> None:
        """Announce the version of all calls that begin afterwards, in all processes of the store."""
        self.apply({self._name: await announcements.announce(self._name, orjson.dumps(version))})


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
