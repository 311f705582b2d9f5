"""The prompt ids of the newest calls, with which the next prompts of their rollouts usually begin."""

from typing import Final

from proxy.protocols.number_lists import KnownPrompt
from proxy.rollouts.newest import Newest

_MAX_BYTES: Final = 2**26
_BYTES_PER_PROMPT: Final = 500  # an estimate: the objects of a prompt without ids
_MIN_IDS: Final = 256  # parsing fewer takes less than looking them up


class KnownPrompts(Newest[tuple[str, str], KnownPrompt]):
    """One prompt per rollout ID and incarnation."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        super().__init__(max_bytes)

    def keep(self, rollout_id: str, incarnation: str, prompt: KnownPrompt) -> None:
        """Keep the prompt of the newest call of a rollout, if it is long enough."""
        if len(prompt.ids) < _MIN_IDS:
            return
        size = _BYTES_PER_PROMPT + len(prompt.text) + len(prompt.ids) * prompt.ids.itemsize
        self.put((rollout_id, incarnation), prompt, size)
