"""Calls that send ids and read ids: a call that was cut equals one that was not."""

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.api.model.test_resumed_calls import CUTS, Stage, stage, tokens_of

from proxy.protocols.dialects.generate import GenerateAccumulator
from proxy.simulator.script import Cut

__all__ = ["stage"]
PATHS = {"/inference/v1/generate": "vllm", "/generate": "sglang"}
CHANGING = {"id", "request_id", "created", "e2e_latency", "response_sent_to_client_ts"}
PROMPT = [350, 261, 300]


def without(value: Any, names: set[str]) -> Any:
    """Return a response without these fields."""
    if isinstance(value, dict):
        return {key: without(inner, names) for key, inner in value.items() if key not in names}
    return [without(inner, names) for inner in value] if isinstance(value, list) else value


def read(raw: bytes, names: set[str], *, stream: bool) -> Any:
    """Return what a client reads of a response, of a stream what it adds up to, with the number of heads and of usages."""
    if not stream:
        return without(orjson.loads(raw), names)
    *blocks, done, rest = raw.split(b"\n\n")
    chunks = [orjson.loads(block.removeprefix(b"data: ")) for block in blocks if not block.startswith(b":")]
    assert (done, rest) == (b"data: [DONE]", b""), raw
    assert len({chunk["request_id"] for chunk in chunks}) == 1
    accumulator = GenerateAccumulator()
    for chunk in chunks:
        accumulator.feed(chunk)
    prompts = sum("prompt_token_ids" in chunk for chunk in chunks)
    return without(accumulator.finish(), names), prompts, sum(not chunk["choices"] for chunk in chunks)


@st.composite
def calls(draw) -> dict[str, dict[str, Any]]:
    """Draw the bodies of a call to each engine."""
    limits = {"max": draw(st.integers(1, 60)), "seed": draw(st.integers(0, 99))}
    common = {"temperature": draw(st.sampled_from([0, 1, 1.5])), "ignore_eos": draw(st.booleans())}
    least = draw(st.integers(0, limits["max"]))
    stream, shows = draw(st.booleans()), draw(st.booleans())
    vllm = {**common, "max_tokens": limits["max"], "min_tokens": least, "seed": limits["seed"]}
    sglang = {**common, "max_new_tokens": limits["max"], "min_new_tokens": least, "sampling_seed": limits["seed"]}
    prompt = {"text": "If it"} if draw(st.booleans()) else {"input_ids": PROMPT}
    return {
        "/inference/v1/generate": {
            "token_ids": PROMPT, "sampling_params": vllm | ({"logprobs": 1} if shows else {}), "return_token_ids": shows,
            "output_mode": draw(st.sampled_from(["tokens", "text"])),
        } | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {}),
        "/generate": {**prompt, "sampling_params": sglang, "return_logprob": shows, "return_prompt_token_ids": shows},
    }  # fmt: skip


@settings(max_examples=60)
@given(calls(), CUTS)
async def test_a_call_that_was_cut_equals_one_that_was_not(stage: Stage, call, cuts):
    """The response, ids, logprobs, versions and record; a text that is cut inside a character is sampled again."""
    kind = (await stage.session.get("/engines")).json["engines"][0]["kind"]
    path = next(path for path in PATHS if PATHS[path] == kind)
    body, stream = call[path], "stream" in call[path]
    whole, expected = await stage.ask(path, body)
    ended = await stage.counted("ended")
    response, step = await stage.ask(path, body, cuts)
    reasons = {reason: await stage.counted("ended", reason) for reason in ("character", "parser", "finished", "length")}

    assert (whole.status, expected.status, expected.problems) == (200, "complete", ()), whole.text
    if await stage.counted("ended") == ended:
        assert response is not None
        # A lost stream has not named the versions of its tokens, so the whole names none.
        names = CHANGING if all(cut.by == "abort" for cut in cuts) else CHANGING | {"weight_versions"}
        assert read(whole.text, names, stream=stream) == read(response.text, names, stream=stream)
        assert without(tokens_of(expected), names) == without(tokens_of(step), names)
    else:
        assert stream
        assert sum(reasons.values()) == await stage.counted("ended")
        assert step.choices[0].ids == expected.choices[0].ids[: len(step.choices[0].ids)]


async def test_a_cut_call_is_resumed_with_its_ids(stage: Stage):
    """Nothing is sampled twice, and ids without texts need no request but that for the rest."""
    body = {
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": 20, "temperature": 0, "ignore_eos": True, "logprobs": 0},
    }
    native = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}}
    kind = (await stage.session.get("/engines")).json["engines"][0]["kind"]
    path, asked = ("/generate", native) if kind == "sglang" else ("/inference/v1/generate", body)
    _, step = await stage.ask(path, asked, [Cut(5, "abort"), Cut(7, "abort")])

    assert [attempt["tokens"] for attempt in step.extra["attempts"]] == [5, 12]
    assert (step.resumed, step.status, step.exact, len(step.choices[0].ids)) == (2, "complete", True, 20)
    assert await stage.counted("resumed", "none") == 2


@pytest.mark.parametrize("stage", ["vllm"], indirect=True)
async def test_a_call_with_stop_strings_starts_again(stage: Stage):
    """A stop string may straddle the cut, and ids do not show it."""
    sampling = {"max_tokens": 20, "temperature": 0, "stop": ["zzz"]}
    _, step = await stage.ask(
        "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": sampling}, [Cut(5, "abort")]
    )

    assert (step.status, step.resumed) == ("complete", 0)
    assert await stage.counted("restarted", "stop") == 1
