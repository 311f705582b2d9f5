"""Completions answers as SGLang 0.5.23 writes them.

Holds what only completions have: ids as deltas, and the older form of logprobs, without offsets; it must not hold
sockets. Shapes are those of the cassettes `sglang-0.5.23/cmpl_*`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from proxy.simulator.distribution import Prefix, prefix_of
from proxy.simulator.generation import Token
from proxy.simulator.model import Manner
from proxy.simulator.prompts import TextPrompt
from proxy.simulator.requests import Common, Completions
from proxy.simulator.sglang.requests import Flags
from proxy.simulator.sglang.wire import Behind, Pair, Scoring, full_usage, matched
from proxy.simulator.wire import Answer, Head, event, usage


@dataclass(slots=True)
class SglangCompletionsReply:
    """One completions answer in the making; see `wire.Reply`. Choice `i` belongs to prompt `i // n`."""

    completions: Completions
    common: Common
    flags: Flags
    head: Head
    texts: Sequence[TextPrompt]
    scoring: Scoring
    behind: Behind
    _sampled: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._sampled = [0] * (len(self.texts) * self.common.samples)

    @property
    def prompts(self) -> Sequence[tuple[Prefix, Manner]]:
        """The prompts, in the order of the request."""
        return [(prefix_of(text.ids), text.manner) for text in self.texts]

    def opening(self) -> list[bytes]:
        """Nothing: completions have no role chunk."""
        return []

    def events(self, index: int, token: Token) -> list[bytes]:
        """The chunk of one token, even if it adds no text; the first of a choice tells the prompt."""
        first = self._sampled[index] == 0
        self._sampled[index] += 1
        counted = None
        if self.common.usage_on_chunks:
            counted = self._streamed_usage(len(self._prompt(index).ids), self._sampled[index])
        told = {"choices": [self._choice(index, [token], first=first)], "usage": counted}
        return [event(self.head.keys("text_completion") | told)]

    def closing(self) -> list[bytes]:
        """The usage chunk, if it was asked for."""
        if not self.common.include_usage:
            return []
        told: Answer = {"choices": [], "usage": self._streamed_usage(self._prompt_tokens, sum(self._sampled))}
        return [event(self.head.keys("text_completion") | told)]

    def whole(self, choices: Sequence[Sequence[Token]]) -> Answer:
        """The text completion."""
        return self.head.keys("text_completion") | {
            "choices": [self._choice(index, tokens, first=True) for index, tokens in enumerate(choices)],
            "usage": full_usage(self._prompt_tokens, sum(map(len, choices))),
            "metadata": self.behind.metadata(len(choices[0])),
        }

    def _choice(self, index: int, tokens: Sequence[Token], *, first: bool) -> Answer:
        prompt = self._prompt(index)
        echoed = prompt.text if first and self.completions.echo else ""
        choice: Answer = {
            "index": index,
            "text": echoed + "".join(token.text for token in tokens),
            "logprobs": self._logprobs(tokens),
            "finish_reason": tokens[-1].finish_reason,
            "matched_stop": matched(tokens[-1]),
        }
        if self.flags.return_token_ids:
            choice["token_ids"] = [token.id for token in tokens]
            if first:
                choice["prompt_token_ids"] = prompt.ids
        return choice

    def _logprobs(self, tokens: Sequence[Token]) -> Answer | None:
        """The logprobs of these tokens; those of an echoed prompt are not simulated."""
        alternatives = self.completions.logprobs
        if alternatives is None:
            return None
        pairs = [self.scoring.pair(token, with_text=True) for token in tokens]
        likely = [self.scoring.best(token, alternatives, with_text=True) for token in tokens] if alternatives else []
        return {
            "text_offset": [-1] * len(tokens),
            "token_logprobs": [logprob for logprob, _, _ in pairs],
            "tokens": [text for _, _, text in pairs],
            "top_logprobs": [_by_text(each) for each in likely],
        }

    def _prompt(self, index: int) -> TextPrompt:
        return self.texts[index // self.common.samples]

    @property
    def _prompt_tokens(self) -> int:
        return sum(len(text.ids) for text in self.texts)

    def _streamed_usage(self, prompt_tokens: int, completion_tokens: int) -> Answer:
        return usage(prompt_tokens, completion_tokens, reasoning_tokens=0)


def _by_text(pairs: Sequence[Pair]) -> Answer:
    return {text: logprob for logprob, _, text in pairs}
