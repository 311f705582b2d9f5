"""SGLang's routes from the clients' side."""

import openai
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.json_bodies import BODIES, JSON
from tests.support.recorded import load

from proxy.protocols.engines import PROBE_PATHS, identify_engine
from proxy.protocols.engines.base import ProbeResponse, Traits
from proxy.simulator.options import Options

SGLANG = Options(shape="sglang", max_model_len=4000)
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Say hello."}]


@pytest.fixture
async def sglang(start):
    """An engine with SGLang's API."""
    return await start(SGLANG)


@pytest.mark.parametrize("has_parser", [True, False])
async def test_it_is_detected(start, has_parser):
    """It is detected as SGLang, with or without parsers."""
    engine = await start(Options(shape="sglang", has_parser=has_parser))
    seen = {}
    for path in PROBE_PATHS:
        async with engine.client.get(path) as response:
            body = await response.json() if response.status == 200 else None
            seen[path] = ProbeResponse(response.status, "", body)

    assert Traits("sglang", "simulator-0.1", has_parser, model="simulated") == identify_engine(seen)


async def test_openais_client_chats(sglang):
    """OpenAI's client gets a chat completion, the same one as a stream, and completions."""
    url = str(sglang.client.make_url("/v1"))
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as agent:
        completion = await agent.chat.completions.create(model="any", messages=MESSAGES, seed=1, logprobs=True)
        stream = await agent.chat.completions.create(model="any", messages=MESSAGES, seed=1, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        completed = await agent.completions.create(model="any", prompt="Return the", seed=1)

    assert completion.choices[0].message.content == text
    assert completion.usage.completion_tokens == len(completion.choices[0].logprobs.content)
    assert completed.choices[0].text


@pytest.mark.parametrize(
    "name",
    ["chat_token_ids_s_plain", "chat_prompt_token_ids_s_plain", "chat_meta_info_s_plain", "err_no_messages_n_plain"],
)
async def test_errors_equal_the_recorded_ones(sglang, name):
    """Requests that SGLang rejects get the same status and body."""
    recorded = load(f"recorded/{name}", "sglang")
    async with sglang.client.post(recorded.path, json=recorded.body) as response:
        assert response.status == recorded.status
        assert await response.read() == recorded.response


@pytest.mark.parametrize("stream", [True, False])
async def test_an_overlong_prompt_is_the_recorded_error(sglang, stream):
    """A prompt that does not fit into the context window is a 400 with SGLang's message, streamed or not."""
    body = {"messages": [{"role": "user", "content": " word" * 6000}], "stream": stream}
    async with sglang.client.post(CHAT, json=body) as response:
        error = await response.json()
    recorded = orjson.loads(load("recorded/err_overlong_n_plain", "sglang").response)
    count = error["message"].split("(")[1].split(" ")[0]

    assert response.status == 400
    message = recorded["message"].replace("2110", count).replace("2048", "4000")
    assert error == {**recorded, "message": message}


@pytest.mark.parametrize("flag", ["return_token_ids", "return_meta_info", "return_prompt_token_ids"])
async def test_an_older_server_ignores_the_flags(start, flag):
    """An older server responds as if the request had no flags for ids."""
    engine = await start(Options(shape="sglang", supports_ids_flags=False, seed=1))
    plain = await engine.chat()
    flagged = await engine.chat(**{flag: True})
    chunks = await engine.chat_stream(**{flag: True})

    assert flagged["choices"] == plain["choices"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("aborts", [False, True])
async def test_the_version_can_change_during_a_call(start, chunks_from, aborts):
    """Tokens after an update of the label have the new version; by default the update aborts running calls."""
    engine = await start(Options(shape="sglang", token_delay_s=0.002))
    body = {"text": "If", "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}, "stream": True}
    async with engine.client.post("/generate", json=body) as response:
        first = await response.content.readuntil(b"\n\n")
        more = {} if aborts else {"abort_all_requests": False}
        updated = await engine("/update_weight_version", new_version="v2", **more)
        last = chunks_from(first + await response.read())[-1]["meta_info"]
    async with engine.client.get("/model_info") as response:
        label = (await response.json())["weight_version"]
    first_span, second_span = last["weight_versions"]

    assert (updated["new_version"], label, last["weight_version"]) == ("v2", "v2", "v2")
    assert (first_span["version"], first_span["start"], second_span["version"]) == ("default", 0, "v2")
    assert first_span["end"] == second_span["start"]
    assert second_span["end"] == last["completion_tokens"]
    assert last["finish_reason"]["type"] == ("abort" if aborts else "length")


async def test_metadata_has_the_spans(start):
    """An unstreamed response always has the spans of its first choice."""
    completion = await (await start(Options(shape="sglang", weight_version="step-7"))).chat(seed=1)
    count = completion["usage"]["completion_tokens"]

    assert completion["metadata"] == {
        "weight_version": "step-7",
        "weight_versions": [{"version": "step-7", "start": 0, "end": count}],
    }


async def test_rid_is_the_id(sglang):
    """`rid` is the id of the response and of its `meta_info`."""
    completion = await sglang.chat(rid="ro-1:step-3", return_meta_info=True)

    assert completion["id"] == completion["choices"][0]["meta_info"]["id"] == "ro-1:step-3"


async def test_tokenize_and_detokenize(sglang):
    """Both paths of tokenize return the ids of a text, and detokenize returns the text."""
    tokenized = await sglang("/v1/tokenize", prompt="Return the")
    older = await sglang("/tokenize", prompt="Return the")

    assert tokenized == older
    assert list(tokenized) == ["tokens", "count", "max_model_len"]
    assert await sglang("/v1/detokenize", tokens=tokenized["tokens"]) == {"text": "Return the"}


async def test_health_metrics_and_models(sglang):
    """The engine is healthy, lists one model, and reports the number of running calls."""
    async with sglang.client.get("/health") as response:
        assert response.status == 200
    async with sglang.client.get("/v1/models") as response:
        assert [(m["id"], m["owned_by"]) for m in (await response.json())["data"]] == [("simulated", "sglang")]
    async with sglang.client.get("/metrics") as response:
        assert 'sglang:num_running_reqs{model_name="simulated"} 0.0' in await response.text()


FLAGS = st.fixed_dictionaries(
    {},
    optional={
        "return_token_ids": st.booleans() | JSON,
        "return_meta_info": st.booleans(),
        "return_output_ids_in_sglext": st.booleans(),
        "return_logprob": st.booleans() | JSON,
        "logprob_start_len": st.integers(-2, 4) | JSON,
        "input_ids": st.lists(st.integers(-1, 3_000), max_size=3) | JSON,
        "text": st.text(max_size=3) | JSON,
        "sampling_params": st.fixed_dictionaries({"max_new_tokens": st.integers(0, 4)}) | JSON,
        "rid": JSON,
    },
)


@given(path=st.sampled_from([CHAT, "/v1/completions", "/generate", "/v1/tokenize"]), body=BODIES, flags=FLAGS)
async def test_every_body_gets_a_response(sglang, path, body, flags):
    """Any JSON body gets a 200 or a 400 with a body."""
    headers = {"Content-Type": "application/json"}
    async with sglang.client.post(path, data=orjson.dumps(body | flags), headers=headers) as response:
        raw = await response.read()

    assert response.status == 200 or (response.status == 400 and raw)
