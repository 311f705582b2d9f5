"""A prompt that ends inside a reply of the model gets the rest of the reply."""

import asyncio
from collections import deque

import aiohttp
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulator.test_templates import EOS, LLAMA
from tests.support.simulated import HELLO

from proxy.simulator.model import Token, load_model
from proxy.simulator.options import Options
from proxy.simulator.prompts import chat_prompt, text_prompts
from proxy.simulator.requests import read_chat, read_common, read_completions
from proxy.simulator.script import Conversation, Cut, Script, ScriptedCall, Turn

SHAPES = pytest.mark.parametrize("shape", ["vllm", "sglang"])
CHAT = "/v1/chat/completions"
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]
TURNS = [
    None,
    Turn(say="Résumé 🦊 of all."),
    Turn(think="So?", say="I look.", call=[ScriptedCall("weather", {"city": "Oslo"})]),
]
ENDING = [
    {"messages": [*HELLO, {"role": "assistant", "content": "Hello"}], "add_generation_prompt": False, **more}
    for more in ({}, {"continue_final_message": True})
]


def sampled(body, options, ids=None, **more) -> tuple[list[int], list[Token]]:
    """Return the ids of the prompt, and the tokens that the engine samples for a chat or completion."""
    body = {**body, **more}
    model = load_model(options.template, options.eos, noncanonical_rate=options.noncanonical_rate)
    common = read_common(body, options)
    if "messages" in body:
        prompt = chat_prompt(read_chat(body), common, model, options, ids=ids)
    else:
        (prompt,) = text_prompts(
            read_completions(body if ids is None else {**body, "prompt": ids}), common, model, options
        )
    seed = options.seed if common.seed is None else common.seed
    return list(prompt.ids), list(model.generate(prompt.ids, common, prompt.options, seed or 0))


BODIES = st.one_of(
    st.fixed_dictionaries(
        {"messages": st.sampled_from([HELLO, [*HELLO, {"role": "assistant", "content": "Hi"}, *HELLO]])},
        optional={
            "tools": st.just(TOOLS),
            "chat_template_kwargs": st.sampled_from([{"enable_thinking": True}, {"enable_thinking": False}]),
        },
    ),
    st.sampled_from(ENDING),
    st.fixed_dictionaries({"prompt": st.sampled_from(["If it", "Return the current", [350, 261], [70]])}),
)
SAMPLING = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 90)},
    optional={
        "seed": st.integers(0, 1 << 32),
        "temperature": st.sampled_from([0, 0.7, 1, 2]),
        "min_tokens": st.integers(0, 90),
        "ignore_eos": st.just(True),
    },
)


@settings(max_examples=300)
@given(
    BODIES,
    SAMPLING,
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([{}, {"template": LLAMA, "eos": EOS}]),
    st.sampled_from(TURNS),
    st.data(),
)
def test_a_reply_continues_after_any_of_its_tokens(body, sampling, rate, template, turn, data):
    """With the seed plus the number of tokens, or the engine's, the rest has the same ids, distributions and reason."""
    script = None if turn is None else Script([Conversation([turn, turn])])
    options = Options(seed=7, noncanonical_rate=rate, script=script, **template)
    body = {**body, **sampling}
    body["min_tokens"] = min(body.get("min_tokens", 0), body["max_tokens"])
    prompt, whole = sampled(body, options)
    count = data.draw(st.integers(0, len(whole) - 1))
    changed = {name: max(body[name] - count, 0) for name in ("max_tokens", "min_tokens")}
    changed |= {"seed": body["seed"] + count} if "seed" in body else {}
    _, rest = sampled(body, options, [*prompt, *(token.id for token in whole[:count])], **changed)

    assert [(t.id, t.distribution.likely, t.finish_reason) for t in whole[count:]] == [
        (t.id, t.distribution.likely, t.finish_reason) for t in rest
    ]


THINKS = {"chat_template_kwargs": {"enable_thinking": True}}
WAYS = {"vllm": lambda ids: {"kv_transfer_params": {"prompt_token_ids": ids}}, "sglang": lambda ids: {"input_ids": ids}}


@SHAPES
@pytest.mark.parametrize("stream", [False, True])
async def test_the_rest_of_a_reply_with_reasoning_is_parsed_as_by_the_engine(shape, stream, start):
    """Inside a thought all engines go on with it; after its end, only vLLM's streams know that, or SGLang by a field."""
    engine = await start(Options(shape=shape))
    body = {"messages": HELLO, "seed": 3, "max_tokens": 90, **THINKS}
    prompt, whole = sampled(body, Options())
    closing = [token.id for token in whole].index(load_model().tokenizer.id("</think>")) + 1

    async def rest(count, **more):
        asked = {**body, "seed": 3 + count, **WAYS[shape]([*prompt, *(token.id for token in whole[:count])]), **more}
        if not stream:
            parts = [(await engine(CHAT, **asked))["choices"][0]["message"]]
        else:
            parts = [choice["delta"] for chunk in await engine.stream(CHAT, **asked) for choice in chunk["choices"]]
        thought = "".join(part.get("reasoning") or part.get("reasoning_content") or "" for part in parts)
        return thought, "".join(part.get("content") or "" for part in parts)

    thought, content = await rest(0)
    rest_of_thought, same = await rest(2)
    known = ("", content) if shape == "vllm" and stream else (content, "")

    assert (thought.endswith(rest_of_thought), same) == (True, content)
    assert known == await rest(closing)
    if shape == "sglang":
        assert await rest(closing, separate_reasoning=False) == ("", content)


def faulty(shape, *cuts, **fields):
    """The options of an engine whose next calls have these cuts."""
    options = Options(shape=shape, seed=3, **fields)
    options.faults.cuts = deque(cuts)
    return options


@SHAPES
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("count", [0, 1, 5])
async def test_a_call_can_be_aborted_after_any_token(shape, path, count, start):
    """An aborted call has the first tokens of the whole, with finish reason abort; the next call is complete."""
    asked = {"messages": HELLO, "logprobs": True} if path == CHAT else {"prompt": "If", "logprobs": 1}
    engine = await start(faulty(shape, Cut(count, "abort"), Cut(count, "abort"), None))
    body = {**asked, "max_tokens": 20, "stop": "zzzzzz", "stream_options": {"include_usage": True}}
    chunks = await engine.stream(path, **body)
    del body["stream_options"]
    cut, whole = [(await engine(path, **body)) for _ in range(2)]
    entries = [(c["choices"][0]["logprobs"] or {}) for c in (cut, whole)]
    tokens, all_tokens = (entry.get("content", entry.get("tokens", [])) for entry in entries)
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    texts = [
        (c["choices"][0].get("message") or {"content": c["choices"][0].get("text")})["content"] for c in (cut, whole)
    ]

    assert (cut["choices"][0]["finish_reason"], cut["usage"]["completion_tokens"]) == ("abort", count)
    assert (all_tokens[:count], count) == (tokens, chunks[-1]["usage"]["completion_tokens"])
    assert texts[1].startswith(texts[0])
    assert reasons == ([] if count == 0 and shape == "vllm" else ["abort"])


@SHAPES
@pytest.mark.parametrize("by", ["lost", "torn"])
async def test_a_connection_can_be_lost_after_any_token(shape, by, start):
    """A stream ends after so many tokens, between or within events, also before its end; an unstreamed response is lost."""
    counts = (0, 1, 5, 8)
    engine = await start(faulty(shape, *(Cut(count, by) for count in counts), Cut(5, by)))
    body = {"prompt": "If", "max_tokens": 8}
    received = []
    for _ in counts:
        async with engine.client.post("/v1/completions", json={**body, "stream": True}) as response:
            raw = b""
            with pytest.raises(aiohttp.ClientPayloadError):
                async for data in response.content.iter_any():
                    raw += data
            received.append((raw.count(b"\n\n"), not raw.endswith(b"\n\n") and raw != b""))
    with pytest.raises(aiohttp.ServerDisconnectedError):
        await engine.answer("/v1/completions", body)

    assert received == [(count, by == "torn") for count in counts]
    assert (await engine("/v1/completions", **body))["usage"]["completion_tokens"] == 8


async def test_a_script_can_cut_several_attempts(start):
    """The attempts at a turn are cut one by one; a number disconnects."""
    script = Script([Conversation([Turn(say="One two three four five.", cut=[Cut(2, "abort"), 2])])])
    engine = await start(Options(script=script))
    aborted = await engine.chat()
    with pytest.raises(aiohttp.ServerDisconnectedError):
        await engine.chat()

    assert (aborted["choices"][0]["finish_reason"], aborted["usage"]["completion_tokens"]) == ("abort", 2)
    assert (await engine.chat())["choices"][0]["message"]["content"] == "One two three four five."


PAUSES = {
    "vllm": {mode: ("/pause", {"params": {"mode": mode}}, "/resume") for mode in ("abort", "keep", "wait")},
    "sglang": {
        mode: ("/pause_generation", {"json": {"mode": mode}}, "/continue_generation")
        for mode in ("abort", "retract", "in_place")
    },
}


@pytest.mark.parametrize(("shape", "mode"), [(shape, mode) for shape in PAUSES for mode in PAUSES[shape]])
async def test_a_pause_ends_or_holds_calls_and_lets_new_calls_wait(shape, mode, start):
    """Running calls are aborted, held or finished; new calls wait, and a client can leave while its call waits."""
    engine = await start(Options(shape=shape, seed=3, token_delay_s=0.002))
    path, more, resume = PAUSES[shape][mode]
    body = {"prompt": "If", "max_tokens": 30, "ignore_eos": True}
    async with engine.client.post("/v1/completions", json={**body, "stream": True}) as running:
        await running.content.readuntil(b"\n\n")
        async with engine.client.post(path, **more) as paused:
            assert paused.status == 200, await paused.read()
        new = asyncio.create_task(engine("/v1/completions", **body))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine("/v1/completions", **body), 0.1)
        reasons = await running.read() if mode in {"abort", "wait"} else b""
        assert not new.done()
        await engine(resume)
        reasons += await running.read()

    assert (b'"abort"' in reasons, b'"length"' in reasons) == (mode == "abort", mode != "abort")
    assert (await new)["usage"]["completion_tokens"] == 30


@pytest.mark.parametrize("stream", [False, True])
async def test_vllm_aborts_calls_by_their_ids(stream, start):
    """The call ends at once with what it has; a call that waits for the end of a pause has nothing, not even a reason."""
    engine = await start(Options(seed=3, token_delay_s=0.002))
    body = {"messages": HELLO, "max_tokens": 400, "ignore_eos": True, "return_token_ids": True, "stream": stream}
    await engine.client.post("/pause?mode=keep")
    calls = [
        asyncio.create_task(engine.answer(CHAT, body, headers={"X-Request-Id": name}))
        for name in ("mine", "yours", "theirs")
    ]
    while (await engine.get("/metrics"))[1].split()[-1] != b"3.0":
        pass
    assert await engine("/abort_requests", request_ids=["chatcmpl-mine"]) == {"status": "aborted", "aborted": 1}
    raw = (await calls[0])[1]
    await engine("/resume")
    await engine("/update_weight_version", new_version="v2")
    await engine.answer("/inference/v1/abort_requests", {"request_ids": ["chatcmpl-yours"]})
    assert b'"abort"' in (await calls[1])[1]
    assert await engine("/abort_requests", request_ids=[]) == {"status": "aborted", "aborted": 1}

    assert b'"abort"' in (await calls[2])[1]
    assert (b'"abort"' in raw, b'"usage":' in raw) == (not stream, not stream)


async def test_vllm_makes_a_reply_of_its_ids(start):
    """All parsers read the ids as those of a reply that was sampled at once; the finish reason is the one that is given."""
    script = Script(
        [Conversation([Turn(think="So?", say="I look.", call=[ScriptedCall("weather", {"city": "Oslo"})])])]
    )
    engine, disabled = await start(Options(script=script)), await start(Options(scale_out=False))
    chat = {"messages": HELLO, "tools": TOOLS}
    reply = await engine.chat(return_token_ids=True, tools=TOOLS)
    (choice,), path = reply["choices"], "/v1/chat/completions/derender"
    given = {"token_ids": choice["token_ids"][:-1], "finish_reason": "stop", "stop_reason": None}
    body = {
        "generate_response": {"choices": [given]},
        "prompt_token_ids": reply["prompt_token_ids"],
        "chat_request": chat,
    }
    (told,) = (await engine(path, **body))["choices"]
    for message in (told["message"], choice["message"]):
        del message["tool_calls"][0]["id"]

    assert choice["message"] == told["message"]
    assert (choice["finish_reason"], told["finish_reason"]) == ("tool_calls", "stop")
    assert path in orjson.loads((await engine.get("/openapi.json"))[1])["paths"]
    assert (await engine.answer(path, {}))[0] == 400
    assert (await disabled.answer(path, body))[0] == 403
