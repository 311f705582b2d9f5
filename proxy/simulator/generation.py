"""The life of one choice: sampled tokens become text, and something ends them.

Holds decoding, stop tokens, stop strings and lengths, as vLLM 0.32 has them; it must not hold parsers or wire
shapes. Which ids are sampled is the sampler's business; what is made of the text is for `chat` and
`completions`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from proxy.simulator.distribution import Odds
from proxy.simulator.tokenizer import Decoder, Tokenizer


class Scored(NamedTuple):
    """A token's string, its logprob and its id."""

    string: str
    logprob: float
    id: int

    def name(self, *, by_id: bool) -> str:
        """What stands for the token beside its logprob: its string, or its id as vLLM spells it."""
        return f"token_id:{self.id}" if by_id else self.string


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token. `text` is what it adds to the text, which may be nothing, or more than itself.

    `scores` is the token itself with its logprob, then the most likely tokens, if alternatives were asked
    for. `odds` is what it was drawn from, for the shapes that tell more of it.
    """

    id: int
    text: str
    scores: tuple[Scored, ...]
    odds: Odds
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What ends a choice. `ends` are the ids that end a turn of themselves; empty when they are ignored."""

    max_tokens: int
    min_tokens: int = 0
    ends: tuple[int, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()
    show_stop: bool = False


@dataclass(slots=True)
class Text:
    """The text of a choice, of which the end is held back while it may be the beginning of a stop string."""

    limits: Limits
    whole: str = ""
    shown: int = 0
    hold: int = field(init=False)

    def __post_init__(self) -> None:
        longest = max(map(len, self.limits.stops), default=1)
        self.hold = 0 if self.limits.show_stop else longest - 1

    def feed(self, piece: str) -> str | None:
        """Add a piece; the stop string that this completes, with the text cut at it, or None."""
        self.whole += piece
        for stop in self.limits.stops:
            at = self.whole.find(stop, max(0, len(self.whole) - len(piece) - len(stop) + 1))
            if piece and at >= 0:
                self.whole = self.whole[: at + len(stop) if self.limits.show_stop else at]
                return stop
        return None

    def show(self, *, ended: bool) -> str:
        """What of it can be shown now and was not yet."""
        until = len(self.whole) - (0 if ended else self.hold)
        if until <= self.shown:
            return ""
        text = self.whole[self.shown : until]
        self.shown = until
        return text


def generate(
    sampled: Iterable[tuple[int, Odds]], tokenizer: Tokenizer, limits: Limits, alternatives: int
) -> Iterator[Token]:
    """Sampled ids as tokens with text, until something ends them; the last one says what.

    A stop token or stop string is sampled as any other, so its ids stay; only the text is cut
    (cassettes `stop_*`).
    """
    decoder = Decoder(tokenizer)
    text = Text(limits)
    for count, (token, odds) in enumerate(sampled, 1):
        finish, reason = _why_ends(token, count, limits)
        scores = score(token, odds, decoder, alternatives)
        if finish != "stop" or limits.show_stop:
            stop = text.feed(decoder.feed(token))
            if stop is not None and count > limits.min_tokens:
                finish, reason = "stop", stop
        yield Token(token, text.show(ended=finish is not None), scores, odds, finish, reason)
        if finish is not None:
            return


def _why_ends(token: int, count: int, limits: Limits) -> tuple[str | None, int | str | None]:
    """The finish and stop reasons that the token or its place gives; the length counts last."""
    if count >= limits.min_tokens:
        if token in limits.ends:
            return "stop", None if token == limits.ends[0] else token
        if token in limits.stop_ids:
            return "stop", token
    return ("length" if count >= limits.max_tokens else None), None


def score(token: int, odds: Odds, decoder: Decoder, alternatives: int) -> tuple[Scored, ...]:
    """The token with its logprob, then the `alternatives` most likely ones, each once."""
    ids = dict.fromkeys([token, *odds.best(alternatives)]) if alternatives else (token,)
    return tuple([Scored(decoder.string(each), odds.logprob(each), each) for each in ids])
