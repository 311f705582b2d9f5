"""Recorded steps, and their tree."""

import asyncio
import re
from itertools import pairwise

import aiohttp
import orjson
import pytest
from tests.support.fakes import settings_for
from tests.support.session import Session

from proxy.continuation.types import REASONS
from proxy.server.listener import running, simulating
from proxy.simulator.options import Options
from storage.types import StepWrite


async def test_a_step_has_its_request_response_ids_logprobs_timing_and_fidelity(proxy):
    (step_id,) = await proxy.turns("r1", 1)
    step = (await proxy.get(f"/rollouts/r1/steps/{step_id}")).json
    listed = (await proxy.get("/rollouts/r1/steps")).json

    assert listed["steps"] == [step]
    assert listed["after"] is None
    assert (step["step_id"], step["rollout_id"], step["index"], step["dialect"]) == (step_id, "r1", 0, "chat")
    assert step["sent"]["set"] == {"return_token_ids": True, "logprobs": True}
    assert "return_token_ids" not in step["request"]
    assert step["model"] == {"asked": "policy", "served": "policy"}
    choice = step["choices"][0]
    assert len(choice["ids"]) == len(choice["logprobs"]) == step["usage"]["completion_tokens"]
    assert len(step["prompt_ids"]) == step["usage"]["prompt_tokens"]
    assert step["response"]["choices"][0]["token_ids"] is None
    assert step["fidelity"] == {"exact": True, "problems": [], "why": []}
    timing = step["timing"]
    assert timing["received"] <= timing["sent"] <= timing["first_byte"] <= timing["last_byte"] <= timing["stored"]


async def test_a_step_of_several_prompts_has_no_prompt_ids(proxy):
    """`prompts` has them, and each choice names its prompt."""
    body = {"model": "policy", "prompt": ["one", "and two"], "max_tokens": 2}
    await proxy.post("/rollouts/r1/v1/completions", body)
    (step,) = await proxy.steps("r1")

    assert step["prompt_ids"] is None
    assert [choice["prompt"] for choice in step["choices"]] == [0, 1]
    assert len(step["prompts"]) == 2


async def test_steps_are_paged_by_index_and_available_as_ndjson(proxy):
    ids = await proxy.turns("r1", 5)
    first = (await proxy.get("/rollouts/r1/steps?limit=2")).json
    second = (await proxy.get(f"/rollouts/r1/steps?limit=9&after={first['after']}")).json
    lines = await proxy.get("/rollouts/r1/steps", headers={"Accept": "application/x-ndjson"})

    assert ids == [step["step_id"] for step in first["steps"] + second["steps"]]
    assert ids == [orjson.loads(line)["step_id"] for line in lines.text.splitlines()]


async def test_an_unknown_step_is_404_and_named(proxy):
    await proxy.chat("r1")
    response = await proxy.get("/rollouts/r1/steps/nothing")

    assert response.status == 404
    assert "nothing" in response.json["error"]["message"]


@pytest.mark.parametrize("query", ["after=x", "after=-1", f"after={10**30}", "limit=0", "before=1"])
async def test_an_invalid_page_of_steps_is_400(proxy, query):
    await proxy.chat("r1")

    assert (await proxy.get(f"/rollouts/r1/steps?{query}")).status == 400


@pytest.fixture(params=["short", "long"])
def length(request, monkeypatch):
    """A short rollout is read in one round trip, a long one in pages (of one record here)."""
    if request.param == "long":
        monkeypatch.setattr("proxy.rollouts.steps._PAGE", 1)
    return request.param


READING = [
    ("/steps", "short", "read"), ("/steps", "short", "blocks"), ("/tree", "short", "read_all"),
    ("/export", "short", "read_all"), ("/tree", "long", "read"), ("/tree", "long", "blocks"),
    ("/export", "long", "read"), ("/export", "long", "blocks"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "length", "verb"), READING, indirect=["length"])
async def test_a_step_that_is_stored_during_a_read_does_not_break_it(proxy, store, path, verb, length):
    """It is read completely or not at all, never without its blocks."""
    await proxy.chat("r1")
    store.waiting[verb], store.reached[verb] = asyncio.Event(), asyncio.Event()
    read = asyncio.ensure_future(proxy.get(f"/rollouts/r1{path}"))
    await store.reached[verb].wait()
    await proxy.chat("r1", {"role": "user", "content": "word " * 2000}, max_tokens=2)  # a prompt of several blocks
    store.waiting.pop(verb).set()

    assert ((await read).status, (await proxy.get(f"/rollouts/r1{path}")).status) == (200, 200)


@pytest.mark.parametrize("is_recreated", [False, True])
@pytest.mark.parametrize("path", ["/steps", "/steps/{step}", "/tree", "/export"])
async def test_a_rollout_that_is_deleted_during_a_read_is_404(proxy, store, path, is_recreated, length):
    """This holds also if it was created again, since the read would mix two incarnations."""
    (step,) = await proxy.turns("r1", 1)
    verb = "read_all" if length == "short" and path in {"/tree", "/export"} else "marks"
    store.waiting[verb], store.reached[verb] = asyncio.Event(), asyncio.Event()
    read = asyncio.ensure_future(proxy.get(f"/rollouts/r1{path.format(step=step)}"))
    await store.reached[verb].wait()
    await proxy.delete("/rollouts/r1")
    if is_recreated:
        await proxy.chat("r1")
    store.waiting.pop(verb).set()

    assert (await read).status == 404


async def test_a_rollout_of_40_steps_and_its_tree_are_returned(proxy):
    """Long responses are computed in a thread."""
    ids = await proxy.turns("r1", 40)
    steps = await proxy.steps("r1")
    tree = (await proxy.get("/rollouts/r1/tree")).json

    assert ids == [step["step_id"] for step in steps] == [node["step_id"] for node in tree["nodes"]]


async def test_an_unreadable_record_is_409_and_never_skipped(proxy, store):
    """The error has its index."""
    await proxy.chat("r1")
    stored = await store.get("r1")
    await store.append(StepWrite("r1", stored.incarnation, "broken", b"TT\x01 not a record"), now_ms=1)

    for path in ("/steps", "/export", "/tree"):
        response = await proxy.get(f"/rollouts/r1{path}")
        assert (response.status, response.json["error"]["code"]) == (409, "damaged_step")
        assert "index 1" in response.json["error"]["message"]


async def test_the_tree_of_a_conversation_is_one_branch(proxy):
    await proxy.turns("r1", 3)
    tree = (await proxy.get("/rollouts/r1/tree")).json

    assert [node["parent"] for node in tree["nodes"]] == [None, 0, 1]
    assert {"steps": 3, "nodes": 3, "roots": 1, "leaves": 1, "sequences": 1, "drift": 0}.items() <= tree[
        "counts"
    ].items()


async def test_the_tree_reports_drift(proxy):
    """The chat template removes earlier reasoning, so the ids differ although the messages continue."""
    kwargs = {"chat_template_kwargs": {"enable_thinking": True}}
    user = {"role": "user", "content": "hi"}
    reply = await proxy.chat("r1", user, **kwargs)
    assistant = {"role": "assistant", "content": reply.message["content"]}
    await proxy.chat("r1", user, assistant, {"role": "user", "content": "go on"}, **kwargs)
    tree = (await proxy.get("/rollouts/r1/tree")).json

    (drift,) = tree["drift"]
    assert reply.step_id == drift["earlier_step_id"]
    assert drift["expected_ids"] != drift["found_ids"]
    assert [node["parent"] for node in tree["nodes"]] == [None, None]


async def test_a_step_that_does_not_continue_an_earlier_one_by_ids_shows_why(proxy):
    """In the step, in its node and in its drift boundary; the first step of a conversation shows nothing."""
    user, other = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "words of the agent"}
    await proxy.chat("r1", user)
    await proxy.chat("r1", user, other, user)
    first, second = await proxy.steps("r1")
    tree = (await proxy.get("/rollouts/r1/tree")).json
    metrics = (await proxy.get("/metrics")).text.decode()

    assert ("continuation" in first["extra"], {"reason": "edited"}) == (False, second["extra"]["continuation"])
    assert "continuation" not in tree["nodes"][0]
    assert {"reason": "edited", "why": REASONS["edited"]} == tree["nodes"][1]["continuation"]
    assert [drift["reason"] for drift in tree["drift"]] == ["edited"]
    assert 'tokentape_continuations_total{reason="edited",result="refused"} 1.0' in metrics


async def test_the_continuation_mode_is_set_by_the_rollout_or_by_a_header(proxy):
    """With `off` a step shows nothing; an unknown mode in the header is 400, and no step is recorded."""
    user, other = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "words of the agent"}
    body = {"model": "policy", "messages": [user, other, user]}
    path = "/rollouts/r1/v1/chat/completions"
    await proxy.post("/rollouts", {"rollout_id": "r1", "continuation": False})
    await proxy.chat("r1", user)
    responses = [
        await proxy.post(path, body, headers={} if mode is None else {"X-Rollout-Continuation": mode})
        for mode in (None, "append", "Faithful", "off", "on")
    ]
    steps = await proxy.steps("r1")

    assert [response.status for response in responses] == [200, 200, 200, 200, 400]
    assert ["continuation" in step["extra"] for step in steps] == [False, False, True, True, False]
    assert "X-Rollout-Continuation must be one of off, faithful, append, not 'on'." in responses[-1].text.decode()


async def test_a_continued_step_shows_the_ids_that_were_kept(store):
    """In its node of the tree, which is one branch. The engine samples token splits that no rendering has."""
    async with (
        simulating("127.0.0.1:0", Options(noncanonical_rate=0.5)) as engine,
        aiohttp.ClientSession() as http,
        running(settings_for(engine), store) as served,
    ):
        proxy = Session(http, served.url)
        steps = await proxy.turns("r1", 4)
        tree = (await proxy.get("/rollouts/r1/tree")).json
        metrics = (await proxy.get("/metrics")).text.decode()
    first, *later = tree["nodes"]

    assert "continuation" not in first
    for before, node in pairwise(tree["nodes"]):
        shown = node["continuation"]
        assert (before["step_id"], 0, before["end"]) == (shown["step_id"], shown["choice"], shown["kept"])
        assert node["start"] == shown["kept"] + shown["bridge"]
    assert [node["parent"] for node in tree["nodes"]] == [None, 0, 1, 2]
    assert any("rendered" in node["continuation"] for node in later)
    counted = re.findall(r'continuations_total{reason="none",result="(?:continued|unchanged)"} (\d)', metrics)
    assert (len(steps) - 1, []) == (sum(map(int, counted)), tree["drift"])
