"""`record.logprobs: off` with vLLM and llama.cpp: the same ids and responses, without logprobs."""

import aiohttp
import orjson
import pytest

from .through import through_proxy

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES = {
    "chat": (CHAT, {"messages": QUESTION, "max_tokens": 24, "temperature": 0, "seed": 7}),
    "completions": (COMPLETIONS, {"prompt": "The capital of France is", "max_tokens": 24, "temperature": 0, "seed": 7}),
}
SHAPES = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
DIALECTS = pytest.mark.parametrize("case", BODIES)


async def shown_and_recorded(engine, folder, path, body, logprobs):
    """Return the texts that a client gets, and the step."""
    async with (
        through_proxy(engine.url, folder / logprobs, record={"logprobs": logprobs}) as proxy,
        aiohttp.ClientSession() as http,
    ):
        async with http.post(f"{proxy.url}/rollouts/r1{path}", json=body) as response:
            assert response.status == 200, await response.text()
            text = await response.read()
        (step,) = await proxy.steps("r1")
    return texts(text), step


def texts(response):
    """Return the text of a response, or of a stream's events, joined."""
    lines = response.split(b"\n")
    payloads = [line[6:] for line in lines if line.startswith(b"data: {")] or [response]
    choices = [choice for payload in payloads for choice in orjson.loads(payload)["choices"]]
    assert all(choice.get("logprobs") is None for choice in choices)
    spoken = [choice.get("message") or choice.get("delta") or choice for choice in choices]
    return "".join((part.get("content") or part.get("text") or "") for part in spoken)


async def both(engine, folder, case, model, *, stream):
    """Return texts and step with logprobs, and without."""
    path, body = BODIES[case]
    body = {**body, "model": model, **({"stream": True} if stream else {})}
    return [await shown_and_recorded(engine, folder, path, body, logprobs) for logprobs in ("full", "off")]


@SHAPES
@DIALECTS
async def test_the_engine_samples_the_same_without_logprobs(engine, tmp_path, case, stream):
    """The proxy requests ids only; and for a stream, the usage."""
    (full_text, full), (text, step) = await both(engine, tmp_path, case, "tiny", stream=stream)
    counts = {"stream_options": {"include_usage": True}} if stream else {}
    chat_of_sglang = engine.kind == "sglang" and case == "chat"
    flags = (
        ("return_input_ids_in_sglext", "return_output_ids_in_sglext")
        if chat_of_sglang and stream
        else (("return_token_ids", "return_meta_info") if chat_of_sglang else ("return_token_ids",))
    )

    assert full_text == text
    assert (True, [], dict.fromkeys(flags, True) | counts) == (
        step["fidelity"]["exact"],
        step["choices"][0]["logprobs"],
        {name: value for name, value in step["sent"]["set"].items() if name not in {"rid", "request_id"}},
    )
    assert len(full["choices"][0]["logprobs"]) == len(full["choices"][0]["ids"]) > 0
    assert (full["prompt_ids"], full["choices"][0]["ids"]) == (step["prompt_ids"], step["choices"][0]["ids"])


@SHAPES
@DIALECTS
async def test_llamacpp_returns_logprobs_only_if_its_ids_are_in_them(llamacpp, tmp_path, case, stream):
    """That is, in a live stream of completions."""
    (full_text, full), (text, step) = await both(llamacpp, tmp_path, case, "smollm2", stream=stream)
    in_them = stream and case == "completions"

    assert full_text == text
    assert (step["fidelity"]["exact"], bool(step["choices"][0]["logprobs"])) == (True, in_them)
    assert (full["prompt_ids"], full["choices"][0]["ids"]) == (step["prompt_ids"], step["choices"][0]["ids"])


async def test_llamacpps_split_characters_are_exact_without_logprobs(llamacpp, tmp_path):
    """Their ids are complete, and only their logprobs would be missing."""
    path, body = BODIES["chat"]
    body = {**body, "model": "smollm2", "grammar": 'root ::= "a🦙🎉"'}
    steps = [
        (await shown_and_recorded(llamacpp, tmp_path, path, body, logprobs))[1]["fidelity"]
        for logprobs in ("full", "off")
    ]

    assert [fidelity["exact"] for fidelity in steps] == [False, True]
