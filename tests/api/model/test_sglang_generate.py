"""SGLang's `/generate` through the proxy: the responses are the engine's, and each call is a step like any other."""

import asyncio
from contextlib import asynccontextmanager

import aiohttp
import orjson
import pytest
from tests.support.fakes import fake_engine, proxying
from tests.support.stored import stored_steps, wait_for_steps

from proxy.server.listener import simulating
from proxy.simulator.options import Options
from proxy.simulator.tokenizer import load_tokenizer

IDS = load_tokenizer().encode("What is 2 and 3?")
GREEDY = {"max_new_tokens": 6, "temperature": 0.0}
CALLS = {
    "text": {"text": "What is 2 and 3?"},
    "ids": {"input_ids": IDS},
    "two samples": {"text": "What is 2 and 3?", "sampling_params": GREEDY | {"n": 2}},
    "two prompts": {"text": ["What is 2?", "And 3?"]},
    "two prompts of ids, two samples": {"input_ids": [IDS, IDS[:4]], "sampling_params": GREEDY | {"n": 2}},
    "one prompt in a list": {"text": ["What is 2?"]},
    "logprobs": {"input_ids": IDS, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2},
    "unused options of logprobs": {"input_ids": IDS, "logprob_start_len": 0, "top_logprobs_num": 2},
    "prompt ids": {"text": "What is 2?", "return_prompt_token_ids": True},
    "no tokens": {"input_ids": IDS, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True},
}
REFUSED = {
    "no prompt": {},
    "a wrong type": {"text": 5},
    "an unknown parameter": {"text": "a", "sampling_params": {"max_tokens": 3}},
}
RANDOM = {"id", "e2e_latency"}


async def answer_of(http, url, body, **headers):
    """Return the status, the content type and the JSON of a response: a list of events of a stream."""
    async with http.post(url, json=body, headers=headers) as response:
        text = await response.read()
    if response.content_type == "application/json":
        return response.status, response.content_type, without_random(orjson.loads(text))
    *events, last, rest = text.split(b"\n\n")
    assert (last, rest) == (b"data: [DONE]", b"")
    payloads = [orjson.loads(event.removeprefix(b"data: ")) for event in events]
    return response.status, response.content_type, without_random(payloads)


class Both:
    """An engine, and a proxy in front of it: `direct` and `call` return the responses of either to `/generate`."""

    def __init__(self, http, engine_url, url):
        self.http, self.engine_url, self.url = http, engine_url, url

    async def direct(self, body):
        return await answer_of(self.http, f"{self.engine_url}/generate", body)

    async def call(self, body, path="/rollouts/r1/generate", **headers):
        return await answer_of(self.http, self.url + path, body, **headers)


@asynccontextmanager
async def serving(store, *, sections=None, **options):
    """Yield Both of an engine with these options, which is SGLang by default."""
    async with (
        simulating("127.0.0.1:0", Options(**{"shape": "sglang", **options})) as engine_url,
        proxying(engine_url, store, **(sections or {})) as served,
        aiohttp.ClientSession() as http,
    ):
        yield Both(http, engine_url, served.url)


@pytest.fixture
async def both(store):
    async with serving(store) as both:
        yield both


def without_random(value):
    """Return JSON without ids and durations."""
    if isinstance(value, dict):
        return {key: without_random(inner) for key, inner in value.items() if key not in RANDOM}
    return [without_random(inner) for inner in value] if isinstance(value, list) else value


def choices_of(payload):
    return payload if isinstance(payload, list) else [payload]


@pytest.mark.parametrize("incremental", [False, True], ids=["repeated", "continued"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_response_is_the_engines_own_and_the_step_is_exact(store, stream, incremental):
    """Each call, whole, as a stream that repeats its choices, and as one that continues them."""
    async with serving(store, incremental_streams=incremental, model="policy") as both:
        for name, call in CALLS.items():
            body = {"sampling_params": GREEDY, **call, **({"stream": True} if stream else {})}
            rollout = f"{name}-{stream}"
            direct, shown = await both.direct(body), await both.call(body, f"/rollouts/{rollout}/generate")
            flags = {"stream": False, "return_logprob": True, "logprob_start_len": -1}
            _, _, whole = await both.direct(body | flags)
            (step,) = await stored_steps(store, rollout)

            assert direct == shown, name
            assert (step.dialect, step.endpoint, step.request) == ("sglang_generate", "/generate", body)
            assert (step.problems, step.model_asked, step.model_served) == ((), None, "policy")
            assert [choice["output_ids"] for choice in choices_of(whole)] == [c.ids.tolist() for c in step.choices]
            for choice, each in zip(step.choices, choices_of(whole), strict=True):
                pairs = each["meta_info"]["output_token_logprobs"]
                assert [pair[0] for pair in pairs] == choice.logprobs.tolist()
                assert len(step.prompts[choice.prompt]) == each["meta_info"]["prompt_tokens"]
                assert each["meta_info"]["finish_reason"]["type"] == choice.finish_reason
            if "input_ids" in call:
                sent = call["input_ids"]
                assert [prompt.tolist() for prompt in step.prompts] == (sent if isinstance(sent[0], list) else [sent])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", REFUSED)
async def test_an_error_is_the_engines_own(store, both, name, stream):
    """Status, content type and body, and a step with the error."""
    body = {**REFUSED[name], "stream": stream}
    direct, shown = await both.direct(body), await both.call(body)
    (step,) = await stored_steps(store, "r1")

    assert direct == shown
    assert (step.status, step.problems) == ("error", ("engine_error",))


@pytest.mark.parametrize("call", [CALLS["text"], CALLS["one prompt in a list"], CALLS["two prompts"]])
async def test_a_retry_with_an_idempotency_key_gets_the_stored_response_in_its_shape(store, both, call):
    """An object, or a list of one or more."""
    body = {**call, "sampling_params": {"max_new_tokens": 4}}
    first, second = [await both.call(body, **{"Idempotency-Key": "k"}) for _ in range(2)]

    assert first == second
    assert len(await stored_steps(store, "r1")) == 1


async def test_the_rules_of_a_rollout_apply_by_the_engines_names(store, both):
    """A default model is not sent: the engine refuses unknown parameters."""
    rules = {"override": {"temperature": 0.5}, "cap": {"max_tokens": 3}, "default": {"seed": 7, "model": "m"}}
    async with both.http.post(f"{both.url}/rollouts", json={"rollout_id": "r1", "sampling": rules}) as opened:
        assert opened.status == 201
    status, _, payload = await both.call({"text": "hi"})
    (step,) = await stored_steps(store, "r1")

    assert (status, len(payload["output_ids"])) == (200, 3)
    assert step.body["sampling_params"] == {"temperature": 0.5, "max_new_tokens": 3, "sampling_seed": 7}
    assert tuple(step.sampling[name] for name in ("temperature", "max_tokens", "seed")) == (0.5, 3, 7)


@pytest.mark.parametrize("call", [CALLS["text"], CALLS["two prompts"]])
async def test_a_client_may_request_the_ids_by_a_header(store, both, call):
    """Of the prompt and of the choice, as in other dialects; the rest of the response is the engine's."""
    body = {**call, "sampling_params": GREEDY}
    (_, _, direct), (_, _, shown) = await both.direct(body), await both.call(body, **{"X-Reply-Ids": "choices"})
    (step,) = await stored_steps(store, "r1")

    for choice, given, kept in zip(choices_of(direct), choices_of(shown), step.choices, strict=True):
        added = {"prompt_token_ids": step.prompts[kept.prompt].tolist(), "response_token_ids": kept.ids.tolist()}
        assert given == choice | added


async def test_calls_join_by_their_ids(both):
    """Turns that send the sampled ids back are one sequence."""
    prompt = IDS
    for stream in (False, True, False):
        _, _, payload = await both.call({"input_ids": prompt, "sampling_params": GREEDY, "stream": stream})
        prompt = prompt + (payload[-1] if stream else payload)["output_ids"] + IDS[:2]
    async with both.http.get(f"{both.url}/rollouts/r1/export?format=sequences") as response:
        (row,) = (await response.json())["rows"]

    assert prompt[:-2] == row["token_ids"]
    assert sum(row["mask"]) == 18


LONG = {"sampling_params": {"max_new_tokens": 5000, "ignore_eos": True}}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5000, "ignore_eos": True}
LEFT = {
    "generate": ("/generate", {"text": "hi", **LONG}),
    "generate, stream": ("/generate", {"text": "hi", "stream": True, **LONG}),
    "generate, two samples": (
        "/generate",
        {"text": "hi", "stream": True, "sampling_params": {**LONG["sampling_params"], "n": 2}},
    ),
    "chat": ("/v1/chat/completions", CHAT),
    "chat, stream": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "completions": ("/v1/completions", {"model": "m", "prompt": "hi", "max_tokens": 5000, "ignore_eos": True}),
}


@pytest.mark.parametrize("has_parser", [False, True], ids=["replayed", "live"])
@pytest.mark.parametrize("name", LEFT)
async def test_what_was_sampled_until_the_client_left_is_recorded(store, name, has_parser):
    """With its ids, logprobs and prompt; the engine stops. A chat stream is replayed without a parser, and live with one.

    An unstreamed call, too: the engine is requested to abort it, and returns what it sampled.
    """
    path, body = LEFT[name]
    async with serving(store, token_delay_s=0.01, has_parser=has_parser) as both:
        calling = asyncio.ensure_future(read(both.http, f"{both.url}/rollouts/r1{path}", body))
        await until_running(both.http, both.engine_url, 1)
        await asyncio.sleep(0.1)  # a few tokens
        calling.cancel()
        (step,) = await wait_for_steps(store, "r1")
        await until_running(both.http, both.engine_url, 0)

    assert (step.status, step.delivered, step.reason) == ("partial", False, "the client disconnected")
    assert {"stream_cut", "aborted", "unparsed_event"} >= set(step.problems), step.problems
    assert len(step.prompts) == 1
    assert all(0 < len(choice.ids) < 5000 for choice in step.choices)
    assert all(len(choice.ids) == len(choice.logprobs) for choice in step.choices)
    assert len(step.choices) == (2 if "two" in name else 1)


async def read(http, url, body):
    async with http.post(url, json=body) as response:
        async for _ in response.content:
            pass


async def until_running(http, engine_url, count):
    """Wait until the engine has this many running calls."""
    async with asyncio.timeout(20):
        while True:
            async with http.get(f"{engine_url}/metrics") as response:
                if f"}} {count}.0" in await response.text():
                    return
            await asyncio.sleep(0.01)


async def test_a_gateway_that_cannot_abort_a_call_is_disconnected(store, engine):
    """The call is recorded as with an engine that loses it: a partial step without ids."""
    engine.fixed_responses = {"/model_info": {"weight_version": "1"}}
    engine.hangs()
    async with proxying(engine.url, store) as served, aiohttp.ClientSession() as http:
        calling = asyncio.ensure_future(read(http, f"{served.url}/rollouts/r1/generate", {"text": "hi"}))
        await engine.reached.wait()
        calling.cancel()
        (step,) = await wait_for_steps(store, "r1")
        await engine.aborted.wait()

    assert (step.status, step.delivered, step.sampled) == ("partial", False, 0)
    assert {"rid": step.sent["set"]["rid"]} in engine.requests


async def test_a_stream_that_repeats_its_choice_may_be_longer_than_the_limit_of_a_response(store):
    """The proxy holds only the last event: 600 tokens are 10 MB of events, and 40 kB remain."""
    body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 600, "ignore_eos": True}, "stream": True}
    async with serving(store, sections={"engines": {"max_response_bytes": 2_000_000}}) as both:
        status, _, events = await both.call(body)
    (step,) = await stored_steps(store, "r1")

    assert (status, len(events[-1]["output_ids"]), step.problems) == (200, 600, ())


async def test_a_call_fails_over_between_engines_that_have_the_endpoint_and_others(store, http):
    """The response has SGLang's shape from either, the step the dialect of the engine that served it."""
    body = {"input_ids": IDS, "sampling_params": GREEDY, "return_logprob": True}
    async with fake_engine() as broken, simulating("127.0.0.1:0", Options()) as vllm:
        broken.fixed_responses = {"/model_info": {"weight_version": "1"}, "/server_info": {"version": "0.5.23"}}
        broken.streams([], then="die")
        endpoints = {"endpoints": [{"url": broken.url, "name": "a"}, {"url": vllm, "name": "b"}]}
        async with proxying(None, store, engines=endpoints) as served:
            for rollout in range(8):  # some of them begin with the broken engine
                status, _, payload = await answer_of(http, f"{served.url}/rollouts/{rollout}/generate", body)
                (step,) = await stored_steps(store, str(rollout))
                assert (status, step.dialect, step.problems) == (200, "completions", ())
                assert payload["output_ids"] == step.choices[0].ids.tolist()
                assert payload["meta_info"]["finish_reason"]["type"] == step.choices[0].finish_reason

    assert any("sampling_params" in request for request in broken.requests)


@pytest.mark.parametrize("body", [{"text": "hi"}, {"input_ids": [[1], [2]]}, {"input_ids": [1], "stream": True}])
async def test_what_only_sglang_has_is_422_with_another_engine(store, body):
    """Nothing is sent or recorded."""
    async with serving(store, shape="vllm") as both:
        status, _, payload = await both.call(body)

    assert (status, payload["error"]["code"]) == (422, "unprocessable_request")
    assert await stored_steps(store, "r1") == []


async def test_a_call_without_a_rollout_is_forwarded_unrecorded_if_configured(store):
    async with serving(store, sections={"agents": {"unnamed_rollouts": "pass"}}) as both:
        async with both.http.get(f"{both.url}/engines"):
            pass  # the engine is detected
        status, _, payload = await both.call({"text": "hi", "sampling_params": GREEDY}, "/generate")

    assert (status, len(payload["output_ids"])) == (200, 6)
    assert (await store.list()).names == ()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_call_that_names_no_model_has_the_model_that_sglang_serves(store, path):
    """SGLang itself names such a model `default` in its response (0.5.23)."""
    body = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    async with serving(store, model="policy") as both:
        _, _, payload = await both.call({**body, "max_tokens": 2}, f"/rollouts/r1{path}")
    (step,) = await stored_steps(store, "r1")

    assert (payload["model"], step.model_asked, step.model_served, step.problems) == ("default", None, "policy", ())


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/generate", {"input_ids": [4096]}, "input_ids"),
        ("/v1/completions", {"prompt": [4096]}, "prompt"),
        ("/v1/chat/completions", {"messages": [], "input_ids": [4096], "stream": True}, "input_ids"),
    ],
)
async def test_an_id_beyond_the_vocabulary_is_a_400_and_does_not_reach_the_engine(
    store, http, engine, path, body, field
):
    """The error names the field and the size; the engine would exit."""
    engine.fixed_responses = {"/model_info": {"weight_version": "1"}, "/server_info": {"version": "0.5.23"}}
    engine.answers({"error": {"message": "logit_bias must has keys in [0, 4095], got 2147483647."}}, 400)
    async with proxying(engine.url, store) as served:
        status, content_type, error = await answer_of(http, f"{served.url}/rollouts/r1{path}", body)

    assert (status, content_type, error.keys()) == (400, "application/json", {"error"})
    assert f"{field}: 4096 is no token id of the engine, which has 4096 of them." in error["error"]["message"]
    assert "4096" not in str(engine.requests)
