"""The endpoints of a policy in a rolling update: one is held while its weights change, and then has its own version.

The announcement `endpoints` of the policy has them by label. Processes of 0.1.0 ignore it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import orjson

from proxy.rollouts.rollout import announced_value, of_policy
from storage.redis.store import Announcements
from storage.types import Announcement

ENDPOINTS_ANNOUNCEMENT: Final = "endpoints"


@dataclass(frozen=True, slots=True)
class EndpointUpdate:
    """An endpoint in a rolling update."""

    is_held: bool = False
    is_last: bool = False  # its calls are interrupted although they lose what was sampled
    version: str | None = None  # of its weights; None: the policy's
    epoch: int = 0
    policy_number: int = -1  # of the policy's announcement when the version was set: a later one replaces the version


def read_endpoints(
    announcements: Mapping[str, Announcement], policy: str, otherwise: Mapping[str, EndpointUpdate] | None = None
) -> dict[str, EndpointUpdate]:
    """Return the endpoints by label, or `otherwise` if the announcement is damaged."""
    name = of_policy(ENDPOINTS_ANNOUNCEMENT, policy)
    announcement, known = announcements.get(name), dict(otherwise or {})
    return {} if announcement is None else announced_value(announcement, dict[str, EndpointUpdate], name, known)


async def change_endpoints(
    announcements: Announcements,
    policy: str,
    change: Callable[[dict[str, EndpointUpdate], Mapping[str, Announcement]], Mapping[str, EndpointUpdate]],
) -> dict[str, Announcement]:
    """Announce what `change` returns for the present endpoints and announcements; concurrent changes are all applied.

    Endpoints that are not held and have no version of their own are dropped.
    """
    name = of_policy(ENDPOINTS_ANNOUNCEMENT, policy)
    while True:
        present = await announcements.read()
        changed = change(read_endpoints(present, policy), present)
        left = {label: it for label, it in changed.items() if it.is_held or it.version is not None}
        number = present[name].number if name in present else 0
        announcement = await announcements.announce_if(name, orjson.dumps(left), number)
        if announcement is not None:
            return {name: announcement}


def held(known: Mapping[str, EndpointUpdate], labels: Iterable[str], *, is_last: bool) -> dict[str, EndpointUpdate]:
    """Return the endpoints with these held."""
    return {
        **known,
        **{label: replace(known.get(label, EndpointUpdate()), is_held=True, is_last=is_last) for label in labels},
    }


def released(
    known: Mapping[str, EndpointUpdate], labels: Iterable[str] | None, update: EndpointUpdate | None
) -> dict[str, EndpointUpdate]:
    """Return the endpoints with these (None: all that are held) released; with a version if `update` has one."""
    chosen = [label for label, it in known.items() if it.is_held] if labels is None else labels
    return {
        **known,
        **{
            label: update or replace(known.get(label, EndpointUpdate()), is_held=False, is_last=False)
            for label in chosen
        },
    }
