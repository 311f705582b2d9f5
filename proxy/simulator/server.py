"""The simulated engine as an aiohttp application.

Holds routes, bodies in and answers out, and the pace of tokens; what is answered is made by `chat` and
`completions`. It is the only file of the package that awaits.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Final

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from proxy.clock import Clock, SystemClock
from proxy.simulator.chat import ChatReply, chat_prompt, rendered
from proxy.simulator.completions import CompletionsReply, text_prompts
from proxy.simulator.faults import RefusedError, bad_value, missing, not_json, not_readable
from proxy.simulator.generation import Token
from proxy.simulator.model import Model, load_model
from proxy.simulator.options import Options
from proxy.simulator.requests import Body, Common, read_chat, read_common, read_completions
from proxy.simulator.wire import DONE, Answer, Head, Reply, event

VERSION: Final = "simulator-0.1"
_CHUNKS_A_WRITE: Final = 32  # without a delay; a socket write costs more than making a chunk
_ROUNDS_A_TURN: Final = 256  # after so many tokens without a pause, other calls get their turn
_LARGEST_BODY_BYTES: Final = 64 << 20

Round = list[tuple[int, Token]]

_Making = Callable[[Body, Common, Head], Reply]
"""What makes a reply of a request's body."""


def make_engine(options: Options, clock: Clock | None = None) -> web.Application:
    """A simulated engine, ready to be served."""
    engine = _Engine(options, clock or SystemClock(), load_model())
    app = web.Application(middlewares=[_answer_faults], client_max_size=_LARGEST_BODY_BYTES)
    app.add_routes(
        [
            web.post("/v1/chat/completions", engine.chat),
            web.post("/v1/completions", engine.completions),
            web.post("/tokenize", engine.tokenize),
            web.post("/detokenize", engine.detokenize),
            web.get("/v1/models", engine.models),
            web.get("/version", engine.version),
            web.get("/health", engine.health),
            web.get("/ping", engine.health),
            web.get("/metrics", engine.metrics),
        ]
    )
    return app


class _Engine:
    """The routes of one engine, and how many calls it is at."""

    __slots__ = ("_clock", "_model", "_options", "_running", "_started_s")

    def __init__(self, options: Options, clock: Clock, model: Model) -> None:
        self._options = options
        self._clock = clock
        self._model = model
        self._running = 0
        self._started_s = int(clock.now())

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/chat/completions`."""
        return await self._answer(request, "chatcmpl", self._make_chat)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`."""
        return await self._answer(request, "cmpl", self._make_completions)

    async def tokenize(self, request: web.Request) -> web.Response:
        """`POST /tokenize`: the ids of a prompt or of rendered messages."""
        body = await _read_body(request)
        if "messages" in body:
            text = rendered(read_chat(body))
        elif isinstance(body.get("prompt"), str):
            text = body["prompt"]
        else:
            raise bad_value("Give a prompt that is a string, or messages.", "prompt")
        ids = self._model.tokenizer.encode(text)
        strings = [self._model.tokenizer.decode([i]) for i in ids] if body.get("return_token_strs") else None
        window = self._options.max_model_len
        return _json({"count": len(ids), "max_model_len": window, "tokens": ids, "token_strs": strings})

    async def detokenize(self, request: web.Request) -> web.Response:
        """`POST /detokenize`: the text of ids."""
        ids = (await _read_body(request)).get("tokens")
        if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
            raise bad_value("Give tokens that are a list of ids.", "tokens")
        self._model.check_ids(ids)
        return _json({"prompt": self._model.tokenizer.decode(ids)})

    async def models(self, request: web.Request) -> web.Response:
        """`GET /v1/models`."""
        model = {
            "id": self._options.model,
            "object": "model",
            "created": self._started_s,
            "owned_by": "tokentape-simulator",
            "root": self._options.model,
            "parent": None,
            "max_model_len": self._options.max_model_len,
            "permission": [],
        }
        return _json({"object": "list", "data": [model]})

    async def version(self, request: web.Request) -> web.Response:
        """`GET /version`: says honestly that this is no vLLM."""
        return _json({"version": VERSION})

    async def health(self, request: web.Request) -> web.Response:
        """`GET /health`."""
        return web.Response()

    async def metrics(self, request: web.Request) -> web.Response:
        """`GET /metrics`: the one gauge that tells whether a call was aborted."""
        name = "vllm:num_requests_running"
        text = (
            f"# HELP {name} Number of requests in model execution batches.\n# TYPE {name} gauge\n"
            f'{name}{{engine="0",model_name="{self._options.model}"}} {self._running:.1f}\n'
        )
        return web.Response(text=text)

    def _make_chat(self, body: Body, common: Common, head: Head) -> Reply:
        chat = read_chat(body)
        prompt = chat_prompt(chat, common, self._model, self._options)
        return ChatReply(chat, common, self._model, head, prompt, lambda: f"chatcmpl-tool-{self._hex()}")

    def _make_completions(self, body: Body, common: Common, head: Head) -> Reply:
        completions = read_completions(body)
        prompts = text_prompts(completions, common, self._model, self._options)
        return CompletionsReply(completions, common, self._model, head, prompts)

    async def _answer(self, request: web.Request, kind: str, making: _Making) -> web.StreamResponse:
        body = await _read_body(request)
        common = read_common(body, self._options)
        name = request.headers.get("X-Request-Id") or common.request_id or self._hex()
        model = common.model or self._options.model
        head = Head(f"{kind}-{name}", int(self._clock.now()), model, self._options.fingerprint)
        reply = making(body, common, head)
        self._running += 1
        try:
            if common.stream:
                return await self._stream(request, reply, self._rounds(reply, common))
            return await self._whole(request, reply, self._rounds(reply, common))
        except ConnectionResetError:
            return web.Response()  # the client left: nobody reads it, and sampling has ended as in vLLM
        finally:
            self._running -= 1

    def _rounds(self, reply: Reply, common: Common) -> Iterator[Round]:
        """The tokens of all choices, in rounds of one for each that is still open."""
        seed = common.seed if common.seed is not None else self._options.seed
        if seed is None:
            seed = int.from_bytes(self._clock.entropy(8), "big")
        choices = [
            # As in vLLM, sample i of seed s is the only sample of seed s + i.
            self._model.reply(prefix, common, manner, seed + sample)
            for prefix, manner in reply.prompts
            for sample in range(common.samples)
        ]
        open_choices = dict(enumerate(choices))
        while open_choices:
            told = [(index, next(tokens)) for index, tokens in open_choices.items()]
            for index, token in told:
                if token.finish_reason is not None:
                    del open_choices[index]
            yield told

    async def _stream(self, request: web.Request, reply: Reply, rounds: Iterator[Round]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        pending = [event(chunk) for chunk in reply.opening()]
        await response.prepare(request)
        for count, told in enumerate(rounds):
            if self._options.token_delay_s or len(pending) >= _CHUNKS_A_WRITE:
                await response.write(b"".join(pending))
                pending.clear()
            await self._pause(request, count)
            chunks = [reply.chunk(index, token) for index, token in told]
            pending += [event(chunk) for chunk in chunks if chunk is not None]
        pending += [event(chunk) for chunk in reply.closing()]
        await response.write(b"".join([*pending, DONE]))
        await response.write_eof()
        return response

    async def _whole(self, request: web.Request, reply: Reply, rounds: Iterator[Round]) -> web.Response:
        choices: dict[int, list[Token]] = defaultdict(list)
        for count, told in enumerate(rounds):
            await self._pause(request, count)
            for index, token in told:
                choices[index].append(token)
        return _json(reply.whole([choices[index] for index in sorted(choices)]))

    async def _pause(self, request: web.Request, count: int) -> None:
        """Wait as long as a token takes; raises `ConnectionResetError` if the client left meanwhile."""
        if self._options.token_delay_s:
            await asyncio.sleep(self._options.token_delay_s)
        elif count % _ROUNDS_A_TURN == _ROUNDS_A_TURN - 1:
            await asyncio.sleep(0)
        if request.transport is None or request.transport.is_closing():
            raise ConnectionResetError

    def _hex(self) -> str:
        return self._clock.entropy(8).hex()


async def _read_body(request: web.Request) -> Body:
    """The JSON object that a request brings; refuses anything else in vLLM's words."""
    if request.content_type != "application/json":
        raise not_readable(["Unsupported Media Type: Only 'application/json' is allowed"], None)
    raw = await request.read()
    if not raw:
        raise missing("body")
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as fault:
        raise not_json(fault) from fault
    if not isinstance(body, dict):
        raise not_readable(["The body must be a JSON object."], "body")
    return body


def _json(answer: Answer, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(answer), status=status, content_type="application/json")


@web.middleware
async def _answer_faults(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refusals, unknown routes and wrong methods in vLLM's shapes."""
    try:
        return await handler(request)
    except RefusedError as refusal:
        return _json(refusal.body, refusal.status)
    except web.HTTPMethodNotAllowed as fault:
        response = _json({"detail": "Method Not Allowed"}, 405)
        response.headers["Allow"] = ", ".join(sorted(fault.allowed_methods))
        return response
    except web.HTTPException as fault:
        return _json({"detail": fault.reason}, fault.status)
