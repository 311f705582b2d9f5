"""The simulated engine: samples all choices of a call in rounds, paces tokens, sends responses; and what responses and routes
share: their bases, usage, server-sent events, weights and experts.

The order of keys and the null values are vLLM 0.32's; SGLang 0.5.23 has the same where it uses these functions. The
simulated model never changes with the label of the weights, and has no experts.
"""

import asyncio
from base64 import b64encode
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from struct import pack
from typing import Any, ClassVar, Final, TypeVar

import orjson
from aiohttp import web

from proxy.clock import Clock
from proxy.simulator.errors import RequestError, invalid_json, missing_field, validation_errors
from proxy.simulator.model import Model, Token
from proxy.simulator.options import Options
from proxy.simulator.parser import Delta, ParsedReply, StreamParser, parse
from proxy.simulator.prompts import Prompt
from proxy.simulator.requests import Body, ChatRequest, CommonFields, ids_to_detokenize
from proxy.simulator.sampler import Prefix, mix, prefix_from

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
    """One simulated engine: model, options, label of the weights, and the number of running calls."""

    __slots__ = ("aborted", "aborts", "clock", "model", "options", "running", "started_s", "weight_version")

    def __init__(self, options: Options, clock: Clock, model: Model) -> None:
        self.options = options
        self.clock = clock
        self.model = model
        self.weight_version = options.weight_version  # the label of the current weights
        self.aborts = 0  # how many times all running calls have been aborted
        self.running = 0
        self.aborted: dict[str, bool] = {}  # by the id of a running call that can be aborted
        self.started_s = int(clock.now())

    def new_hex(self, count: int = 8) -> str:
        """Return that many random bytes as hex digits, for ids."""
        return self.clock.entropy(count).hex()

    async def respond(self, request: web.Request, response: "Response") -> web.StreamResponse:
        """Sample the choices and send the response."""
        rounds = self.rounds(response)
        rid = response.rid
        self.running += 1
        if rid is not None:
            self.aborted[rid] = False
        try:
            if response.common.stream:
                return await self._stream(request, response, rounds)
            choices: dict[int, list[Token]] = defaultdict(list)
            for count, tokens in enumerate(rounds):
                await self._pause(request, count)
                for index, token in tokens:
                    choices[index].append(token)
            sampled = [choices[index] for index in sorted(choices)]
            if response.scores_prompt:  # in a thread: it takes about 10 µs per prompt token
                return json_response(await asyncio.to_thread(response.body, sampled))
            return json_response(response.body(sampled))
        except ConnectionResetError:
            return web.Response()  # the client has disconnected, which ends sampling, as in vLLM
        finally:
            self.running -= 1
            if rid is not None:
                self.aborted.pop(rid, None)

    def rounds(self, response: "Response") -> Iterator[Round]:
        """Yield rounds until all choices have ended; record which weights sample which tokens."""
        common = response.common
        seed = common.seed if common.seed is not None else self.options.seed
        if seed is None:
            seed = int.from_bytes(self.clock.entropy(8), "big")
        choices = [
            # As in vLLM, choice i of seed s equals the only choice of seed s + i.
            self.model.generate(prefix_from(prompt.ids), common, prompt.options, seed + number)
            for prompt in response.prompts
            for number in range(common.choices)
        ]
        open_choices = dict(enumerate(choices))
        aborts, rid, version = self.aborts, response.rid, None
        position = 0
        while open_choices:
            if version != self.weight_version:
                version = self.weight_version
                response.versions.record(position, version)
            tokens = [(index, next(choice)) for index, choice in open_choices.items()]
            if self.aborts != aborts or (rid is not None and self.aborted.get(rid)):
                tokens = [(index, replace(token, finish_reason="abort", stop_reason=None)) for index, token in tokens]
            for index, token in tokens:
                if token.finish_reason is not None:
                    del open_choices[index]
            position += 1
            yield tokens

    async def _stream(self, request: web.Request, response: "Response", rounds: Iterator[Round]) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        pending = response.opening_events()
        await stream.prepare(request)
        disconnect_after = {prompt.options.disconnect_after for prompt in response.prompts} - {None}
        for count, tokens in enumerate(rounds):
            if count in disconnect_after:
                await stream.write(b"".join(pending))
                request.transport.close()  # type: ignore[union-attr] # still connected: the write would have raised
            if pending and (self.options.token_delay_s or len(pending) >= _CHUNKS_PER_WRITE):
                await stream.write(b"".join(pending))
                pending.clear()
            await self._pause(request, count)
            for index, token in tokens:
                pending += response.token_events(index, token)
        await stream.write(b"".join([*pending, *response.closing_events(), DONE]))
        await stream.write_eof()
        return stream

    async def _pause(self, request: web.Request, count: int) -> None:
        """Wait for the delay of a token; raise ConnectionResetError if the client has disconnected."""
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
        return None

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
        is_open, blocks = self.prompt.options.reasoning_open, self.prompt.call_blocks
        self._parsers = [
            StreamParser(reasoning=self.reasons, tools=self.calls, reasoning_open=is_open, blocks=blocks)
            for _ in self.ids
        ]

    @property
    def reasons(self) -> bool:
        """Whether replies begin with reasoning that is parsed."""
        return self.engine.options.has_parser and self.prompt.options.reasoning

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
        self.ids[index].append(token.id)
        delta = self._parsers[index].feed(token.text, ended=token.finish_reason is not None)
        if delta.calls:
            self.with_calls.add(index)
        return delta


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


def gauge_response(name: str, labels: str, help_text: str, value: float) -> web.Response:
    """Return one gauge in the text format of Prometheus."""
    text = f"# HELP {name} {help_text}\n# TYPE {name} gauge\n{name}{{{labels}}} {value:.1f}\n"
    return web.Response(text=text)


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
