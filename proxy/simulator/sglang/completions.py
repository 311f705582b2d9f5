"""SGLang's `/v1/completions`, with ids in each chunk and logprobs without text offsets.

Shapes are those of the cassettes `sglang-0.5.23/*/cmpl_*`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from proxy.simulator.distribution import Prefix, prefix_from
from proxy.simulator.generation import Token
from proxy.simulator.model import GenerationOptions
from proxy.simulator.prompts import TextPrompt
from proxy.simulator.requests import CommonFields, CompletionsRequest
from proxy.simulator.sglang.requests import SglangFields
from proxy.simulator.sglang.wire import LogprobFormatter, LogprobTuple, ResponseMetadata, full_usage, matched_stop
from proxy.simulator.wire import Head, JsonObject, event, usage


@dataclass(slots=True)
class SglangCompletionsResponse:
    """A text completion; see `wire.Response`. Choice `i` belongs to prompt `i // n`."""

    completions: CompletionsRequest
    common: CommonFields
    fields: SglangFields
    head: Head
    texts: Sequence[TextPrompt]
    formatter: LogprobFormatter
    metadata: ResponseMetadata
    _sampled: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._sampled = [0] * (len(self.texts) * self.common.choices)

    @property
    def prompts(self) -> Sequence[tuple[Prefix, GenerationOptions]]:
        """The prompts, in the order of the request."""
        return [(prefix_from(text.ids), text.options) for text in self.texts]

    def opening_events(self) -> list[bytes]:
        """Return no events: completions have no role chunk."""
        return []

    def token_events(self, index: int, token: Token) -> list[bytes]:
        """Return the chunk of one token, even if it adds no text; the first chunk of a choice has the prompt."""
        first = self._sampled[index] == 0
        self._sampled[index] += 1
        so_far = None
        if self.common.continuous_usage:
            so_far = self._streamed_usage(len(self._prompt(index).ids), self._sampled[index])
        chunk = {"choices": [self._choice(index, [token], first=first)], "usage": so_far}
        return [event(self.head.keys("text_completion") | chunk)]

    def closing_events(self) -> list[bytes]:
        """Return the usage chunk, if it is requested."""
        if not self.common.include_usage:
            return []
        chunk: JsonObject = {"choices": [], "usage": self._streamed_usage(self._prompt_tokens, sum(self._sampled))}
        return [event(self.head.keys("text_completion") | chunk)]

    def body(self, choices: Sequence[Sequence[Token]]) -> JsonObject:
        """Return the text completion."""
        return self.head.keys("text_completion") | {
            "choices": [self._choice(index, tokens, first=True) for index, tokens in enumerate(choices)],
            "usage": full_usage(self._prompt_tokens, sum(map(len, choices))),
            "metadata": self.metadata.metadata(len(choices[0])),
        }

    def _choice(self, index: int, tokens: Sequence[Token], *, first: bool) -> JsonObject:
        prompt = self._prompt(index)
        echoed = prompt.text if first and self.completions.echo else ""
        choice: JsonObject = {
            "index": index,
            "text": echoed + "".join(token.text for token in tokens),
            "logprobs": self._logprobs(tokens),
            "finish_reason": tokens[-1].finish_reason,
            "matched_stop": matched_stop(tokens[-1]),
        }
        if self.fields.return_token_ids:
            choice["token_ids"] = [token.id for token in tokens]
            if first:
                choice["prompt_token_ids"] = prompt.ids
        return choice

    def _logprobs(self, tokens: Sequence[Token]) -> JsonObject | None:
        """Return the logprobs of these tokens; those of an echoed prompt are not simulated."""
        alternatives = self.completions.logprobs
        if alternatives is None:
            return None
        sampled = [self.formatter.sampled(token, with_text=True) for token in tokens]
        top = [self.formatter.top(token, alternatives, with_text=True) for token in tokens] if alternatives else []
        return {
            "text_offset": [-1] * len(tokens),
            "token_logprobs": [logprob for logprob, _, _ in sampled],
            "tokens": [text for _, _, text in sampled],
            "top_logprobs": [_by_text(entries) for entries in top],
        }

    def _prompt(self, index: int) -> TextPrompt:
        return self.texts[index // self.common.choices]

    @property
    def _prompt_tokens(self) -> int:
        return sum(len(text.ids) for text in self.texts)

    def _streamed_usage(self, prompt_tokens: int, completion_tokens: int) -> JsonObject:
        return usage(prompt_tokens, completion_tokens, reasoning_tokens=0)


def _by_text(entries: Sequence[LogprobTuple]) -> JsonObject:
    return {text: logprob for logprob, _, text in entries}
