"""The simulated model: generates the tokens of choices and scores the tokens of prompts.

Sampled ids become text, and a choice ends at stop tokens, stop strings or the length, as in vLLM 0.32.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from proxy.simulator.errors import invalid_value
from proxy.simulator.requests import CommonFields
from proxy.simulator.sampler import (
    NextTokenModel,
    Prefix,
    RandomStream,
    Sampler,
    TokenDistribution,
    UnigramTail,
    Words,
    load_next_token_model,
    mix,
    plan_reply,
    prefix_from,
    words_from,
)
from proxy.simulator.script import Cut
from proxy.simulator.template import BOS, PLACEHOLDER, markers_of, uses_bos
from proxy.simulator.tokenizer import Decoder, Tokenizer, load_tokenizer, load_vocabulary

if TYPE_CHECKING:
    from proxy.simulator.jinja_template import JinjaTemplate


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
    """One sampled token."""

    id: int
    text: str  # what it adds to the text: nothing, its own string, or also text that was held back before
    logprobs: tuple[TokenLogprob, ...]  # the token itself, then the most likely tokens if alternatives are requested
    distribution: TokenDistribution
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def is_sampled(self) -> bool:
        """Whether it is a token, not only the end of an aborted choice."""
        return self.id >= 0


ABORTED: Final = Token(-1, "", (), TokenDistribution({}, UnigramTail([], [], [])), "abort")
"""The end of a choice that is aborted between tokens; its text is what was held back before."""

Abort = Literal["with", "over", "instead"]
"""Whether an aborted choice ends with its next token, also if that ends it otherwise (`over`: SGLang), or at once."""


@dataclass(slots=True)
class TextBuffer:
    """The text of a choice; holds the end back while it may be the beginning of a stop string."""

    stops: Sequence[str]
    include_stop: bool
    text: str = ""
    released: int = 0
    held_back: int = field(init=False)

    def __post_init__(self) -> None:
        self.held_back = 0 if self.include_stop else max(map(len, self.stops), default=1) - 1

    def feed(self, piece: str, *, can_stop: bool) -> str | None:
        """Append a piece; return the stop string that it completes (the text then ends there), or None."""
        self.text += piece
        for stop in self.stops if can_stop else ():
            start = self.text.find(stop, max(0, len(self.text) - len(piece) - len(stop) + 1))
            if piece and start >= 0:
                self.text = self.text[: start + len(stop) if self.include_stop else start]
                return stop
        return None

    def release(self, *, ended: bool) -> str:
        """Return the text that is final and was not returned before."""
        until = len(self.text) - (0 if ended else self.held_back)
        if until <= self.released:
            return ""
        start, self.released = self.released, until
        return self.text[start:until]


def generate(
    sampled: Iterable[tuple[int, TokenDistribution]],
    tokenizer: Tokenizer,
    common: CommonFields,
    max_tokens: int,
    *,
    eos_ids: Sequence[int],
    alternatives: int,
    aborted: Callable[[], Abort | None] = lambda: None,
) -> Iterator[Token]:
    """Yield sampled ids as tokens with text until a stop condition is met or `aborted`; the last token has the finish reason.

    A stop token, or the tokens of a stop string, stay among the ids; only the text is cut (cassettes `stop_*`). `eos_ids`
    end a turn.
    """
    decoder = Decoder(tokenizer)
    buffer = TextBuffer(common.stop_strings, common.include_stop_str_in_output)
    stop_ids = frozenset(common.stop_token_ids or ())
    for count, (token, distribution) in enumerate(sampled, 1):
        abort = aborted()
        if abort == "instead":
            yield replace(ABORTED, text=buffer.release(ended=True))
            return
        finish: str | None = "length" if count >= max_tokens else "abort" if abort else None
        reason: int | str | None = None
        logprobs = token_logprobs(token, distribution, decoder, alternatives)
        if abort == "over":
            if token not in eos_ids:  # a special token
                buffer.feed(decoder.feed(token), can_stop=False)
            yield Token(token, buffer.release(ended=True), logprobs, distribution, "abort", None)
            return
        if count >= common.min_tokens and (token in stop_ids or token in eos_ids):  # it precedes length
            finish, reason = "stop", None if token == next(iter(eos_ids), None) else token
        if finish != "stop" or buffer.include_stop:
            stop = buffer.feed(decoder.feed(token), can_stop=count > common.min_tokens)
            if stop is not None:
                finish, reason = "stop", stop
        yield Token(token, buffer.release(ended=finish is not None), logprobs, distribution, finish, reason)
        if finish is not None:
            return


def token_logprobs(
    token: int, distribution: TokenDistribution, decoder: Decoder, alternatives: int
) -> tuple[TokenLogprob, ...]:
    """Return the logprob of the token, then of the `alternatives` most likely tokens, each token once."""
    ids = dict.fromkeys([token, *distribution.top(alternatives)]) if alternatives else (token,)
    return tuple([TokenLogprob(decoder.string(i), distribution.logprob(i), i) for i in ids])


def _prompt_entry(token: int, distribution: TokenDistribution, decoder: Decoder) -> dict[str, Any]:
    logprob, rank = distribution.logprob(token), distribution.rank(token)
    return {"logprob": logprob, "rank": rank, "decoded_token": decoder.string(token)}


_END_OF_TEXT: Final = "<|endoftext|>"
_MAX_SEARCHED: Final = 256  # tokens of a prompt that does not show where its last turn begins; about 5 ms


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How to generate a choice, apart from the fields of `CommonFields`."""

    max_tokens: int  # what the context window allows
    alternatives: int = 0  # most likely tokens to score at each position
    # Returns the ids of a call, or of the whole reply of a script.
    make_reply: Callable[[RandomStream], Sequence[int]] | None = None
    is_scripted: bool = False
    reasoning: bool = False  # the reply begins with reasoning
    reasoning_open: bool = False  # the prompt of the whole reply ends with the tag that opens it
    ends_with_call: bool = False
    cut: Cut | None = None
    # Where in the prompt its last turn may have begun; None: the prompt does not show it.
    starts: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """The model, its tokenizer and its chat template (None: `proxy.simulator.template`); all methods are pure.

    The first id of `eos_ids` ends the turns that the model samples, `call_eos_id` ends turns with tool calls. `bos_id` begins
    prompts that are texts.
    """

    tokenizer: Tokenizer
    next_token: NextTokenModel
    words: Words
    eos_ids: tuple[int, ...]
    call_eos_id: int
    bos_id: int | None = None
    template: "JinjaTemplate | None" = None
    noncanonical_rate: float = 0.0

    def generate(
        self,
        prompt: Sequence[int],
        common: CommonFields,
        options: GenerationOptions,
        seed: int,
        aborted: Callable[[], Abort | None] = lambda: None,
    ) -> Iterator[Token]:
        """Yield the tokens of one choice.

        A prompt that ends inside a reply of this model gets the rest of that reply, as from an engine that was not interrupted:
        with the same seed if that is the engine's, or with `seed` of the request plus the number of tokens of the beginning.
        """
        eos_ids = () if common.ignore_eos else self.eos_ids
        return generate(
            self._continued(prompt, common, options, seed),
            self.tokenizer,
            common,
            options.max_tokens,
            eos_ids=eos_ids,
            alternatives=options.alternatives,
            aborted=aborted,
        )

    def _continued(
        self, prompt: Sequence[int], common: CommonFields, options: GenerationOptions, seed: int
    ) -> Iterator[tuple[int, TokenDistribution]]:
        """Return what is sampled after a prompt: the rest of the longest reply that the model samples with its end."""
        starts = options.starts
        if starts is None:
            last = range(len(prompt), max(len(prompt) - _MAX_SEARCHED, 0), -1)
            starts = [*takewhile(lambda at: at == len(prompt) or prompt[at] not in self.eos_ids, last)][::-1]
        at, prefix = 0, Prefix()
        for start in starts:
            for token in prompt[at:start]:
                prefix = prefix.with_token(token)
            at, begun = start, prompt[start:]
            # The seed of a request is that of the whole plus the number of tokens of the beginning.
            before = seed if common.seed is None else seed - len(begun)
            reply = self._reply(prefix, common, options, before, common.min_tokens + len(begun))
            if all(next(reply)[0] == token for token in begun):
                return reply
        return self._reply(prefix_from(prompt), common, options, seed, common.min_tokens)

    def _reply(
        self, prompt: Prefix, common: CommonFields, options: GenerationOptions, seed: int, min_tokens: int
    ) -> Iterator[tuple[int, TokenDistribution]]:
        """Return the tokens of a reply from its beginning, endless, with the distributions that they are sampled from."""
        temperature = 1.0 if common.temperature is None else common.temperature
        seed = mix(seed if temperature else 0)
        opening = None if options.reasoning_open else self.tokenizer.id("<think>")
        stream = RandomStream(mix(seed) ^ prompt.hash)
        tags = (opening, self.tokenizer.id("</think>"))
        plan = plan_reply(
            stream,
            forced=options.make_reply(stream) if options.make_reply else (),
            reasoning_tags=tags if options.reasoning and not options.is_scripted else None,
        )
        return Sampler(self.next_token, self.words, seed, temperature).sample(
            prompt,
            plan,
            self._split if self.noncanonical_rate else None,
            end=None if common.ignore_eos else self.call_eos_id if options.ends_with_call else self.eos_ids[0],
            min_tokens=min_tokens,
        )

    def _split(self, token: int, stream: RandomStream) -> Sequence[int]:
        """Return the tokens to sample in place of one: itself or, at `noncanonical_rate`, its two parts, split recursively."""
        parts = self.tokenizer.parts(token)
        if parts is None or stream.unit() >= self.noncanonical_rate:
            return (token,)
        return [*self._split(parts[0], stream), *self._split(parts[1], stream)]

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text; with `add_special_tokens` after the BOS token, if the chat template has one."""
        bos = [self.bos_id] if add_special_tokens and self.bos_id is not None else []
        return bos + self.tokenizer.encode(text)

    def score(self, ids: Sequence[int], alternatives: int) -> list[tuple[TokenLogprob, ...]]:
        """Return the logprobs of each prompt token but the first, which has no prefix."""
        return [token_logprobs(*scored, alternatives) for scored in self._scored(ids)]

    def prompt_logprobs(self, ids: Sequence[int], alternatives: int) -> list[dict[str, Any] | None]:
        """Return `prompt_logprobs`: None for the first token, then by id the token and the most likely tokens."""
        entries: list[dict[str, Any] | None] = [None]
        for token, distribution, decoder in self._scored(ids):
            shown = dict.fromkeys([token, *distribution.top(alternatives)])
            entries.append({str(i): _prompt_entry(i, distribution, decoder) for i in shown})
        return entries

    def _scored(self, ids: Sequence[int]) -> Iterator[tuple[int, TokenDistribution, Decoder]]:
        """Yield each token but the first with its distribution, and a decoder that has been fed the tokens before it."""
        decoder = Decoder(self.tokenizer)
        prefix = prefix_from(ids[:1])
        decoder.feed(ids[0])
        for token in ids[1:]:
            yield token, self.next_token.distribution(prefix), decoder
            prefix = prefix.with_token(token)
            decoder.feed(token)

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise RequestError for an id outside the vocabulary."""
        unknown = next((i for i in ids if not 0 <= i < len(self.tokenizer)), None)
        if unknown is not None:
            raise invalid_value(f"Token id {unknown} is out of vocabulary")


@lru_cache(maxsize=16)
def load_model(
    template: str | None = None,
    eos: str = "<|im_end|>",
    call_eos: str | None = None,
    noncanonical_rate: float = 0.0,
    *,
    has_images: bool = False,
) -> Model:
    """Return the model over the installed vocabulary; engines with the same arguments share it.

    Raises ValueError if the template is invalid or requires jinja2, or an EOS is not a single token.
    """
    chat_template = None
    if template is not None:
        try:
            from proxy.simulator.jinja_template import JinjaTemplate  # noqa: PLC0415 - jinja2 is optional
        except ModuleNotFoundError:
            raise ValueError("A chat template requires jinja2: pip install jinja2.") from None
        chat_template = JinjaTemplate(template, eos)
    vocabulary = load_vocabulary()
    markers = [] if template is None else markers_of(template, eos)
    markers += [PLACEHOLDER] if has_images and PLACEHOLDER not in markers else []
    has_bos = template is not None and uses_bos(template)
    tokenizer, next_token = load_tokenizer(), load_next_token_model(len(markers))
    if markers:
        tokenizer = Tokenizer(vocabulary["merges"], markers, {eos, call_eos or eos, BOS} & {*markers})
    stops = (eos, call_eos or eos, _END_OF_TEXT)
    for name in stops:
        if name not in tokenizer.names:
            raise ValueError(f"EOS {name!r} is not a single token; use one of {', '.join(tokenizer.names)}")
    return Model(
        tokenizer,
        next_token,
        words_from(vocabulary, tokenizer),
        eos_ids=tuple(dict.fromkeys(map(tokenizer.id, stops))),
        call_eos_id=tokenizer.id(stops[1]),
        bos_id=tokenizer.id(BOS) if has_bos else None,
        template=chat_template,
        noncanonical_rate=noncanonical_rate,
    )
