"""vLLM's `/v1/completions`: prompts in, a text completion or its chunks out.

Shapes are those of the cassettes `cmpl_*`, recorded from vLLM 0.32.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from proxy.simulator.distribution import Prefix, prefix_from
from proxy.simulator.generation import Token, TokenLogprob
from proxy.simulator.model import GenerationOptions, Model
from proxy.simulator.prompts import TextPrompt
from proxy.simulator.requests import CommonFields, CompletionsRequest
from proxy.simulator.wire import Head, JsonObject, event, usage


@dataclass(slots=True)
class CompletionsResponse:
    """A text completion; see `wire.Response`. Choice `i` belongs to prompt `i // n`."""

    completions: CompletionsRequest
    common: CommonFields
    model: Model
    head: Head
    texts: Sequence[TextPrompt]
    _offsets: list[int] = field(init=False)
    _sampled: list[int] = field(init=False)

    def __post_init__(self) -> None:
        count = len(self.texts) * self.common.choices
        self._offsets = [0] * count
        self._sampled = [0] * count

    @property
    def prompts(self) -> Sequence[tuple[Prefix, GenerationOptions]]:
        """The prompts, in the order of the request."""
        return [(prefix_from(text.ids), text.options) for text in self.texts]

    def opening_events(self) -> list[bytes]:
        """Return no events: completions have no role chunk."""
        return []

    def token_events(self, index: int, token: Token) -> list[bytes]:
        """Return the chunk of one token, even if it adds no text; the first chunk of a choice has the prompt's ids."""
        prompt = self._prompt(index)
        first = self._sampled[index] == 0
        self._sampled[index] += 1
        has_prompt_ids = first and bool(self.common.return_token_ids or self.completions.echo)
        choice = {
            "index": index,
            "text": self._text([token], prompt, first=first),
            "logprobs": self._logprobs(index, [token], prompt, first=first),
            "finish_reason": token.finish_reason,
            "stop_reason": token.stop_reason,
            "prompt_token_ids": prompt.ids if has_prompt_ids else None,
            "token_ids": [token.id] if self.common.return_token_ids else None,
        }
        chunk = self.head.keys("text_completion") | {"choices": [choice]}
        if self.common.continuous_usage:
            chunk["usage"] = usage(len(prompt.ids), self._sampled[index])
        if token.finish_reason is not None and not self.common.include_usage:
            chunk["system_fingerprint"] = self.head.fingerprint
        return [event(chunk)]

    def closing_events(self) -> list[bytes]:
        """Return the usage chunk, if it is requested."""
        if not self.common.include_usage:
            return []
        chunk = {
            "choices": [],
            "usage": usage(self._prompt_tokens, sum(self._sampled)),
            "system_fingerprint": self.head.fingerprint,
        }
        return [event(self.head.keys("text_completion") | chunk)]

    def body(self, choices: Sequence[Sequence[Token]]) -> JsonObject:
        """Return the text completion."""
        total = usage(
            self._prompt_tokens,
            sum(map(len, choices)),
            prompt_tokens_details=None,
            completion_tokens_details=None,
        )
        return self.head.keys("text_completion") | {
            "choices": [self._choice(index, tokens) for index, tokens in enumerate(choices)],
            "service_tier": None,
            "system_fingerprint": self.head.fingerprint,
            "usage": total,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _choice(self, index: int, tokens: Sequence[Token]) -> JsonObject:
        prompt = self._prompt(index)
        alternatives = self.common.prompt_logprobs
        if self.completions.echo and self.completions.logprobs is not None:
            alternatives = self.completions.logprobs  # as in vLLM, which gets the prompt's logprobs this way
        return {
            "index": index,
            "text": self._text(tokens, prompt, first=True),
            "logprobs": self._logprobs(index, tokens, prompt, first=True),
            "finish_reason": tokens[-1].finish_reason,
            "stop_reason": tokens[-1].stop_reason,
            "token_ids": [token.id for token in tokens] if self.common.return_token_ids else None,
            "prompt_logprobs": None if alternatives is None else self.model.prompt_logprobs(prompt.ids, alternatives),
            "prompt_token_ids": prompt.ids if self.common.return_token_ids else None,
            "routed_experts": None,
        }

    def _prompt(self, index: int) -> TextPrompt:
        return self.texts[index // self.common.choices]

    @property
    def _prompt_tokens(self) -> int:
        return sum(len(text.ids) for text in self.texts)

    @property
    def _only_echoes(self) -> bool:
        return bool(self.completions.echo) and self.common.max_tokens == 0

    def _text(self, tokens: Sequence[Token], prompt: TextPrompt, *, first: bool) -> str:
        """Return the text of these tokens, after the echoed prompt unless ids are requested."""
        echoes = first and self.completions.echo and not self.common.return_token_ids
        generated = "" if self._only_echoes else "".join(token.text for token in tokens)
        return prompt.text + generated if echoes else generated

    def _logprobs(self, index: int, tokens: Sequence[Token], prompt: TextPrompt, *, first: bool) -> JsonObject | None:
        """Return the logprobs of these tokens, after those of an echoed prompt, whose first token has none."""
        alternatives = self.completions.logprobs
        if alternatives is None:
            return None
        by_id = bool(self.common.return_tokens_as_token_ids)
        entries: list[tuple[TokenLogprob, ...] | None] = []
        strings = []
        if first and self.completions.echo:
            prompt_entries = self.model.score(prompt.ids, alternatives)
            entries += [None, *prompt_entries]
            opening = TokenLogprob(self.model.tokenizer.decode(prompt.ids[:1]), 0.0, prompt.ids[0])
            strings += [opening.name(by_id=by_id), *(entry[0].name(by_id=by_id) for entry in prompt_entries)]
        if not self._only_echoes:
            entries += [token.logprobs for token in tokens]
            strings += [token.logprobs[0].name(by_id=by_id) for token in tokens]
        offsets = []
        for string in strings:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(string)
        return {
            "text_offset": offsets,
            "token_logprobs": [entry and entry[0].logprob for entry in entries],
            "tokens": strings,
            "top_logprobs": [entry and {t.name(by_id=by_id): t.logprob for t in entry} for entry in entries],
        }
