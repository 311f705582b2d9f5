"""Streams of engines with events cut, dropped, doubled and garbled: each leaves a step, and an exact one has the sent
ids.
"""

from contextlib import suppress

import aiohttp
import orjson
import pytest
from hypothesis import strategies as st
from tests.support.fakes import settings_for
from tests.support.recorded import cut, dialect_cassettes, plan_of, play
from tests.support.stored import wait_for_steps

from proxy.server.listener import running
from proxy.trajectory.blocks import BlockReader
from proxy.trajectory.codec import decode, encode

pytestmark = [pytest.mark.timeout(3600), pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")]
STREAMS = [c for c in dialect_cassettes() if c.is_stream and c.status == 200 and "generate" not in c.path]
CHAT = next(cassette for cassette in STREAMS if "chat" in cassette.path)


@st.composite
def damaged_streams(draw, cassettes):
    """Draw a recorded stream with events dropped, doubled, swapped or garbled, in any reads; the engine may disconnect."""
    cassette = draw(st.sampled_from(cassettes))
    events = cassette.response.split(b"\n\n")
    for _ in range(draw(st.integers(0, 3))):
        position = draw(st.integers(0, len(events) - 1))
        match draw(st.sampled_from(["drop", "double", "swap", "garble", "replace", "cut"])):
            case "drop" if len(events) > 1:
                del events[position]
            case "double":
                events.insert(position, events[position])
            case "swap":
                events[position], events[0] = events[0], events[position]
            case "garble" if events[position]:
                index = draw(st.integers(0, len(events[position]) - 1))
                events[position] = (
                    events[position][:index] + draw(st.binary(max_size=3)) + events[position][index + 1 :]
                )
            case "replace":
                events[position] = b"data: " + draw(
                    st.binary(max_size=20) | st.sampled_from([b"[DONE]", b"{}", b"null", b"[]"])
                )
            case _:
                events = events[: position + 1]
    response = b"\n\n".join(events)
    sizes = draw(st.lists(st.integers(0, 400), max_size=8))
    return cassette, response, cut(response, sizes)


def sampled_ids(response):
    """Read the sampled ids of each choice from the stream in a simple way. None if that is not possible."""
    found = {}
    for event in response.split(b"\n\n"):
        if event in (b"", b"data: [DONE]"):
            continue
        if not event.startswith(b"data: {") or b"\n" in event or b"\r" in event:
            return None  # events can be written in other ways, and this parser knows one
        try:
            for choice in orjson.loads(event.removeprefix(b"data: ")).get("choices") or []:
                found.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            return None
    return found


def check_step(step, response):
    """Assert that the record reads the same, and that a step without a flag has the ids of the stream, in order."""
    written = encode(step)
    read = decode(written.record, BlockReader(written.blocks))
    assert [choice.ids for choice in read.choices] == [choice.ids for choice in step.choices]
    ids = sampled_ids(response)
    if step.exact and ids is not None:
        assert {choice.index: choice.ids.tolist() for choice in step.choices} == ids


async def test_a_damaged_stream_leaves_a_step_that_claims_only_what_was_sent(fuzz):
    """No exception; a step that can be stored and is exact only with the sent ids; the client gets only what was sent."""

    def check(drawn):
        cassette, response, reads = drawn
        plan = plan_of(cassette.path, cassette.body)
        exchanged = play(plan, cassette, reads)
        check_step(exchanged[2], response)
        # A rewritten event has a space after "data:", also where the engine's has none.
        assert len(exchanged[0]) + len(exchanged[1]) <= len(response) + 2 + response.count(b"data:")

    await fuzz(0.24, damaged_streams(STREAMS), check)


async def test_a_client_gets_the_end_of_a_damaged_stream(fuzz, store, engine):
    """With sockets: a response or a closed connection, then a step in the store, and never a 500."""
    known = {"endpoints": [{"url": engine.url, "kind": "vllm"}]}
    number = 0
    async with running(settings_for(None, engines=known), store) as served, aiohttp.ClientSession() as http:

        async def check(drawn):
            nonlocal number
            number += 1
            cassette, response, reads = drawn
            engine.streams([read for read in reads if read], then="end")
            path = f"{served.url}/rollouts/r{number}{cassette.path}"
            with suppress(aiohttp.ClientPayloadError):
                async with http.post(path, json=cassette.body) as shown:
                    await shown.read()
                    assert shown.status in (200, 502), shown.status
            (step,) = await wait_for_steps(store, f"r{number}")
            check_step(step, response)

        await fuzz(0.06, damaged_streams([CHAT]), check)
