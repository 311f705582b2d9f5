"""Each engine's shape through the whole proxy, over real sockets, by the simulator: recorded exactly, or flagged."""

import openai
import pytest
from fakes import proxying
from stored import steps_of

from proxy.server.listener import simulating
from proxy.simulator.options import Options

ASK = [{"role": "user", "content": "Count to three."}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
BODY = {"model": "simulated", "messages": ASK, "max_tokens": 200, "seed": 7}

SGLANG = Options(shape="sglang", seed=7)
BARE = Options(shape="sglang", seed=7, has_parser=False)
OLD = Options(shape="sglang", seed=7, supports_ids_flags=False)


async def told(client, *, stream: bool, **more) -> tuple[str, str | None]:
    """What the official client is told: the text and the reason to finish."""
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
    """A simulator says honestly that it is no release of SGLang's; the configuration may say which one it is like."""
    return {"endpoints": [{"url": url, "version": "0.5.23" if options.shape == "sglang" else None}]}


async def recorded(store, options: Options, *, stream: bool, rollout="r1", asks=None, **record):
    """A call directly and through the proxy: what both clients were told, and the step."""
    async with (
        simulating("127.0.0.1:0", options) as engine,
        proxying(None, store, record=record, engines=engines_at(engine, options)) as served,
    ):
        async with openai.AsyncOpenAI(base_url=f"{engine}/v1", api_key="none", max_retries=0) as direct:
            expected = await told(direct, stream=stream, **(asks or {}))
        base_url = f"{served.url}/rollouts/{rollout}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            actual = await told(client, stream=stream, **(asks or {}))
    (step,) = await steps_of(store, rollout)
    return expected, actual, step


@pytest.mark.parametrize(
    ("options", "stream", "framing"),
    [
        (Options(seed=7), False, None),
        (Options(seed=7), True, "live"),
        (SGLANG, False, None),
        (SGLANG, True, "live"),
        (BARE, False, None),
        (BARE, True, "replay"),  # its streams lose the logprob of the end
    ],
    ids=["vllm", "vllm-stream", "sglang", "sglang-stream", "bare", "bare-stream"],
)
async def test_every_shape_is_recorded_exactly(store, options, stream, framing):
    """The client is told what the engine alone would have told it; the step is exact, by whichever way it went."""
    expected, actual, step = await recorded(store, options, stream=stream)

    assert expected == actual
    assert (options.shape, (), framing) == (step.engine.kind, step.problems, step.extra.get("streaming"))
    assert len(step.choices[0].ids) == len(step.choices[0].logprobs) > 0


async def test_a_live_stream_that_loses_logprobs_is_flagged(store):
    """Told to go live, an SGLang without a parser loses the end's logprob, and the step says so."""
    expected, actual, step = await recorded(store, BARE, stream=True, streaming="live")

    assert expected == actual
    assert ("logprob_count",) == step.problems


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_server_that_ignores_the_flags_is_flagged(store, stream):
    """It answers as ever, and nothing is taken for an id."""
    expected, actual, step = await recorded(store, OLD, stream=stream)

    assert expected == actual
    assert {"no_token_ids", "no_prompt_ids"} <= set(step.problems)
    assert 0 == step.sampled


async def test_both_framings_and_both_ways_of_a_stream_record_the_same_tokens(store):
    """The same seed: the same ids, logprobs and reason."""
    seen = set()
    for number, (stream, streaming) in enumerate([(False, "auto"), (True, "live"), (True, "replay")]):
        async with (
            simulating("127.0.0.1:0", SGLANG) as engine,
            proxying(None, store, record={"streaming": streaming}, engines=engines_at(engine, SGLANG)) as served,
            openai.AsyncOpenAI(base_url=f"{served.url}/rollouts/s{number}/v1", api_key="none") as client,
        ):
            await told(client, stream=stream, tools=[TOOL])
        (step,) = await steps_of(store, f"s{number}")
        seen.add((tuple(step.choices[0].ids), tuple(step.choices[0].logprobs), step.choices[0].finish_reason))

    assert 1 == len(seen)


async def test_a_client_that_asks_for_logprobs_has_them_recorded_whatever_is_configured(store):
    """`record.logprobs` is of what nobody asked for."""
    _, _, step = await recorded(store, Options(seed=7), stream=False, asks={"logprobs": True}, logprobs="off")

    assert () == step.problems
    assert len(step.choices[0].ids) == len(step.choices[0].logprobs) > 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("options", [Options(seed=7), SGLANG, BARE], ids=["vllm", "sglang", "bare"])
async def test_without_logprobs_the_ids_are_the_same_and_the_step_is_exact(store, options, stream):
    """record.logprobs: off asks for none, misses none, and goes live where logprobs alone would be lost."""
    _, _, full = await recorded(store, options, stream=stream)
    expected, actual, step = await recorded(store, options, stream=stream, rollout="r2", logprobs="off")

    assert expected == actual
    assert ((), True) == (step.problems, step.trainable)
    assert "logprobs" not in step.sent["set"]
    assert ("live" if stream else None) == step.extra.get("streaming")
    assert full.choices[0].ids == step.choices[0].ids
    assert (full.prompts, 0) == (step.prompts, len(step.choices[0].logprobs))


async def test_rows_without_logprobs_are_exported_with_nulls_or_refused(store, http):
    """The canonical formats say null; a format that has one for each token is refused, naming the setting."""
    options = Options(seed=7)
    async with (
        simulating("127.0.0.1:0", options) as engine,
        proxying(None, store, record={"logprobs": "off"}, engines=engines_at(engine, options)) as served,
    ):
        async with openai.AsyncOpenAI(base_url=f"{served.url}/rollouts/r1/v1", api_key="none") as client:
            await told(client, stream=True)
        answers = {}
        for name in ("sequences", "steps", "tinker"):
            async with http.get(f"{served.url}/rollouts/r1/export?format={name}&container=json") as answer:
                answers[name] = answer.status, await answer.json()

    (step,) = await steps_of(store, "r1")
    (row,) = answers["sequences"][1]["rows"]
    assert [None] * (len(step.prompts[0]) + step.sampled) == row["logprobs"]
    assert step.sampled == sum(row["mask"])
    assert [None] * step.sampled == answers["steps"][1]["rows"][0]["logprobs"]
    assert 409 == answers["tinker"][0]
    assert "record.logprobs: off" in answers["tinker"][1]["error"]["message"]
