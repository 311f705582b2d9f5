"""The simulated engine: samples all choices of a call in rounds, paces tokens, sends responses; and what responses and routes
share: their bases, usage, server-sent events, weights and experts.

The order of keys and the null values are vLLM 0.32's; SGLang 0.5.23 has the same where it uses these functions. The
simulated model never changes with the label of the weights, and has no experts.
"""

import asyncio
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from struct import pack
from typing import Any, ClassVar, Final, Literal, NoReturn, TypeVar

import orjson
from aiohttp import web

from proxy.clock import Clock
from proxy.simulator.errors import RequestError, invalid_json, missing_field, validation_errors
from proxy.simulator.model import ABORTED, Abort, Model, Token
from proxy.simulator.options import Options
from proxy.simulator.parser import Delta, ParsedReply, StreamParser, parse
from proxy.simulator.prompts import Prompt
from proxy.simulator.requests import Body, ChatRequest, CommonFields, ids_to_detokenize
from proxy.simulator.sampler import Prefix, mix
from proxy.simulator.script import Cut

JsonObject = dict[str, Any]

LAYERS: Final = 2
EXPERTS_PER_TOKEN: Final = 2
_EXPERTS: Final = 8
DONE: Final = b"data: [DONE]\n\n"
FINGERPRINT: Final = "vllm-0.32.0-simulator"
_CHUNKS_PER_WRITE: Final = 32  # without a delay; a socket write costs more than building a chunk
_ROUNDS_PER_YIELD: Final = 256  # without a delay, other calls run after this many rounds

Round = list[tuple[int, Token]]
"""One token for each choice that is still open, with the choice's index."""


@dataclass(slots=True)
class WeightVersions:
    """The weight versions of one call.

    All choices of a call sample one token per round, so a position has the same version in every choice.
    """

    _starts: list[tuple[int, str]] = field(default_factory=list)

    def record(self, position: int, version: str) -> None:
        """Record that this version, another one than before, samples the tokens from this position on."""
        self._starts.append((position, version))

    def spans(self, length: int) -> list[dict[str, Any]]:
        """Return `weight_versions` of a choice of this length: spans of output positions, in both engines' form."""
        ends: Sequence[int] = [start for start, _ in self._starts[1:]] + [length]
        return [
            {"version": version, "start": start, "end": min(end, length)}
            for (start, version), end in zip(self._starts, ends, strict=True)
            if start < length
        ]


class Engine:
    """One simulated engine: model, options, label of the weights, and the running calls."""

    __slots__ = ("_calls", "_changed", "clock", "model", "options", "paused", "started_s", "weight_version")

    def __init__(self, options: Options, clock: Clock, model: Model) -> None:
        self.options = options
        self.clock = clock
        self.model = model
        self.weight_version = options.weight_version  # the label of the current weights
        self.paused: Literal["new", "all"] | None = None  # which calls wait
        self._calls: dict[int, Response] = {}  # that are running
        self._changed = asyncio.Event()
        self.started_s = int(clock.now())

    def new_hex(self, count: int = 8) -> str:
        """Return that many random bytes as hex digits, for ids."""
        return self.clock.entropy(count).hex()

    async def respond(self, request: web.Request, response: "Response") -> web.StreamResponse:
        """Sample the choices and send the response."""
        cuts = self.options.faults.cuts
        response.cut = (
            cuts.popleft() if cuts else next((p.options.cut for p in response.prompts if p.options.cut), None)
        )
        self._calls[id(response)] = response
        try:
            await self._permission(request, response)
            response.has_begun = True
            rounds = self.rounds(response)
            if response.common.stream:
                return await self._stream(request, response, rounds)
            sampled = await self._sampled(request, response, rounds)
            if response.scores_prompt:  # in a thread: it takes about 10 µs per prompt token
                return json_response(await asyncio.to_thread(response.body, sampled))
            return json_response(response.body(sampled))
        except ConnectionResetError:
            # The client has disconnected, which ends sampling, as in vLLM; or a cut disconnects.
            if request.transport is not None:
                request.transport.close()
            return web.Response()
        finally:
            del self._calls[id(response)]
            self._notify()

    @property
    def running(self) -> int:
        """The number of running calls, with those that wait."""
        return len(self._calls)

    def abort(self, selects: Callable[["Response"], bool] = lambda _: True) -> Sequence["Response"]:
        """Abort the running calls that `selects` accepts, and return them.

        SGLang ends a running call with its next token, and no call that waits for the end of a pause (0.5.23); vLLM ends all at
        once (0.32, v1/engine/output_processor.py, `abort_requests`).
        """
        is_sglang = self.options.shape == "sglang"
        found = [call for call in self._calls.values() if selects(call) and (call.has_begun or not is_sglang)]
        for response in found:
            response.abort = "over" if is_sglang else "instead"
        self._notify()
        return found

    def pause(self, which: Literal["new", "all"] | None) -> None:
        """Let new calls or all calls wait; with None they continue."""
        self.paused = which
        self._notify()

    async def ended(self, calls: Sequence["Response"] | None = None) -> None:
        """Wait until these calls have ended; by default all that have begun."""
        calls = [call for call in self._calls.values() if call.has_begun] if calls is None else calls
        while any(id(call) in self._calls for call in calls):
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _permission(self, request: web.Request, response: "Response") -> None:
        """Wait while the engine is paused for this call; raise ConnectionResetError if the client has disconnected."""
        while (self.paused == "all" or (self.paused and not response.has_begun)) and response.abort is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _HANG_POLL_S)
            if request.transport is None or request.transport.is_closing():
                raise ConnectionResetError

    def rounds(self, response: "Response") -> Iterator[Round]:
        """Yield rounds until all choices have ended; record which weights sample which tokens."""
        common = response.common
        seed = common.seed if common.seed is not None else self.options.seed
        options = [prompt.options for prompt in response.prompts]
        if seed is None:
            seed = int.from_bytes(self.clock.entropy(8), "big")
            if common.temperature != 0:  # no reply can be continued
                options = [replace(option, starts=()) for option in options]
        choices = [
            # As in vLLM, choice i of seed s equals the only choice of seed s + i.
            self.model.generate(prompt.ids, common, option, seed + number, lambda: response.abort)
            for prompt, option in zip(response.prompts, options, strict=True)
            for number in range(common.choices)
        ]
        open_choices = dict(enumerate(choices))
        version = None
        position = 0
        while open_choices:
            if version != self.weight_version:
                version = self.weight_version
                response.versions.record(position, version)
            if response.cut is not None and response.cut.by == "abort" and position + 1 >= response.cut.after:
                response.abort = (
                    ("over" if self.options.shape == "sglang" else "with") if response.cut.after else "instead"
                )
            tokens = [(index, next(choice)) for index, choice in open_choices.items()]
            for index, token in tokens:
                if token.finish_reason is not None:
                    del open_choices[index]
            position += 1
            yield tokens

    async def _sampled(self, request: web.Request, response: "Response", rounds: Iterator[Round]) -> list[list[Token]]:
        sampled: list[list[Token]] = [[] for _ in response.ids]
        for count, tokens in enumerate(rounds):
            if response.is_lost(count):
                raise ConnectionResetError
            await self._pause(request, response, count)
            for index, token in tokens:
                append(sampled[index], token)
        if response.is_lost(max(map(len, sampled))):
            raise ConnectionResetError
        return sampled

    async def _stream(self, request: web.Request, response: "Response", rounds: Iterator[Round]) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        pending = response.opening_events()
        await stream.prepare(request)
        count = -1
        for count, tokens in enumerate(rounds):
            if response.is_lost(count):
                events = [event for index, token in tokens for event in response.token_events(index, token)]
                await self._lose(stream, response, pending, events)
            if pending and (self.options.token_delay_s or len(pending) >= _CHUNKS_PER_WRITE):
                await stream.write(b"".join(pending))
                pending.clear()
            await self._pause(request, response, count)
            for index, token in tokens:
                pending += response.token_events(index, token)
        closing = [*response.closing_events(), DONE]
        if response.is_lost(count + 1):
            await self._lose(stream, response, pending, closing)
        await stream.write(b"".join([*pending, *closing]))
        await stream.write_eof()
        return stream

    async def _lose(
        self, stream: web.StreamResponse, response: "Response", pending: Sequence[bytes], events: Sequence[bytes]
    ) -> NoReturn:
        """Write the pending events, and half of the next event if it is to be torn; then disconnect."""
        torn = b"".join(events[:1]) if response.cut is not None and response.cut.by == "torn" else b""
        await stream.write(b"".join(pending) + torn[: len(torn) // 2])
        raise ConnectionResetError

    async def _pause(self, request: web.Request, response: "Response", count: int) -> None:
        """Wait for the delay of a token, and while paused; raise ConnectionResetError if the client has disconnected."""
        await self._permission(request, response)
        if self.options.token_delay_s:
            await asyncio.sleep(self.options.token_delay_s)
        elif count % _ROUNDS_PER_YIELD == _ROUNDS_PER_YIELD - 1:
            await asyncio.sleep(0)
        if request.transport is None or request.transport.is_closing():
            raise ConnectionResetError


@dataclass(slots=True)
class Response:
    """A response that an engine builds in full, or streams token by token. Choice `i` belongs to prompt `i // n`."""

    engine: Engine
    common: CommonFields
    prompts: Sequence[Prompt]
    id: str
    created_s: int = field(init=False)  # Unix seconds
    model_name: str = field(init=False)  # SGLang 0.5.23 names a model that was not requested `default`
    ids: list[list[int]] = field(init=False)  # of the tokens of each choice that are streamed
    versions: WeightVersions = field(init=False, default_factory=WeightVersions)
    has_begun: bool = field(init=False, default=False)
    abort: Abort | None = field(init=False, default=None)  # how it ends if it is aborted
    cut: Cut | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        options = self.engine.options
        self.created_s = int(self.engine.clock.now())
        self.model_name = self.common.model or ("default" if options.shape == "sglang" else options.model)
        self.ids = [[] for _ in range(len(self.prompts) * self.common.choices)]

    @property
    def scores_prompt(self) -> bool:
        """Whether the body has logprobs of the prompt."""
        return self.common.prompt_logprobs is not None

    @property
    def rid(self) -> str | None:
        """The id by which the call can be aborted."""
        return self.id

    def is_lost(self, count: int) -> bool:
        """Return whether the connection is lost after so many tokens."""
        return self.cut is not None and self.cut.by != "abort" and count == self.cut.after

    @property
    def prompt(self) -> Prompt:
        """The first prompt."""
        return self.prompts[0]

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of all prompts."""
        return sum(len(prompt.ids) for prompt in self.prompts)

    @property
    def streamed(self) -> int:
        """The number of tokens that are streamed."""
        return sum(map(len, self.ids))

    def prompt_of(self, index: int) -> Prompt:
        """Return the prompt of a choice."""
        return self.prompts[index // self.common.choices]

    def head(self, kind: str) -> JsonObject:
        """Return the first keys of a response; `kind` is its `object`."""
        return {"id": self.id, "object": kind, "created": self.created_s, "model": self.model_name}

    def opening_events(self) -> list[bytes]:
        """Return the events before the first token."""
        return []

    def token_events(self, index: int, token: Token) -> list[bytes]:
        """Return the events of one token of one choice; none if the engine sends none."""
        raise NotImplementedError

    def closing_events(self) -> list[bytes]:
        """Return the events after the last token."""
        return []

    def body(self, choices: Sequence[Sequence[Token]]) -> JsonObject | list[JsonObject]:
        """Return the body of the response that is not streamed."""
        raise NotImplementedError


@dataclass(slots=True)
class ChatReply(Response):
    """A chat completion of either engine: the parsers of its choices."""

    chat: ChatRequest
    with_calls: set[int] = field(init=False, default_factory=set)  # the streamed choices that have a tool call
    _parsers: list[StreamParser] = field(init=False)

    def __post_init__(self) -> None:
        Response.__post_init__(self)
        is_open, blocks = self.prompt.reasoning_open, self.prompt.call_blocks
        # The streamed parser of vLLM 0.32 looks for the end of the reasoning in the prompt; its other one and SGLang's do not.
        reasons = self.reasons and not (self.prompt.reasoning_closed and self.engine.options.shape == "vllm")
        self._parsers = [
            StreamParser(reasoning=reasons, tools=self.calls, reasoning_open=is_open, blocks=blocks) for _ in self.ids
        ]

    @property
    def separates(self) -> bool:
        """Whether the client wants reasoning apart from content."""
        return True

    @property
    def reasons(self) -> bool:
        """Whether replies begin with reasoning that is parsed."""
        return self.engine.options.has_parser and self.prompt.options.reasoning and self.separates

    @property
    def calls(self) -> bool:
        """Whether tool calls are parsed."""
        return self.engine.options.has_parser and bool(self.chat.functions)

    def parsed(self, tokens: Sequence[Token]) -> ParsedReply:
        """Return a complete reply."""
        text = "".join(token.text for token in tokens)
        return parse(text, reasoning=self.reasons, tools=self.calls, blocks=self.prompt.call_blocks)

    def feed(self, index: int, token: Token) -> Delta:
        """Return what a token adds to a streamed reply."""
        self.ids[index] += [token.id] if token.is_sampled else []
        # What the parsers hold back of a reply that is aborted is lost (vLLM 0.32, SGLang 0.5.23).
        delta = self._parsers[index].feed(token.text, ended=token.finish_reason not in {None, "abort"})
        if delta.calls:
            self.with_calls.add(index)
        return delta


def append(tokens: list[Token], token: Token) -> None:
    """Add a token to a choice; what is no token ends the last one."""
    if token.is_sampled:
        tokens.append(token)
    elif tokens:
        tokens[-1] = replace(tokens[-1], text=tokens[-1].text + token.text, finish_reason=token.finish_reason)


def last_of(tokens: Sequence[Token]) -> Token:
    """Return the last token of a choice, which has no tokens if it was aborted before the first."""
    return tokens[-1] if tokens else ABORTED


async def read_body(request: web.Request) -> Body:
    """Return the JSON object in a request's body; raise RequestError for any other body."""
    if request.content_type != "application/json":
        raise validation_errors(["Unsupported Media Type: Only 'application/json' is allowed"], None)
    raw = await request.read()
    if not raw:
        raise missing_field("body")
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise invalid_json(error) from error
    if not isinstance(body, dict):
        raise validation_errors(["The body must be a JSON object."], "body")
    return body


def json_response(payload: JsonObject | list[JsonObject], status: int = 200) -> web.Response:
    """Return a response with a JSON body."""
    return web.Response(body=orjson.dumps(payload), status=status, content_type="application/json")


VERSION: Final = "simulator-0.1"
Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])
_HANG_POLL_S: Final = 0.05  # how soon a request that hangs notices that its client has disconnected


def route(method: str, *paths: str) -> Callable[[Handler], Handler]:
    """Declare the paths that a method of `EngineRoutes` handles."""

    def declared(handler: Handler) -> Handler:
        handler.__dict__["routes"] = [(method, path) for path in paths]
        return handler

    return declared


class EngineRoutes:
    """The base of an engine's routes."""

    __slots__ = ("_engine",)

    owned_by: ClassVar[str]  # in the model list
    text_key: ClassVar[str]  # of the text in the response of `/detokenize`
    skips_special_tokens: ClassVar[bool] = False  # by default
    gauge: ClassVar[tuple[str, str, str]]  # of running requests: its name, its help, and labels before the model's

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def table(self) -> list[web.RouteDef]:
        """Return all routes."""
        return [
            web.route(method, path, getattr(self, name))
            for name in dir(type(self))
            for method, path in getattr(getattr(type(self), name), "routes", ())
        ]

    @route("POST", "/detokenize")
    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await read_body(request)
        ids = ids_to_detokenize(body)
        self._engine.model.check_ids(ids)
        skips = self.skips_special_tokens and body.get("skip_special_tokens", True) is True
        return json_response({self.text_key: self._engine.model.tokenizer.decode(ids, skip_special=skips)})

    async def body_to_tokenize(self, request: web.Request) -> Body:
        """Return the body of a `/tokenize` request, unless the endpoint has a fault."""
        body = await read_body(request)
        fault = self._engine.options.faults.tokenize
        while fault == "hangs" and request.transport is not None and not request.transport.is_closing():  # noqa: ASYNC110
            await asyncio.sleep(_HANG_POLL_S)
        if isinstance(fault, int):
            raise RequestError("The tokenizer endpoint has a fault.", status=fault, kind="InternalServerError")
        return body

    @route("GET", "/v1/models")
    async def _models(self, request: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [self._model_card()]})

    @route("GET", "/health")
    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    @route("GET", "/metrics")
    async def _metrics(self, request: web.Request) -> web.Response:
        # The only gauge that shows whether a call was aborted.
        name, help_text, labels = self.gauge
        sample = f'{name}{{{labels}model_name="{self._engine.options.model}"}} {self._engine.running:.1f}'
        return web.Response(text=f"# HELP {name} {help_text}\n# TYPE {name} gauge\n{sample}\n")

    def _model_card(self) -> JsonObject:
        options = self._engine.options
        return {
            "id": options.model,
            "object": "model",
            "created": self._engine.started_s,
            "owned_by": self.owned_by,
            "root": options.model,
            "parent": None,
            "max_model_len": options.max_model_len,
        }


def experts_as_npy(ids: Sequence[int]) -> str:
    """Return routed experts as vLLM 0.32 does: base64 of a .npy array (tokens - 1, layers, experts per token)."""
    shape = (max(len(ids) - 1, 0), LAYERS, EXPERTS_PER_TOKEN)
    header = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}, }}"
    padded = header.ljust(-(-(10 + len(header) + 1) // 64) * 64 - 11) + "\n"  # the array begins at a multiple of 64
    return b64encode(b"\x93NUMPY\x01\x00" + pack("<H", len(padded)) + padded.encode() + _int32(ids)).decode()


def experts_as_int32(ids: Sequence[int], start: int = 0) -> str:
    """Return routed experts as SGLang 0.5.23 does: base64 of int32 numbers in the same order, without a header."""
    raw = _int32(ids)
    return b64encode(raw[start * len(raw) // max(1, len(ids) - 1) :]).decode()


def _int32(ids: Sequence[int]) -> bytes:
    """Return the experts of each token but the last, which is sampled but never fed to the model."""
    prefix = Prefix()
    experts: list[int] = []
    for token in ids[:-1]:
        prefix = prefix.with_token(token)
        bits = mix(prefix.hash)
        experts += [(bits >> 3 * slot) % _EXPERTS for slot in range(LAYERS * EXPERTS_PER_TOKEN)]
    return pack(f"<{len(experts)}i", *experts)


def event(payload: JsonObject) -> bytes:
    """Return a chunk as a server-sent event."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def usage(prompt_tokens: int, completion_tokens: int, **details: Any) -> JsonObject:
    """Return `usage`; `details` are the keys that only some responses have."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        **details,
    }
