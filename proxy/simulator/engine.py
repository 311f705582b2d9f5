"""What every shape of engine does alike: read a body, sample in rounds, pace the tokens, write the answer.

Holds the calls in flight and their pace; what is answered is made by the replies, and which routes there are
is for `vllm.routes` and `sglang.routes`. With them it is all of the package that awaits.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import orjson
from aiohttp import web

from proxy.clock import Clock
from proxy.simulator.errors import missing, not_json, not_readable
from proxy.simulator.generation import Token
from proxy.simulator.model import Model
from proxy.simulator.options import Options
from proxy.simulator.requests import Body, Common
from proxy.simulator.weights import Versions, Weights
from proxy.simulator.wire import DONE, Answer, Head, Reply

_CHUNKS_A_WRITE: Final = 32  # without a delay; a socket write costs more than making a chunk
_ROUNDS_A_TURN: Final = 256  # after so many tokens without a pause, other calls get their turn

Round = list[tuple[int, Token]]


class Engine:
    """One engine at work: its model, the label of its weights, and how many calls it is at."""

    __slots__ = ("clock", "model", "options", "running", "started_s", "weights")

    def __init__(self, options: Options, clock: Clock, model: Model) -> None:
        self.options = options
        self.clock = clock
        self.model = model
        self.weights = Weights(options.weight_version)
        self.running = 0
        self.started_s = int(clock.now())

    def new_hex(self) -> str:
        """A new name, for what needs one."""
        return self.clock.entropy(8).hex()

    def head(self, name: str, common: Common) -> Head:
        """The head of an answer of this name, from now."""
        model = common.model or self.options.model
        return Head(name, int(self.clock.now()), model, self.options.fingerprint)

    async def answer(
        self,
        request: web.Request,
        common: Common,
        reply: Reply,
        versions: Versions | None = None,
        *,
        scores_prompt: bool = False,
    ) -> web.StreamResponse:
        """Sample a reply and write it; `versions` is told which weights sampled what.

        To score a prompt takes its time, about 10 µs a token, so it is done in a thread.
        """
        rounds = self._rounds(reply, common, versions)
        self.running += 1
        try:
            if common.stream:
                return await self._stream(request, reply, rounds)
            choices = await self._sampled(request, rounds)
            if scores_prompt:
                return as_json(await asyncio.to_thread(reply.whole, choices))
            return as_json(reply.whole(choices))
        except ConnectionResetError:
            return web.Response()  # the client left: nobody reads it, and sampling has ended as in vLLM
        finally:
            self.running -= 1

    def _rounds(self, reply: Reply, common: Common, versions: Versions | None) -> Iterator[Round]:
        """The tokens of all choices, in rounds of one for each that is still open."""
        seed = common.seed if common.seed is not None else self.options.seed
        if seed is None:
            seed = int.from_bytes(self.clock.entropy(8), "big")
        choices = [
            # As in vLLM, sample i of seed s is the only sample of seed s + i.
            self.model.reply(prefix, common, manner, seed + sample)
            for prefix, manner in reply.prompts
            for sample in range(common.samples)
        ]
        open_choices = dict(enumerate(choices))
        aborts = self.weights.aborts
        position = 0
        while open_choices:
            if versions is not None:
                versions.note(position, self.weights.version)
            told = [(index, next(tokens)) for index, tokens in open_choices.items()]
            if self.weights.aborts != aborts:
                told = [(index, replace(token, finish_reason="abort", stop_reason=None)) for index, token in told]
            for index, token in told:
                if token.finish_reason is not None:
                    del open_choices[index]
            position += 1
            yield told

    async def _stream(self, request: web.Request, reply: Reply, rounds: Iterator[Round]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        pending = reply.opening()
        await response.prepare(request)
        cuts = {manner.cut for _, manner in reply.prompts} - {None}
        for count, told in enumerate(rounds):
            if count in cuts:
                await response.write(b"".join(pending))
                request.transport.close()  # type: ignore[union-attr] # it was there a line before
            if pending and (self.options.token_delay_s or len(pending) >= _CHUNKS_A_WRITE):
                await response.write(b"".join(pending))
                pending.clear()
            await self._pause(request, count)
            for index, token in told:
                pending += reply.events(index, token)
        await response.write(b"".join([*pending, *reply.closing(), DONE]))
        await response.write_eof()
        return response

    async def _sampled(self, request: web.Request, rounds: Iterator[Round]) -> list[list[Token]]:
        """All tokens of each choice."""
        choices: dict[int, list[Token]] = defaultdict(list)
        for count, told in enumerate(rounds):
            await self._pause(request, count)
            for index, token in told:
                choices[index].append(token)
        return [choices[index] for index in sorted(choices)]

    async def _pause(self, request: web.Request, count: int) -> None:
        """Wait as long as a token takes; raises `ConnectionResetError` if the client left meanwhile."""
        if self.options.token_delay_s:
            await asyncio.sleep(self.options.token_delay_s)
        elif count % _ROUNDS_A_TURN == _ROUNDS_A_TURN - 1:
            await asyncio.sleep(0)
        if request.transport is None or request.transport.is_closing():
            raise ConnectionResetError


async def read_body(request: web.Request) -> Body:
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


def as_json(answer: Answer | list[Answer], status: int = 200) -> web.Response:
    """An answer that is JSON."""
    return web.Response(body=orjson.dumps(answer), status=status, content_type="application/json")


def as_gauge(name: str, labels: str, help_text: str, value: float) -> web.Response:
    """One gauge, as Prometheus reads it."""
    text = f"# HELP {name} {help_text}\n# TYPE {name} gauge\n{name}{{{labels}}} {value:.1f}\n"
    return web.Response(text=text)
