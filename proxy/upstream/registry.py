"""Which endpoints there are: the configured ones, until others are put in their place at run time.

Holds their name among the store's notices, their writing and reading, and what this process was told last. It must not send
anything, nor know what an endpoint is for. Keys of engines are in the notice as they are: the store is internal.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import orjson
from pydantic import TypeAdapter, ValidationError

from proxy.config.sections import EndpointList, EndpointSettings
from proxy.telemetry.logs import LOG
from storage.store import Announcements
from storage.types import Announcement

ENGINES_NOTICE: Final = "engines"
_LIST: Final[TypeAdapter[list[EndpointSettings]]] = TypeAdapter(EndpointList)

Changed = Callable[[Sequence[EndpointSettings]], None]


class EndpointRegistry:
    """The endpoints as this process knows them. `changed` are told of every change."""

    def __init__(
        self, notices: Announcements, configured: Sequence[EndpointSettings], changed: Sequence[Changed]
    ) -> None:
        self.number = 0
        self.is_put = False
        self._notices = notices
        self._configured = configured
        self._changed = changed

    def __repr__(self) -> str:
        return f"<Fleet {self.number}, {'put' if self.is_put else 'configured'}>"

    async def put(self, endpoints: Sequence[EndpointSettings] | None) -> None:
        """Have every process that shares the store use these, and after a restart as well; the configured ones with None."""
        value = orjson.dumps(None if endpoints is None else [_written(endpoint) for endpoint in endpoints])
        self.apply({ENGINES_NOTICE: await self._notices.announce(ENGINES_NOTICE, value)})

    def apply(self, notices: Mapping[str, Announcement]) -> None:
        """Take over what is newer: answers of the store may overtake each other."""
        notice = notices.get(ENGINES_NOTICE)
        if notice is None or notice.number <= self.number:
            return
        self.number = notice.number
        said = orjson.loads(notice.value)
        try:
            endpoints = self._configured if said is None else _LIST.validate_python(said)
        except ValidationError as error:  # a process of another version put it: what is at work here goes on
            fields = ", ".join(".".join(map(str, one["loc"])) for one in error.errors())
            LOG.error("the endpoints in the store cannot be read here, and are left as they were: %s", fields)
            return
        self.is_put = said is not None
        LOG.info("the endpoints are now %s", ", ".join(endpoint.label for endpoint in endpoints))
        for changed in self._changed:
            changed(endpoints)


def _written(endpoint: EndpointSettings) -> dict[str, Any]:
    key = endpoint.api_key
    said = endpoint.model_dump(mode="json", exclude_defaults=True, exclude={"api_key"})
    return said if key is None else {**said, "api_key": key.get_secret_value()}
