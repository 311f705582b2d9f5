"""Bodies of the model API, from bytes that are not JSON to calls with one odd field, sent to a proxy."""

import aiohttp
import orjson
import pytest
from hypothesis import strategies as st
from tests.support.fakes import proxying
from tests.support.stored import stored_steps

from proxy.server.listener import simulating
from proxy.simulator.options import Options

pytestmark = [pytest.mark.timeout(3600), pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")]
SHARE = 0.25
REFUSALS = {400, 401, 404, 409, 413, 415, 422, 429}
TEXT = st.text(max_size=8)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
ROLE = st.sampled_from(["system", "user", "assistant", "tool", "", None])
CONTENT = (
    TEXT | st.none() | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}), max_size=2) | VALUE
)
MESSAGE = st.fixed_dictionaries(
    {"role": ROLE, "content": CONTENT}, optional={"tool_calls": VALUE, "tool_call_id": TEXT}
)
SMALL = st.integers(-1, 3)
IDS = st.lists(st.integers(-1, 200), max_size=4)
ODD = {
    "model": TEXT | VALUE, "messages": st.lists(MESSAGE, max_size=3) | VALUE, "prompt": TEXT | IDS | VALUE,
    "token_ids": IDS, "sampling_params": st.dictionaries(TEXT, VALUE, max_size=2), "max_tokens": SMALL | VALUE,
    "stream": st.booleans() | VALUE, "stream_options": VALUE, "n": SMALL | VALUE, "logprobs": SMALL | st.booleans() | VALUE,
    "top_logprobs": SMALL | VALUE, "temperature": st.floats() | SMALL, "stop": TEXT | st.lists(TEXT, max_size=2) | VALUE,
    "tools": VALUE, "tool_choice": VALUE, "seed": VALUE, "rollout_id": VALUE, "metadata": VALUE, "echo": VALUE,
    "return_token_ids": VALUE, "response_format": VALUE, "response_mask": VALUE, "include_reasoning": VALUE, "status": TEXT,
    "top_p": st.floats() | SMALL, "min_tokens": SMALL, "ignore_eos": VALUE, "x": VALUE, "reward": VALUE,
}  # fmt: skip
GOOD = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}},
    "/generate": {"prompt": {"prompt_token_ids": [5, 6]}, "max_tokens": 2},
    "/v1/rollout/completed": {"rollout_id": "r", "status": "COMPLETED"},
}


def encoded(body):
    """Encode the body as JSON, including values that orjson does not write."""
    import json

    return json.dumps(body).encode()


@st.composite
def bodies(draw):
    """Draw a valid call with some odd fields, any JSON, or any bytes; sometimes with one byte changed."""
    path = draw(st.sampled_from(sorted(GOOD)))
    odd = {name: draw(ODD[name]) for name in draw(st.lists(st.sampled_from(sorted(ODD)), max_size=3, unique=True))}
    text = encoded(GOOD[path] | odd)
    if draw(st.integers(0, 9)) == 0:
        text = draw(st.binary(max_size=30) | VALUE.map(encoded))
    if text and draw(st.integers(0, 9)) == 0:
        offset = draw(st.integers(0, len(text) - 1))
        text = text[:offset] + draw(st.binary(max_size=2)) + text[offset + 1 :]
    return path, text, draw(st.none() | st.sampled_from(["choices", "x", ""]))


async def test_no_body_causes_a_500_and_the_recorded_request_is_the_body(fuzz, store):
    """Each gets an error or the engine's response; the step's request equals the body, value for value."""
    async with (
        simulating("127.0.0.1:0", Options()) as engine,
        proxying(engine, store) as served,
        aiohttp.ClientSession() as http,
    ):
        recorded = 0

        async def check(drawn):
            nonlocal recorded
            path, text, ids = drawn
            headers = {"Content-Type": "application/json"} | ({} if ids is None else {"X-Reply-Ids": ids})
            async with http.post(served.url + path, data=text, headers=headers) as response:
                shown = await response.read()
                name, step_id = response.headers.get("X-Rollout-Id"), response.headers.get("X-Step-Id")
            assert response.status == 200 or response.status in REFUSALS, (response.status, shown[:500])
            if response.status == 200 and step_id is not None:
                recorded += 1
                (step,) = [step for step in await stored_steps(store, name) if step.step_id == step_id]
                assert orjson.dumps(step.request) == orjson.dumps(orjson.loads(text)) or path == "/generate"
                assert all(len(choice.ids) == len(choice.logprobs) for choice in step.choices if choice.logprobs)

        await fuzz(SHARE, bodies(), check)
        assert recorded > 5
