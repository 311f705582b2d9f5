"""The prompt ids of the newest calls, with which the next prompts of their rollouts usually begin."""

from collections import OrderedDict
from typing import Final

from proxy.protocols.number_lists import KnownPrompt

_MAX_BYTES: Final = 2**26
_BYTES_PER_PROMPT: Final = 500  # an estimate: the objects of a prompt without ids
_MIN_IDS: Final = 256  # parsing fewer takes less than looking them up


class KnownPrompts:
    """A cache of one prompt per rollout; at `max_bytes` the least recently used ones are dropped."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._prompts: OrderedDict[tuple[str, str], KnownPrompt] = OrderedDict()
        self._size = 0

    def __repr__(self) -> str:
        return f"<KnownPrompts {len(self._prompts)} rollouts, {self._size} bytes>"

    def get(self, rollout_id: str, incarnation: str) -> KnownPrompt | None:
        """Return the prompt of the newest call of a rollout."""
        key = rollout_id, incarnation
        if key not in self._prompts:
            return None
        self._prompts.move_to_end(key)
        return self._prompts[key]

    def put(self, rollout_id: str, incarnation: str, prompt: KnownPrompt | None) -> None:
        """Keep the prompt of the newest call of a rollout, if it is known and long enough."""
        if prompt is None or len(prompt.ids) < _MIN_IDS:
            return
        key = rollout_id, incarnation
        self._size += _size_of(prompt) - _size_of(self._prompts.pop(key, None))
        self._prompts[key] = prompt
        while self._size > self._max_bytes:
            self._size -= _size_of(self._prompts.popitem(last=False)[1])


def _size_of(prompt: KnownPrompt | None) -> int:
    return 0 if prompt is None else _BYTES_PER_PROMPT + len(prompt.text) + len(prompt.ids) * prompt.ids.itemsize
