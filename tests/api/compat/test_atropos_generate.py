"""`/generate` in the two shapes of Atropos' token servers."""

import time
import uuid
from types import SimpleNamespace

import aiohttp
import pytest
from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice
from tests.support.session import one_call, session_with
from tests.support.stored import stored_steps
from tests.support.trainers import load_published

from proxy.api.compat.atropos_generate import read_generate, read_trl_generate
from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects.base import TranslationOptions
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


def with_samples(body, n):
    """Return the call with n samples."""
    if "sampling_params" in body:
        return {**body, "sampling_params": {**body["sampling_params"], "n": n}}
    return {**body, "n": n}


async def generate(store, *bodies, shape="vllm", headers=None, **sections):
    """Return the responses to calls of rollout `r1`, by a proxy in front of a simulated engine."""
    async with (
        simulating("127.0.0.1:0", Options(shape=shape)) as engine,
        session_with(engine, store, **sections) as session,
    ):
        return [await session.post("/rollouts/r1/generate", body, headers=headers) for body in bodies]


def read_as_vllm_server_does(results):
    """Parse a response like Atropos' vllm_server.py (296a0bc): ids, logprobs, reasons, with one list per sample."""
    ids = [[int(next(iter(item[0]))) for item in sequence] for sequence in results["logprobs"]]
    logprobs = [[next(iter(item[0].values())) for item in sequence] for sequence in results["logprobs"]]
    return ids, logprobs, results["finish_reasons"]


def read_as_sglang_server_does(results):
    """Parse a response like sglang_server.py."""
    samples = results if isinstance(results, list) else [results]
    pairs = [result.get("meta_info", {}).get("output_token_logprobs", []) for result in samples]
    reasons = [result["meta_info"]["finish_reason"]["type"] for result in samples]
    return (
        [[item[1] for item in sample] for sample in pairs],
        [[item[0] for item in sample] for sample in pairs],
        reasons,
    )


@ENGINES
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize(("body", "read"), [(VLLM, read_as_vllm_server_does), (SGLANG, read_as_sglang_server_does)])
async def test_at_8_both_shapes_are_served_and_recorded_with_either_engine(store, engine_shape, body, read, n):
    """The response has the ids, logprobs and finish reasons of the recorded step."""
    (response,) = await generate(store, with_samples(body, n), shape=engine_shape)
    (step,) = await stored_steps(store, "r1")
    ids, logprobs, reasons = read(response.json)

    assert (response.status, len(ids)) == (200, n), response.text
    assert [prompt.tolist() for prompt in step.prompts] == [PROMPT]
    assert [choice.ids.tolist() for choice in step.choices] == ids
    assert [choice.logprobs.tolist() for choice in step.choices] == logprobs
    assert [choice.finish_reason for choice in step.choices] == reasons
    assert (step.exact, step.trainable) == (True, True)
    is_native = engine_shape == "sglang" and "input_ids" in body
    served_as = ("sglang_generate", "/generate") if is_native else ("completions", "/v1/completions")
    assert (*served_as, with_samples(body, n)) == (step.dialect, step.endpoint, step.request)


@pytest.mark.parametrize("path", ["/generate", "/sessions/r1/generate", "/rollouts/r1/generate"])
async def test_at_8_the_path_prefix_names_the_rollout(store, path):
    """Without a prefix the call gets a new rollout."""
    async with simulating("127.0.0.1:0", Options()) as engine, session_with(engine, store) as session:
        rollout_id = (await session.post(path, VLLM)).headers["X-Rollout-Id"]

    assert len(await stored_steps(store, rollout_id)) == 1
    assert path == "/generate" or rollout_id == "r1"


@pytest.mark.parametrize("prefix", ["", "/rollouts/r1", "/sessions/r1"])
async def test_at_9_the_health_probe_of_the_vllm_client_is_200_and_not_recorded(store, engine, prefix):
    """The client sends `GET {base}/health` with any base URL; the engine gets no request."""
    async with session_with(engine, store) as session:
        response = await session.get(f"{prefix}/health")

    assert (response.status, response.json) == (200, {"status": "ok"})
    assert engine.requests == []
    assert await store.get("r1") is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "m", "prompt": "hi", "max_tokens": 1}),
        ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
    ],
)
async def test_at_9_probes_of_the_sglang_client_succeed_and_are_not_recorded(store, path, body):
    options = Options(shape="sglang", model="m")
    async with simulating("127.0.0.1:0", options) as engine, session_with(engine, store) as session:
        response = await session.post(path, body)

    assert (response.status, len(response.json["choices"])) == (200, 1)
    assert (await store.list()).names == ()


@ENGINES
@pytest.mark.parametrize("prompts", [["Hello"], ["Hello", "What is 2 and 3?"]])
async def test_trl_gets_the_ids_of_each_sample_of_each_text(store, engine_shape, prompts):
    """As Atropos' TrlVllmServer requests them, with its fields. The step has the same ids, in the same order."""
    body = {"prompts": prompts, "n": 2, "max_tokens": 6, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
            "repetition_penalty": 1.0}  # fmt: skip
    async with simulating("127.0.0.1:0", Options(shape=engine_shape)) as engine, session_with(engine, store) as session:
        response = await session.post("/rollouts/r1/generate/", body)
    (step,) = await stored_steps(store, "r1")

    assert (response.status, step.trainable) == (200, True)
    assert [load_tokenizer().encode(text) for text in prompts] == response.json["prompt_ids"]
    assert 2 * len(prompts) == len(step.choices)
    assert [choice.ids.tolist() for choice in step.choices] == response.json["completion_ids"]
    assert [list(choice.logprobs) for choice in step.choices] == response.json["logprobs"]
    assert [index // 2 for index in range(len(step.choices))] == [choice.prompt for choice in step.choices]


@ENGINES
@pytest.mark.parametrize("body", [VLLM, SGLANG])
async def test_requested_logprobs_are_returned_with_every_setting_of_record_logprobs(store, engine_shape, body):
    """Logprobs that are not requested are not recorded."""
    without = {key: value for key, value in body.items() if key not in {"logprobs", "return_logprob"}}
    responses = await generate(store, body, without, shape=engine_shape, record={"logprobs": "off"})

    assert [response.status for response in responses] == [200, 200]
    assert [len(step.choices[0].logprobs) > 0 for step in await stored_steps(store, "r1")] == [True, False]


async def test_prompt_logprobs_have_the_shape_of_vllm_server_and_the_sampled_token_is_not_trained(store):
    """`get_logprobs` expects a map of ids to logprobs per prompt id, and null for the first."""
    body = {**VLLM, "prompt_logprobs": 2, "temperature": 0.0, "max_tokens": 1}
    (response,) = await generate(store, body)
    (step,) = await stored_steps(store, "r1")
    first, *entries = response.json["prompt_logprobs"]

    assert (200, None, len(PROMPT) - 1) == (response.status, first, len(entries))
    assert all(str(token) in entry for token, entry in zip(PROMPT[1:], entries, strict=True))
    assert all(isinstance(logprob, float) for entry in entries for logprob in entry.values())
    assert (step.problems, step.trainable) == (("phantom_token",), False)


async def test_prompt_logprobs_are_422_with_an_engine_that_returns_none(store):
    """Completions of SGLang ignore the field; nothing is sent or recorded."""
    (response,) = await generate(store, {**VLLM, "prompt_logprobs": 1}, shape="sglang")

    assert (response.status, response.json["error"]["param"]) == (422, "prompt_logprobs")
    assert "requires vLLM" in response.json["error"]["message"]
    assert await stored_steps(store, "r1") == []


async def test_generate_is_422_with_an_engine_that_returns_no_token_ids(store, engine):
    endpoints = [{"url": engine.url, "kind": "plain"}]
    async with session_with(None, store, engines={"endpoints": endpoints}) as session:
        response = await session.post("/rollouts/r1/generate", VLLM)

    assert response.status == 422
    assert "no token ids" in response.json["error"]["message"]
    assert engine.requests == []


@pytest.mark.parametrize("body", [VLLM, SGLANG])
@pytest.mark.parametrize(
    "choice",
    [
        {"token_ids": None, "logprobs": None},
        {"token_ids": [5, 6], "logprobs": {"token_logprobs": [-0.5], "tokens": ["a"], "top_logprobs": [None]}},
        {"token_ids": [5], "logprobs": {"token_logprobs": [None], "tokens": ["a"], "top_logprobs": [None]}},
    ],
)
async def test_an_engine_response_without_an_id_or_logprob_is_502_and_a_flagged_step(store, engine, body, choice):
    sampled = {"index": 0, "text": "a", "finish_reason": "stop", "prompt_token_ids": PROMPT, **choice}
    engine.answers({"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": [sampled]})
    response, step = await one_call(engine, store, body, "/rollouts/r1/generate")

    assert (response.status, response.json["error"]["code"]) == (502, "engine_disconnected")
    assert "did not return token ids" in response.json["error"]["message"]
    assert (step.status, step.trainable) == ("complete", False)


async def test_an_engine_error_is_returned_unchanged(store, engine):
    engine.answers({"error": {"message": "too long"}}, 400)
    response, _ = await one_call(engine, store, VLLM, "/rollouts/r1/generate")

    assert (response.status, response.json) == (400, {"error": {"message": "too long"}})


async def test_a_retry_with_an_idempotency_key_replays_the_response_in_its_shape(store):
    first, second = await generate(store, SGLANG, SGLANG, headers={"Idempotency-Key": "k"})

    assert (first.status, first.json) == (second.status, second.json)
    assert len(await stored_steps(store, "r1")) == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "hi"}, "prompt"),
        ({"text": "hi"}, "prompt"),
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
def test_a_body_that_cannot_be_translated_is_rejected_and_names_the_field(body, param):
    """SGLang gets bodies in its own shape unchanged: whether they can be translated is checked once the engine is known."""
    with pytest.raises(UnprocessableRequest) as refused:
        read_generate("/generate", body, TranslationOptions()).native({}, "vllm")

    assert param == refused.value.param


@pytest.mark.parametrize("body", [{"text": "hi"}, {"input_ids": [[1]], "stream": True}, SGLANG])
def test_sglang_gets_a_body_of_its_own_shape_unchanged(body):
    """For an unknown engine it is not rejected either: the call is recorded as one without a response."""
    call = read_generate("/generate", body, TranslationOptions())

    assert (call.own, call.request) == ({"sglang": "/generate"}, body)
    call.native({}, None)


def test_sampling_parameters_of_sglang_are_translated_to_completions():
    """SGLang's default of max_new_tokens is applied."""
    sampling = {"max_new_tokens": 7, "min_new_tokens": 2, "stop": ["x"], "top_p": None, "no_stop_trim": True}
    body = read_generate("/generate", {"input_ids": [1], "sampling_params": sampling}, TranslationOptions()).body

    assert body == {
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
        "max_tokens": 7, "min_tokens": 2, "stop": ["x"], "include_stop_str_in_output": True, "prompt": [1]
    }  # fmt: skip
    assert read_generate("/generate", {"input_ids": [1]}, TranslationOptions()).body["max_tokens"] == 128


@pytest.mark.parametrize("body", [VLLM, SGLANG])
def test_missing_sampling_parameters_are_sent_with_neutral_values(body):
    """Completions would otherwise apply the model's `generation_config`."""
    sampling = {**body.get("sampling_params", body), "top_p": 0.5, "temperature": None}
    body = {**body, "sampling_params": sampling} if "sampling_params" in body else sampling
    neutral = {"temperature": 1.0, "top_p": 0.5, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}

    assert neutral.items() <= read_generate("/generate", body, TranslationOptions()).body.items()


async def test_the_trl_server_of_atropos_gets_what_was_sampled(store):
    """Its published class decodes the ids; it needs `base_url` without `/v1`."""
    decode, requested = load_tokenizer().decode, SimpleNamespace(model_name="m", base_url="")
    tokenizer = SimpleNamespace(decode=decode, eos_token_id=2, apply_chat_template=lambda messages, **_: str(messages))
    used = {"aiohttp": aiohttp, "uuid": uuid, "time": time, "Completion": Completion, "CompletionChoice": CompletionChoice,
            "ChatCompletion": ChatCompletion, "ChatCompletionMessage": ChatCompletionMessage, "Choice": Choice,
            "AutoTokenizer": SimpleNamespace(from_pretrained=lambda _name: tokenizer)}  # fmt: skip
    base = type("APIServer", (), {"__init__": lambda self, config, reasoning_config=None: None})
    path = "atroposlib/envs/server_handling/trl_vllm_server.py"
    published = load_published(path, "TrlVllmServer", APIServer=base, **used)
    async with simulating("127.0.0.1:0", Options()) as engine, session_with(engine, store) as session:
        requested.base_url = f"{session.url}/rollouts/r1"
        server = published.TrlVllmServer(requested)
        completion = await server._completion_wrapper(prompt="Hello", n=2, max_tokens=6)
        chat = await server._chat_completion_wrapper(messages=[{"role": "user", "content": "Hello"}], max_tokens=6)
    steps = await stored_steps(store, "r1")

    texts = [[decode(choice.ids.tolist()) for choice in step.choices] for step in steps]
    assert [[it.text for it in completion.choices], [it.message.content for it in chat.choices]] == texts
    assert [len(step.choices) for step in steps] == [2, 1]


@pytest.mark.parametrize("prompts", [None, [], "hi", [1], [[1, 2]]])
def test_trl_requires_a_list_of_texts(prompts):
    with pytest.raises(UnprocessableRequest) as refused:
        read_trl_generate("/generate/", {"prompts": prompts}, TranslationOptions())

    assert refused.value.param == "prompts"


@pytest.mark.parametrize(
    ("name", "value"),
    [("images", ["aGk="]), ("generation_kwargs", {"seed": 7}), ("guided_decoding_regex", "a+"),
     ("structured_outputs_regex", "a+")],
)  # fmt: skip
def test_trl_gets_an_error_for_a_field_that_completions_would_ignore(name, value):
    """Of TRL's server; empty ones, as TRL's client sends them, have no effect."""
    with pytest.raises(UnprocessableRequest) as refused:
        read_trl_generate("/generate/", {"prompts": ["hi"], name: value}, TranslationOptions())
    sent = read_trl_generate("/generate/", {"prompts": ["hi"], name: type(value)()}, TranslationOptions()).body

    assert name == refused.value.param
    assert name not in sent


def test_the_catch_all_alias_applies_to_calls_without_a_model():
    """Atropos' clients send no `model`."""
    form = read_generate("/generate", VLLM, TranslationOptions())

    assert "model" not in form.native({"gpt": "policy"}, "vllm")
    assert form.native({"*": "policy"}, "vllm")["model"] == "policy"
