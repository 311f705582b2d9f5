"""Each engine's shape through the whole proxy, over sockets, with the simulator: recorded exactly, or flagged."""

import openai
import pytest
from tests.support.fakes import proxying
from tests.support.stored import stored_steps

from proxy.server.listener import simulating
from proxy.simulator.options import Options

ASK = [{"role": "user", "content": "Count to three."}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
BODY = {"model": "simulated", "messages": ASK, "max_tokens": 200, "seed": 7}

SGLANG = Options(shape="sglang", seed=7)
BARE = Options(shape="sglang", seed=7, has_parser=False)
OLD = Options(shape="sglang", seed=7, supports_ids_flags=False)


async def shown_to(client, *, stream: bool, **more) -> tuple[str, str | None]:
    """Return what the official client gets: the text and the finish reason."""
    if not stream:
        reply = await client.chat.completions.create(**BODY, **more)
        return reply.choices[0].message.content or "", reply.choices[0].finish_reason
    text, finish = "", None
    async for chunk in await client.chat.completions.create(**BODY, **more, stream=True):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    return text, finish


def engines_at(url: str, options: Options) -> dict:
    """Return settings with the kind of engine that the simulator imitates: it does not claim to be a release of SGLang."""
    return {"endpoints": [{"url": url, "version": "0.5.23" if options.shape == "sglang" else None}]}


async def recorded(store, options: Options, *, stream: bool, rollout="r1", asks=None, **record):
    """Make a call directly and through the proxy; return what both clients got, and the step."""
    async with (
        simulating("127.0.0.1:0", options) as engine,
        proxying(None, store, record=record, engines=engines_at(engine, options)) as served,
    ):
        async with openai.AsyncOpenAI(base_url=f"{engine}/v1", api_key="none", max_retries=0) as direct:
            expected = await shown_to(direct, stream=stream, **(asks or {}))
        base_url = f"{served.url}/rollouts/{rollout}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            actual = await shown_to(client, stream=stream, **(asks or {}))
    (step,) = await stored_steps(store, rollout)
    return expected, actual, step


@pytest.mark.parametrize(
    ("options", "stream", "framing"),
    [
        (Options(seed=7), False, None),
        (Options(seed=7), True, "live"),
        (SGLANG, False, None),
        (SGLANG, True, "live"),
        (BARE, False, None),
        (BARE, True, "replay"),  # its streams lose the logprob of the EOS
    ],
    ids=["vllm", "vllm-stream", "sglang", "sglang-stream", "bare", "bare-stream"],
)
async def test_every_shape_is_recorded_exactly(store, options, stream, framing):
    """The client gets what the engine alone would have sent; the step is exact, with a live or a synthetic stream."""
    expected, actual, step = await recorded(store, options, stream=stream)

    assert actual == expected
    assert (options.shape, (), framing) == (step.engine.kind, step.problems, step.extra.get("streaming"))
    assert len(step.choices[0].ids) == len(step.choices[0].logprobs) > 0


async def test_a_live_stream_that_loses_logprobs_is_flagged(store):
    """With a forced live stream, an SGLang without a parser loses the EOS's logprob, and the step is flagged."""
    expected, actual, step = await recorded(store, BARE, stream=True, streaming="live")

    assert actual == expected
    assert step.problems == ("logprob_count",)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_server_that_ignores_the_injected_fields_is_flagged(store, stream):
    """It answers without ids, and nothing else is taken for an id."""
    expected, actual, step = await recorded(store, OLD, stream=stream)

    assert actual == expected
    assert {"no_token_ids", "no_prompt_ids"} <= set(step.problems)
    assert step.sampled == 0


async def test_live_and_synthetic_streams_and_whole_responses_record_the_same_tokens(store):
    """The same seed gives the same ids, logprobs and finish reason."""
    seen = set()
    for number, (stream, streaming) in enumerate([(False, "auto"), (True, "live"), (True, "replay")]):
        async with (
            simulating("127.0.0.1:0", SGLANG) as engine,
            proxying(None, store, record={"streaming": streaming}, engines=engines_at(engine, SGLANG)) as served,
            openai.AsyncOpenAI(base_url=f"{served.url}/rollouts/s{number}/v1", api_key="none") as client,
        ):
            await shown_to(client, stream=stream, tools=[TOOL])
        (step,) = await stored_steps(store, f"s{number}")
        seen.add((tuple(step.choices[0].ids), tuple(step.choices[0].logprobs), step.choices[0].finish_reason))

    assert len(seen) == 1


async def test_logprobs_that_a_client_requests_are_always_recorded(store):
    """`record.logprobs` applies to logprobs that the client does not request."""
    _, _, step = await recorded(store, Options(seed=7), stream=False, asks={"logprobs": True}, logprobs="off")

    assert step.problems == ()
    assert len(step.choices[0].ids) == len(step.choices[0].logprobs) > 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("options", [Options(seed=7), SGLANG, BARE], ids=["vllm", "sglang", "bare"])
async def test_without_logprobs_the_ids_are_the_same_and_the_step_is_exact(store, options, stream):
    """`record.logprobs: off` requests none, flags none, and streams live where only logprobs would be lost."""
    _, _, full = await recorded(store, options, stream=stream)
    expected, actual, step = await recorded(store, options, stream=stream, rollout="r2", logprobs="off")

    assert actual == expected
    assert (step.problems, step.trainable) == ((), True)
    assert "logprobs" not in step.sent["set"]
    assert ("live" if stream else None) == step.extra.get("streaming")
    assert full.choices[0].ids == step.choices[0].ids
    assert (full.prompts, 0) == (step.prompts, len(step.choices[0].logprobs))


async def test_rows_without_logprobs_are_exported_with_nulls_or_rejected(store, http):
    """The canonical formats have nulls; a format with one for each token is rejected, and the error names the setting."""
    options = Options(seed=7)
    async with (
        simulating("127.0.0.1:0", options) as engine,
        proxying(None, store, record={"logprobs": "off"}, engines=engines_at(engine, options)) as served,
    ):
        async with openai.AsyncOpenAI(base_url=f"{served.url}/rollouts/r1/v1", api_key="none") as client:
            await shown_to(client, stream=True)
        responses = {}
        for name in ("sequences", "steps", "tinker"):
            async with http.get(f"{served.url}/rollouts/r1/export?format={name}&container=json") as response:
                responses[name] = response.status, await response.json()

    (step,) = await stored_steps(store, "r1")
    (row,) = responses["sequences"][1]["rows"]
    assert [None] * (len(step.prompts[0]) + step.sampled) == row["logprobs"]
    assert step.sampled == sum(row["mask"])
    assert [None] * step.sampled == responses["steps"][1]["rows"][0]["logprobs"]
    assert responses["tinker"][0] == 409
    assert "record.logprobs: off" in responses["tinker"][1]["error"]["message"]
