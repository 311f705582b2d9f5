"""One choice: decodes sampled ids to text and ends at stop tokens, stop strings or the length, as vLLM 0.32 does."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from proxy.simulator.distribution import TokenDistribution
from proxy.simulator.tokenizer import Decoder, Tokenizer


class TokenLogprob(NamedTuple):
    """A token's string, logprob and id."""

    string: str
    logprob: float
    id: int

    def name(self, *, by_id: bool) -> str:
        """Return the token's string, or its id in vLLM's form (`return_tokens_as_token_ids`)."""
        return f"token_id:{self.id}" if by_id else self.string


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token.

    `text` is what the token adds to the text: nothing, its own string, or also text that was held back before.
    `logprobs` has the token itself, then the most likely tokens if alternatives are requested.
    """

    id: int
    text: str
    logprobs: tuple[TokenLogprob, ...]
    distribution: TokenDistribution
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class StopConditions:
    """What ends a choice. `eos_ids` end a turn; empty with `ignore_eos`."""

    max_tokens: int
    min_tokens: int = 0
    eos_ids: tuple[int, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    include_stop: bool = False


@dataclass(slots=True)
class TextBuffer:
    """The text of a choice; holds the end back while it may be the beginning of a stop string."""

    conditions: StopConditions
    text: str = ""
    released: int = 0
    held_back: int = field(init=False)

    def __post_init__(self) -> None:
        longest = max(map(len, self.conditions.stop_strings), default=1)
        self.held_back = 0 if self.conditions.include_stop else longest - 1

    def feed(self, piece: str) -> str | None:
        """Append a piece; return the stop string that it completes (the text then ends there), or None."""
        self.text += piece
        for stop in self.conditions.stop_strings:
            start = self.text.find(stop, max(0, len(self.text) - len(piece) - len(stop) + 1))
            if piece and start >= 0:
                self.text = self.text[: start + len(stop) if self.conditions.include_stop else start]
                return stop
        return None

    def release(self, *, ended: bool) -> str:
        """Return the text that is final and was not returned before."""
        until = len(self.text) - (0 if ended else self.held_back)
        if until <= self.released:
            return ""
        text = self.text[self.released : until]
        self.released = until
        return text


def generate(
    sampled: Iterable[tuple[int, TokenDistribution]],
    tokenizer: Tokenizer,
    conditions: StopConditions,
    alternatives: int,
) -> Iterator[Token]:
    """Yield sampled ids as tokens with text until a stop condition is met; the last token has the finish reason.

    A stop token, or the tokens of a stop string, stay among the ids; only the text is cut (cassettes `stop_*`).
    """
    decoder = Decoder(tokenizer)
    buffer = TextBuffer(conditions)
    for count, (token, distribution) in enumerate(sampled, 1):
        finish, reason = _finish(token, count, conditions)
        logprobs = token_logprobs(token, distribution, decoder, alternatives)
        if finish != "stop" or conditions.include_stop:
            stop = buffer.feed(decoder.feed(token))
            if stop is not None and count > conditions.min_tokens:
                finish, reason = "stop", stop
        yield Token(token, buffer.release(ended=finish is not None), logprobs, distribution, finish, reason)
        if finish is not None:
            return


def _finish(token: int, count: int, conditions: StopConditions) -> tuple[str | None, int | str | None]:
    """Return the finish and stop reasons that the token's id or its position gives; stop precedes length."""
    if count >= conditions.min_tokens:
        if token in conditions.eos_ids:
            return "stop", None if token == conditions.eos_ids[0] else token
        if token in conditions.stop_token_ids:
            return "stop", token
    return ("length" if count >= conditions.max_tokens else None), None


def token_logprobs(
    token: int, distribution: TokenDistribution, decoder: Decoder, alternatives: int
) -> tuple[TokenLogprob, ...]:
    """Return the token's logprob, then those of the `alternatives` most likely tokens, each token once."""
    ids = dict.fromkeys([token, *distribution.top(alternatives)]) if alternatives else (token,)
    return tuple([TokenLogprob(decoder.string(i), distribution.logprob(i), i) for i in ids])
