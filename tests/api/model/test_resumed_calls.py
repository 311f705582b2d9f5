"""Calls that their engine ends early: the client, and the record, have what an engine that was never interrupted would give.

The simulator continues a prompt that ends inside a reply with the rest of that reply, so whole replies can be compared.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import aiohttp
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.anthropic_events import accumulated, events_of, plain
from tests.support.recorded import comparable
from tests.support.session import Session, session_with
from tests.support.stored import stored_steps, wait_for_steps

from proxy.protocols.dialects import DIALECTS
from proxy.server.listener import simulating
from proxy.simulator.options import Faults, Options
from proxy.simulator.script import Conversation, Cut, Script, ScriptedCall, Turn
from proxy.trajectory.step import Step

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "chat/completions", "completions", "messages", "responses"
TURNS = {
    "fox": Turn(say="Résumé of a 🦊 and a 👩‍🚀: naïve, <b> of 1 < 2, the end."),
    "think": Turn(think="So what?", say="I know: it rains."),
    "look": Turn(
        say="I look.", call=[ScriptedCall("look_up", {"word": "lake"}), ScriptedCall("look_up", {"word": "🦊"})]
    ),
    "long": Turn(say="This is a very long list of the words in it. " * 9),
    "": Turn(),
}
SCRIPT = Script([Conversation([turn], when) for when, turn in TURNS.items()])
PARAMETERS = {"type": "object", "properties": {"word": {"type": "string"}}}
ENDED = {"id", "created", "created_at", "completed_at", "call_id", "item_id", "signature", "output_tokens_details"}
COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")


def without_ids(value: Any) -> Any:
    """Return a response without what differs between any two runs."""
    if isinstance(value, dict):
        kept = COUNTS if "completion_tokens" in value else value  # details of a stream may be those of a whole response
        return {key: without_ids(value.get(key)) for key in kept if key not in ENDED}
    if isinstance(value, str):
        return value.rstrip("\ufffd")  # the simulator drops half characters at the end of a reply, as only vLLM does
    return [without_ids(inner) for inner in value] if isinstance(value, list) else value


def read_chunks(raw: bytes, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return what a chat or completions stream adds up to: one head and one usage, and a role and a reason for each choice."""
    *blocks, done, rest = raw.split(b"\n\n")
    chunks = [orjson.loads(block.removeprefix(b"data: ")) for block in blocks if not block.startswith(b":")]
    choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
    roles = [choice["delta"]["role"] for choice in choices if choice.get("delta", {}).get("role")]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]

    count = body.get("n", 1)
    usages = [chunk for chunk in chunks if not chunk["choices"]]

    assert (done, rest) == (b"data: [DONE]", b""), raw
    assert len({(chunk.get("created"), chunk.get("model")) for chunk in chunks}) == 1, raw
    assert count > 1 or len({chunk.get("id") for chunk in chunks}) == 1, raw
    assert (len(roles), len(reasons), len(usages)) == (count * (path == CHAT), count, 1), raw
    assert chunks[-1]["choices"] == []
    assert "logprobs" in body or not any(choice.get("token_ids") or choice.get("logprobs") for choice in choices)
    accumulator = DIALECTS[f"/v1/{path}"].accumulator()
    for chunk in chunks:
        accumulator.feed(chunk)
    return {"reply": accumulator.finish(), "usage": chunks[-1]["usage"]}


def read_responses(raw: bytes) -> dict[str, Any]:
    """Return the response at the end of a stream of the Responses API, whose events are numbered and have its text."""
    events = [orjson.loads(block.partition(b"data: ")[2]) for block in raw.split(b"\n\n") if b"data: {" in block]
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    last = events[-1]["response"]
    parts = [part.get("text", "") for item in last["output"] for part in item.get("content") or ()]

    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert [event["type"] for event in events if event["type"] == "response.created"] == ["response.created"]
    assert "".join(parts).endswith(text)
    return {"reply": last, "text": text}


def read(raw: bytes, path: str, body: dict[str, Any]) -> Any:
    """Return what a client reads of a response."""
    if not body["stream"]:
        return without_ids(orjson.loads(raw))
    if path == MESSAGES:
        assert [event["type"] for event in events_of(raw)].count("message_stop") == 1
        return without_ids(plain(accumulated(raw)))
    return without_ids(read_responses(raw) if path == RESPONSES else read_chunks(raw, path, body))


def tokens_of(step: Step) -> Any:
    """Return what a step has of its call: the ids, their logprobs, and the response, without nulls."""
    choices = [
        (choice.ids.tolist(), choice.logprobs.tolist(), choice.finish_reason, choice.stop_reason)
        for choice in step.choices
    ]
    for choice in step.choices:  # which parts report their version depends on how they are sent
        ends = [span.end for span in choice.spans]
        assert ([0, *ends[:-1]], ends[-1]) == ([span.start for span in choice.spans], len(choice.ids))
    return {
        "prompts": [list(prompt) for prompt in step.prompts],
        "choices": choices,
        "status": step.status,
        "problems": step.problems,
        "usage": without_ids(step.usage),
        "response": without_ids(comparable({name: (step.response or {}).get(name) for name in ("choices", "usage")})),
        "request": step.request,
        "delivered": step.delivered,
    }


@dataclass
class Stage:
    """A proxy before two engines, whose next calls have faults."""

    session: Session
    store: Any
    faults: Faults
    urls: Sequence[str] = ()  # of the engines
    is_replayed: bool = False
    count: int = 0
    running: int = 0

    async def begin(self, path: str, rollout: str) -> asyncio.Task[bytes]:
        """Begin a streamed call; return the task that reads its response."""
        self.running += 1
        call = Running(self, path, rollout)
        await call.has_begun()
        return call.read

    async def ask(
        self, path: str, body: dict[str, Any], cuts: Sequence[Cut] = ()
    ) -> tuple[SimpleNamespace | None, Step]:
        """Make a call whose parts have these cuts; return the response, None if it is torn, and the step."""
        self.faults.cuts.extend(cuts)
        self.count += 1
        rollout = f"r{self.count}"
        try:
            url = path if path.startswith("/") else f"/v1/{path}"
            response = await self.session.post(f"/rollouts/{rollout}{url}", {"model": "m", **body})
        except aiohttp.ClientPayloadError:  # a call that ends as today
            response = None
        self.faults.cuts.clear()
        (step,) = await stored_steps(self.store, rollout)
        return response, step

    async def counted(self, result: str, reason: str = "") -> float:
        """Return how many calls that were cut had this result, for this reason."""
        lines = (await self.session.get("/metrics")).text.decode().splitlines()
        labels = (f'result="{result}"', f'reason="{reason}"' if reason else "")
        counts = [line for line in lines if "resumed_calls_total{" in line and all(label in line for label in labels)]
        return sum(float(line.split()[-1]) for line in counts)


@pytest.fixture(params=["vllm", "sglang"])
async def stage(request, store):
    """A proxy before two engines of a kind."""
    faults = Faults()
    options = [Options(shape=request.param, faults=faults, script=SCRIPT, seed=5) for _ in range(2)]
    async with simulating("127.0.0.1:0", options[0]) as one, simulating("127.0.0.1:0", options[1]) as other:
        endpoints = [
            {"url": url, "name": name, "kind": request.param} for url, name in ((one, "one"), (other, "other"))
        ]
        engines = {"endpoints": endpoints, "eject_after": 1000, "max_attempts": 20}
        agents = {"max_resumes": 20, "resume_timeout_s": 20}
        async with session_with(None, store, engines=engines, agents=agents) as session:
            yield Stage(session, store, faults)


# What is sampled or shown with a state that the rest of a reply does not have.
OTHERS = [
    {"n": 2},
    {"presence_penalty": 0.5},
    {"response_format": {"type": "json_object"}},
    {"logprobs": True, "top_logprobs": 2},
]


@st.composite
def calls(draw) -> tuple[str, dict[str, Any], bool]:
    """Draw a dialect, a body, and whether nothing of it is parsed or matched, so that it has to be resumed."""
    path = draw(st.sampled_from([CHAT, CHAT, COMPLETIONS, MESSAGES, RESPONSES]))
    topic = draw(st.sampled_from(["", "", "fox", "think", "look"])) if path != COMPLETIONS else ""
    body: dict[str, Any] = {"stream": draw(st.booleans()), "temperature": draw(st.sampled_from([0, 1, 1.5]))}
    limit = {RESPONSES: "max_output_tokens"}.get(path, "max_tokens")
    if path == COMPLETIONS:
        body |= {"prompt": draw(st.sampled_from(["If it", "Return the current"]))}
    elif path == RESPONSES:
        body |= {"input": f"Tell: {topic}"}
    else:
        body |= {"messages": [{"role": "user", "content": f"Tell: {topic}"}]}
    if path == MESSAGES or draw(st.booleans()):
        body[limit] = draw(st.integers(1, 60))
    if path in {CHAT, COMPLETIONS}:
        body |= {"seed": draw(st.integers(0, 99))} if draw(st.booleans()) else {}
        body |= {"min_tokens": draw(st.integers(0, body.get(limit, 16)))} if draw(st.booleans()) else {}
        body |= {"stream_options": {"include_usage": True}} if body["stream"] else {}
    stops = draw(st.sampled_from([None, None, ["e t"], [" the", "zzz"]])) if path != RESPONSES else None
    if stops:
        body["stop_sequences" if path == MESSAGES else "stop"] = stops
    has_tools = path != COMPLETIONS and draw(st.sampled_from([False, False, True]))
    if has_tools:
        body["tools"] = {
            CHAT: [{"type": "function", "function": {"name": "look_up", "parameters": PARAMETERS}}],
            MESSAGES: [{"name": "look_up", "input_schema": PARAMETERS}],
            RESPONSES: [{"type": "function", "name": "look_up", "parameters": PARAMETERS}],
        }[path]
    if has_tools and body["stream"] and limit in body:
        body[limit] = 200  # of a call that is not complete, streamed and unstreamed replies show different parts
    more = draw(st.sampled_from([{}, {}, {}, *OTHERS])) if path == CHAT else {}
    return path, {**body, **more}, not (stops or has_tools or more) and topic == ""


CUTS = st.lists(st.builds(Cut, st.integers(0, 25), st.sampled_from(["abort", "lost", "torn"])), min_size=1, max_size=4)


@settings(max_examples=40)
@given(calls(), CUTS)
async def test_a_call_that_was_cut_equals_one_that_was_not(stage, call, cuts):
    """Its response, ids, logprobs and record are the same; or it ends with the beginning of it, for a counted reason."""
    path, body, is_plain = call
    whole, expected = await stage.ask(path, body)
    ended = await stage.counted("ended")
    response, step = await stage.ask(path, body, cuts)
    count = await stage.counted("ended") - ended

    assert whole is not None
    # A part that the parsers read otherwise than the whole is one more.
    assert step.resumed <= len(step.extra.get("attempts", ())) <= len(cuts) + 1
    assert (whole.status, expected.status, expected.problems) == (200, "complete", ()), whole.text
    if count == 0:
        assert response is not None
        assert response.status == 200, response.text
        assert read(whole.text, path, body) == read(response.text, path, body)
        assert tokens_of(expected) == tokens_of(step)
    else:
        ids, all_ids = ({choice.index: choice.ids.tolist() for choice in each.choices} for each in (step, expected))
        assert count == 1
        # A stop string that the parts of a reply with tools do not show is found too late, in what the engine sampled.
        limits = {
            index: len(found) if body.keys() & {"stop", "stop_sequences"} else None for index, found in all_ids.items()
        }
        assert all(all_ids[index][: len(some)] == some[: limits[index]] for index, some in ids.items())
        assert not is_plain or ids == all_ids, (response, step)  # the connection was lost after the last token
        assert step.status == "partial" or "abort" in {choice.finish_reason for choice in step.choices} or not ids


@pytest.mark.parametrize("stage", ["sglang"], indirect=True)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("limit", [5, 60], ids=["length", "stop"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES])
async def test_a_reply_that_is_aborted_together_with_its_last_token_is_whole(stage, path, limit, stream):
    """SGLang does not look at that token: the reply ends as it would have without the abort."""
    asked = {"prompt": "Return the current"} if path == COMPLETIONS else {"messages": BODIES[MESSAGES]["messages"]}
    asked = asked if limit == 5 or path == COMPLETIONS else {"messages": [{"role": "user", "content": "Tell: fox"}]}
    body = asked | {"temperature": 0, "max_tokens": limit, "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream and path != MESSAGES else {}
    for _ in range(9):  # by both engines
        whole, expected = await stage.ask(path, body)
    (choice,) = expected.choices
    response, step = await stage.ask(path, body, [Cut(len(choice.ids), "abort")])

    assert ("length" if limit == 5 else "stop") == choice.finish_reason
    assert read(whole.text, path, body) == read(response.text, path, body)
    assert (tokens_of(expected), ()) == (tokens_of(step), step.problems)
    assert "attempts" not in step.extra


@pytest.mark.parametrize("stage", ["sglang"], indirect=True)
async def test_a_reply_that_is_aborted_together_with_a_stop_string_ends_before_it(stage):
    body = {
        "messages": [{"role": "user", "content": "Tell: long"}],
        "temperature": 0,
        "stop": [" very"],
        "stream": False,
    }
    whole, expected = await stage.ask(CHAT, body)
    response, step = await stage.ask(CHAT, body, [Cut(len(expected.choices[0].ids), "abort")])

    assert read(whole.text, CHAT, body) == read(response.text, CHAT, body)
    assert tokens_of(expected) == tokens_of(step)


@pytest.fixture(params=["vllm", "sglang"])
def shape(request):
    return request.param


WAITING = {"stream": True, "temperature": 0, "max_tokens": 40, "ignore_eos": True}
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "Tell: "}], **WAITING, "stream_options": {"include_usage": True}},
    COMPLETIONS: {"prompt": "If it", **WAITING, "stream_options": {"include_usage": True}},
    MESSAGES: {
        "messages": [{"role": "user", "content": "Tell: long"}],
        "stream": True,
        "temperature": 0,
        "max_tokens": 40,
    },
}


@pytest.fixture
async def slow(store, shape):
    """A stage with one engine that takes its time, and few resumes."""
    faults = Faults()
    options = Options(shape=shape, faults=faults, script=SCRIPT, seed=5, token_delay_s=0.01, weight_version="1")
    async with simulating("127.0.0.1:0", options) as url:
        engines = {"endpoints": [{"url": url, "name": "one", "kind": shape}]}
        async with session_with(
            None, store, engines=engines, agents={"max_resumes": 2, "resume_timeout_s": 0.6}
        ) as session:
            yield Stage(session, store, faults, [url], is_replayed=shape == "sglang")


class Running:
    """A streamed call of a client that reads it while it runs."""

    def __init__(self, stage: Stage, path: str, rollout: str) -> None:
        self._stage, self._body, self._raw = stage, BODIES[path], b""
        self._url = f"{stage.session.url}/rollouts/{rollout}/v1/{path}"
        self.read = asyncio.create_task(self._read())

    async def _read(self) -> bytes:
        async with self._stage.session.http.post(self._url, json={"model": "m", **self._body}) as response:
            async for data in response.content.iter_any():
                self._raw += data
        return self._raw

    async def has_begun(self) -> None:
        """Wait for events, or, where a stream is sent at its end, for the engine to have begun all calls."""
        while self._raw.count(b"\n\n") < 6 and not self.read.done():
            counts = [await self._stage.session.http.get(f"{url}/metrics") for url in self._stage.urls]
            if self._stage.is_replayed and self._stage.running == sum(
                [float((await c.text()).split()[-1]) for c in counts]
            ):
                return
        assert not self.read.done(), self._raw


async def test_a_pause_interrupts_calls_which_go_on_after_it_with_the_new_version(slow):
    """The pause counts no call in flight; each reply is the uninterrupted one, with a span for each version."""
    expected = {path: await slow.ask(path, body) for path, body in BODIES.items()}
    await slow.session.put("/policy", {"version": 1})
    calls = {path: await slow.begin(path, path.replace("/", "-")) for path in BODIES}
    paused = await slow.session.post("/policy/pause?drain_s=20", {"in_flight": "resume"})
    await slow.session.put("/policy", {"version": 2})
    await slow.session.http.post(f"{slow.urls[0]}/update_weight_version", json={"new_version": "2"})
    await slow.session.post("/policy/resume")
    for path, call in calls.items():
        text = await call
        (step,) = await stored_steps(slow.store, path.replace("/", "-"))
        whole, uncut = expected[path]
        count = len(uncut.choices[0].ids)

        assert read(whole.text, path, BODIES[path]) == read(text, path, BODIES[path])
        first, second = step.choices[0].spans
        assert [("1", 0), ("2", first.end), count] == [
            (first.policy_version, first.start),
            (second.policy_version, second.start),
            second.end,
        ]
        assert tokens_of(uncut)["choices"][0][:2] == tokens_of(step)["choices"][0][:2]
        assert (step.resumed, step.exact, step.status) == (1, True, "complete")
    assert paused.json == {"mode": "wait", "in_flight": 0, "drained": True}


async def test_a_client_that_leaves_during_the_pause_leaves_a_partial_step(slow):
    """It has what was sampled before the pause, and the pause does not wait for the call."""
    _, uncut = await slow.ask(CHAT, BODIES[CHAT])
    call = await slow.begin(CHAT, "left")
    await slow.session.post("/policy/pause?drain_s=20", {"in_flight": "resume"})
    call.cancel()
    (step,) = await wait_for_steps(slow.store, "left")
    (choice,) = step.choices

    assert (step.status, step.delivered) == ("partial", False)
    assert 0 < len(choice.ids) < len(uncut.choices[0].ids)
    assert choice.ids == uncut.choices[0].ids[: len(choice.ids)]
    assert len(choice.ids) == len(choice.logprobs)


async def test_a_call_waits_for_the_end_of_a_pause_only_so_long(slow):
    """After `agents.resume_timeout_s` it ends with what was sampled; the reason is counted."""
    call = await slow.begin(COMPLETIONS, "late")
    await slow.session.post("/policy/pause?drain_s=20", {"in_flight": "resume"})
    with suppress(aiohttp.ClientPayloadError):
        await call
    (step,) = await wait_for_steps(slow.store, "late")

    assert step.status == "partial" or "aborted" in step.problems
    assert step.choices[0].ids
    assert await slow.counted("ended", "timeout") == 1


async def test_a_call_is_resumed_only_so_often(slow):
    """After `agents.max_resumes` it ends as its engine ended it; each token was sampled once."""
    _, uncut = await slow.ask(CHAT, BODIES[CHAT])
    response, step = await slow.ask(CHAT, BODIES[CHAT], [Cut(3, "abort")] * 4)
    (choice,) = step.choices

    assert uncut.choices[0].ids[:9] == choice.ids
    assert (choice.finish_reason, step.resumed) == ("abort", 2)
    assert b'"finish_reason":"abort"' in response.text
    assert await slow.counted("ended", "max_resumes") == 1


@pytest.mark.parametrize("path", BODIES)
async def test_an_engine_that_dies_in_mid_stream_is_no_error_if_there_is_another(store, shape, path):
    """The other one goes on with the reply; the step names both."""
    one, other = (Options(shape=shape, script=SCRIPT, seed=5, faults=Faults()) for _ in range(2))
    async with AsyncExitStack() as dying, simulating("127.0.0.1:0", other) as survivor:
        victim = await dying.enter_async_context(simulating("127.0.0.1:0", one))
        named = {"one": victim, "other": survivor}
        endpoints = [{"url": url, "name": name, "kind": shape} for name, url in named.items()]
        async with session_with(None, store, engines={"endpoints": endpoints}, agents={"max_resumes": 1}) as session:
            stage = Stage(session, store, one.faults)
            expected, uncut = await stage.ask(path, BODIES[path])
            rollout = "0"
            while await endpoint_of(stage, rollout) != "one":
                rollout += "0"
            one.faults.cuts.extend([Cut(7, "torn"), *[Cut(0, "lost")] * 9])
            response = await session.post(f"/rollouts/{rollout}/v1/{path}", {"model": "m", **BODIES[path]})
            *_, step = await stored_steps(store, rollout)

    assert expected is not None
    assert read(expected.text, path, BODIES[path]) == read(response.text, path, BODIES[path])
    assert tokens_of(uncut) == tokens_of(step)
    assert (step.engine.name, [attempt["endpoint"] for attempt in step.extra["attempts"]]) == ("other", ["one"])


async def endpoint_of(stage: Stage, rollout: str) -> str:
    """Return the name of the endpoint of a rollout."""
    await stage.session.chat(rollout, max_tokens=1)
    *_, step = await stored_steps(stage.store, rollout)
    return step.engine.name
