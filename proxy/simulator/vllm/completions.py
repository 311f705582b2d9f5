"""Completions answers: prompts in, a text completion or its chunks out, as vLLM 0.32 writes them.

Holds what only completions have: several prompts, prompts of ids, echo, and their own shape of logprobs; it
must not hold sockets. Shapes are those of the cassettes `cmpl_*`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from proxy.simulator.distribution import Prefix, prefix_of
from proxy.simulator.generation import Scored, Token
from proxy.simulator.model import Manner, Model
from proxy.simulator.prompts import TextPrompt
from proxy.simulator.requests import Common, Completions
from proxy.simulator.wire import Answer, Head, event, usage


@dataclass(slots=True)
class CompletionsReply:
    """One completions answer in the making; see `wire.Reply`. Choice `i` belongs to prompt `i // n`."""

    completions: Completions
    common: Common
    model: Model
    head: Head
    texts: Sequence[TextPrompt]
    _offsets: list[int] = field(init=False)
    _sampled: list[int] = field(init=False)

    def __post_init__(self) -> None:
        count = len(self.texts) * self.common.samples
        self._offsets = [0] * count
        self._sampled = [0] * count

    @property
    def prompts(self) -> Sequence[tuple[Prefix, Manner]]:
        """The prompts, in the order of the request."""
        return [(prefix_of(text.ids), text.manner) for text in self.texts]

    def opening(self) -> list[bytes]:
        """Nothing: completions have no role chunk."""
        return []

    def events(self, index: int, token: Token) -> list[bytes]:
        """The chunk of one token, even if it adds no text; the first of a choice tells the prompt."""
        prompt = self._prompt(index)
        first = self._sampled[index] == 0
        self._sampled[index] += 1
        tells_prompt = first and bool(self.common.return_token_ids or self.completions.echo)
        choice = {
            "index": index,
            "text": self._text([token], prompt, first=first),
            "logprobs": self._logprobs(index, [token], prompt, first=first),
            "finish_reason": token.finish_reason,
            "stop_reason": token.stop_reason,
            "prompt_token_ids": prompt.ids if tells_prompt else None,
            "token_ids": [token.id] if self.common.return_token_ids else None,
        }
        chunk = self.head.keys("text_completion") | {"choices": [choice]}
        if self.common.usage_on_chunks:
            chunk["usage"] = usage(len(prompt.ids), self._sampled[index])
        if token.finish_reason is not None and not self.common.include_usage:
            chunk["system_fingerprint"] = self.head.fingerprint
        return [event(chunk)]

    def closing(self) -> list[bytes]:
        """The usage chunk, if it was asked for."""
        if not self.common.include_usage:
            return []
        told = {
            "choices": [],
            "usage": usage(self._prompt_tokens, sum(self._sampled)),
            "system_fingerprint": self.head.fingerprint,
        }
        return [event(self.head.keys("text_completion") | told)]

    def whole(self, choices: Sequence[Sequence[Token]]) -> Answer:
        """The text completion."""
        counted = usage(
            self._prompt_tokens,
            sum(map(len, choices)),
            prompt_tokens_details=None,
            completion_tokens_details=None,
        )
        return self.head.keys("text_completion") | {
            "choices": [self._choice(index, tokens) for index, tokens in enumerate(choices)],
            "service_tier": None,
            "system_fingerprint": self.head.fingerprint,
            "usage": counted,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _choice(self, index: int, tokens: Sequence[Token]) -> Answer:
        prompt = self._prompt(index)
        asked = self.common.prompt_logprobs
        if self.completions.echo and self.completions.logprobs is not None:
            asked = self.completions.logprobs  # that is how vLLM comes to the prompt's logprobs
        return {
            "index": index,
            "text": self._text(tokens, prompt, first=True),
            "logprobs": self._logprobs(index, tokens, prompt, first=True),
            "finish_reason": tokens[-1].finish_reason,
            "stop_reason": tokens[-1].stop_reason,
            "token_ids": [token.id for token in tokens] if self.common.return_token_ids else None,
            "prompt_logprobs": None if asked is None else self.model.prompt_logprobs(prompt.ids, asked),
            "prompt_token_ids": prompt.ids if self.common.return_token_ids else None,
            "routed_experts": None,
        }

    def _prompt(self, index: int) -> TextPrompt:
        return self.texts[index // self.common.samples]

    @property
    def _prompt_tokens(self) -> int:
        return sum(len(text.ids) for text in self.texts)

    @property
    def _only_echoes(self) -> bool:
        return bool(self.completions.echo) and self.common.max_tokens == 0

    def _text(self, tokens: Sequence[Token], prompt: TextPrompt, *, first: bool) -> str:
        """The text of these tokens; an echoed prompt stands first, unless ids are asked for too."""
        echoes = first and self.completions.echo and not self.common.return_token_ids
        generated = "" if self._only_echoes else "".join(token.text for token in tokens)
        return prompt.text + generated if echoes else generated

    def _logprobs(self, index: int, tokens: Sequence[Token], prompt: TextPrompt, *, first: bool) -> Answer | None:
        """The logprobs of these tokens; those of an echoed prompt stand first, its first token has none."""
        alternatives = self.completions.logprobs
        if alternatives is None:
            return None
        by_id = bool(self.common.return_tokens_as_token_ids)
        scores: list[tuple[Scored, ...] | None] = []
        strings = []
        if first and self.completions.echo:
            known = self.model.prompt_scores(prompt.ids, alternatives)
            scores += [None, *known]
            opening = Scored(self.model.tokenizer.decode(prompt.ids[:1]), 0.0, prompt.ids[0])
            strings += [opening.name(by_id=by_id), *(score[0].name(by_id=by_id) for score in known)]
        if not self._only_echoes:
            scores += [token.scores for token in tokens]
            strings += [token.scores[0].name(by_id=by_id) for token in tokens]
        offsets = []
        for string in strings:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(string)
        return {
            "text_offset": offsets,
            "token_logprobs": [score and score[0].logprob for score in scores],
            "tokens": strings,
            "top_logprobs": [score and {each.name(by_id=by_id): each.logprob for each in score} for score in scores],
        }
