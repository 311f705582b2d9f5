"""A cache of one value per rollout, bounded in bytes: that of its newest call, with which the next call usually begins."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Newest(OrderedDict[K, V]):
    """The newest values, of at most `max_bytes` together; those that were kept first are dropped, and passed to `on_drop`.

    It is a dict, because each call reads it, and only long calls write to it.
    """

    def __init__(self, max_bytes: int, on_drop: Callable[[V], None] | None = None) -> None:
        super().__init__()
        self._max_bytes = max_bytes
        self._on_drop = on_drop
        self._sizes: dict[K, int] = {}
        self._size = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self)} rollouts, {self._size} bytes>"

    def put(self, key: K, value: V, size: int) -> None:
        """Keep a value of this many bytes in place of the one before."""
        self._size += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self[key] = value
        self.move_to_end(key)
        while self._size > self._max_bytes:
            name, dropped = self.popitem(last=False)
            self._size -= self._sizes.pop(name)
            if self._on_drop is not None:
                self._on_drop(dropped)
