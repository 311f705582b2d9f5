"""The policy version that trainers announce, as it is told to whoever opens a rollout.

Holds its name among the store's notices, and what this process was told last.
"""

from collections.abc import Mapping
from typing import Final

import orjson

from storage.types import Announcement

POLICY_NOTICE: Final = "policy"


def read_policy(notices: Mapping[str, Announcement]) -> str | None:
    """The policy version that is announced, None if none is."""
    notice = notices.get(POLICY_NOTICE)
    version: str | None = None if notice is None else orjson.loads(notice.value)
    return version


class Policy:
    """The version that this process was told last: every call is told, so that one that ends may learn that it changed."""

    __slots__ = ("_number", "version")

    def __init__(self) -> None:
        self.version: str | None = None
        self._number = -1

    def told(self, notices: Mapping[str, Announcement]) -> None:
        """Take over what is newer: answers of the store may overtake each other."""
        notice = notices.get(POLICY_NOTICE)
        if notice is not None and notice.number > self._number:
            self.version, self._number = read_policy(notices), notice.number
