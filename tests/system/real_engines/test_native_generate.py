"""SGLang's own `/generate` through the proxy: the responses are SGLang's, and every call is recorded exactly."""

import asyncio
from collections.abc import Iterator
from typing import Any

import aiohttp
import orjson
import pytest

from . import environment
from .conftest import Engine, start_sglang
from .through import through_proxy

GENERATE, CHAT, COMPLETIONS = "/generate", "/v1/chat/completions", "/v1/completions"
GREEDY = {"temperature": 0, "max_new_tokens": 12}
IDS = [46, 77, 306, 1020]
CASES: dict[str, dict[str, Any]] = {
    "text": {"text": "Once upon a time"},
    "ids": {"input_ids": IDS},
    "n=3": {"text": "Once upon a time", "sampling_params": GREEDY | {"n": 3}},
    "two prompts": {"text": ["Once upon", "The quick brown fox"]},
    "two prompts, n=2": {"input_ids": [IDS, IDS[:2]], "sampling_params": GREEDY | {"n": 2}},
    "one prompt in a list": {"text": ["Once upon"]},
    "logprobs": {"input_ids": IDS, "return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 2},
    "logprobs of given ids": {"input_ids": IDS, "return_logprob": True, "token_ids_logprob": [5, 6]},
    "logprobs with texts": {"text": "Once", "return_logprob": True, "return_text_in_logprobs": True},
    "logprobs of one prompt": {"text": ["Once", "The"], "return_logprob": [False, True], "logprob_start_len": [0, 0]},
    "unused options of logprobs": {"input_ids": IDS, "logprob_start_len": 0, "top_logprobs_num": 2},
    "prompt ids": {"text": "Once upon a time", "return_prompt_token_ids": True},
    "no tokens": {"input_ids": IDS, "sampling_params": {"max_new_tokens": 0}},
    "other parameters": {"text": ["Once", "The"], "sampling_params": [GREEDY, GREEDY | {"max_new_tokens": 3}]},
    "regex": {"text": "Once", "sampling_params": GREEDY | {"regex": "a🦙é", "max_new_tokens": 40}},
    "unknown fields": {"text": "Once", "metadata": {"a": 1}, "unknown": [1, 2.5, None]},
    # slime and Atropos' SGLangServer
    "slime": {
        "input_ids": IDS,
        "return_logprob": True,
        "sampling_params": GREEDY
        | {"skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False},
    },
    "atropos": {"input_ids": IDS, "return_logprob": True, "return_text_in_logprobs": False},
}
REFUSED: dict[str, dict[str, Any]] = {
    "no prompt": {},
    "wrong type": {"text": 5},
    "unknown parameter": {"text": "a", "sampling_params": {"max_tokens": 3}},
    "too long": {"input_ids": [5] * 4000},
    "lists with samples": {"text": ["a"], "return_logprob": [True], "sampling_params": {"n": 2}},
}
# What differs between any two calls, beside times.
VOLATILE = {"id", "cached_tokens", "cached_tokens_details"}
CONTINUED = {"output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"}
LONG = {"max_new_tokens": 1500, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "Count to three."}]
LEFT: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": (GENERATE, {"text": "Once", "sampling_params": LONG}),
    "generate, n=2": (GENERATE, {"text": "Once", "sampling_params": LONG | {"n": 2}, "stream": True}),
    "chat": (CHAT, {"model": "tiny", "messages": MESSAGES, "max_tokens": 1500, "ignore_eos": True}),
    "completions": (COMPLETIONS, {"model": "tiny", "prompt": "Once", "max_tokens": 1500, "ignore_eos": True}),
}
TIMEOUT_S = 30


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An SGLang without parsers; its streams continue their choices."""
    log = tmp_path_factory.mktemp("engine") / "bare.log"
    with start_sglang(environment.ensure_sglang().model, "tiny", log, "--incremental-streaming-output") as engine:
        yield engine


@pytest.fixture(params=["sglang", "bare"])
def either(request: pytest.FixtureRequest) -> Engine:
    """An SGLang with parsers, which repeats choices in its streams, and one without, which continues them."""
    engine: Engine = request.getfixturevalue(request.param)
    return engine


@pytest.fixture
async def http():
    async with aiohttp.ClientSession() as session:
        yield session


async def post(http, url, body):
    """Return status, content type, and the response; of a stream, each choice as its events add up, and all keys."""
    async with http.post(url, json=body) as response:
        text = await response.read()
    if response.content_type == "application/json":
        return response.status, response.content_type, comparable(orjson.loads(text))
    *events, last, rest = text.split(b"\n\n")
    assert (last, rest) == (b"data: [DONE]", b"")
    keys: set[str] = set()
    choices: dict[int, Any] = {}
    for event in events:
        payload = orjson.loads(event.removeprefix(b"data: "))
        keys |= {*payload, *payload.get("meta_info", {})}
        index = payload.get("index", 0)
        choices[index] = payload if index not in choices else joined(choices[index], payload)
    return response.status, response.content_type, comparable(choices), keys


def joined(before, event):
    """Return a choice with its next event, which repeats it or continues it."""
    meta = event["meta_info"]
    if len(before["output_ids"]) + len(event["output_ids"]) != meta["completion_tokens"]:
        return event
    lists = {name: before["meta_info"][name] + values for name, values in meta.items() if name in CONTINUED}
    text, ids = before["text"] + event["text"], before["output_ids"] + event["output_ids"]
    return {**event, "text": text, "output_ids": ids, "meta_info": {**meta, **lists}}


def comparable(value):
    """Return JSON without ids, times and what was cached; the last digits of logprobs depend on the batch."""
    if isinstance(value, dict):
        is_kept = {key: not isinstance(inner, float) and key not in VOLATILE for key, inner in value.items()}
        return {key: comparable(inner) for key, inner in value.items() if is_kept[key]}
    if isinstance(value, list):
        return [comparable(inner) for inner in value]
    return round(value, 3) if isinstance(value, float) else value


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_responses_are_sglangs_own_and_steps_are_exact(either, http, tmp_path, stream):
    """Each case directly and through the proxy; the step has the ids, logprobs, prompts and versions of a direct call."""
    async with through_proxy(either.url, tmp_path) as proxy:
        for name, case in CASES.items():
            body = {"sampling_params": GREEDY} | case | ({"stream": True} if stream else {})
            flagged = body | {"stream": False, "return_logprob": True, "return_prompt_token_ids": True}
            direct = await post(http, either.url + GENERATE, body)
            shown = await post(http, f"{proxy.url}/rollouts/{name}{GENERATE}", body)
            async with http.post(either.url + GENERATE, json=flagged) as response:
                answered = await response.json()
            choices = answered if isinstance(answered, list) else [answered]
            (step,) = await proxy.steps(name)

            assert direct == shown, name
            assert (step["dialect"], step["fidelity"]["problems"]) == ("sglang_generate", []), name
            assert step["model"] == {"asked": None, "served": "tiny"}
            prompts = step["prompts"] if step["prompt_ids"] is None else [step["prompt_ids"]]
            for kept, engine in zip(step["choices"], choices, strict=True):
                pairs = engine["meta_info"]["output_token_logprobs"]
                assert engine["output_ids"] == kept["ids"], name
                assert pytest.approx([pair[0] for pair in pairs], abs=1e-3) == kept["logprobs"]
                assert engine["prompt_token_ids"] == prompts[kept["prompt"]]
                assert engine["meta_info"]["finish_reason"]["type"] == kept["finish_reason"]
                spans = [{"start": 0, "end": len(kept["ids"]), "policy_version": "default"}]
                assert (spans if kept["ids"] else []) == kept["spans"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_error_is_sglangs_own(sglang, http, tmp_path, stream):
    """Status and body, also of errors that a stream returns as an event."""
    async with through_proxy(sglang.url, tmp_path) as proxy:
        for name, case in REFUSED.items():
            body = case | {"stream": stream}
            direct = await post(http, sglang.url + GENERATE, body)
            shown = await post(http, f"{proxy.url}/rollouts/{name}{GENERATE}", body)
            (step,) = await proxy.steps(name)

            assert (shown, step["status"]) == (direct, "error"), name


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_recorded_logprobs_are_those_that_sglang_scores(sglang, http, tmp_path, stream):
    """Sampled at temperature 1, with several prompts and samples; each choice is scored again with its prompt."""
    sampling = {"temperature": 1.0, "max_new_tokens": 40, "n": 2}
    body = {"text": ["Once upon a time", "The"], "sampling_params": sampling, "stream": stream}
    async with through_proxy(sglang.url, tmp_path) as proxy:
        await post(http, f"{proxy.url}/rollouts/r1{GENERATE}", body)
        (step,) = await proxy.steps("r1")
    for choice in step["choices"]:
        scores = await sglang.score(step["prompts"][choice["prompt"]] + choice["ids"])
        assert pytest.approx(scores[-len(choice["ids"]) :], abs=1e-4) == choice["logprobs"]


async def test_sampled_ids_that_are_sent_back_extend_the_sequence(either, http, tmp_path):
    """Whole and streamed turns alternate."""
    async with through_proxy(either.url, tmp_path) as proxy:
        prompt = IDS
        for stream in (False, True, False):
            body = {"input_ids": prompt, "sampling_params": GREEDY | {"ignore_eos": True}, "stream": stream}
            await post(http, f"{proxy.url}/rollouts/r1{GENERATE}", body)
            prompt = prompt + (await proxy.steps("r1"))[-1]["choices"][0]["ids"] + [198, 50]
        (row,) = await proxy.rows("r1")

    assert prompt[:-2] == row["token_ids"]
    assert sum(row["mask"]) == 36


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_weights_that_change_in_flight_have_different_versions(sglang, http, tmp_path, stream):
    """Each sampled token has the version that sampled it, in the step and in the row."""
    body = {"text": "Once", "sampling_params": LONG, "stream": stream}
    try:
        async with through_proxy(sglang.url, tmp_path) as proxy:
            calling = asyncio.ensure_future(post(http, f"{proxy.url}/rollouts/r1{GENERATE}", body))
            await until(sglang, http, 1)
            await asyncio.sleep(0.2)  # a few tokens: no metric of SGLang shows a running request's tokens
            await change_version(http, sglang, "v2")
            await calling
            (step,) = await proxy.steps("r1")
            (row,) = await proxy.rows("r1")
    finally:
        await change_version(http, sglang, "default")

    first, second = step["choices"][0]["spans"]
    assert (first["policy_version"], second["policy_version"]) == ("default", "v2")
    assert (0, second["start"], 1500) == (first["start"], first["end"], second["end"])
    assert [span["policy_version"] for span in row["spans"]] == ["default", "v2"]
    assert step["fidelity"]["exact"]


async def change_version(http, engine, version):
    """Set the label of the engine's weights; they do not change, and running requests continue."""
    body = {"new_version": version, "abort_all_requests": False}
    async with http.post(f"{engine.url}/update_weight_version", json=body) as response:
        assert response.status == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", LEFT)
async def test_what_was_sampled_until_the_client_left_is_recorded(either, http, tmp_path, name, stream):
    """With as many logprobs as ids, which SGLang scores alike, and the engine stops; streams of chat are replayed by `bare`."""
    path, body = LEFT[name]
    async with through_proxy(either.url, tmp_path) as proxy:
        await until(either, http, 0)
        calling = asyncio.ensure_future(post(http, f"{proxy.url}/rollouts/r1{path}", {"stream": stream, **body}))
        await until(either, http, 1)
        await asyncio.sleep(0.2)  # a few tokens
        calling.cancel()
        async with asyncio.timeout(TIMEOUT_S):
            while not (steps := await proxy.steps("r1")):
                await asyncio.sleep(0.05)
        await until(either, http, 0)

    (step,) = steps
    assert (step["status"], step["delivered"], step["reason"]) == ("partial", False, "the client disconnected")
    assert {"stream_cut", "aborted", "unparsed_event"} >= set(step["fidelity"]["problems"])
    for choice in step["choices"]:
        assert 0 < len(choice["ids"]) == len(choice["logprobs"]) < 1500
        scores = await either.score(step["prompt_ids"] + choice["ids"])
        assert pytest.approx(scores[-len(choice["ids"]) :], abs=1e-3) == choice["logprobs"]


async def until(engine, http, running):
    """Wait until the engine has this many running requests, or more than none; it has no notification."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            async with http.get(f"{engine.url}/metrics") as response:
                lines = (await response.text()).splitlines()
            values = [float(line.rpartition(" ")[2]) for line in lines if line.startswith("sglang:num_running_reqs{")]
            if bool(sum(values)) == bool(running):
                return
            await asyncio.sleep(0.05)
