"""An engine and a dialect are one class and one line each: calls are recorded, and hidden fields are stripped."""

import runpy

import aiohttp
import orjson
from aiohttp import web
from tests.support.fakes import proxying

from proxy.api import compat
from proxy.protocols.dialects import TRANSLATORS
from proxy.protocols.dialects.base import EVENT_STREAM, NO_REFERENCES, References, ResponseRenderer, Translator
from proxy.protocols.engines import ENGINES
from proxy.protocols.engines.base import (
    Engine,
    Injection,
    Sampled,
    StreamShape,
    StripRules,
    Tokens,
    Traits,
    index_of,
    without,
)
from proxy.server.listener import simulating
from proxy.simulator.options import Options


class Echo(Engine):
    """A server that returns the ids of a chat in its choices, if they are requested."""

    kind = "echo"
    owners = ("echo-server",)
    logprobs_mode = "raw_logprobs"
    shape = StreamShape(head=frozenset({"id"}), role={}, delta={}, call_delta={})

    def identify(self, probed):
        return Traits(self.kind, "1.0") if probed.owner in self.owners else None

    def inject(self, dialect, body, options):
        return Injection({"with_ids": True}, StripRules(keys=frozenset({"ids", "prompt", "lps"})))

    def strip(self, dialect, response, rules):
        return {**response, "choices": [without(choice, rules) for choice in response["choices"]]}

    def tokens(self, dialect, body, response, found=None):
        sampled = [
            Sampled(index_of(it), it["prompt"], it["ids"], it["lps"], it["finish_reason"], None)
            for it in response["choices"]
        ]
        return Tokens(None, tuple(sampled))


MODELS = {"object": "list", "data": [{"id": "m", "owned_by": "echo-server"}]}


async def test_a_new_engine_is_one_class_and_one_line(store, engine, monkeypatch):
    """It is detected, its ids are recorded, and the client does not see them."""
    monkeypatch.setitem(ENGINES, Echo.kind, Echo())

    async def respond(request, body):
        if request.path == "/v1/models":
            return web.json_response(MODELS)
        ids = {"prompt": [1, 2], "ids": [3, 4], "lps": [-0.5, -1.5]} if body.get("with_ids") else {}
        choice = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop", **ids}
        usage = {"prompt_tokens": 2, "completion_tokens": 2}
        return web.json_response({"id": "x", "object": "chat.completion", "choices": [choice], "usage": usage})

    engine.respond = respond
    engine.fixed_responses.pop("/version")
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    async with proxying(engine.url, store) as served, aiohttp.ClientSession(served.url) as http:
        async with http.post("/rollouts/r/v1/chat/completions", json=body) as response:
            (choice,) = (await response.json())["choices"]
        async with http.get("/rollouts/r/steps") as response:
            (step,) = (await response.json())["steps"]
        async with http.get("/engines") as response:
            (shown,) = (await response.json())["engines"]

    assert choice.keys() == {"index", "message", "finish_reason"}
    assert (step["engine"]["kind"], step["fidelity"]["problems"]) == ("echo", [])
    assert (step["prompt_ids"], step["choices"][0]["ids"]) == ([1, 2], [3, 4])
    assert (shown["kind"], shown["version"], shown["token_ids"]) == ("echo", "1.0", True)


PATH = "/v1/ask"


class AskRenderer(ResponseRenderer):
    """Renders a response as one text."""

    stream_format = EVENT_STREAM

    def feed(self, chunk):
        return b""

    def finish(self, response, error=None):
        return b"data: " + orjson.dumps(self.whole(response)) + b"\n\n"

    def whole(self, response):
        return {"reply": response["choices"][0]["message"]["content"]}


class Ask(Translator):
    """A dialect with a question and a reply. A new name would be a second line, in `trajectory.step.Dialect`."""

    name = "responses"

    def read(self, body, options, resolved=NO_REFERENCES):
        return {"model": body["model"], "messages": [{"role": "user", "content": body["question"]}]}

    def references(self, body):
        return References()

    def renderer(self, body, identity):
        return AskRenderer()

    def error(self, error):
        return orjson.dumps({"failure": error.message})

    def engine_error(self, status, text):
        return orjson.dumps({"failure": text})


async def test_a_new_dialect_is_one_class_and_one_line(store, monkeypatch):
    """The response is rendered again for a retry, and errors are in its format."""
    monkeypatch.delitem(TRANSLATORS, "/v1/responses")
    monkeypatch.setitem(TRANSLATORS, PATH, Ask())
    monkeypatch.setitem(compat.CALL_ROUTES, PATH, runpy.run_path(compat.__file__)["CALL_ROUTES"][PATH])

    async with (
        simulating("127.0.0.1:0", Options()) as engine,
        proxying(engine, store) as served,
        aiohttp.ClientSession(served.url) as http,
    ):

        async def ask(body):
            headers = {"Idempotency-Key": "k"}
            async with http.post(f"/rollouts/r{PATH}", json=body, headers=headers) as response:
                return response.status, await response.json()

        first = await ask({"model": "m", "question": "Is it so?"})
        again = await ask({"model": "m", "question": "Is it so?"})
        status, refused = await ask([])
        async with http.get("/rollouts/r/steps") as response:
            (step,) = (await response.json())["steps"]

    assert (first[0], first[1].keys()) == (200, {"reply"})
    assert again == first
    assert (status, refused.keys()) == (400, {"failure"})
    assert (step["dialect"], step["fidelity"]["problems"]) == ("responses", [])
    assert step["choices"][0]["ids"]
