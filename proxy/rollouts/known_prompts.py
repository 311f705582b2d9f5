"""The prompt ids of the newest calls, with which the next prompts of their rollouts usually begin."""

from collections import OrderedDict
from typing import Final

from proxy.protocols.number_lists import KnownPrompt

_MAX_BYTES: Final = 2**26
_BYTES_PER_PROMPT: Final = 500  # an estimate: the objects of a prompt without ids
_MIN_IDS: Final = 256  # parsing fewer takes less than looking them up


class KnownPrompts(OrderedDict[tuple[str, str], KnownPrompt]):
    """One prompt per rollout ID and incarnation; at `max_bytes` those that were kept first are dropped.

    It is a dict, because each call reads it, and only calls with long prompts write to it.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        super().__init__()
        self._max_bytes = max_bytes
        self._size = 0

    def __repr__(self) -> str:
        return f"<KnownPrompts {len(self)} rollouts, {self._size} bytes>"

    def keep(self, rollout_id: str, incarnation: str, prompt: KnownPrompt) -> None:
        """Keep the prompt of the newest call of a rollout, if it is long enough."""
        if len(prompt.ids) < _MIN_IDS:
            return
        key = rollout_id, incarnation
        self._size += _size_of(prompt) - _size_of(self.pop(key, None))
        self[key] = prompt
        while self._size > self._max_bytes:
            self._size -= _size_of(self.popitem(last=False)[1])


def _size_of(prompt: KnownPrompt | None) -> int:
    return 0 if prompt is None else _BYTES_PER_PROMPT + len(prompt.text) + len(prompt.ids) * prompt.ids.itemsize
