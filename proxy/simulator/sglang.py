"""The routes, responses and stream chunks of SGLang 0.5.23.

Shapes are from the cassettes `sglang-0.5.23/*`, the shapes of `/generate` from SGLang's source
(`managers/tokenizer_manager.py`, lines 2505 to 2712).

Rules of chat: the role chunk of a choice comes with its first token, and all choices finish at the end of the stream.
Logprobs are in the first chunk of their token. A token without a chunk gets one for its logprobs if a parser is configured;
otherwise its logprobs are lost, as always at the end of the turn.

Rules of `/generate`: a stream is cumulative, each event has all of its choice so far; with `incremental_streams`, it has
what is new. Logprobs of the prompt are the model's, without temperature; logprobs of sampled tokens are after temperature.
With `max_new_tokens` 0, one token is sampled but not returned.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from aiohttp import web

from proxy.simulator.engine import (
    VERSION,
    ChatReply,
    EngineRoutes,
    JsonObject,
    Response,
    append,
    event,
    experts_as_int32,
    json_response,
    last_of,
    read_body,
    route,
    usage,
)
from proxy.simulator.errors import RequestError, invalid_value
from proxy.simulator.model import ABORTED, GenerationOptions, Model, Token
from proxy.simulator.options import Options
from proxy.simulator.parser import CallDelta
from proxy.simulator.prompts import Prompt, chat_prompt, ids_to_return, max_tokens_after, text_prompts, with_fault
from proxy.simulator.requests import (
    CommonFields,
    CompletionsRequest,
    NativeRequest,
    SglangFields,
    new_version,
    read_completions,
    read_native,
    read_sglang_chat,
    read_sglang_common,
    read_sglang_fields,
)
from proxy.simulator.sampler import TokenDistribution, UnigramTail, as_float32
from proxy.simulator.template import prepare_for_sglang
from proxy.simulator.tokenizer import Tokenizer

LogprobTuple = list[Any]
"""A logprob, the token's id, and its text or None: an entry of `output_token_logprobs`."""


def full_usage(prompt_tokens: int, completion_tokens: int) -> JsonObject:
    """Return the usage of chat, and of completions that are not streamed; reasoning tokens are not counted."""
    details = {"prompt_tokens_details": None, "reasoning_tokens": 0, "completion_tokens_details": None}
    return usage(prompt_tokens, completion_tokens, **details)


def matched_stop(token: Token) -> int | str | None:
    """Return `matched_stop`: the id or stop string that ended the choice; for the end of a turn, its id."""
    if token.finish_reason != "stop":
        return None
    return token.id if token.stop_reason is None else token.stop_reason


def tempered(distribution: TokenDistribution, temperature: float) -> Callable[[int], float]:
    """Return the function that returns the logprob of a token after temperature: log_softmax(logits / temperature).

    Temperatures 0 and 1 change nothing: logprobs of greedy batches are the model's own. A sampler that truncates the
    vocabulary (top_k, top_p) changes nothing either (SGLang 0.5.23, `layers/sampler.py:208-331`).
    """
    if temperature in {0.0, 1.0}:
        return distribution.logprob
    log_sum = _log_sum(distribution, 1.0 / temperature)
    return lambda token: as_float32(math.log(distribution.probability(token)) / temperature - log_sum)


def _log_sum(distribution: TokenDistribution, power: float) -> float:
    """Return the logarithm of the sum of all probabilities to this power.

    The sum over the tail is cached, because it is the same after every prefix; the likely tokens correct it.
    """
    highest = math.log(max(distribution.likely.values()))
    total = math.exp(_tail_log_sum(distribution.tail, power) - power * highest)
    for token, probability in distribution.likely.items():
        total += math.exp(power * (math.log(probability) - highest))
        total -= math.exp(power * (math.log(distribution.tail.probabilities[token]) - highest))
    return power * highest + math.log(total)


@lru_cache(maxsize=64)
def _tail_log_sum(tail: UnigramTail, power: float) -> float:
    logs = [math.log(probability) for probability in tail.probabilities]
    highest = max(logs)
    return power * highest + math.log(math.fsum(math.exp(power * (log - highest)) for log in logs))


@dataclass(frozen=True, slots=True)
class LogprobFormatter:
    """Formats tokens and their logprobs: after temperature, each token by its own bytes."""

    tokenizer: Tokenizer
    temperature: float

    def chat_entry(self, token: Token, alternatives: int) -> JsonObject:
        """Return an entry of chat's `logprobs.content`."""
        logprob = tempered(token.distribution, self.temperature)

        def entry(i: int) -> JsonObject:
            return {"token": self.text(i), "bytes": list(self.tokenizer.pieces[i]), "logprob": logprob(i)}

        top = token.distribution.top(alternatives) if alternatives else []
        return entry(token.id) | {"top_logprobs": [entry(i) for i in top]}

    def sampled(self, token: Token, *, with_text: bool) -> LogprobTuple:
        """Return the entry of the sampled token."""
        return self._tuples(token, [token.id], with_text=with_text)[0]

    def top(self, token: Token, alternatives: int, *, with_text: bool) -> list[LogprobTuple]:
        """Return the entries of the most likely tokens at the position, most likely first."""
        return self._tuples(token, token.distribution.top(alternatives), with_text=with_text)

    def output(self, tokens: Sequence[Token], alternatives: int, *, with_text: bool) -> JsonObject:
        """Return the keys of `meta_info` with the logprobs of the sampled tokens."""
        keys: JsonObject = {"output_token_logprobs": [self.sampled(token, with_text=with_text) for token in tokens]}
        if alternatives:
            keys["output_top_logprobs"] = [self.top(token, alternatives, with_text=with_text) for token in tokens]
        return keys | {"output_token_logprobs_length": len(tokens)}

    def _tuples(self, token: Token, ids: Sequence[int], *, with_text: bool) -> list[LogprobTuple]:
        logprob = tempered(token.distribution, self.temperature)
        return [[logprob(i), i, self.text(i) if with_text else None] for i in ids]

    def text(self, token: int) -> str:
        """Return the text of a single token; bytes that are not valid UTF-8 become U+FFFD."""
        return self.tokenizer.decode([token])


def finish_reason(tokens: Sequence[Token]) -> JsonObject | None:
    """Return the finish reason of the native API; a choice has no tokens if `max_new_tokens` is 0."""
    if not tokens:
        return {"type": "length", "length": 0}
    last = tokens[-1]
    if last.finish_reason == "stop":
        return {"type": "stop", "matched": matched_stop(last)}
    if last.finish_reason == "length":
        return {"type": "length", "length": len(tokens)}
    if last.finish_reason == "abort":
        return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    return None


def routed_experts(prompt: Sequence[int], sampled: Sequence[int], start: int = 0) -> str:
    """Return `routed_experts` of one choice, from a token on. Raises RequestError if the prompt is shorter."""
    if not 0 <= start <= len(prompt):
        raise invalid_value(f"routed_experts_start_len={start} is not within the prompt of {len(prompt)} tokens.")
    return experts_as_int32([*prompt, *sampled], start)


class _Sglang(Response):
    """What all responses of SGLang have: an id by which they can be aborted, the weights, and logprobs."""

    __slots__ = ()

    @property
    def rid(self) -> str | None:
        return self.id if self.common.choices == 1 else None  # each of several choices has a separate id

    @property
    def formatter(self) -> LogprobFormatter:
        """What formats logprobs: after temperature."""
        temperature = self.common.temperature
        return LogprobFormatter(self.engine.model.tokenizer, 1.0 if temperature is None else temperature)

    def metadata(self, choices: Sequence[Sequence[Token]]) -> JsonObject:
        """Return `metadata` of the response, with the spans of its first choice."""
        spans = self.versions.spans(len(choices[0]))
        return {"weight_version": self.engine.weight_version, "weight_versions": spans}

    def meta_info(self, prompt: Prompt, tokens: Sequence[Token], logprobs: JsonObject) -> JsonObject:
        """Return `meta_info` of one choice with these keys of logprobs; the latency is always 0."""
        return {
            "id": self.id,
            "finish_reason": finish_reason(tokens if tokens or self.abort is None else [ABORTED]),
            "prompt_tokens": len(prompt.ids),
            "weight_version": self.engine.weight_version,
            "num_retractions": 0,
            **logprobs,
            "reasoning_tokens": 0,
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
            "weight_versions": self.versions.spans(len(tokens)),
            "cached_tokens_details": None,
            "dp_rank": None,
            "e2e_latency": 0.0,
        }


@dataclass(slots=True)
class _Chat(_Sglang, ChatReply):
    fields: SglangFields
    _last: dict[int, Token] = field(init=False, default_factory=dict)  # of each choice that is streamed

    @property
    def separates(self) -> bool:
        return self.fields.separate_reasoning is not False

    def token_events(self, index: int, token: Token) -> list[bytes]:
        first = not self.ids[index]
        self._last[index] = token
        if not token.is_sampled:
            return []
        parsed = self.feed(index, token)
        chunks = []
        if first:
            role = {"reasoning_content": None, "role": "assistant", "content": ""}
            chunks.append(self._chunk(index, role, None))
        unsent_logprobs = self._logprobs([token])
        if parsed.reasoning:
            chunks.append(self._chunk(index, {"reasoning_content": parsed.reasoning}, unsent_logprobs))
            unsent_logprobs = None
        if parsed.content and self.calls:
            chunks.append(self._parser_chunk(index, content=parsed.content))
        elif parsed.content:
            delta = {"reasoning_content": None, "content": parsed.content}
            chunks.append(self._chunk(index, delta, unsent_logprobs))
            unsent_logprobs = None
        for call in parsed.calls:
            # The name and the arguments are in separate chunks.
            parts = [CallDelta(call.index, call.name)] if call.name is not None else []
            parts += [CallDelta(call.index, None, call.arguments)] if call.arguments else []
            chunks += [self._parser_chunk(index, call=part) for part in parts]
        if unsent_logprobs is not None and self.engine.options.has_parser:
            chunks.append(self._chunk(index, {"reasoning_content": None}, unsent_logprobs))
        return [event(chunk) for chunk in chunks]

    def closing_events(self) -> list[bytes]:
        # All events have the id of the last choice.
        events = []
        last = {"id": self._id_of(len(self.ids) - 1)}
        for index in range(len(self.ids)):
            end = self._last.get(index, ABORTED)
            reason = self._finish(end, has_calls=index in self.with_calls)
            closing = self._chunk(index, {"reasoning_content": None}, None, reason, matched_stop(end))
            events.append(event(closing | last))
        head = self.head("chat.completion.chunk") | last | {"choices": []}
        extension = self._extension(self.ids)
        if extension:
            chunk = head | {"usage": None, "sglext": extension}
            events.append((b"event: sglext_ids\n" if self.fields.framed else b"") + event(chunk))
        if self.common.include_usage:
            events.append(event(head | {"usage": full_usage(len(self.prompt.ids), self.streamed)}))
        return events

    def body(self, choices: Sequence[Sequence[Token]]) -> JsonObject:
        payload = self.head("chat.completion") | {
            "choices": [self._choice(index, tokens) for index, tokens in enumerate(choices)],
            "usage": full_usage(len(self.prompt.ids), sum(map(len, choices))),
            "metadata": self.metadata(choices),
        }
        extension = self._extension([[token.id for token in tokens] for tokens in choices])
        return payload | {"sglext": extension} if extension else payload

    def _choice(self, index: int, tokens: Sequence[Token]) -> JsonObject:
        parsed = self.parsed(tokens)
        reason = self._finish(last_of(tokens), has_calls=bool(parsed.calls))
        message: JsonObject = {
            "role": "assistant",
            "content": parsed.content or "",
            "reasoning_content": parsed.reasoning,
        }
        if parsed.calls:
            calls = enumerate(parsed.calls)
            message["tool_calls"] = [self._call(CallDelta(number, call.name, call.arguments)) for number, call in calls]
        choice = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(tokens),
            "finish_reason": reason,
            "matched_stop": None if reason == "tool_calls" else matched_stop(last_of(tokens)),  # streams have it
        }
        if self.fields.prompt_ids:
            choice["prompt_token_ids"] = self.prompt.unexpanded or self.prompt.ids
        if self.fields.return_token_ids:
            choice["response_token_ids"] = [token.id for token in tokens]
        if self.fields.return_meta_info:
            ended = {"finish_reason": {"type": reason, "matched": None}} if reason == "tool_calls" else {}
            choice["meta_info"] = self._meta_info(tokens) | ended
        return choice

    def _meta_info(self, tokens: Sequence[Token]) -> JsonObject:
        logprobs: JsonObject = {}
        if self.chat.logprobs:
            alternatives = self.chat.top_logprobs or 0
            sampled = self.formatter.output(tokens, alternatives, with_text=True)
            logprobs = {"input_token_logprobs": []} | sampled
        meta = self.meta_info(self.prompt, tokens, logprobs)
        if self._has_experts:
            start = self.fields.routed_experts_start_len or 0
            meta["routed_experts"] = routed_experts(self.prompt.ids, [token.id for token in tokens], start)
        return meta

    @property
    def _has_experts(self) -> bool:
        return bool(self.fields.return_routed_experts) and self.engine.options.routed_experts

    def _extension(self, choices: Sequence[list[int]]) -> JsonObject:
        """Return `sglext`; empty if no field of it is requested."""
        extension: JsonObject = {}
        if self.fields.return_input_ids_in_sglext:
            extension["input_ids"] = self.prompt.unexpanded or self.prompt.ids
        if self.fields.return_output_ids_in_sglext:
            extension["output_ids"] = choices
        if self._has_experts and not self.fields.return_meta_info:
            extension["routed_experts"] = routed_experts(self.prompt.ids, choices[0])
        return extension

    def _id_of(self, index: int) -> str:
        return self.id if index == 0 else f"{self.id}-{index}"

    def _chunk(
        self,
        index: int,
        delta: JsonObject,
        logprobs: JsonObject | None,
        finish_reason: str | None = None,
        matched: int | str | None = None,
    ) -> JsonObject:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "matched_stop": matched,
        }
        chunk = self.head("chat.completion.chunk") | {"id": self._id_of(index), "choices": [choice]}
        if self.common.continuous_usage and finish_reason is None:
            chunk["usage"] = full_usage(len(self.prompt.ids), len(self.ids[index]))
        return chunk

    def _parser_chunk(self, index: int, *, content: str | None = None, call: CallDelta | None = None) -> JsonObject:
        """Return a chunk of the tool parser, which has all keys."""
        tool_calls = None if call is None else [self._call(call)]
        delta: JsonObject = {"role": None, "content": content, "reasoning_content": None, "tool_calls": tool_calls}
        chunk = self._chunk(index, delta, None)
        chunk.setdefault("usage", None)
        return chunk

    def _call(self, call: CallDelta) -> JsonObject:
        """Return a tool call, or more of its arguments, with id and name null."""
        return {
            "id": None if call.name is None else f"call_{self.engine.new_hex(12)}",
            "index": call.index,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }

    def _finish(self, token: Token, *, has_calls: bool) -> str | None:
        return "tool_calls" if token.finish_reason == "stop" and has_calls else token.finish_reason

    def _logprobs(self, tokens: Sequence[Token]) -> JsonObject | None:
        if not self.chat.logprobs:
            return None
        return {"content": [self.formatter.chat_entry(token, self.chat.top_logprobs or 0) for token in tokens]}


@dataclass(slots=True)
class _Completions(_Sglang):
    completions: CompletionsRequest
    fields: SglangFields

    def token_events(self, index: int, token: Token) -> list[bytes]:
        first = not self.ids[index]
        sampled = [token] if token.is_sampled else []
        self.ids[index] += [token.id for token in sampled]
        so_far = None
        if self.common.continuous_usage:
            so_far = usage(len(self.prompt_of(index).ids), len(self.ids[index]), reasoning_tokens=0)
        chunk = {"choices": [self._choice(index, sampled, first=first)], "usage": so_far}
        return [event(self.head("text_completion") | chunk)]

    def closing_events(self) -> list[bytes]:
        if not self.common.include_usage:
            return []
        total = usage(self.prompt_tokens, self.streamed, reasoning_tokens=0)
        return [event(self.head("text_completion") | {"choices": [], "usage": total})]

    def body(self, choices: Sequence[Sequence[Token]]) -> JsonObject:
        return self.head("text_completion") | {
            "choices": [self._choice(index, tokens, first=True) for index, tokens in enumerate(choices)],
            "usage": full_usage(self.prompt_tokens, sum(map(len, choices))),
            "metadata": self.metadata(choices),
        }

    def _choice(self, index: int, tokens: Sequence[Token], *, first: bool) -> JsonObject:
        prompt = self.prompt_of(index)
        echoed = prompt.text if first and self.completions.echo else ""
        choice: JsonObject = {
            "index": index,
            "text": echoed + "".join(token.text for token in tokens),
            "logprobs": self._logprobs(tokens),
            "finish_reason": last_of(tokens).finish_reason,
            "matched_stop": matched_stop(last_of(tokens)),
        }
        if self.fields.return_token_ids:
            choice["token_ids"] = [token.id for token in tokens]
            if first:
                choice["prompt_token_ids"] = prompt.ids
        return choice

    def _logprobs(self, tokens: Sequence[Token]) -> JsonObject | None:
        """Return the logprobs of these tokens. Logprobs of an echoed prompt are not simulated."""
        alternatives = self.completions.logprobs
        if alternatives is None:
            return None
        sampled = [self.formatter.sampled(token, with_text=True) for token in tokens]
        top = [self.formatter.top(token, alternatives, with_text=True) for token in tokens] if alternatives else []
        return {
            "text_offset": [-1] * len(tokens),
            "token_logprobs": [logprob for logprob, _, _ in sampled],
            "tokens": [text for _, _, text in sampled],
            "top_logprobs": [{text: logprob for logprob, _, text in entries} for entries in top],
        }


def _native_prompts(native: NativeRequest, common: CommonFields, model: Model, options: Options) -> list[Prompt]:
    prompts = []
    for prompt in native.prompts:
        ids = model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        model.check_ids(ids)
        if not ids:
            raise invalid_value("The prompt must not be empty.")
        max_tokens = max_tokens_after(len(ids), max(common.max_tokens or 0, 1), common, options)
        prompts.append(Prompt(ids, GenerationOptions(max_tokens)))
    if not prompts:
        raise invalid_value("The prompt must not be empty.")
    return prompts


@dataclass(slots=True)
class _Native(_Sglang):
    native: NativeRequest
    _tokens: list[list[Token]] = field(init=False)
    _prompt_entries: dict[int, list[LogprobTuple]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        Response.__post_init__(self)
        self._tokens = [[] for _ in self.ids]

    @property
    def scores_prompt(self) -> bool:
        return bool(self.native.return_logprob)

    @property
    def rid(self) -> str | None:
        return None if self._is_list else self.id

    def token_events(self, index: int, token: Token) -> list[bytes]:
        append(self._tokens[index], token)
        choice = self._choice(index, self._tokens[index])
        if self.engine.options.incremental_streams:
            ids = choice["output_ids"][-1:]
            choice |= {"text": token.text if ids else "", "output_ids": ids}
            for name in ("output_token_logprobs", "output_top_logprobs"):
                if name in choice["meta_info"]:
                    choice["meta_info"][name] = choice["meta_info"][name][-1:]
        return [event(choice | {"index": index} if self._is_list else choice)]

    def body(self, choices: Sequence[Sequence[Token]]) -> JsonObject | list[JsonObject]:
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
            choice["prompt_token_ids"] = self.prompts[prompt_index].ids
        return choice | {"meta_info": self._meta_info(prompt_index, tokens)}

    def _meta_info(self, prompt_index: int, tokens: Sequence[Token]) -> JsonObject:
        prompt = self.prompts[prompt_index].ids
        logprobs: JsonObject = {}
        if self.native.return_logprob:
            alternatives, with_text = self.native.top_logprobs_num or 0, bool(self.native.return_text_in_logprobs)
            logprobs["input_token_logprobs"] = self._prompt_logprobs(prompt_index, with_text=with_text)
            if alternatives:
                logprobs["input_top_logprobs"] = self._prompt_top_logprobs(prompt, alternatives, with_text=with_text)
            logprobs |= self.formatter.output(tokens, alternatives, with_text=with_text)
        meta = self.meta_info(self.prompts[prompt_index], tokens, logprobs)
        if meta["finish_reason"] is None:
            del meta["weight_versions"], meta["e2e_latency"]
        if self.native.return_routed_experts and self.engine.options.routed_experts:
            meta["routed_experts"] = routed_experts(prompt, [token.id for token in tokens])
        return meta

    def _prompt_logprobs(self, prompt_index: int, *, with_text: bool) -> list[LogprobTuple]:
        """Return the prompt's logprobs from `logprob_start_len` on; the first is None, at any position."""
        start = self.native.logprob_start_len
        if start is None or start < 0:
            return []
        if prompt_index not in self._prompt_entries:
            ids = self.prompts[prompt_index].ids
            logprobs = [None, *[scores[0].logprob for scores in self.engine.model.score(ids, 0)]]
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
        for scores in self.engine.model.score(ids, alternatives)[start:]:
            best = sorted(scores, key=lambda scored: -scored.logprob)[:alternatives]
            entries.append([[each.logprob, each.id, each.string if with_text else None] for each in best])
        return entries


class SglangRoutes(EngineRoutes):
    """The routes of one SGLang engine."""

    __slots__ = ()

    owned_by = "sglang"
    text_key = "text"
    gauge = ("sglang:num_running_reqs", "The number of running requests.", "")
    skips_special_tokens = True

    @route("POST", "/v1/detokenize")
    async def _detokenize_v1(self, request: web.Request) -> web.Response:
        return await self._detokenize(request)

    @route("POST", "/v1/chat/completions")
    async def _chat(self, request: web.Request) -> web.StreamResponse:
        model, options = self._engine.model, self._engine.options
        body = await read_body(request)
        fields = read_sglang_fields(body, request.headers, options)
        chat, common = read_sglang_chat(body, fields), read_sglang_common(body, options)
        if fields.input_ids is not None:
            model.check_ids(fields.input_ids)
        ids = with_fault(fields.input_ids, options.faults)
        prompt = chat_prompt(chat, common, model, options, ids=ids)
        response = _Chat(self._engine, common, [prompt], self._id(fields.rid), chat, fields)
        return await self._engine.respond(request, response)

    @route("POST", "/v1/completions")
    async def _completions(self, request: web.Request) -> web.StreamResponse:
        model, options = self._engine.model, self._engine.options
        body = await read_body(request)
        fields = read_sglang_fields(body, request.headers, options)
        completions, common = read_completions(body), read_sglang_common(body, options)
        prompts = text_prompts(completions, common, model, options)
        response = _Completions(self._engine, common, prompts, self._id(fields.rid), completions, fields)
        return await self._engine.respond(request, response)

    @route("POST", "/generate")
    async def _generate(self, request: web.Request) -> web.StreamResponse:
        # Its errors have another format than errors of the OpenAI endpoints.
        model, options = self._engine.model, self._engine.options
        try:
            native, common = read_native(await read_body(request), options)
            prompts = _native_prompts(native, common, model, options)
        except RequestError as error:
            is_validation = error.kind == "Bad Request"
            return json_response({"error": str(error) if is_validation else {"message": str(error)}}, error.status)
        response = _Native(self._engine, common, prompts, self._id(native.rid), native)
        return await self._engine.respond(request, response)

    @route("POST", "/v1/tokenize", "/tokenize")
    async def _tokenize(self, request: web.Request) -> web.Response:
        ids = ids_to_return(await self.body_to_tokenize(request), self._engine.model, prepare_for_sglang)
        return json_response({"tokens": ids, "count": len(ids), "max_model_len": self._engine.options.max_model_len})

    @route("POST", "/abort_request")
    async def _abort_request(self, request: web.Request) -> web.Response:
        # Every running call with an id that begins with `rid` ends; the response is empty in any case.
        body = await read_body(request)
        rid = body.get("rid")
        if body.get("abort_all") is True:
            self._engine.abort()
        elif isinstance(rid, str) and rid:
            self._engine.abort(lambda response: response.rid is not None and response.rid.startswith(rid))
        return web.Response()

    @route("POST", "/pause_generation")
    async def _pause_generation(self, request: web.Request) -> web.Response:
        engine, mode = self._engine, (await read_body(request)).get("mode", "abort")
        if mode not in {"abort", "retract", "in_place"}:
            raise invalid_value(f"mode must be abort, retract or in_place, got {mode!r}.")
        engine.pause("all")
        if mode == "abort":
            await engine.ended(engine.abort())
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    @route("POST", "/continue_generation")
    async def _continue_generation(self, request: web.Request) -> web.Response:
        self._engine.pause(None)
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    @route("POST", "/update_weight_version")
    async def _update_weight_version(self, request: web.Request) -> web.Response:
        body = await read_body(request)
        version = new_version(body)
        self._engine.weight_version = version
        if body.get("abort_all_requests", True):
            self._engine.abort()
        message = f"Weight version updated to {version}"
        return json_response({"success": True, "message": message, "new_version": version})

    @route("GET", "/server_info", "/get_server_info")
    async def _server_info(self, request: web.Request) -> web.Response:
        options = self._engine.options
        info = {"model_path": options.model, "context_length": options.max_model_len}
        return json_response({**info, **self._parsers, "version": VERSION})

    @route("GET", "/model_info", "/get_model_info")
    async def _model_info(self, request: web.Request) -> web.Response:
        info = {
            "model_path": self._engine.options.model,
            "tokenizer_path": self._engine.options.model,
            "is_generation": True,
            "served_model_name": self._engine.options.model,
            "preferred_sampling_params": None,
            "weight_version": self._engine.weight_version,
        }
        return json_response({**info, **self._parsers})

    @property
    def _parsers(self) -> dict[str, str | None]:
        """The names of the parsers that `proxy.simulator.parser` behaves like."""
        has_parser = self._engine.options.has_parser
        return {
            "reasoning_parser": "qwen3" if has_parser else None,
            "tool_call_parser": "qwen25" if has_parser else None,
        }

    def _id(self, rid: str | None) -> str:
        """Return the id of a response, which the client can choose."""
        return rid or self._engine.new_hex(16)
