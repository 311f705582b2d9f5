"""`/generate` in the two shapes of Atropos' token servers: read, sent on as completions, recorded, answered in its shape."""

import aiohttp
import orjson
import pytest
from aiohttp import web
from fakes import proxying
from stored import stored_steps

from proxy.api.compat.atropos.generate import read_generate
from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects.translation import TranslationOptions
from proxy.server.listener import simulating
from proxy.simulator.options import Options
from proxy.simulator.tokenizer import load_tokenizer

PROMPT = load_tokenizer().encode("What is 2 and 3?")
VLLM = {"prompt": {"prompt_token_ids": PROMPT}, "logprobs": 0, "max_tokens": 6, "temperature": 1.0, "n": 1}
SGLANG = {
    "input_ids": PROMPT,
    "sampling_params": {"max_new_tokens": 6, "temperature": 1.0, "n": 1},
    "return_logprob": True,
    "return_text_in_logprobs": False,
}
ENGINES = pytest.mark.parametrize("engine_shape", ["vllm", "sglang"])


def asking(body, n):
    """The same call for n samples."""
    if "sampling_params" in body:
        return {**body, "sampling_params": {**body["sampling_params"], "n": n}}
    return {**body, "n": n}


async def post(url, body, **headers):
    async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as response:
        return response.status, orjson.loads(await response.read())


def read_as_vllm_server_does(results):
    """Its own reading of an answer (296a0bc, vllm_server.py): ids, logprobs, reasons, one list each per sample."""
    ids = [[int(next(iter(item[0]))) for item in sequence] for sequence in results["logprobs"]]
    logprobs = [[next(iter(item[0].values())) for item in sequence] for sequence in results["logprobs"]]
    return ids, logprobs, results["finish_reasons"]


def read_as_sglang_server_does(results):
    """Likewise (sglang_server.py)."""
    each = results if isinstance(results, list) else [results]
    pairs = [result.get("meta_info", {}).get("output_token_logprobs", []) for result in each]
    reasons = [result["meta_info"]["finish_reason"]["type"] for result in each]
    return [[item[1] for item in one] for one in pairs], [[item[0] for item in one] for one in pairs], reasons


@ENGINES
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize(("body", "read"), [(VLLM, read_as_vllm_server_does), (SGLANG, read_as_sglang_server_does)])
async def test_at_8_both_dialects_are_served_and_recorded_from_either_engine(store, engine_shape, body, read, n):
    """What the client reads is what the step has, exactly: ids, logprobs, and why it ended."""
    async with (
        simulating("127.0.0.1:0", Options(shape=engine_shape)) as engine_url,
        proxying(engine_url, store) as served,
    ):
        status, told = await post(f"{served.url}/rollouts/r1/generate", asking(body, n))
    (step,) = await stored_steps(store, "r1")
    ids, logprobs, reasons = read(told)

    assert (200, n) == (status, len(ids)), told
    assert [PROMPT] == [prompt.tolist() for prompt in step.prompts]
    assert [choice.ids.tolist() for choice in step.choices] == ids
    assert [choice.logprobs.tolist() for choice in step.choices] == logprobs
    assert [choice.finish_reason for choice in step.choices] == reasons
    assert (True, True) == (step.exact, step.trainable)
    assert ("completions", "/v1/completions", asking(body, n)) == (step.dialect, step.endpoint, step.request)


@pytest.mark.parametrize("where", ["/generate", "/sessions/r1/generate", "/rollouts/r1/generate"])
async def test_at_8_the_path_names_the_rollout_as_everywhere(store, http, where):
    """Below a rollout's base URL, in either spelling; at the root the call gets a rollout of its own."""
    async with (
        simulating("127.0.0.1:0", Options()) as engine_url,
        proxying(engine_url, store) as served,
        http.post(served.url + where, json=VLLM) as response,
    ):
        named = response.headers["X-Rollout-Id"]

    assert 1 == len(await stored_steps(store, named))
    assert where == "/generate" or named == "r1"


@pytest.mark.parametrize("where", ["", "/rollouts/r1", "/sessions/r1"])
async def test_at_9_the_vllm_clients_health_probe_is_answered_and_never_a_step(store, engine, http, where):
    """It asks `GET {base}/health`, whatever the base URL; the engine is not asked, and no rollout comes of it."""
    async with proxying(engine.url, store) as served, http.get(f"{served.url}{where}/health") as response:
        assert (200, {"status": "ok"}) == (response.status, await response.json())

    assert [] == engine.requests
    assert await store.get("r1") is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "m", "prompt": "hi", "max_tokens": 1}),
        ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
    ],
)
async def test_at_9_the_sglang_clients_probes_are_answered_and_never_exported(store, path, body):
    """With nothing configured."""
    async with (
        simulating("127.0.0.1:0", Options(shape="sglang", model="m")) as engine_url,
        proxying(engine_url, store) as served,
    ):
        status, told = await post(f"{served.url}{path}", body)

    assert (200, 1) == (status, len(told["choices"]))
    assert () == (await store.list()).names


@ENGINES
@pytest.mark.parametrize("body", [VLLM, SGLANG])
async def test_logprobs_that_the_client_asks_for_are_told_whatever_is_configured(store, engine_shape, body):
    """And no others are asked for."""
    silent = {key: value for key, value in body.items() if key not in {"logprobs", "return_logprob"}}
    async with (
        simulating("127.0.0.1:0", Options(shape=engine_shape)) as engine_url,
        proxying(engine_url, store, record={"logprobs": "off"}) as served,
    ):
        statuses = [(await post(f"{served.url}/rollouts/r1/generate", asked))[0] for asked in (body, silent)]

    assert [200, 200] == statuses
    assert [True, False] == [len(step.choices[0].logprobs) > 0 for step in await stored_steps(store, "r1")]


async def test_logprobs_of_the_prompt_come_in_the_scripts_shape_and_its_one_token_is_not_trained(store):
    """`get_logprobs` of VLLMServer: one place per id of the prompt, each a map of ids to numbers; the first has none."""
    asked = {**VLLM, "prompt_logprobs": 2, "temperature": 0.0, "max_tokens": 1}
    async with simulating("127.0.0.1:0", Options()) as engine_url, proxying(engine_url, store) as served:
        status, told = await post(f"{served.url}/rollouts/r1/generate", asked)
    (step,) = await stored_steps(store, "r1")
    first, *places = told["prompt_logprobs"]

    assert (200, None, len(PROMPT) - 1) == (status, first, len(places))
    assert all(str(token) in place for token, place in zip(PROMPT[1:], places, strict=True))
    assert all(isinstance(logprob, float) for place in places for logprob in place.values())
    assert (("phantom_token",), False) == (step.problems, step.trainable)


async def test_logprobs_of_the_prompt_are_refused_where_the_engine_tells_none(store):
    """Nothing is sent and nothing recorded: completions of SGLang ignore the field."""
    async with (
        simulating("127.0.0.1:0", Options(shape="sglang")) as engine_url,
        proxying(engine_url, store) as served,
    ):
        status, told = await post(f"{served.url}/rollouts/r1/generate", {**VLLM, "prompt_logprobs": 1})

    assert (422, "prompt_logprobs") == (status, told["error"]["param"])
    assert "requires vLLM" in told["error"]["message"]
    assert [] == await stored_steps(store, "r1")


async def test_an_engine_of_text_is_refused_and_nothing_is_made_up(store, engine):
    """Before anything is sent."""
    endpoints = [{"url": engine.url, "kind": "plain"}]
    async with proxying(None, store, engines={"endpoints": endpoints}) as served:
        status, told = await post(f"{served.url}/rollouts/r1/generate", VLLM)

    assert 422 == status
    assert "no token ids" in told["error"]["message"]
    assert [] == engine.requests


@pytest.mark.parametrize("body", [VLLM, SGLANG])
@pytest.mark.parametrize(
    "choice",
    [
        {"token_ids": None, "logprobs": None},
        {"token_ids": [5, 6], "logprobs": {"token_logprobs": [-0.5], "tokens": ["a"], "top_logprobs": [None]}},
        {"token_ids": [5], "logprobs": {"token_logprobs": [None], "tokens": ["a"], "top_logprobs": [None]}},
    ],
)
async def test_an_answer_without_an_id_or_a_logprob_is_an_error_and_recorded_as_it_came(store, engine, body, choice):
    """502: the step is there, flagged; the client is told that something is missing, and gets no placeholder."""

    async def respond(request, asked):
        told = {"index": 0, "text": "a", "finish_reason": "stop", "prompt_token_ids": asked["prompt"], **choice}
        return web.json_response(
            {"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": [told]}
        )

    engine.respond = respond
    async with proxying(engine.url, store) as served:
        status, told = await post(f"{served.url}/rollouts/r1/generate", body)
    (step,) = await stored_steps(store, "r1")

    assert (502, "engine_disconnected") == (status, told["error"]["code"])
    assert "did not return token ids" in told["error"]["message"]
    assert ("complete", False) == (step.status, step.trainable)


async def test_an_engines_refusal_reaches_the_client_as_it_is(store, engine):
    """Status and body."""
    engine.respond = lambda request, body: refusing()

    async def refusing():
        return web.json_response({"error": {"message": "too long"}}, status=400)

    async with proxying(engine.url, store) as served:
        assert (400, {"error": {"message": "too long"}}) == await post(f"{served.url}/generate", VLLM)


async def test_a_retry_with_a_key_is_answered_in_the_same_shape(store, engine):
    """Its ids and logprobs come out of the store; the engine is asked once."""
    async with simulating("127.0.0.1:0", Options()) as engine_url, proxying(engine_url, store) as served:
        where = f"{served.url}/rollouts/r1/generate"
        once = await post(where, SGLANG, **{"Idempotency-Key": "k"})
        again = await post(where, SGLANG, **{"Idempotency-Key": "k"})

    assert once == again
    assert 1 == len(await stored_steps(store, "r1"))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "hi"}, "prompt"),
        ({}, "prompt"),
        ({"prompt": {"prompt_token_ids": [1, 2.0]}}, "prompt"),
        ({"prompt": {"prompt_token_ids": []}}, "prompt"),
        ({"input_ids": [[1, 2], [3]]}, "input_ids"),
        ({"input_ids": [1], "sampling_params": [1]}, "sampling_params"),
        ({"input_ids": [1], "logprob_start_len": 0}, "logprob_start_len"),
        ({"input_ids": [1], "logprob_start_len": -1, "return_hidden_states": True}, "return_hidden_states"),
        ({"input_ids": [1], "top_logprobs_num": 3}, "top_logprobs_num"),
        ({**VLLM, "stream": True}, "stream"),
        ({**VLLM, "echo": True}, "echo"),
    ],
)
def test_what_is_neither_shape_or_could_not_be_answered_is_refused(body, param):
    """By the name of the field."""
    with pytest.raises(UnprocessableRequest) as refused:
        read_generate("/generate", body, TranslationOptions())

    assert param == refused.value.param


def test_sglangs_names_of_sampling_become_those_of_completions():
    """And its own default of new tokens, which completions would not take."""
    sampling = {"max_new_tokens": 7, "min_new_tokens": 2, "stop": ["x"], "top_p": None, "no_stop_trim": True}
    asked = read_generate("/generate", {"input_ids": [1], "sampling_params": sampling}, TranslationOptions()).body

    assert {
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
        "max_tokens": 7, "min_tokens": 2, "stop": ["x"], "include_stop_str_in_output": True, "prompt": [1]
    } == asked  # fmt: skip
    assert 128 == read_generate("/generate", {"input_ids": [1]}, TranslationOptions()).body["max_tokens"]


@pytest.mark.parametrize("body", [VLLM, SGLANG])
def test_what_is_not_said_of_sampling_is_not_left_to_the_models_configuration(body):
    """Engines of completions would take `generation_config` for it, and the ids would be drawn from something else."""
    said = {**body.get("sampling_params", body), "top_p": 0.5, "temperature": None}
    asked = read_generate(
        "/generate", {**body, "sampling_params": said} if "sampling_params" in body else said, TranslationOptions()
    ).body

    assert (1.0, 0.5, -1, 0.0, 1.0) == tuple(
        asked[name] for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    )


def test_a_name_for_any_model_is_the_model_of_calls_that_name_none():
    """Atropos' clients take `model` out; a rollout's or the configuration's `*` still holds."""
    form = read_generate("/generate", VLLM, TranslationOptions())

    assert "model" not in form.native({"gpt": "policy"}, "vllm")
    assert "policy" == form.native({"*": "policy"}, "vllm")["model"]
