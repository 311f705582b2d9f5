"""Updates of the policy by both clients."""

import asyncio

import pytest
from aiohttp import web
from tests.support.fakes import fake_engine, proxying
from tests.support.recorded import load
from tests.support.stored import wait_for_steps

from tokentape import AsyncClient, Client, ClientError

WHOLE, STREAM = load("chat_ids_lp"), load("chat_ids_lp_stream")
CHAT = "/rollouts/r1/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def requests(engine):
    """The requests that a server receives. It answers as the proxy does, and with status 500 if the key is in `failing`."""
    received, names = [], ("first", "second")
    engines = [{"name": name, "url": f"http://{name}", "policies": ["default"]} for name in names]
    engines.append({"name": "third", "url": "http://third", "policies": ["judge"]})

    async def respond(request, body):
        received.append((request.method, request.raw_path, body))
        if {request.path, f"{request.method} {request.path}"} & engine.failing:
            return web.json_response({"error": {"message": "failed"}}, status=500)
        if request.path == "/engines":
            return web.json_response({"engines": engines})
        drained = body.get("endpoints") != engine.undrained
        return web.json_response({"version": "2", "mode": "wait", "in_flight": int(not drained), "drained": drained})

    engine.failing, engine.undrained = set(), ["none"]
    engine.respond = respond
    return received


@pytest.fixture
async def served(engine, store):
    """A proxy before the fake engine."""
    async with proxying(engine.url, store) as served:
        yield served


@pytest.mark.parametrize(("policy", "path"), [(None, "/policy"), ("planner", "/policies/planner")])
async def test_an_update_pauses_drains_updates_announces_and_resumes(client_at, engine, requests, policy, path):
    """On the routes of the policy."""
    client = client_at(engine.url)
    result = await client.update_policy(2, lambda: requests.append("update"), drain_s=30, mode="reject", policy=policy)
    await client.close()

    assert requests == [
        ("GET", path, {"raw": b""}),
        ("POST", f"{path}/pause?drain_s=30", {"mode": "reject", "in_flight": "resume"}),
        "update",
        ("PUT", path, {"version": 2}),
        ("POST", f"{path}/resume", {"raw": b""}),
    ]
    assert result == {"version": "2", "mode": "wait", "in_flight": 0, "drained": True}


async def test_an_update_of_an_unknown_policy_is_an_error_without_an_update(client_at, served):
    """Nothing is paused, and no note claims it."""
    client, updates = client_at(served.url), []
    with pytest.raises(ClientError, match="'planner' not found") as caught:
        await client.update_policy(2, lambda: updates.append(2), policy="planner")
    await client.close()

    assert (caught.value.status, updates, getattr(caught.value, "__notes__", [])) == (404, [], [])


@pytest.mark.parametrize(
    ("in_flight", "path", "body"),
    [
        ("abort", "/policy/pause?drain_s=5", {"mode": "wait", "in_flight": "abort"}),
        ("drain", "/policy/pause?drain_s=5", {"mode": "wait"}),
        ("continue", "/policy/pause", {"mode": "wait"}),
    ],
)
async def test_calls_in_flight_are_drained_or_aborted_after_the_drain_or_continue_without_one(
    client_at, engine, requests, in_flight, path, body
):
    client = client_at(engine.url)
    await client.update_policy("v2", lambda: None, drain_s=5, in_flight=in_flight)
    await client.close()

    assert requests[1] == ("POST", path, body)


def held(label):
    return ("POST", "/policy/pause?drain_s=30", {"mode": "wait", "in_flight": "resume", "endpoints": [label]})


def released(label, **version):
    return ("POST", "/policy/resume", {"endpoints": [label], **version})


async def test_a_rolling_update_holds_updates_and_releases_the_endpoints_of_the_policy_one_by_one(
    client_at, engine, requests
):
    """The callback gets the label and the URL of each. Then the version is announced."""
    client = client_at(engine.url)
    announced = await client.update_policy(
        2, lambda endpoint: requests.append((endpoint["label"], endpoint["url"])), rolling=True, drain_s=30, run="a"
    )
    await client.close()

    assert [
        ("GET", "/policy", {"raw": b""}),
        ("GET", "/engines", {"raw": b""}),
        held("first"), ("first", "http://first"), released("first", version=2, run="a"),
        held("second"), ("second", "http://second"), released("second", version=2, run="a"),
        ("PUT", "/policy", {"version": 2, "run": "a"}),
        ("POST", "/policy/resume", {"raw": b""}),
    ] == requests  # fmt: skip
    assert announced["in_flight"] == 0


@pytest.mark.parametrize(("undrained", "updated"), [(["second"], ["first"]), (["none"], ["first", "second"])])
async def test_if_an_endpoint_is_not_updated_it_is_released_with_its_version_and_nothing_is_announced(
    client_at, engine, requests, undrained, updated
):
    """Because its calls did not end, or the callback raised; the endpoints before have the new version."""
    engine.undrained, found = undrained, []

    def update(endpoint):
        found.append(endpoint["label"])
        if endpoint["label"] == "second":
            raise RuntimeError("no weights")

    client = client_at(engine.url)
    with pytest.raises((RuntimeError, ClientError)) as caught:
        await client.update_policy(2, update, rolling=True, drain_s=30)
    await client.close()

    assert "no weights" in str(caught.value) or caught.value.code == "not_drained"
    assert (updated, released("second")) == (found, requests[-1])
    assert [released("first", version=2), held("second")] == requests[-3:-1]


@pytest.mark.parametrize("failing", ["release", "announcement"])
async def test_what_a_rolling_update_could_not_do_is_in_a_note(client_at, engine, requests, failing):
    engine.failing = {"/policy/resume"} if failing == "release" else {"PUT /policy"}
    client = client_at(engine.url)
    with pytest.raises(ClientError) as caught:
        await client.update_policy(2, lambda endpoint: None, rolling=True)
    await client.close()

    note = "Endpoint first is still held" if failing == "release" else "each endpoint has it as its own"
    assert note in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("options", "code"), [({"in_flight": "abort"}, "unprocessable_request"), ({"policy": "nothing"}, None)]
)
async def test_a_rolling_update_without_an_endpoint_or_without_resume_is_refused(
    client_at, engine, requests, options, code
):
    client = client_at(engine.url)
    with pytest.raises(ClientError, match="rolling update|No engine serves policy 'nothing'"):
        await client.update_policy(2, lambda endpoint: requests.append("update"), rolling=True, **options)
    await client.close()

    assert not any("update" in request or "POST" in request for request in requests)


async def test_a_rolling_update_of_a_running_proxy_announces_the_version_of_its_endpoints(client_at, store):
    """While an endpoint is updated it is held; afterwards none is, and none has a version of its own."""
    async with fake_engine() as first, fake_engine() as second:
        endpoints = [{"url": engine.url, "name": name} for engine, name in ((first, "a"), (second, "b"))]
        async with proxying(None, store, engines={"endpoints": endpoints}) as served:
            client, seen = client_at(served.url), []

            async def state():
                (policy,) = (await client.policies())["policies"]
                return policy["version"], policy.get("held"), policy.get("versions")

            await client.put_policy(1)
            await client.pause(in_flight="resume", endpoints=["b"])  # as a trainer that died left it
            await client.update_policy(2, lambda endpoint: seen.append(endpoint["url"]), rolling=True)
            after = await state()
            await client.pause(in_flight="resume", endpoints=["a"])
            await client.resume(endpoints=["a"], version=3)
            ahead = await state()
            await client.close()

    assert ([first.url, second.url], ("2", None, None), ("2", [], {"a": "3"})) == (seen, after, ahead)


async def test_after_an_exception_of_the_callback_calls_resume_with_the_old_version(client_at, served):
    """The exception is raised."""

    def update():
        raise RuntimeError("no weights")

    client = client_at(served.url)
    await client.put_policy(1)
    with pytest.raises(RuntimeError, match="no weights"):
        await client.update_policy(2, update)

    assert ((await client.policy())["version"], (await client.resume())["mode"]) == ("1", None)
    await client.close()


async def test_if_resuming_fails_after_an_exception_there_is_a_note_on_how_to_resume(client_at, engine, requests):
    engine.failing = {"/policy/resume"}

    def update():
        raise RuntimeError("no weights")

    client = client_at(engine.url)
    with pytest.raises(RuntimeError, match="no weights") as caught:
        await client.update_policy(2, update)
    await client.close()

    assert caught.value.__notes__ == ["Calls are still paused; POST /policy/resume ends the pause."]


async def test_calls_stay_paused_if_the_version_cannot_be_announced(client_at, engine, requests):
    """The engines have weights of an unknown version."""
    engine.failing = {"PUT /policy"}
    client = client_at(engine.url)
    with pytest.raises(ClientError) as caught:
        await client.update_policy(2, lambda: None)
    await client.close()

    assert [method for method, *_ in requests] == ["GET", "POST", "PUT"]
    assert "calls stay paused until" in caught.value.__notes__[0]


async def test_a_lower_version_is_refused_before_calls_are_paused_unless_the_run_is_another_one(client_at, served):
    """The same version again, and one that is not a number, are no lower ones."""
    client, updates = client_at(served.url), []

    async def update(version, **options):
        announced = await client.update_policy(version, lambda: updates.append(version), **options)
        return announced["version"], announced["epoch"], announced["run"]

    first = [await update(105, run="a"), await update(105, run="a")]
    for options in ({}, {"run": "a"}):
        with pytest.raises(ClientError, match="104 is lower than 105") as caught:
            await update(104, **options)
    paused = (await client.policies())["policies"][0]["mode"]
    other = await update(104, run="b")
    named = [await update("eval"), await update("105")]
    await client.close()

    assert first == [("105", 0, "a")] * 2
    assert (caught.value.code, updates, paused) == ("lower_version", [105, 105, 104, "eval", "105"], None)
    assert [other, *named] == [("104", 1, "b"), ("eval", 1, "b"), ("105", 1, "b")]


async def test_a_lower_version_is_refused_before_the_update_after_one_that_is_not_a_number(client_at, served):
    """Else the weights would be loaded, their version refused, and calls would stay paused."""
    client, updates = client_at(served.url), []
    for version in (105, "eval"):
        await client.put_policy(version)
    with pytest.raises(ClientError, match="104 is lower than 105") as caught:
        await client.update_policy(104, lambda: updates.append(104))
    announced, paused = await client.policy(), (await client.policies())["policies"][0]["mode"]
    await client.close()

    assert (caught.value.code, updates, paused) == ("lower_version", [], None)
    assert announced == {"version": "eval", "epoch": 0, "run": None, "highest": 105}


async def test_a_new_epoch_of_an_announcement_takes_any_version(client_at, served):
    client = client_at(served.url)
    await client.put_policy(105)
    with pytest.raises(ClientError) as caught:
        await client.put_policy(104)
    announced = await client.put_policy(104, new_epoch=True)
    await client.close()

    assert (caught.value.code, caught.value.status) == ("lower_version", 409)
    assert announced == {"version": "104", "epoch": 1, "run": None}


async def test_a_version_that_is_not_a_number_is_logged_by_the_client(client_at, served, caplog):
    client = client_at(served.url)
    await client.update_policy("main", lambda: None)
    await client.close()

    assert [
        record.name for record in caplog.records if "is not a number" in record.message and "tape.cl" in record.name
    ] == ["tokentape.client"]


@pytest.mark.parametrize("version", [None, "", "x" * 257, 1.5, True])
async def test_an_invalid_version_is_rejected_before_calls_are_paused(client_at, engine, requests, version):
    client = client_at(engine.url)
    with pytest.raises(ClientError) as caught:
        await client.update_policy(version, lambda: None)
    await client.close()

    assert (caught.value.param, requests) == ("version", [])


async def test_an_unknown_choice_for_calls_in_flight_is_rejected_before_calls_are_paused(client_at, engine, requests):
    client = client_at(engine.url)
    with pytest.raises(ClientError) as caught:
        await client.update_policy(1, lambda: None, in_flight="kill")
    await client.close()

    assert (caught.value.param, requests) == ("in_flight", [])


async def test_the_asynchronous_client_awaits_the_callback(served):
    done = asyncio.Event()

    async def update():
        done.set()

    async with AsyncClient(served.url) as client:
        result = await client.update_policy(7, update)

    assert done.is_set()
    assert result == {"version": "7", "epoch": 0, "run": None, "in_flight": 0}


async def test_the_blocking_client_rejects_an_asynchronous_callback(served):
    """Calls resume with the old version."""

    async def update():
        raise AssertionError

    with Client(served.url) as client:
        with pytest.raises(TypeError, match="use AsyncClient"):
            await asyncio.to_thread(client.update_policy, 7, update)

        assert (await asyncio.to_thread(client.policy))["version"] is None


async def test_a_call_that_does_not_end_prevents_an_update_that_drains(served, engine, http):
    """Nothing is updated, and new calls are accepted afterwards."""
    engine.streams([STREAM.response[:2000]], then="hang")
    updates = []
    async with AsyncClient(served.url) as client, http.post(served.url + CHAT, json=BODY | {"stream": True}) as call:
        await call.content.readany()
        with pytest.raises(ClientError) as caught:
            await client.update_policy(2, lambda: updates.append(1), drain_s=0.1, in_flight="drain")
        engine.plays(WHOLE)
        async with http.post(served.url + CHAT, json=BODY) as other:
            assert other.status == 200

        assert (caught.value.code, updates, (await client.policy())["version"]) == ("not_drained", [], None)
        assert caught.value.message.startswith("1 calls are in flight after 0.1 s")


async def test_an_update_that_aborts_records_partial_steps_of_the_old_version(served, store, engine, http):
    """Calls afterwards have the new version."""
    engine.streams([STREAM.response[:2000]], then="hang")
    async with AsyncClient(served.url) as client:
        await client.put_policy(1)
        async with http.post(served.url + CHAT, json=BODY | {"stream": True}) as call:
            await call.content.readany()
            await client.update_policy(2, engine.aborted.wait, drain_s=0.1, in_flight="abort")
        engine.plays(WHOLE)
        async with http.post(served.url + CHAT, json=BODY) as other:
            await other.read()
    first, second = await wait_for_steps(store, "r1", 2)

    assert (first.status, first.policy_version, first.policy_version_end) == ("partial", "1", None)
    assert "because the weights changed" in first.reason
    assert (second.status, second.policy_version, second.policy_version_end) == ("complete", "2", None)


async def test_calls_that_continue_have_both_versions(served, store, engine, http):
    """No other call has to begin for that."""
    release = asyncio.Event()
    engine.streams([STREAM.response], then="end", after=release)
    async with AsyncClient(served.url) as client:
        await client.put_policy(1)
        async with http.post(served.url + CHAT, json=BODY | {"stream": True}) as call:
            await call.content.readany()
            result = await client.update_policy(2, lambda: None, in_flight="continue")
            release.set()
            await call.read()
    (step,) = await wait_for_steps(store, "r1")

    assert result["in_flight"] == 1
    assert (step.status, step.policy_version, step.policy_version_end) == ("complete", "1", "2")
