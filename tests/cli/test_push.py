"""`tokentape export --push`: posting scored groups to Atropos' service."""

import asyncio
import io
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from rich.console import Console
from tests.support.fakes import proxying
from tests.support.listening import listening

from proxy.cli import push
from proxy.cli.control import ControlAddress
from proxy.cli.export import ExportRequest
from proxy.cli.push import Member, PushOptions, assert_even, post_groups, prepare
from proxy.export import Rows
from proxy.server.listener import simulating
from proxy.simulator.options import Options

TRAINERS = Path(__file__).parents[2] / ".trainers"
SCORED_DATA = ExportRequest("scored_data", (), None, "exact", "ndjson")
TRAINER = {
    "wandb_group": "g", "wandb_project": "p", "batch_size": 4, "max_token_len": 4096, "checkpoint_dir": "",
    "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 1,
}  # fmt: skip
ENVIRONMENT = {"max_token_length": 4096, "desired_name": "e", "weight": 1.0, "group_size": 4}


async def call_proxy(http, method, url, body=None):
    async with http.request(method, url, json=body) as response:
        assert response.status < 300, await response.text()
        return await response.json(content_type=None)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_service():
    """The URL of Atropos' own trainer service, run as a process. Its package is in .trainers, by `make install`."""
    assert (TRAINERS / "atroposlib").is_dir(), "atroposlib is not in .trainers: run make install"
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        words = ("-m", "uvicorn", "atroposlib.api:app", "--fd", str(held.fileno()))  # it needs only fastapi and uvicorn
        environment = {**os.environ, "PYTHONPATH": str(TRAINERS)}
        run = await asyncio.create_subprocess_exec(sys.executable, *words, pass_fds=(held.fileno(),), env=environment)
    try:
        # The socket accepts connections already: the first response comes once the service runs.
        async with aiohttp.ClientSession() as http, http.get(url + "/") as response:
            assert response.status == 200
        yield url
    finally:
        run.terminate()
        await run.wait()


@pytest.fixture
async def service(http, running_service):
    """Atropos' service with a trainer and an environment of groups of four: its URL and the environment's ID."""
    async with http.get(running_service + "/reset_data") as reset:
        assert reset.status == 200
    await call_proxy(http, "POST", running_service + "/register", TRAINER)
    await call_proxy(http, "GET", running_service + "/batch")
    env = await call_proxy(http, "POST", running_service + "/register-env", ENVIRONMENT)
    assert env["status"] == "success"
    return running_service, env["env_id"]


@pytest.fixture
async def proxy(store):
    """The URL of a proxy in front of the simulator."""
    async with simulating("127.0.0.1:0", Options()) as engine, proxying(engine, store) as served:
        yield served.url


async def record_group(http, proxy, rewards, *, group="g", max_tokens=16, models=("simulated",), **finish):
    """Record a group of finished rollouts of one step for each model, with these rewards."""
    for number, reward in enumerate(rewards):
        name = f"{group}-{number}"
        headers = {"X-Rollout-Id": name, "X-Rollout-Group": group}
        messages = [{"role": "user", "content": f"hi {number}"}]
        for model in models:
            body = {"model": model, "messages": messages, "max_tokens": max_tokens}
            async with http.post(proxy + "/v1/chat/completions", json=body, headers=headers) as response:
                assert response.status == 200
        end = {"status": "completed", "reward": reward, **finish}
        await call_proxy(http, "POST", f"{proxy}/rollouts/{name}/finish", end)


async def push_to(proxy, service, request=SCORED_DATA, **options) -> tuple[bool, str]:
    url, env_id = service
    output = io.StringIO()
    to = PushOptions(**{"service": url, "group_size": 4, "env_id": env_id, **options})
    received = await post_groups(
        ControlAddress(proxy, None, None), request, to, Console(file=output, width=1000), as_json=False
    )
    return received, output.getvalue()


async def exported(http, proxy, group, size, more=""):
    """Return the rows of the rollouts' exports as one group."""
    query = f"format=scored_data{more}"
    rows = [await call_proxy(http, "GET", f"{proxy}/rollouts/{group}-{n}/export?{query}") for n in range(size)]
    flat = [row for body in rows for row in (body["rows"] if isinstance(body, dict) and "rows" in body else [body])]
    flat = [row for item in flat for row in (item if isinstance(item, list) else [item])]
    return {name: [row[name][0] for row in flat] for name in ("tokens", "masks", "scores", "inference_logprobs")}


async def test_ab_1_a_pushed_group_is_one_object_of_the_batch_with_the_exported_arrays(http, proxy, service):
    """The environment has groups of four."""
    await record_group(http, proxy, [0.0, 1.0, 0.5, 0.25])

    received, output = await push_to(proxy, service)

    assert received, output
    assert "group 'g': received" in output
    batch = (await call_proxy(http, "GET", service[0] + "/batch"))["batch"]
    assert len(batch) == 1
    ours = await exported(http, proxy, "g", 4)
    assert ours == {name: batch[0][name] for name in ours}
    assert batch[0]["scores"] == [0.0, 1.0, 0.5, 0.25]


async def test_an_opened_group_needs_no_group_size(http, proxy, service):
    """A missing rollout is an error; a group created by calls requires the option."""
    opened = await call_proxy(http, "POST", f"{proxy}/groups", {"group_id": "opened", "size": 4})
    for number, rollout in enumerate(opened["rollouts"]):
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 16}
        await call_proxy(http, "POST", rollout["base_url"] + "/chat/completions", body)
        end = {"status": "completed", "reward": number / 4}
        await call_proxy(http, "POST", f"{proxy}/rollouts/{rollout['rollout_id']}/finish", end)
    complete = await push_to(proxy, service, group_size=None)
    async with http.delete(f"{proxy}/rollouts/{opened['rollouts'][0]['rollout_id']}"):
        pass
    partial = await push_to(proxy, service, group_size=None)
    await record_group(http, proxy, [0.0, 1.0, 0.5, 0.25], group="made")
    created_by_calls = await push_to(proxy, service, group_size=None)

    assert complete == (True, "group 'opened': received\ngroups: 1 received\n")
    assert (partial[0], "it has 3 sequences to post; a complete group has 4" in partial[1]) == (False, True)
    assert "group 'made': its size is unknown because calls created it" in created_by_calls[1]


async def test_only_the_sequences_of_the_named_policy_are_posted(http, store, service):
    policies = {"planner": {"models": ["planner"]}, "coder": {"models": ["coder"]}}
    async with simulating("127.0.0.1:0", Options()) as engine, proxying(engine, store, policies=policies) as served:
        await record_group(http, served.url, [0.0, 1.0, 0.5, 0.25], models=("planner", "coder"))
        request = replace(SCORED_DATA, more=(("policy", "planner"),))
        received, output = await push_to(served.url, service, request)
        ours = await exported(http, served.url, "g", 4, "&policy=planner")
    batch = (await call_proxy(http, "GET", service[0] + "/batch"))["batch"]

    assert received, output
    assert len(batch) == 1
    assert ours == {name: batch[0][name] for name in ours}


@pytest.mark.parametrize("compressed_from", [1, 1 << 30])
async def test_ab_2_the_service_reads_the_same_group_with_and_without_gzip(
    http, proxy, service, monkeypatch, compressed_from
):
    monkeypatch.setattr(push, "MIN_GZIP_BYTES", compressed_from)
    await record_group(http, proxy, [0.0, 1.0, 0.5, 0.25])

    received, output = await push_to(proxy, service)

    assert received, output
    batch = (await call_proxy(http, "GET", service[0] + "/batch"))["batch"]
    ours = await exported(http, proxy, "g", 4)
    assert ours == {name: batch[0][name] for name in ours}


async def test_ab_3_a_partial_group_is_posted_only_with_force_partial(http, proxy, service):
    """The service then buffers it, which is not a success."""
    await record_group(http, proxy, [0.0, 1.0, 0.5])

    received, output = await push_to(proxy, service)
    assert not received
    assert "it has 3 sequences to post; a complete group has 4" in output
    assert "group 'g': not posted" in output
    assert (await call_proxy(http, "GET", service[0] + "/status"))["queue_size"] == 0

    received, output = await push_to(proxy, service, force_partial=True)
    assert not received
    assert "buffered, not received: the service buffers 3 sequences" in output


async def test_ab_4_groups_that_the_service_would_drop_are_reported_and_not_posted(http, proxy, service):
    """They have equal scores, an unscored rollout or an empty one; other groups are posted."""
    await record_group(http, proxy, [1.0] * 4, group="equal")
    await record_group(http, proxy, [0.0, 1.0, 0.5, None], group="unscored")
    await record_group(http, proxy, [0.0, 1.0, 0.5, 0.25], group="good")
    await call_proxy(http, "POST", f"{proxy}/rollouts", {"rollout_id": "void", "group_id": "empty"})
    await call_proxy(http, "POST", f"{proxy}/rollouts/void/finish", {"status": "failed", "reward": 0.0})

    received, output = await push_to(proxy, service)

    assert not received
    assert "group 'equal': all scores are equal (1.0)" in output
    assert "group 'unscored': rollout 'unscored-3' cannot be exported" in output
    assert "requires a reward" in output
    assert "group 'empty': rollout 'void' is empty" in output
    assert "group 'good': received" in output
    batch = (await call_proxy(http, "GET", service[0] + "/batch"))["batch"]
    assert [group["scores"] for group in batch] == [[0.0, 1.0, 0.5, 0.25]]


def member(name, length, score, *, status="completed") -> Member:
    lists = {"tokens": [[1] * length], "masks": [[1] * length], "inference_logprobs": [[-1.0] * length]}
    return Member(name, status, Rows([{**lists, "scores": [score]}], []))


UNTRAINED = member("c", 7, 0.0)
UNTRAINED.rows.rows[0]["masks"] = [[-100] * 7]


@pytest.mark.parametrize(
    ("other", "limit", "reason"),
    [
        (member("a", 8, 0.0), 8, "rollout 'a' is too long: it has 8 tokens, and the service accepts fewer than 8"),
        (member("a", 8, 0.0, status="open"), -1, "rollout 'a' has status open; finish it first"),
        (UNTRAINED, -1, "rollout 'c' has a sequence without trained tokens"),
    ],
)
def test_ab_4_a_group_with_a_rollout_that_cannot_be_trained_is_not_posted(other, limit, reason):
    """The service accepts sequences that are shorter than its limit; 0 or less means no limit."""
    body, reasons = prepare(2, [member("b", 7, 1.0), other], PushOptions(""), limit)

    assert (body, reasons[0]) == (None, reason)
    assert prepare(2, [member("a", 8, 0.0), member("b", 7, 1.0)], PushOptions(""), -1)[0] is not None


def test_a_group_has_an_env_id_only_if_one_is_configured():
    """Without one the service accepts any group size."""
    members = [member("a", 8, 0.0), member("b", 7, 1.0)]

    assert prepare(None, members, PushOptions("", 2, env_id=3), -1)[0]["env_id"] == 3
    assert "env_id" not in prepare(None, members, PushOptions("", 2), -1)[0]


@pytest.mark.parametrize("name", ["masks", "inference_logprobs", "advantages"])
def test_ab_5_arrays_of_unequal_length_are_never_posted(name):
    """The service would accept them with 200."""
    even = {**member("a", 3, 0.0).rows.rows[0], "advantages": [[0.0] * 3]}
    assert_even(even)

    with pytest.raises(ValueError, match="sequence 0 have different lengths"):
        assert_even({**even, name: [[1.0, 1.0]]})
    with pytest.raises(ValueError, match="different numbers of sequences"):
        assert_even({**even, name: [*even[name], [1.0] * 3]})


async def test_a_rejected_group_does_not_prevent_others(http, proxy, service, monkeypatch):
    """The result of each is reported; after a disconnect it is unknown."""
    await record_group(http, proxy, [0.0, 1.0, 0.5, 0.25], group="a")
    await record_group(http, proxy, [0.0, 1.0, 0.5, 0.25], group="b")
    statuses = iter([None, 500, 302])

    async def respond(request):
        if request.path == "/info":
            return web.json_response({"max_token_len": -1, "batch_size": 4})
        if (status := next(statuses)) is None:
            request.transport.close()
        return web.Response(status=status or 200, headers={"Location": "/elsewhere"})

    async with listening(respond) as address:
        first, second = await push_to(proxy, (address, 0)), await push_to(proxy, (address, 0), max_len=3)

    assert (first[0], second[0]) == (False, False)
    assert "group 'b': posted, but it is unknown whether it was received" in first[1]
    assert "group 'a': not received: " in first[1]
    assert "returned 500" in first[1]
    assert "groups: 2 posted but not received" in first[1]
    assert "tokens, and --max-len is 3" in second[1]
    assert "groups: 2 not posted" in second[1]


async def test_a_done_group_is_not_posted_unless_named(http, proxy, service):
    """It was trained already."""
    opened = await call_proxy(http, "POST", f"{proxy}/groups", {"group_id": "g", "size": 2})
    for number, rollout in enumerate(opened["rollouts"]):
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 16}
        await call_proxy(http, "POST", rollout["base_url"] + "/chat/completions", body)
        end = {"status": "completed", "reward": float(number)}
        await call_proxy(http, "POST", f"{proxy}/rollouts/{rollout['rollout_id']}/finish", end)
    batch = await call_proxy(http, "POST", f"{proxy}/batches/claim", {"consumer": "trainer"})
    await call_proxy(http, "POST", f"{proxy}/batches/{batch['batch_id']}/ack", {})
    received, output = await push_to(proxy, service, group_size=None)

    assert not received
    assert "group 'g': its status is already done" in output


async def test_an_unreachable_service_is_an_error(proxy):
    with pytest.raises(OSError, match="is unreachable"):
        await push_to(proxy, ("http://127.0.0.1:9", 0))


async def test_a_url_that_is_not_atropos_service_is_an_error_with_the_status(proxy):
    with pytest.raises(OSError, match="/nowhere/info returned 40"):
        await push_to(proxy, (proxy + "/nowhere", 0))
