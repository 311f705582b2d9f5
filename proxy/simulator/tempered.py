"""Odds after temperature: what SGLang tells as logprobs, where vLLM tells those of the model itself.

Holds log_softmax(logits / temperature) over the whole vocabulary and nothing that samples; a sampler that cuts
the vocabulary (top_k, top_p) changes nothing here, as in SGLang 0.5.23 (`layers/sampler.py:208-331`).
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache

from proxy.simulator.distribution import Odds, Tail, as_float32


@dataclass(slots=True)
class Tempered:
    """The odds of one place at a temperature; 0 and 1 leave them as they are (greedy batches are told raw)."""

    odds: Odds
    temperature: float
    _log_sum: float | None = field(init=False, default=None)

    def logprob(self, token: int) -> float:
        """The natural logarithm of the probability after temperature, rounded to float32."""
        if self.temperature in {0.0, 1.0}:
            return self.odds.logprob(token)
        if self._log_sum is None:
            self._log_sum = _log_sum(self.odds, 1.0 / self.temperature)
        return as_float32(math.log(self.odds.chance(token)) / self.temperature - self._log_sum)


def _log_sum(odds: Odds, power: float) -> float:
    """The logarithm of the sum of all chances to this power.

    The tail's part is the same after every prefix, so only the likely tokens are added up anew.
    """
    highest = math.log(max(odds.likely.values()))
    total = math.exp(_tail_log_sum(_Identity(odds.tail), power) - power * highest)
    for token, chance in odds.likely.items():
        total += math.exp(power * (math.log(chance) - highest))
        total -= math.exp(power * (math.log(odds.tail.chances[token]) - highest))
    return power * highest + math.log(total)


@dataclass(frozen=True, slots=True, eq=False)
class _Identity:
    """A tail as the key of a cache: the same one, not an equal one."""

    tail: Tail

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.tail is self.tail

    def __hash__(self) -> int:
        return id(self.tail)


@lru_cache(maxsize=64)
def _tail_log_sum(key: _Identity, power: float) -> float:
    logs = [math.log(chance) for chance in key.tail.chances]
    highest = max(logs)
    return power * highest + math.log(math.fsum(math.exp(power * (each - highest)) for each in logs))
