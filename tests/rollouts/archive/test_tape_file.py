"""Rollouts in a JSON file: what is read from it, and that a store gets it whole."""

from collections import deque
from copy import deepcopy
from dataclasses import replace
from math import nan
from secrets import token_hex

import aiohttp
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.fakes import proxying

from proxy.cli.commands import print_rollout
from proxy.cli.control import ControlAddress
from proxy.cli.render import StepView
from proxy.rollouts.archive.tape_file import _put_repeats, import_rollout, read_tape_file
from proxy.rollouts.rollout import read_rollout
from proxy.rollouts.steps import read_steps
from proxy.server.listener import simulating
from proxy.simulator.options import Options
from storage import StoreOptions, open_store
from tokentape.testing import _without_repeats, _write

NDJSON = {"Accept": "application/x-ndjson"}


@pytest.fixture
async def other_store(server):
    """Another store."""
    opened = await open_store(f"unix:{server.socket}", StoreOptions(prefix=token_hex(8)))
    yield opened
    await opened.close()


@pytest.fixture
async def recorded(store):
    """The JSON lines of a rollout with a conversation, a Messages call, a call with several choices, and a failed one."""
    async with (
        simulating("127.0.0.1:0", Options(seed=1)) as engine,
        proxying(engine, store) as served,
        aiohttp.ClientSession(served.url) as http,
    ):

        async def post(path, body):
            async with http.post(path, json=body) as response:
                return await response.json()

        terms = {"rollout_id": "r", "metadata": {"task": 7}, "sampling": {"default": {"temperature": 0.5}}}
        await post("/rollouts", terms)
        chat = {"model": "m", "max_tokens": 6, "messages": [{"role": "user", "content": "Hello"}]}
        for _ in range(2):
            answer = await post("/rollouts/r/v1/chat/completions", chat)
            more = [answer["choices"][0]["message"], {"role": "user", "content": "Go on"}]
            chat = {**chat, "messages": [*chat["messages"], *more]}
        await post("/rollouts/r/v1/messages", chat)
        await post("/rollouts/r/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 3})
        await post("/rollouts/r/v1/completions", {"prompt": "a", "temperature": -1})
        async with http.get("/rollouts/r") as response:
            rollout = await response.read()
        async with http.get("/rollouts/r/steps", headers=NDJSON) as response:
            steps = await response.read()
    return rollout, steps


async def imported(store, path):
    """The rollouts of a file with their steps, as a store has them."""
    found = []
    for each in read_tape_file(path):
        await import_rollout(store, each, 5000)
        rollout = read_rollout(await store.get(each.rollout_id))
        found.append((rollout, await read_steps(store, rollout, whole=True)))
    return found


async def test_the_ndjson_of_the_steps_route_returns_the_same_steps(recorded, store, other_store, tmp_path):
    """With and without the line of the rollout, which has its terms."""
    rollout, lines = recorded
    path = tmp_path / "tape.jsonl"
    path.write_bytes(lines)
    ((plain, steps),) = await imported(other_store, path)
    original = await read_steps(store, read_rollout(await store.get("r")), whole=True)

    assert len(steps) == 5
    assert original == steps
    assert (plain.status, plain.finished_ms, plain.metadata) == ("completed", 5000, {})
    assert {name: plain.counts[name] for name in ("steps", "exact", "error")} == {"steps": 5, "exact": 4, "error": 1}

    await other_store.delete("r")
    path.write_bytes(b'{"rollout": ' + rollout + b"}\n\n" + lines)
    ((titled, again),) = await imported(other_store, path)
    assert original == again
    assert (titled.metadata, titled.sampling.default) == ({"task": 7}, {"temperature": 0.5})


async def test_the_document_of_show_json_is_a_file_too(recorded, store, other_store, tmp_path, capsys, server):
    """Its steps are equal; a rollout that was finished keeps its status."""
    async with simulating("127.0.0.1:0", Options()) as engine, proxying(engine, store) as served:
        async with aiohttp.ClientSession(served.url) as http:
            await http.post("/rollouts/r/finish", json={"status": "failed", "reward": 0.5})
        await print_rollout(ControlAddress(served.url, None, None), None, "r", StepView(), as_json=True)
    path = tmp_path / "r.json"
    path.write_text(capsys.readouterr().out)
    ((rollout, steps),) = await imported(other_store, path)

    assert await read_steps(store, read_rollout(await store.get("r")), whole=True) == steps
    assert (rollout.status, rollout.reward) == ("failed", 0.5)


def a_step(**changes) -> dict:
    """The shortest step that is accepted."""
    return {
        "step_id": "s",
        "rollout_id": "r",
        "dialect": "chat",
        "endpoint": "/v1/chat/completions",
        "engine": {"name": "e", "kind": "vllm", "version": None, "url": ""},
        "request": {},
        "response": {"choices": []},
        "timing": {"received": 1.0},
        "status": "complete",
        **changes,
    }


async def test_a_rollout_that_the_store_has_is_not_changed(store, tmp_path):
    path = tmp_path / "tape.jsonl"
    path.write_bytes(orjson.dumps(a_step()))
    await imported(store, path)
    with pytest.raises(ValueError, match="has a rollout 'r' already"):
        await imported(store, path)


async def test_marks_and_values_that_json_lacks_are_kept(store, tmp_path):
    """A step that was late or undelivered is that again; a logprob of null is NaN."""
    choice = {"ids": [1, 2], "logprobs": [None, -0.5]}
    path = tmp_path / "tape.jsonl"
    lines = [a_step(late=True, choices=[choice]), a_step(step_id="t", delivered=False, prompts=[[1], [2]])]
    path.write_bytes(b"\n".join(map(orjson.dumps, lines)))
    ((_, (first, second)),) = await imported(store, path)

    assert (first.late, first.delivered, second.late, second.delivered) == (True, True, False, False)
    assert str([nan, -0.5]) == str(first.choices[0].logprobs.tolist())
    assert [prompt[:].tolist() for prompt in second.prompts] == [[1], [2]]


async def test_what_the_fixture_writes_once_is_read_as_it_was(recorded, other_store, store, tmp_path):
    """Messages, tools and ids that calls repeat are written once, in a file that is a fraction as long."""
    _, lines = recorded
    long = {"role": "system", "content": "-" * 20_000}
    steps = [orjson.loads(line) for line in lines.splitlines()]
    for step in steps:
        if "messages" in step["request"]:
            step["request"]["messages"].insert(0, long)
    path, whole = tmp_path / "tape.jsonl", tmp_path / "whole.jsonl"
    whole.write_bytes(b"\n".join(map(orjson.dumps, steps)))
    _write(path, {"rollout_id": "r"}, steps)
    ((_, read),) = await imported(other_store, path)
    await other_store.delete("r")
    ((_, expected),) = await imported(other_store, whole)

    assert [replace(step, engine=replace(step.engine, url="")) for step in expected] == read
    assert whole.stat().st_size > 2 * path.stat().st_size


TEXTS = st.text("ab", max_size=400)
ITEMS = st.one_of(TEXTS, st.sampled_from([1, True, 1.0, 0, False, {"a": 1}, {"a": True}]))
VALUES = st.one_of(TEXTS, st.lists(ITEMS, max_size=6), st.none(), st.dictionaries(st.sampled_from("xy"), TEXTS))
FIELDS = st.dictionaries(st.sampled_from(["messages", "input", "tools"]), VALUES)
STEPS = st.fixed_dictionaries(
    {
        "request": FIELDS,
        "sent": st.one_of(st.just({}), st.fixed_dictionaries({"set": FIELDS})),
        "prompt_ids": st.one_of(st.none(), st.lists(st.integers(0, 1), max_size=400)),
    }
)


@given(st.lists(STEPS, max_size=12))
def test_what_steps_repeat_is_read_as_it_was(steps):
    read: deque = deque()
    for written in _without_repeats(deepcopy(steps)):
        step = orjson.loads(orjson.dumps(written))
        _put_repeats(step, read)
        read.appendleft(step)

    assert [{**step, "sent": {**step["sent"], "set": step["sent"].get("set") or {}}} for step in steps] == [
        *reversed(read)
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "is not JSON"),
        (b"7", "is not a JSON object"),
        (b"{}", "line 1 is no step of a rollout: 'rollout'"),
        (b'{"rollout": {"rollout_id": "r"}}', "has no steps"),
        (b'{"rollout": {"rollout_id": 7}}', "is no step of a rollout"),
        (orjson.dumps(a_step()) + b"\n{", "line 2 is not JSON"),
        (orjson.dumps(a_step()) * 2, "is not JSON"),
        (b"\n".join([orjson.dumps(a_step())] * 2), "line 2 .*has step 's' before"),
        (orjson.dumps(a_step(step_id=7)), "Expected `str`, got `int`"),
        (orjson.dumps(a_step(rollout_id="")), "must have 1 to 256 characters"),
        (orjson.dumps(a_step(prompt_ids=[2**40])), "does not fit into 32 bits"),
        (orjson.dumps(a_step(choices=[{"ids": [1], "logprobs": ["x"]}])), "Expected `float | null`"),
        (orjson.dumps(a_step(status="odd")), "Invalid enum value 'odd'"),
        (orjson.dumps(a_step(policy_version=7)), "Expected `str | null`, got `int`"),
        (orjson.dumps(a_step(prompt_ids={"repeats": [1, 2], "then": []})), "is no step of a rollout"),
        (orjson.dumps(a_step(request={"a": {"repeats": ["x", 2], "then": []}})), r"a repeats \['x', 2\]"),
        (orjson.dumps(a_step(request={"a": {"repeats": [0, 2], "then": []}})), r"a repeats \[0, 2\]"),
        (orjson.dumps(a_step(request=7)), "is no step of a rollout"),
        (orjson.dumps(a_step(sent=7)), "is no step of a rollout"),
        (orjson.dumps({"rollout": {"rollout_id": "r"}, "steps": [{"step_id": "s"}]}), "step 0 is no step"),
    ],
)
def test_a_file_that_is_no_tape_is_refused_with_the_line(tmp_path, text, why):
    path = tmp_path / "tape.jsonl"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=why):
        read_tape_file(path)


@pytest.mark.parametrize("facts", [{"model": 7}, {"sampling": {"override": 1}}, {"reward": "x"}])
async def test_terms_that_no_rollout_can_have_are_refused(store, tmp_path, facts):
    path = tmp_path / "tape.jsonl"
    path.write_bytes(orjson.dumps({"rollout": {"rollout_id": "r", **facts}}) + b"\n" + orjson.dumps(a_step()))
    with pytest.raises(ValueError, match="rollout 'r': "):
        await imported(store, path)
