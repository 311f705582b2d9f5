"""SGLang's native `/generate`: text or ids in, ids and `meta_info` out.

Shapes are from the source of SGLang 0.5.23 (`managers/tokenizer_manager.py:2505-2712`), those of `meta_info` from its
recorded chat completions.

Rule 1: a stream is cumulative: each event has all of its choice so far. With `incremental_streams`, it has what is new.
Rule 2: logprobs of the prompt are the model's, without temperature; those of sampled tokens are after temperature.
Rule 3: with `max_new_tokens` 0, one token is sampled but not returned.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from proxy.simulator.distribution import Prefix, prefix_from
from proxy.simulator.generation import Token
from proxy.simulator.model import GenerationOptions, Model
from proxy.simulator.options import Options
from proxy.simulator.requests import CommonFields
from proxy.simulator.sglang.requests import NativeRequest, request_error, sglang_max_tokens
from proxy.simulator.sglang.wire import (
    LogprobFormatter,
    LogprobTuple,
    ResponseMetadata,
    output_logprobs,
    routed_experts,
)
from proxy.simulator.wire import JsonObject, event


@dataclass(frozen=True, slots=True)
class NativePrompt:
    """The ids of one prompt, and the options of its choices."""

    ids: Sequence[int]
    options: GenerationOptions


def native_prompts(native: NativeRequest, common: CommonFields, model: Model, options: Options) -> list[NativePrompt]:
    """Return the prompts of a request.

    Raises:
        RequestError: an id is outside the vocabulary, or a prompt is empty or does not fit into the context window.
    """
    prompts = []
    for prompt in native.prompts:
        ids = model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        model.check_ids(ids)
        if not ids:
            raise request_error("The prompt must not be empty.")
        max_tokens = sglang_max_tokens(len(ids), max(common.max_tokens or 0, 1), common, options)
        prompts.append(NativePrompt(ids, GenerationOptions(max_tokens)))
    if not prompts:
        raise request_error("The prompt must not be empty.")
    return prompts


@dataclass(slots=True)
class NativeResponse:
    """A response of `/generate`; see `wire.Response`. Choice `i` belongs to prompt `i // n`."""

    native: NativeRequest
    common: CommonFields
    model: Model
    options: Options
    native_prompts: Sequence[NativePrompt]
    formatter: LogprobFormatter
    metadata: ResponseMetadata
    _tokens: list[list[Token]] = field(init=False)
    _prompt_entries: dict[int, list[LogprobTuple]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tokens = [[] for _ in range(len(self.native_prompts) * self.common.choices)]

    @property
    def prompts(self) -> Sequence[tuple[Prefix, GenerationOptions]]:
        """The prompts, in the order of the request."""
        return [(prefix_from(prompt.ids), prompt.options) for prompt in self.native_prompts]

    def opening_events(self) -> list[bytes]:
        """Return no events: there is no role."""
        return []

    def token_events(self, index: int, token: Token) -> list[bytes]:
        """Return an event with all of the choice so far, or with what is new."""
        self._tokens[index].append(token)
        choice = self._choice(index, self._tokens[index])
        if self.options.incremental_streams:
            ids = choice["output_ids"][-1:]
            choice |= {"text": token.text if ids else "", "output_ids": ids}
            for name in ("output_token_logprobs", "output_top_logprobs"):
                if name in choice["meta_info"]:
                    choice["meta_info"][name] = choice["meta_info"][name][-1:]
        return [event(choice | {"index": index} if self._is_list else choice)]

    def closing_events(self) -> list[bytes]:
        """Return no events: the last event of each choice is complete."""
        return []

    def body(self, choices: Sequence[Sequence[Token]]) -> JsonObject | list[JsonObject]:
        """Return the one choice, or a list of several."""
        payloads = [self._choice(index, tokens) for index, tokens in enumerate(choices)]
        return payloads if self._is_list else payloads[0]

    @property
    def _is_list(self) -> bool:
        return self.native.is_batch or self.common.choices > 1

    def _choice(self, index: int, sampled: Sequence[Token]) -> JsonObject:
        tokens = [] if self.common.max_tokens == 0 else sampled
        prompt_index = index // self.common.choices
        choice: JsonObject = {
            "text": "".join(token.text for token in tokens),
            "output_ids": [token.id for token in tokens],
        }
        if self.native.return_prompt_token_ids:
            choice["prompt_token_ids"] = self.native_prompts[prompt_index].ids
        return choice | {"meta_info": self._meta_info(prompt_index, tokens)}

    def _meta_info(self, prompt_index: int, tokens: Sequence[Token]) -> JsonObject:
        prompt = self.native_prompts[prompt_index].ids
        logprobs: JsonObject = {}
        if self.native.return_logprob:
            alternatives, with_text = self.native.top_logprobs_num or 0, bool(self.native.return_text_in_logprobs)
            logprobs["input_token_logprobs"] = self._prompt_logprobs(prompt_index, with_text=with_text)
            if alternatives:
                logprobs["input_top_logprobs"] = self._prompt_top_logprobs(prompt, alternatives, with_text=with_text)
            logprobs |= output_logprobs(self.formatter, tokens, alternatives, with_text=with_text)
        meta = self.metadata.meta_info(prompt, tokens, logprobs)
        if meta["finish_reason"] is None:
            del meta["weight_versions"], meta["e2e_latency"]
        if self.native.return_routed_experts and self.options.routed_experts:
            meta["routed_experts"] = routed_experts(prompt, tokens)
        return meta

    def _prompt_logprobs(self, prompt_index: int, *, with_text: bool) -> list[LogprobTuple]:
        """Return the prompt's logprobs from `logprob_start_len` on; the first is None, at any position."""
        start = self.native.logprob_start_len
        if start is None or start < 0:
            return []
        if prompt_index not in self._prompt_entries:
            ids = self.native_prompts[prompt_index].ids
            logprobs = [None, *[scores[0].logprob for scores in self.model.score(ids, 0)]]
            self._prompt_entries[prompt_index] = [
                [logprob if position else None, token, self.formatter.text(token) if with_text else None]
                for position, (logprob, token) in enumerate(zip(logprobs[start:], ids[start:], strict=True))
            ]
        return self._prompt_entries[prompt_index]

    def _prompt_top_logprobs(
        self, ids: Sequence[int], alternatives: int, *, with_text: bool
    ) -> list[list[LogprobTuple] | None]:
        """Return the most likely tokens of each position from `logprob_start_len` on, the most likely first."""
        start = self.native.logprob_start_len
        if start is None or start < 0:
            return []
        entries: list[list[LogprobTuple] | None] = [None]
        for scores in self.model.score(ids, alternatives)[start:]:
            best = sorted(scores, key=lambda scored: -scored.logprob)[:alternatives]
            entries.append([[each.logprob, each.id, each.string if with_text else None] for each in best])
        return entries
