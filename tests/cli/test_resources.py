"""The commands of `tokentape rollout`, `group`, `policy`, `engines` and `open`."""

import asyncio

import orjson
import pytest
from tests.support.fakes import proxying

from proxy.cli.control import Control
from proxy.cli.runner import Exit
from proxy.rollouts.policy import unknown_staleness

POLICIES = {"student": {"models": ["simulated"]}, "judge": {"models": ["j-*"], "train": False}}


async def test_rollouts_are_rewarded_finished_and_deleted(invoke, recorded, call_proxy):
    """A negative reward is a number and not an option. Each can be repeated; other values are an error."""
    step = (await call_proxy("GET", "/rollouts/choices/steps"))["steps"][0]["step_id"]
    assert await invoke("rollout", "reward", "choices", "-1.5") == (0, "", "rollout 'choices': open, reward -1.5\n")
    code, out, _ = await invoke("rollout", "reward", "choices", "--step", f"{step}=2e-1", "--json")
    assert (code, *map(orjson.loads(out).get, ("step_rewards", "reward"))) == (0, {step: 0.2}, -1.5)
    for _ in range(2):
        code, out, _ = await invoke("rollout", "finish", "choices", "--metadata", '{"task": 1}', "--json")
        assert (code, *map(orjson.loads(out).get, ("status", "metadata"))) == (0, "completed", {"task": 1})
    finished = await invoke("rollout", "finish", "choices", "--metadata", '{"task": 1}')
    assert finished == (0, "", "rollout 'choices': completed, reward -1.5, 1 step with a reward\n")
    rewarded = await invoke("rollout", "reward", "choices", "-1.5")
    assert rewarded == (0, "", "rollout 'choices': completed, reward -1.5, 1 step with a reward\n")
    code, _, errors = await invoke("rollout", "finish", "choices", "--status", "failed")
    assert (code, "409" in errors) == (Exit.FAILED, True)
    assert await invoke("rollout", "delete", "choices") == (0, "", "rollout 'choices': deleted\n")
    missing = "rollout 'choices': does not exist; nothing was deleted\n"
    assert await invoke("rollout", "delete", "choices") == (0, "", missing)


async def test_ids_of_any_kind_are_encoded(invoke, call_proxy):
    """As JSON the result is the control API's response."""
    name = "a/b c#?\u00e4"
    await call_proxy("POST", "/rollouts", {"rollout_id": name})
    _, out, _ = await invoke("rollout", "finish", name, "--json")
    assert tuple(map(orjson.loads(out).get, ("status", "rollout_id"))) == ("completed", name)
    for exists in (True, False):
        _, out, _ = await invoke("rollout", "delete", name, "--json")
        assert orjson.loads(out) == {"rollout_id": name, "deleted": exists}


async def test_branches_of_a_rollout_are_opened(invoke, recorded, call_proxy):
    """With --json the response of the proxy; a step that does not exist is an error."""
    step = (await call_proxy("GET", "/rollouts/choices/steps"))["steps"][0]["step_id"]
    code, out, errors = await invoke(
        "rollout", "branch", "choices", "--before", step, "--count", "2", "--group", "tries"
    )
    branches = (await call_proxy("GET", "/rollouts/choices/branches"))["branches"]
    members = [rollout["rollout_id"] for rollout in (await call_proxy("GET", "/groups/tries"))["rollouts"]]
    _, shown, _ = await invoke("rollout", "branch", "choices", "--preset", "codex", "--json")
    refused, _, reason = await invoke("rollout", "branch", "choices", "--before", "gone")

    assert (code, out) == (0, ""), errors
    assert f"group 'tries': {', '.join(map(repr, members))}\n" == errors
    assert [(name, step) for name in sorted(members)] == sorted((it["rollout_id"], it["before"]) for it in branches)
    assert orjson.loads(shown)["size"] == 1
    assert (refused, "'gone' of rollout 'choices' not found" in reason) == (Exit.FAILED, True)


async def test_a_rollout_that_cannot_be_read_is_deleted(invoke, address, store):
    await store.open("damaged", {"metadata": b"{{{"}, now_ms=1)

    assert await invoke("rollout", "delete", "damaged") == (0, "", "rollout 'damaged': deleted\n")
    assert await store.get("damaged") is None


async def test_the_replacement_of_a_failed_member_is_named(invoke, call_proxy):
    opened = await call_proxy("POST", "/groups", {"group_id": "g", "size": 1, "replace": 1})
    _, _, errors = await invoke("rollout", "finish", opened["rollouts"][0]["rollout_id"], "--status", "failed")

    assert "; replaced by " in errors


async def test_a_group_is_requeued_and_an_open_one_is_refused(invoke, call_proxy):
    opened = await call_proxy("POST", "/groups", {"group_id": "g/1", "size": 1})
    code, _, errors = await invoke("group", "requeue", "g/1")
    assert (code, "is open" in errors) == (Exit.FAILED, True)
    body = {"status": "completed", "reward": 1.0}
    await call_proxy("POST", f"/rollouts/{opened['rollouts'][0]['rollout_id']}/finish", body)
    batch = await call_proxy("POST", "/batches/claim", {"consumer": "c", "min_group": 2})
    assert [(group["group_id"], group["code"]) for group in batch["dropped"]] == [("g/1", "too_few_members")]
    for _ in range(2):
        assert await invoke("group", "requeue", "g/1", "--max-staleness", "3") == (0, "", "group 'g/1': complete\n")
    _, out, _ = await invoke("group", "requeue", "g/1", "--policy", "default", "--json")

    assert orjson.loads(out)["requeued"] == 1


async def test_groups_are_listed_and_shown(invoke, recorded, call_proxy):
    await call_proxy("POST", "/groups", {"group_id": "h", "size": 2})
    code, out, _ = await invoke("group", "list")
    assert (code, [line.split()[0] for line in out.splitlines()[1:]]) == (0, ["h", "g"])
    code, out, _ = await invoke("group", "show", "g")
    assert (code, [line.split()[0] for line in out.splitlines() if line][1::2]) == (0, ["g", "choices"])
    code, out, _ = await invoke("group", "show", "h", "--json")
    assert (code, len(orjson.loads(out)["rollouts"])) == (0, 2)
    assert (await invoke("group", "show", "none"))[0] == Exit.FAILED


async def test_a_policy_is_announced_paused_and_resumed(address, invoke, call_proxy, http):
    """A version that is no number has a warning."""
    _, _, errors = await invoke("policy", "pause", "--mode", "reject", "--drain-s", "5")
    assert errors == "policy 'default': new calls are rejected, no calls in flight\n"
    async with http.post(f"{address.url}/v1/completions", json={"prompt": "once"}) as refused:
        assert refused.status == 429
    lines = [(await invoke("policy", *words))[2] for words in (("set", "7"), ("set", "-7", "--run", "a"), ("resume",))]
    async with http.post(f"{address.url}/v1/completions", json={"prompt": "once"}) as answered:
        assert answered.status == 200

    assert (await call_proxy("GET", "/policies"))["policies"][0]["version"] == "-7"
    assert [
        "policy 'default': version 7\n",
        f"{unknown_staleness('-7')}\npolicy 'default': version -7, epoch 1\n",
        "policy 'default': calls are sent\n",
    ] == lines
    code, _, errors = await invoke("policy", "set", "1", "--policy", "no/such")
    assert (code, "404" in errors) == (Exit.FAILED, True)


async def test_a_pause_with_a_call_in_flight_is_not_drained(address, invoke, http):
    slow = {"prompt": "once", "max_tokens": 20_000, "ignore_eos": True}
    call = asyncio.create_task(http.post(f"{address.url}/rollouts/r/v1/completions", json=slow))
    while b"tokentape_in_flight_calls 1.0" not in await (await http.get(f"{address.url}/metrics")).read():
        assert not call.done()
    assert await invoke("policy", "pause") == (0, "", "policy 'default': new calls wait, 1 calls in flight\n")
    call.cancel()
    await asyncio.wait([call])
    assert (await invoke("policy", "pause", "--drain-s", "30")) == (
        0,
        "",
        "policy 'default': new calls wait, no calls in flight\n",
    )


async def test_policies_are_listed_announced_paused_and_resumed(store, address, invoke):
    """Each by its name."""
    async with proxying(address.url, store, policies=POLICIES) as served:
        for more in (("-3",), ("5", "--run", "a"), ("-3", "--new-epoch")):
            assert (await invoke("policy", "set", *more, "--policy", "student", url=served.url))[0] == 0
        code, _, errors = await invoke("policy", "pause", "--policy", "judge", "--drain-s", "30", url=served.url)
        assert (code, errors) == (0, "policy 'judge': new calls wait, no calls in flight\n")
        _, out, _ = await invoke("policy", "list", "--json", url=served.url)
        found = {policy["name"]: (policy["version"], policy["mode"]) for policy in orjson.loads(out)["policies"]}
        assert {"student": ("-3", None), "judge": (None, "wait")}.items() <= found.items()
        code, out, _ = await invoke("policy", "list", url=served.url)
        assert ["student", "-3", "2"] in [line.split()[:3] for line in out.splitlines()]
        assert ["judge", "wait", "no", "j-*"] in [line.split() for line in out.splitlines()]
        assert (await invoke("policy", "resume", "--policy", "judge", url=served.url))[::2] == (
            0,
            "policy 'judge': calls are sent\n",
        )
        assert (await invoke("policy", "set", "1", "--policy", "none", url=served.url))[0] == Exit.FAILED


async def test_an_endpoint_is_held_and_released_with_a_version(invoke, store, address, http):
    """--interrupt and --endpoint exclude --abort."""
    endpoints = [{"url": address.url, "name": "main"}, {"url": "http://127.0.0.1:9", "name": "spare"}]
    async with proxying(None, store, engines={"endpoints": endpoints}) as served:
        words = (
            ("pause", "--endpoint", "main"),
            ("pause", "--interrupt"),
            ("resume", "--endpoint", "main", "--version", "3"),
        )
        lines = [(await invoke("policy", *of, url=served.url))[2] for of in words]
        async with http.get(f"{served.url}/policies") as response:
            (policy,) = (await response.json())["policies"]

    assert lines == [
        "policy 'default': calls are sent, main held, no calls in flight\n",
        "policy 'default': new calls wait, no calls in flight\n",
        "policy 'default': new calls wait\n",
    ]
    assert (policy["held"], policy["versions"]) == ([], {"main": "3"})
    assert (await invoke("policy", "pause", "--abort", "--interrupt"))[0] == 2


@pytest.mark.parametrize(
    ("options", "code"), [((), 0), (("--drain-s", "1"), 3), (("--abort",), 3), (("--interrupt",), 3)]
)
async def test_a_pause_with_calls_in_flight_is_3_if_they_should_have_ended(invoke, monkeypatch, options, code):
    async def undrained(*_, **__):
        return {"drained": False, "mode": "wait", "in_flight": 1}

    monkeypatch.setattr(Control, "pause", undrained)

    assert code == (await invoke("policy", "pause", *options))[0]


async def test_engines_are_listed_with_their_states(invoke, store, address):
    """An engine that does not respond has its last failure."""
    endpoints = [{"url": address.url, "name": "up"}, {"url": "http://127.0.0.1:9", "name": "down"}]
    async with proxying(None, store, engines={"endpoints": endpoints}) as served:
        code, out, _ = await invoke("engines", url=served.url)
        _, as_json, _ = await invoke("engines", "--json", url=served.url)
    up, down = out.splitlines()[1:]

    assert (code, up.split()[:2], down.split()[0]) == (0, ["up", "healthy"], "down")
    assert down.split()[1] in {"UNREACHABLE", "ejected"}
    assert "cannot connect to 127.0.0.1:9: Connection refused" in down
    assert [engine["healthy"] for engine in orjson.loads(as_json)["engines"]] == [True, False]


async def test_a_rollout_is_opened_with_the_fields_of_its_request(invoke, call_proxy):
    """The output is the environment of its agent. A value that is JSON is sent as JSON."""
    words = (
        "rollout",
        "open",
        "r1",
        "--group",
        "g",
        "--metadata",
        '{"task": 1}',
        "--set",
        "idle_s=60",
        "--set",
        "model=m",
    )
    code, out, note = await invoke(*words)
    again = await invoke(*words)
    opened = await call_proxy("GET", "/rollouts/r1")
    named = dict(pair.split("=", 1) for pair in out.split())

    assert (0, "rollout 'r1': open\n", (0, out, note)) == (code, note, again)
    assert named["OPENAI_BASE_URL"].endswith("/rollouts/r1/v1")
    assert (
        opened["group_id"], opened["metadata"], opened["idle_s"], opened["model"]
    ) == ("g", {"task": 1}, 60, "m")  # fmt: skip
    assert (await invoke("rollout", "open", "--set", "idle_s"))[0] == 2
    assert (await invoke("rollout", "open", "--metadata", "[1]"))[0] == 2


async def test_a_group_is_opened_claimed_acknowledged_and_deleted(invoke, call_proxy):
    """A claim without a complete group names no batch."""
    code, out, note = await invoke("group", "open", "2", "--group", "g", "--set", "over_sample=0")
    assert (code, len(out.splitlines()), note.startswith("group 'g': ")) == (0, 2, True)
    assert await invoke("batch", "claim", "--consumer", "c") == (0, "", "no group is complete\n")
    for member in (await call_proxy("GET", "/groups/g"))["rollouts"]:
        call = {"prompt": "once", "max_tokens": 2}
        await call_proxy("POST", f"/rollouts/{member['rollout_id']}/v1/completions", call)
        assert (await invoke("rollout", "finish", member["rollout_id"], "--reward", "1"))[0] == 0
    code, out, note = await invoke("batch", "claim", "--consumer", "c", "--format", "trl", "--lease-s", "20")
    batch = (await call_proxy("GET", "/groups/g"))["batch_id"]
    assert (0, "g  2 rows\n", f"batch {batch!r}, for 20 s\n") == (code, out, note)
    assert await invoke("batch", "extend", batch, "--lease-s", "30") == (0, "", f"batch {batch!r}: extended by 30 s\n")
    assert await invoke("batch", "release", batch) == (0, "", f"batch {batch!r}: released\n")
    _, out, _ = await invoke("batch", "claim", "--consumer", "c", "--json")
    batch = orjson.loads(out)["batch_id"]
    assert await invoke("batch", "ack", batch) == (0, "", f"batch {batch!r}: acknowledged\n")
    code, out, note = await invoke("training")
    assert (code, out.splitlines()[1].split()[:4]) == (0, ["g", "done", "2/2", "1"])
    assert "1 done" in note
    assert await invoke("group", "delete", "g") == (0, "", "group 'g': deleted\n")
    assert await invoke("group", "delete", "g") == (0, "", "group 'g': does not exist; nothing was deleted\n")
    assert (await invoke("batch", "ack", "none"))[0] == Exit.FAILED


async def test_a_search_shows_where_the_text_is(invoke, recorded):
    """Control characters are escaped."""
    code, out, note = await invoke("search", "Be terse")
    found = out.splitlines()

    assert (code, {line.split()[0] for line in found}) == (0, {"demo"})
    assert "searched" in note
    assert "\x1b" not in out


async def test_any_request_can_be_sent(invoke, recorded):
    """Fields are the query of a GET and the body of other requests; the response is JSON."""
    code, out, _ = await invoke("request", "get", "/rollouts", "--set", "limit=1", "--set", "status=completed")
    assert (code, [rollout["rollout_id"] for rollout in orjson.loads(out)["rollouts"]]) == (0, ["demo"])
    code, out, _ = await invoke("request", "PATCH", "/rollouts/demo", "--set", "reward=-2.5")
    assert (code, orjson.loads(out)["reward"]) == (0, -2.5)
    code, out, _ = await invoke("request", "GET", "/rollouts?limit=2", "--set", "status=completed")
    assert (code, [rollout["rollout_id"] for rollout in orjson.loads(out)["rollouts"]]) == (0, ["demo"])
    for name in ("body", "method", "path", "self", "wait_s"):
        code, _, errors = await invoke("request", "GET", "/rollouts", "--set", f"{name}=1")
        assert (code, f"Unknown query parameter '{name}'" in errors) == (Exit.FAILED, True), errors
    assert (await invoke("request", "GET", "rollouts"))[0] == 2
    code, _, errors = await invoke("request", "GET", "/noä/such")
    assert (code, "404" in errors) == (Exit.FAILED, True)


async def test_rewards_of_threads_are_set_by_name(invoke, recorded):
    code, out, _ = await invoke("rollout", "reward", "choices", "--thread", "main=0.25", "--json")
    repeated, _, text = await invoke("rollout", "reward", "choices", "--thread", "main=0.25")
    invalid, _, error = await invoke("rollout", "reward", "choices", "--thread", "main")
    unknown, _, refused = await invoke("rollout", "reward", "choices", "--thread", "other=1")

    assert (code, orjson.loads(out)["thread_rewards"]) == (0, {"main": 0.25})
    assert repeated == 0
    assert "1 thread with a reward" in text
    assert (invalid, "use THREAD=NUMBER" in error) == (2, True)
    assert unknown != 0
    assert "the threads are main" in refused


async def test_other_fields_are_the_requests_own(invoke):
    """They come last: one that has an argument or an option too replaces it. The proxy refuses what it does not know."""
    code, _, errors = await invoke("group", "open", "2", "--set", "limits={}")
    assert (code, "422" in errors and "limits" in errors) == (Exit.FAILED, True), errors
    for words, field, line in (
        (("group", "open", "2", "--group", "g"), "size=1", "group 'g': '"),
        (("rollout", "open", "r1"), "rollout_id=r2", "rollout 'r2': open"),
        (("batch", "claim", "--consumer", "a"), "consumer=b", "no group is complete"),
    ):
        code, _, errors = await invoke(*words, "--set", field)
        assert (code, errors.startswith(line)) == (0, True), errors
