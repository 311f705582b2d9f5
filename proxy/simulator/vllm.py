"""The routes, responses and stream chunks of vLLM 0.32.

Shapes are from the cassettes `chat_*`, `tool_*`, `reasoning/*`, `cmpl_*`, `scale_out/generate*` and
`abort/generate_midflight_version`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Annotated, Any, Final, Literal

from aiohttp import web
from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass as validated

from proxy.simulator.engine import (
    FINGERPRINT,
    VERSION,
    ChatReply,
    Engine,
    EngineRoutes,
    JsonObject,
    Response,
    event,
    experts_as_npy,
    json_response,
    last_of,
    read_body,
    route,
    usage,
)
from proxy.simulator.errors import RequestError, invalid_value, validation_errors
from proxy.simulator.model import GenerationOptions, Model, Token, TokenLogprob
from proxy.simulator.options import Options
from proxy.simulator.parser import CallDelta, Delta, ParsedReply, parse
from proxy.simulator.prompts import (
    Prompt,
    chat_prompt,
    ids_to_return,
    max_tokens_after,
    reused_ids,
    text_prompts,
    with_fault,
)
from proxy.simulator.requests import (
    Body,
    ChatRequest,
    CommonFields,
    CompletionsRequest,
    check_logprobs,
    new_version,
    read_chat,
    read_common,
    read_completions,
    read_fields,
)

_NULLS: Final[JsonObject] = {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}


def _chunk(response: Response, kind: str, index: int, choice: JsonObject, **details: Any) -> JsonObject:
    """Return a chunk with a part of a choice; `details` are the keys of its usage that only chat has."""
    chunk = response.head(kind) | {"choices": [{"index": index, **choice}]}
    if response.common.continuous_usage:
        chunk["usage"] = usage(len(response.prompt_of(index).ids), len(response.ids[index]), **details)
    if choice["finish_reason"] is not None and not response.common.include_usage:
        chunk["system_fingerprint"] = FINGERPRINT
    return chunk


def _usage_chunks(response: Response, kind: str, **details: Any) -> list[bytes]:
    """Return the usage chunk, if it is requested."""
    if not response.common.include_usage:
        return []
    total = usage(response.prompt_tokens, response.streamed, **details)
    return [event(response.head(kind) | {"choices": [], "usage": total, "system_fingerprint": FINGERPRINT})]


def _full_usage(
    response: Response, choices: Sequence[Sequence[object]], details: JsonObject | None = None
) -> JsonObject:
    """Return the usage of a response that is not streamed; `details` count its completion tokens by kind."""
    completion_tokens = sum(map(len, choices))
    return usage(
        response.prompt_tokens, completion_tokens, prompt_tokens_details=None, completion_tokens_details=details
    )


def _prompt_logprobs(response: Response, prompt: Prompt, alternatives: int | None) -> list[Any] | None:
    return None if alternatives is None else response.engine.model.prompt_logprobs(prompt.ids, alternatives)


@dataclass(slots=True)
class _Chat(ChatReply):
    @property
    def _has_ids(self) -> bool:
        # With a parser configured, vLLM returns neither ids nor logprobs of a reply with hidden reasoning
        # (cassette `tool_include_reasoning_false`).
        return bool(self.common.return_token_ids) and self.chat.include_reasoning

    @property
    def _has_logprobs(self) -> bool:
        return bool(self.chat.logprobs) and self.chat.include_reasoning

    @property
    def _prompt_keys(self) -> JsonObject:
        return {
            "prompt_token_ids": self.prompt.ids if self.common.return_token_ids else None,
            "prompt_text": self.prompt.text if self.chat.return_prompt_text else None,
        }

    def opening_events(self) -> list[bytes]:
        choice = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [event(self._chunk(index, choice) | self._prompt_keys) for index in range(self.common.choices)]

    def token_events(self, index: int, token: Token) -> list[bytes]:
        # If the text of a token is held back, it has a chunk only for its ids or logprobs.
        delta = self._delta(self.feed(index, token))
        if not self.ids[index]:
            return []  # aborted before its first token (cassette `pause_abort_stream`)
        sampled = [token] if token.is_sampled else []
        ended = token.finish_reason is not None
        if not delta and not ended and not self._has_ids and not self._has_logprobs:
            return []
        choice: JsonObject = {
            "delta": delta,
            "logprobs": self._logprobs(sampled),
            "finish_reason": self._finish(token, has_calls=index in self.with_calls),
        }
        if ended:
            choice["stop_reason"] = token.stop_reason
        choice["token_ids"] = [token.id for token in sampled] if self._has_ids else None
        return [event(self._chunk(index, choice))]

    def closing_events(self) -> list[bytes]:
        details = {"completion_tokens_details": self._details(self.ids)} if self.reasons else {}
        return _usage_chunks(self, "chat.completion.chunk", **details)

    def body(self, choices: Sequence[Sequence[Token]]) -> JsonObject:
        ids = [[token.id for token in tokens] for tokens in choices]
        return {
            **self.head("chat.completion"),
            "choices": [self._choice(index, tokens) for index, tokens in enumerate(choices)],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": _full_usage(self, choices, self._details(ids) if self.reasons else None),
            "prompt_logprobs": _prompt_logprobs(self, self.prompt, self.common.prompt_logprobs),
            **self._prompt_keys,
            **_NULLS,
        }

    def _choice(self, index: int, tokens: Sequence[Token]) -> JsonObject:
        parsed = self.parsed(tokens)
        return {
            "index": index,
            "message": _message(self.engine, self.chat, parsed),
            "logprobs": self._logprobs(tokens),
            "finish_reason": self._finish(last_of(tokens), has_calls=bool(parsed.calls)),
            "stop_reason": last_of(tokens).stop_reason,
            "token_ids": [token.id for token in tokens] if self._has_ids else None,
            "routed_experts": None,
        }

    def _chunk(self, index: int, choice: JsonObject) -> JsonObject:
        return _chunk(self, "chat.completion.chunk", index, choice, completion_tokens_details=None)

    def _delta(self, parsed: Delta) -> JsonObject:
        """Return the delta of a chunk; empty if nothing visible is added."""
        delta: JsonObject = {}
        if parsed.content or parsed.calls:
            delta["content"] = parsed.content or None
            if not self.chat.include_reasoning:
                delta["reasoning"] = None
        if parsed.reasoning and self.chat.include_reasoning:
            delta["reasoning"] = parsed.reasoning
        if parsed.calls:
            delta["tool_calls"] = [self._call_delta(call) for call in parsed.calls]
        return delta

    def _call_delta(self, call: CallDelta) -> JsonObject:
        arguments = {"arguments": call.arguments} if call.arguments else {}
        if call.name is None:
            return {"index": call.index, "function": arguments}
        opened = _call(self.engine, name=call.name, **arguments)
        return {"id": opened["id"], "type": opened["type"], "index": call.index, "function": opened["function"]}

    def _finish(self, token: Token, *, has_calls: bool) -> str | None:
        if token.finish_reason == "stop" and has_calls and self.chat.named_tool is None:
            return "tool_calls"
        return token.finish_reason

    def _logprobs(self, tokens: Sequence[Token]) -> JsonObject | None:
        if not self._has_logprobs:
            return None
        count, by_id = self.prompt.options.alternatives, bool(self.common.return_tokens_as_token_ids)
        return {
            "content": [
                # `bytes` of the token encode its string, even by id; `bytes` of alternatives encode `token`.
                _entry(token.logprobs[0], by_id=by_id)
                | {"bytes": list(token.logprobs[0].string.encode())}
                # vLLM truncates the list that begins with the token itself, so top_logprobs 1 has no alternative.
                | {"top_logprobs": [_entry(entry, by_id=by_id) for entry in token.logprobs[:count]]}
                for token in tokens
            ]
        }

    def _details(self, choices: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Return the number of reasoning tokens of all choices, without the opening and closing tags."""
        close = self.engine.model.tokenizer.id("</think>")
        start = 0 if self.prompt.reasoning_open else 1
        reasoning = [list(takewhile(close.__ne__, ids[start:])) for ids in choices]
        return {"reasoning_tokens": sum(map(len, reasoning))}


def _message(engine: Engine, chat: ChatRequest, parsed: ParsedReply) -> JsonObject:
    """Return the message of a complete reply."""
    message: JsonObject = {
        "role": "assistant",
        "content": "" if parsed.calls and chat.named_tool else parsed.content,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
    }
    if parsed.calls:
        message["tool_calls"] = [_call(engine, name=call.name, arguments=call.arguments) for call in parsed.calls]
    message["reasoning"] = parsed.reasoning if chat.include_reasoning else None
    return message


def _call(engine: Engine, **function: str) -> JsonObject:
    return {"id": f"chatcmpl-tool-{engine.new_hex()}", "type": "function", "function": function}


def _entry(logprob: TokenLogprob, *, by_id: bool) -> JsonObject:
    name = logprob.name(by_id=by_id)
    return {"token": name, "logprob": logprob.logprob, "bytes": list(name.encode())}


@dataclass(slots=True)
class _Completions(Response):
    completions: CompletionsRequest
    _offsets: list[int] = field(init=False)

    def __post_init__(self) -> None:
        Response.__post_init__(self)
        self._offsets = [0] * len(self.ids)

    def token_events(self, index: int, token: Token) -> list[bytes]:
        prompt = self.prompt_of(index)
        first = not self.ids[index]
        sampled = [token] if token.is_sampled else []
        self.ids[index] += [token.id for token in sampled]
        if not self.ids[index]:
            return []  # aborted before its first token (vLLM 0.32, entrypoints/openai/completion/serving.py)
        has_prompt_ids = first and bool(self.common.return_token_ids or self.completions.echo)
        choice = {
            "text": self._text([token], prompt, first=first),
            "logprobs": self._logprobs(index, sampled, prompt, first=first),
            "finish_reason": token.finish_reason,
            "stop_reason": token.stop_reason,
            "prompt_token_ids": prompt.ids if has_prompt_ids else None,
            "token_ids": [token.id for token in sampled] if self.common.return_token_ids else None,
        }
        return [event(_chunk(self, "text_completion", index, choice))]

    @property
    def rid(self) -> str | None:
        return f"{self.id}-0"  # each prompt has its own id

    @property
    def scores_prompt(self) -> bool:
        return self.common.prompt_logprobs is not None or bool(self.completions.echo)

    def closing_events(self) -> list[bytes]:
        return _usage_chunks(self, "text_completion")

    def body(self, choices: Sequence[Sequence[Token]]) -> JsonObject:
        return {
            **self.head("text_completion"),
            "choices": [self._choice(index, tokens) for index, tokens in enumerate(choices)],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": _full_usage(self, choices),
            **_NULLS,
        }

    def _choice(self, index: int, tokens: Sequence[Token]) -> JsonObject:
        prompt = self.prompt_of(index)
        alternatives = self.common.prompt_logprobs
        if self.completions.echo and self.completions.logprobs is not None:
            alternatives = self.completions.logprobs  # as in vLLM, which gets the prompt's logprobs this way
        return {
            "index": index,
            "text": self._text(tokens, prompt, first=True),
            "logprobs": self._logprobs(index, tokens, prompt, first=True),
            "finish_reason": last_of(tokens).finish_reason,
            "stop_reason": last_of(tokens).stop_reason,
            "token_ids": [token.id for token in tokens] if self.common.return_token_ids else None,
            "prompt_logprobs": _prompt_logprobs(self, prompt, alternatives),
            "prompt_token_ids": prompt.ids if self.common.return_token_ids else None,
            "routed_experts": None,
        }

    @property
    def _only_echoes(self) -> bool:
        return bool(self.completions.echo) and self.common.max_tokens == 0

    def _text(self, tokens: Sequence[Token], prompt: Prompt, *, first: bool) -> str:
        """Return the text of these tokens, after the echoed prompt unless ids are requested."""
        echoes = first and self.completions.echo and not self.common.return_token_ids
        generated = "" if self._only_echoes else "".join(token.text for token in tokens)
        return prompt.text + generated if echoes else generated

    def _logprobs(self, index: int, tokens: Sequence[Token], prompt: Prompt, *, first: bool) -> JsonObject | None:
        """Return the logprobs of an echoed prompt (null for its first token), then of these tokens."""
        alternatives = self.completions.logprobs
        if alternatives is None:
            return None
        by_id = bool(self.common.return_tokens_as_token_ids)
        entries: list[tuple[TokenLogprob, ...] | None] = []
        strings = []
        if first and self.completions.echo:
            prompt_entries = self.engine.model.score(prompt.ids, alternatives)
            entries += [None, *prompt_entries]
            opening = TokenLogprob(self.engine.model.tokenizer.decode(prompt.ids[:1]), 0.0, prompt.ids[0])
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


_DEFAULT_MAX_TOKENS: Final = 16  # of vLLM's SamplingParams
# Fields of `CommonFields` that are outside `sampling_params`.
_TOP_LEVEL: Final = ("model", "stream", "stream_options", "request_id")


@validated(frozen=True, slots=True)
class _GenerateFields:
    """The fields that only `/inference/v1/generate` has."""

    token_ids: list[Annotated[int, Field(ge=0)]]
    sampling_params: dict[str, Any]
    return_token_ids: bool | None = None
    output_mode: Literal["tokens", "text"] = "tokens"

    @property
    def logprobs(self) -> int | None:
        count = self.sampling_params.get("logprobs")
        return count if isinstance(count, int) else None


_GENERATE: Final = TypeAdapter(_GenerateFields)


def _read_generate(body: Body, options: Options) -> tuple[_GenerateFields, CommonFields]:
    fields = read_fields(_GENERATE, body)
    top_level: Body = {key: body[key] for key in _TOP_LEVEL if key in body}
    common = read_common({**fields.sampling_params, **top_level}, options)
    check_logprobs(fields.logprobs, "logprobs", "sample")
    return fields, common


def _generate_prompt(fields: _GenerateFields, common: CommonFields, model: Model, options: Options) -> Prompt:
    if not fields.token_ids:
        raise invalid_value("The prompt must not be empty.", "token_ids")
    model.check_ids(fields.token_ids)
    requested = _DEFAULT_MAX_TOKENS if common.max_tokens is None else common.max_tokens
    max_tokens = max_tokens_after(len(fields.token_ids), requested, common, options)
    return Prompt(fields.token_ids, GenerationOptions(max_tokens, fields.logprobs or 0))


@dataclass(slots=True)
class _Generated(Response):
    fields: _GenerateFields

    def token_events(self, index: int, token: Token) -> list[bytes]:
        first = not any(self.ids)
        self.ids[index] += [token.id] if token.is_sampled else []
        if not self.ids[index]:
            return []
        count = _full_usage(self, [self.ids[index]]) if self.common.continuous_usage else None
        chunk: JsonObject = {"request_id": self.id, "usage": count}
        if first and self.fields.return_token_ids:
            chunk["prompt_token_ids"] = self.fields.token_ids
        choice = self._choice(index, [token], self.ids[index])
        return [event(chunk | {"output_mode": self.fields.output_mode, "choices": [choice]})]

    def closing_events(self) -> list[bytes]:
        if not self.common.include_usage:
            return []
        total = usage(self.prompt_tokens, self.streamed)
        chunk: JsonObject = {"usage": total, "output_mode": self.fields.output_mode, "choices": []}
        return [event({"request_id": self.id, **chunk})]

    def body(self, choices: Sequence[Sequence[Token]]) -> JsonObject:
        return {
            "request_id": self.id,
            "model": self.model_name,
            "created": self.created_s,
            "usage": _full_usage(self, choices),
            "prompt_logprobs": _prompt_logprobs(self, self.prompt, self.common.prompt_logprobs),
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": self.fields.token_ids if self.fields.return_token_ids else None,
            "mm_placeholders": None,
            "metrics": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "output_mode": self.fields.output_mode,
            "choices": [self._choice(index, tokens, [t.id for t in tokens]) for index, tokens in enumerate(choices)],
        }

    def _choice(self, index: int, tokens: Sequence[Token], sampled_ids: Sequence[int]) -> JsonObject:
        """Return a choice with these tokens; experts and weight versions, which need all ids so far, are in its last chunk."""
        last, text = last_of(tokens), "".join(token.text for token in tokens)
        tokens = [token for token in tokens if token.is_sampled]
        ended = last.finish_reason is not None
        experts = self.engine.options.routed_experts and ended
        masks = [sorted({*token.distribution.likely, token.id}) for token in tokens]  # ids that could have been sampled
        choice: JsonObject = {
            "index": index,
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
            "token_ids": [token.id for token in tokens],
            "routed_experts": experts_as_npy([*self.fields.token_ids, *sampled_ids]) if experts else None,
            "sampling_mask": masks if self.engine.options.sampling_mask else None,
            "weight_versions": self.versions.spans(len(sampled_ids)) if ended else None,
        }
        if self.fields.output_mode == "text":
            choice["text"] = text
        choice["logprobs"] = self._logprobs(tokens)
        return choice

    def _logprobs(self, tokens: Sequence[Token]) -> JsonObject | None:
        """Return logprobs by ids or texts; vLLM truncates the alternatives, which begin with the token, to at least one."""
        alternatives = self.fields.logprobs
        if alternatives is None:
            return None
        content = []
        for token in tokens:
            distribution, count = token.distribution, max(alternatives, 1)
            if self.fields.output_mode == "text":
                entries = [_entry(entry, by_id=False) for entry in token.logprobs[:count]]
            else:
                ids = list(dict.fromkeys([token.id, *distribution.top(alternatives)]))[:count]
                entries = [
                    {"token_id": i, "logprob": distribution.logprob(i), "rank": distribution.rank(i)} for i in ids
                ]
            content.append({**entries[0], "top_logprobs": entries})
        return {"content": content}


@validated(frozen=True, slots=True)
class _DerenderFields:
    """The fields of `/v1/chat/completions/derender`: what was sampled, and the chat that it replies to."""

    generate_response: dict[str, Any]
    prompt_token_ids: list[Annotated[int, Field(ge=0)]]
    chat_request: dict[str, Any]

    @property
    def choices(self) -> list[JsonObject]:
        """The choices, each with ids. Raises RequestError."""
        choices = self.generate_response.get("choices")
        if not isinstance(choices, list) or not all(isinstance(c, dict) and c.get("token_ids") for c in choices):
            raise invalid_value("Each choice must have token ids.", "generate_response")
        return choices


_DERENDER: Final = TypeAdapter(_DerenderFields)


class VllmRoutes(EngineRoutes):
    """The routes of one vLLM engine."""

    __slots__ = ()

    owned_by = "tokentape-simulator"
    text_key = "prompt"
    gauge = ("vllm:num_requests_running", "Number of requests in model execution batches.", 'engine="0",')

    @route("POST", "/v1/chat/completions")
    async def _chat(self, request: web.Request) -> web.StreamResponse:
        model, options = self._engine.model, self._engine.options
        body = await read_body(request)
        common = read_common(body, options)
        ids = with_fault(reused_ids(body, model, has_field=options.has_prompt_field), options.faults)
        chat = read_chat(body, has_ids=ids is not None)
        prompt = chat_prompt(chat, common, model, options, ids=ids)
        return await self._respond(request, _Chat(self._engine, common, [prompt], "chatcmpl", chat))

    @route("POST", "/v1/completions")
    async def _completions(self, request: web.Request) -> web.StreamResponse:
        model, options = self._engine.model, self._engine.options
        body = await read_body(request)
        common, completions = read_common(body, options), read_completions(body)
        prompts = text_prompts(completions, common, model, options)
        return await self._respond(request, _Completions(self._engine, common, prompts, "cmpl", completions))

    @route("POST", "/inference/v1/generate")
    async def _generate(self, request: web.Request) -> web.StreamResponse:
        model, options = self._engine.model, self._engine.options
        self._check_scale_out()
        fields, common = _read_generate(await read_body(request), options)
        prompt = _generate_prompt(fields, common, model, options)
        return await self._respond(request, _Generated(self._engine, common, [prompt], "generate-tokens", fields))

    @route("POST", "/v1/chat/completions/derender")
    async def _derender(self, request: web.Request) -> web.Response:
        """Parse ids as a reply: all of them, also special tokens if there is a parser. The finish reason is the given one."""
        self._check_scale_out()
        engine, has_parser = self._engine, self._engine.options.has_parser
        fields, tokenizer = read_fields(_DERENDER, await read_body(request)), engine.model.tokenizer
        chat, choices = read_chat(fields.chat_request, has_ids=True), []
        is_open = tokenizer.decode(fields.prompt_token_ids[-8:]).rstrip().endswith("<think>")
        for index, choice in enumerate(fields.choices):
            engine.model.check_ids(choice["token_ids"])
            text = tokenizer.decode(choice["token_ids"], skip_special=not has_parser)
            reasons = has_parser and (chat.enable_thinking is True or is_open or text.startswith("<think>"))
            parsed = parse(text, reasoning=reasons, tools=has_parser and bool(chat.functions))
            ends = {name: choice.get(name) for name in ("finish_reason", "stop_reason")}
            message = _message(engine, chat, parsed)
            choices.append({"index": index, "message": message, "logprobs": None, **ends, "token_ids": None})
        head = {"id": fields.generate_response.get("request_id"), "object": "chat.completion"}
        sampled = sum(len(choice["token_ids"]) for choice in fields.choices)
        return json_response({**head, "choices": choices, "usage": usage(len(fields.prompt_token_ids), sampled)})

    async def _respond(self, request: web.Request, response: Response) -> web.StreamResponse:
        """Send a response. Its id, which the client can choose, begins with the kind of response."""
        named = request.headers.get("X-Request-Id") or response.common.request_id
        response.id = f"{response.id}-{named or self._engine.new_hex()}"
        return await self._engine.respond(request, response)

    @route("POST", "/tokenize")
    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await self.body_to_tokenize(request)
        tokenizer = self._engine.model.tokenizer
        ids = ids_to_return(body, self._engine.model)
        strings = [tokenizer.decode([i]) for i in ids] if body.get("return_token_strs") else None
        window = self._engine.options.max_model_len
        return json_response({"count": len(ids), "max_model_len": window, "tokens": ids, "token_strs": strings})

    @route("GET", "/weight_info")
    async def _weight_info(self, request: web.Request) -> web.Response:
        return json_response({"weight_version": self._engine.weight_version})

    @route("POST", "/update_weight_version")
    async def _update_weight_version(self, request: web.Request) -> web.Response:
        version = new_version(await read_body(request))
        self._engine.weight_version = version
        return json_response({"success": True, "new_version": version})

    @route("POST", "/pause")
    async def _pause(self, request: web.Request) -> web.Response:
        engine, mode = self._engine, request.query.get("mode", "abort")
        if mode not in {"abort", "wait", "keep"}:
            raise validation_errors(["Input should be 'abort', 'wait' or 'keep'"], "query.mode")
        engine.pause("new" if mode == "wait" else "all")
        if mode != "keep":
            await engine.ended(engine.abort() if mode == "abort" else None)
        return json_response({"status": "paused"})

    @route("POST", "/resume")
    async def _resume(self, request: web.Request) -> web.Response:
        self._engine.pause(None)
        return json_response({"status": "resumed"})

    @route("POST", "/abort_requests")
    async def _abort_requests(self, request: web.Request) -> web.Response:
        ids = (await read_body(request)).get("request_ids") or ()
        aborted = self._engine.abort(lambda response: not ids or response.rid in ids)
        return json_response({"status": "aborted", "aborted": len(ids or aborted)})

    @route("POST", "/inference/v1/abort_requests")
    async def _abort_generate(self, request: web.Request) -> web.Response:
        self._check_scale_out()
        ids = (await read_body(request)).get("request_ids")
        if ids is None:
            return json_response({"detail": "Missing 'request_ids' in request body"}, 400)
        self._engine.abort(lambda response: response.rid in ids)
        return web.Response()

    def _check_scale_out(self) -> None:
        if not self._engine.options.scale_out:
            message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
            raise RequestError(message, status=403, kind="PermissionDeniedError")

    @route("GET", "/version")
    async def _version(self, request: web.Request) -> web.Response:
        return json_response({"version": VERSION})

    @route("GET", "/openapi.json")
    async def _openapi(self, request: web.Request) -> web.Response:
        # Only the fields of chat requests for prompt ids are described, and the routes that parse ids or abort calls.
        options = self._engine.options
        fields: JsonObject = {"kv_transfer_params": {}} | ({"prompt_token_ids": {}} if options.has_prompt_field else {})
        paths: JsonObject = {"/abort_requests": {"post": {}}} if options.lists_aborts else {}
        paths |= {"/v1/chat/completions/derender": {"post": {}}} if options.scale_out else {}
        schemas = {"ChatCompletionRequest": {"properties": fields}}
        return json_response({"paths": paths, "components": {"schemas": schemas}})

    def _model_card(self) -> JsonObject:
        return super()._model_card() | {"permission": []}
