"""The current list of endpoints: the configured one, or the one that `PUT /engines` announced to all processes.

Announcements contain the API keys and headers of engines in plain text: the store is internal.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import orjson
from pydantic import TypeAdapter, ValidationError

from proxy.config.engines import EndpointList, EndpointSettings
from proxy.telemetry.logs import LOG
from storage.redis.store import Announcements
from storage.types import Announcement, newer

ENGINES_ANNOUNCEMENT: Final = "engines"
_LIST: Final[TypeAdapter[list[EndpointSettings]]] = TypeAdapter(EndpointList)

OnChange = Callable[[Sequence[EndpointSettings]], None]


class EndpointRegistry:
    """The endpoints as this process knows them. `on_change` are called with each new list."""

    def __init__(
        self, announcements: Announcements, configured: Sequence[EndpointSettings], on_change: Sequence[OnChange]
    ) -> None:
        self.number = 0
        self.is_overridden = False
        self._announcements = announcements
        self._configured = configured
        self._on_change = on_change

    def __repr__(self) -> str:
        return f"<EndpointRegistry {self.number}, {'overridden' if self.is_overridden else 'configured'}>"

    async def put(self, endpoints: Sequence[EndpointSettings] | None) -> None:
        """Replace the endpoints of every process that shares the store; None restores the configured ones.

        The change survives restarts.
        """
        value = orjson.dumps(None if endpoints is None else [_to_json(endpoint) for endpoint in endpoints])
        self.apply({ENGINES_ANNOUNCEMENT: await self._announcements.announce(ENGINES_ANNOUNCEMENT, value)})

    def apply(self, announcements: Mapping[str, Announcement]) -> None:
        """Apply a newer announcement."""
        announcement = newer(announcements, ENGINES_ANNOUNCEMENT, self.number)
        if announcement is None:
            return
        self.number = announcement.number
        try:
            values = orjson.loads(announcement.value)
            endpoints = self._configured if values is None else _LIST.validate_python(values)
        except orjson.JSONDecodeError as error:
            LOG.error("Endpoints in the store are unreadable and not applied: %s", error)
            return
        except ValidationError as error:  # announced by another version: the current endpoints stay in use
            fields = ", ".join(".".join(map(str, problem["loc"])) for problem in error.errors())
            LOG.error("Endpoints in the store are unreadable and not applied: %s", fields)
            return
        self.is_overridden = values is not None
        LOG.info("Endpoints changed to %s", ", ".join(endpoint.label for endpoint in endpoints))
        for on_change in self._on_change:
            on_change(endpoints)


def _to_json(endpoint: EndpointSettings) -> dict[str, Any]:
    fields = endpoint.model_dump(mode="json", exclude_defaults=True, exclude={"api_key", "headers"})
    if endpoint.api_key is not None:
        fields["api_key"] = endpoint.api_key.get_secret_value()
    if endpoint.headers:
        fields["headers"] = {name: value.get_secret_value() for name, value in endpoint.headers.items()}
    return fields
