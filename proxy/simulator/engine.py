"""The simulated engine: reads bodies, samples all choices of a call in rounds, paces tokens, sends responses, and the
routes that both engines have.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar, Final, TypeVar

import orjson
from aiohttp import web

from proxy.clock import Clock
from proxy.simulator.errors import RequestError, invalid_json, missing_field, validation_errors
from proxy.simulator.model import Model, Token
from proxy.simulator.options import Options
from proxy.simulator.requests import Body, CommonFields, ids_to_detokenize
from proxy.simulator.sampler import prefix_from
from proxy.simulator.wire import DONE, Head, JsonObject, Response, Weights, WeightVersions

_CHUNKS_PER_WRITE: Final = 32  # without a delay; a socket write costs more than building a chunk
_ROUNDS_PER_YIELD: Final = 256  # without a delay, other calls run after this many rounds

Round = list[tuple[int, Token]]
"""One token for each choice that is still open, with the choice's index."""


class Engine:
    """One simulated engine: model, options, label of the weights, and the number of running calls."""

    __slots__ = ("aborted", "clock", "model", "options", "running", "started_s", "weights")

    def __init__(self, options: Options, clock: Clock, model: Model) -> None:
        self.options = options
        self.clock = clock
        self.model = model
        self.weights = Weights(options.weight_version)
        self.running = 0
        self.aborted: dict[str, bool] = {}  # by the id of a running call that can be aborted
        self.started_s = int(clock.now())

    @property
    def served(self) -> tuple[Model, Options]:
        """The model and the options, with which responses begin."""
        return self.model, self.options

    def new_hex(self) -> str:
        """Return 16 random hex digits, for ids."""
        return self.clock.entropy(8).hex()

    def head(self, response_id: str, common: CommonFields) -> Head:
        """Return the head of a response that is created now. SGLang 0.5.23 names a model that was not requested `default`."""
        model = common.model or ("default" if self.options.shape == "sglang" else self.options.model)
        return Head(response_id, int(self.clock.now()), model)

    async def respond(
        self,
        request: web.Request,
        common: CommonFields,
        response: Response,
        versions: WeightVersions | None = None,
        *,
        scores_prompt: bool = False,
        rid: str | None = None,
    ) -> web.StreamResponse:
        """Sample the choices and send the response; record in `versions` which weights sample which tokens.

        `rid`: the id by which the call can be aborted. With `scores_prompt` the body is built in a thread, because scoring
        takes about 10 µs per prompt token.
        """
        rounds = self._rounds(response, common, versions, rid)
        self.running += 1
        if rid is not None:
            self.aborted[rid] = False
        try:
            if common.stream:
                return await self._stream(request, response, rounds)
            choices = await self._sample(request, rounds)
            if scores_prompt:
                return json_response(await asyncio.to_thread(response.body, choices))
            return json_response(response.body(choices))
        except ConnectionResetError:
            return web.Response()  # the client has disconnected, which ends sampling, as in vLLM
        finally:
            self.running -= 1
            if rid is not None:
                self.aborted.pop(rid, None)

    def _rounds(
        self, response: Response, common: CommonFields, versions: WeightVersions | None, rid: str | None
    ) -> Iterator[Round]:
        """Yield rounds until all choices have ended."""
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
        aborts = self.weights.aborts
        position = 0
        while open_choices:
            if versions is not None:
                versions.record(position, self.weights.version)
            tokens = [(index, next(choice)) for index, choice in open_choices.items()]
            if self.weights.aborts != aborts or (rid is not None and self.aborted.get(rid)):
                tokens = [(index, replace(token, finish_reason="abort", stop_reason=None)) for index, token in tokens]
            for index, token in tokens:
                if token.finish_reason is not None:
                    del open_choices[index]
            position += 1
            yield tokens

    async def _stream(self, request: web.Request, response: Response, rounds: Iterator[Round]) -> web.StreamResponse:
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

    async def _sample(self, request: web.Request, rounds: Iterator[Round]) -> list[list[Token]]:
        """Return all tokens of each choice."""
        choices: dict[int, list[Token]] = defaultdict(list)
        for count, tokens in enumerate(rounds):
            await self._pause(request, count)
            for index, token in tokens:
                choices[index].append(token)
        return [choices[index] for index in sorted(choices)]

    async def _pause(self, request: web.Request, count: int) -> None:
        """Wait for the delay of a token; raise ConnectionResetError if the client has disconnected."""
        if self.options.token_delay_s:
            await asyncio.sleep(self.options.token_delay_s)
        elif count % _ROUNDS_PER_YIELD == _ROUNDS_PER_YIELD - 1:
            await asyncio.sleep(0)
        if request.transport is None or request.transport.is_closing():
            raise ConnectionResetError


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
