"""Epochs of a policy: versions of a run that continues from an earlier version are not compared with those before."""

import asyncio

import pytest
from tests.support.fakes import settings_for
from tests.support.session import Session, names_in
from tests.support.stored import stored_steps

from proxy.rollouts.policy import POLICY_ANNOUNCEMENT
from proxy.server.listener import running, simulating
from proxy.simulator.options import Options


async def announce(proxy, version, *, policy="default", **more):
    """Announce a version; return the response."""
    return await proxy.put(f"/policies/{policy}", {"version": version, **more})


def outcome(claimed):
    """Return the groups of a claim by what became of them."""
    listed = {name: [(entry["group_id"], entry["code"]) for entry in claimed[name]] for name in ("dropped", "refused")}
    return {"claimed": names_in(claimed), **listed}


async def lost_run(proxy):
    """Record groups of two updates that are lost, and continue the run from the checkpoint before them."""
    await announce(proxy, 104)
    await proxy.group("lost-104", 1)
    await announce(proxy, 105)
    await proxy.group("lost-105", 1)
    await announce(proxy, 103, new_epoch=True)
    await proxy.group("new", 1)


@pytest.mark.parametrize("staleness", [{}, {"max_staleness": 0}, {"max_staleness": 9}])
async def test_groups_of_an_earlier_epoch_are_dropped_with_their_own_reason(proxy, staleness):
    """Also without `max_staleness`. Their versions are higher than the announced one, but their weights are lost."""
    await lost_run(proxy)
    claimed = await proxy.claim(groups=10, **staleness)
    (group,) = claimed["groups"]
    lost = (await proxy.get("/groups/lost-105")).json

    assert outcome(claimed)["dropped"] == [("lost-104", "earlier_epoch"), ("lost-105", "earlier_epoch")]
    assert (claimed["policy_version"], claimed["policy_epoch"]) == ("103", 1)
    assert tuple(group[name] for name in ("group_id", "policy_version", "policy_epoch", "staleness")) == (
        "new",
        "103",
        1,
        0,
    )
    assert (lost["status"], lost["code"]) == ("dropped", "earlier_epoch")
    assert lost["why"] == "its oldest token is of epoch 0 of the policy, and epoch 1 has begun"


async def test_groups_of_an_earlier_epoch_are_refused_with_stale_keep_or_taken_on_request(proxy):
    """Both `max_staleness` and `earlier_epochs: take` are 422: their versions cannot be compared with the announced one."""
    await lost_run(proxy)
    kept = await proxy.claim(groups=10, stale="keep")
    await proxy.release(kept)
    both = await proxy.post("/batches/claim", {"consumer": "t", "earlier_epochs": "take", "max_staleness": 4})
    taken = await proxy.claim(groups=10, earlier_epochs="take", order="newest")

    assert outcome(kept)["refused"] == [("lost-104", "earlier_epoch"), ("lost-105", "earlier_epoch")]
    assert (both.status, "max_staleness" in both.json["error"]["message"]) == (422, True)
    assert outcome(taken)["claimed"] == ["new", "lost-105", "lost-104"]
    assert [(group["policy_version"], group["policy_epoch"], group["staleness"]) for group in taken["groups"]] == [
        ("103", 1, 0),
        ("105", 0, None),
        ("104", 0, None),
    ]


async def test_a_setting_takes_groups_of_earlier_epochs_in_claims_that_do_not_choose(store, http):
    """A claim with `max_staleness` drops them nevertheless."""
    async with (
        simulating("127.0.0.1:0", Options()) as engine,
        running(settings_for(engine, groups={"earlier_epochs": "take"}), store) as served,
    ):
        proxy = Session(http, served.url)
        await lost_run(proxy)
        bounded = await proxy.claim(groups=10, stale="keep", max_staleness=9)
        await proxy.release(bounded)
        chosen = await proxy.claim(groups=10, stale="keep", earlier_epochs="drop")
        await proxy.release(chosen)
        taken = await proxy.claim(groups=10)

    lost = [("lost-104", "earlier_epoch"), ("lost-105", "earlier_epoch")]
    assert [outcome(claimed)["refused"] for claimed in (bounded, chosen)] == [lost, lost]
    assert set(outcome(taken)["claimed"]) == {"new", "lost-105", "lost-104"}


async def test_a_group_with_tokens_of_two_epochs_is_of_the_earlier_one(proxy):
    await announce(proxy, 7)
    (member,) = await proxy.group("both", None, finish=False)
    await announce(proxy, 5, new_epoch=True)
    await proxy.chat(member)
    await proxy.finish(member, reward=1)

    assert outcome(await proxy.claim())["dropped"] == [("both", "earlier_epoch")]


async def test_a_lower_version_without_a_new_epoch_is_409_and_changes_nothing(proxy):
    """A late retry must not drop the queue. The same version again is 200, also after one that is not a number."""
    for version in (104, 105):
        await announce(proxy, version)
    await proxy.group("g", 1)
    late = await announce(proxy, 104)
    again = await announce(proxy, "105")
    await announce(proxy, "eval")
    later = await announce(proxy, 104)

    assert (late.status, *(late.json["error"][name] for name in ("code", "param"))) == (409, "lower_version", "version")
    assert "104 is lower than 105" in late.json["error"]["message"]
    assert (again.status, again.json["version"], again.json["epoch"], later.status) == (200, "105", 0, 409)
    assert (await proxy.get("/policy")).json["version"] == "eval"
    assert outcome(await proxy.claim())["claimed"] == ["g"]


async def test_a_new_epoch_begins_with_the_id_of_another_run(proxy):
    """The first ID begins none if no version was announced before; an announcement without an ID keeps the run."""
    epochs = []
    for version, run in ((0, "a"), (5, "a"), (6, None), (5, "b"), (5, "b"), (6, "b"), (2, "a")):
        announced = (await announce(proxy, version, **({} if run is None else {"run": run}))).json
        epochs.append((announced["epoch"], announced["run"]))

    assert epochs == [(0, "a"), (0, "a"), (0, "a"), (1, "b"), (1, "b"), (1, "b"), (2, "a")]
    assert (await announce(proxy, 1, run="a")).status == 409
    assert (await proxy.get("/policy")).json == {"version": "2", "epoch": 2, "run": "a"}


async def test_the_first_id_of_a_run_begins_an_epoch_if_versions_were_announced_without_one(proxy):
    await announce(proxy, 7)

    assert (await announce(proxy, 3, run="a")).json["epoch"] == 1
    assert (await announce(proxy, 3, run="a", new_epoch=True)).json["epoch"] == 2


async def test_concurrent_announcements_of_a_run_at_two_processes_begin_one_epoch(proxy, store):
    """And the highest version is announced in the end."""
    await announce(proxy, 50)
    async with running(settings_for(None), store) as other:

        async def send(version):
            url = (proxy.url, other.url)[version % 2]
            async with proxy.http.put(f"{url}/policy", json={"version": version, "run": "b"}) as response:
                return response.status

        statuses = await asyncio.gather(*map(send, range(10, 22)))

        assert {200, 409} >= set(statuses)
        assert (await proxy.get("/policy")).json == {"version": "21", "epoch": 1, "run": "b"}


async def test_an_epoch_applies_to_every_process_once_the_response_is_sent(proxy, store):
    async with running(settings_for(None), store) as other:
        async with proxy.http.put(f"{other.url}/policy", json={"version": 3, "new_epoch": True}) as response:
            assert response.status == 200
        await proxy.chat("r1")

    assert [(span.epoch, span.policy_version) for span in (await stored_steps(store, "r1"))[0].choices[0].spans] == [
        (1, "3")
    ]


async def test_the_first_epoch_is_not_written_and_the_version_is_announced_as_before(proxy, store):
    """So that stores without epochs stay as they are, and older processes read them."""
    await announce(proxy, 3)
    await proxy.group("g", 1)
    announced = (await store.announcements.read())[POLICY_ANNOUNCEMENT]
    group = await store.groups.get("g")
    (waiting,) = (await store.queue.read(limit=1)).groups

    assert announced.value == b'"3"'
    assert "epoch" not in group.fields
    assert waiting.note == b'{"oldest":"3","rewarded":true}'
    listed = (await proxy.get("/groups?limit=1")).json["groups"][0]
    assert "policy_epoch" not in listed


async def test_steps_rows_and_groups_have_the_epoch(proxy):
    """In spans, the tree and every container of rows; the first one is not shown."""
    await announce(proxy, 9)
    await proxy.group("old", 1)
    await announce(proxy, 3, new_epoch=True)
    (member,) = await proxy.group("new", 1)
    (old,) = (await proxy.get("/groups/old")).json["rollouts"]
    found = {}
    for name in (old["rollout_id"], member):
        (step,) = await proxy.steps(name)
        (node,) = (await proxy.get(f"/rollouts/{name}/tree")).json["nodes"]
        rows = (await proxy.get(f"/rollouts/{name}/export?format=sequences")).text
        (flat,) = (await proxy.get(f"/rollouts/{name}/export?format=steps")).text.splitlines()
        found[name] = (
            step.get("policy_epoch"),
            step["choices"][0]["spans"][0].get("epoch"),
            node.get("policy_epoch"),
            b'"epoch":1' in rows,
            b'"policy_epoch":1' in flat,
        )

    assert found[old["rollout_id"]] == (None, None, None, False, False)
    assert found[member] == (1, 1, 1, True, True)
    assert (await proxy.get("/groups/new")).json["policy_epoch"] == 1


async def test_the_training_page_has_epochs_and_the_staleness_within_the_epoch(proxy):
    await lost_run(proxy)
    await announce(proxy, 105)
    found = (await proxy.get("/training")).json

    assert (found["version"], found["epoch"]) == ("105", 1)
    assert [
        tuple(group[name] for name in ("group_id", "version", "epoch", "staleness")) for group in found["groups"]
    ] == [("new", "103", 1, 2), ("lost-105", "105", 0, None), ("lost-104", "104", 0, None)]


async def metric(proxy, name):
    """Return the value of a metric of the default policy."""
    lines = (await proxy.get("/metrics")).text.decode().splitlines()
    (line,) = [line for line in lines if line.startswith(f'tokentape_{name}{{policy="default"')]
    return float(line.split()[-1])


async def test_metrics_have_the_epoch_and_the_staleness_of_its_groups_only(proxy):
    await lost_run(proxy)
    await announce(proxy, 105)
    await proxy.claim(groups=10, earlier_epochs="take")

    assert tuple(
        [await metric(proxy, name) for name in ("policy_epoch", "claim_staleness_count", "claim_staleness_sum")]
    ) == (1, 1, 2)


@pytest.mark.parametrize("version", ["main", "1.5", -3, "1" * 19])
async def test_a_version_that_is_not_a_number_warns_when_it_is_announced_and_recorded(proxy, caplog, version):
    """Once in the log for each, not at every step; a metric counts the steps."""
    announced = await announce(proxy, version)
    at_once = [record.message for record in caplog.records if "is not a number" in record.message]
    for number in range(3):
        await proxy.chat(f"r{number}")
    logged = [record.message for record in caplog.records if "is not a number" in record.message]

    assert (200, str(version)) == (announced.status, announced.json["version"])
    assert [announced.json["warning"]] == at_once
    assert "staleness of its groups is unknown" in announced.json["warning"]
    assert (len(logged), await metric(proxy, "unknown_version_steps_total")) == (2, 3)


async def test_a_number_and_no_version_warn_of_nothing(proxy, caplog):
    await proxy.chat("r0")
    announced = await announce(proxy, 3)
    await proxy.chat("r1")

    assert "warning" not in announced.json
    assert [record for record in caplog.records if "is not a number" in record.message] == []
    assert await metric(proxy, "unknown_version_steps_total") == 0


async def test_the_record_of_a_lost_announcement_is_refused_and_not_dropped(proxy, store):
    """A failover of the store can lose the newest epoch; the next announcement decides. Without `max_staleness` it is taken."""
    await announce(proxy, 3)
    await announce(proxy, 3, new_epoch=True)
    await proxy.group("g", 1)
    await store.announcements.announce(POLICY_ANNOUNCEMENT, b'"3"')
    refused = await proxy.claim(max_staleness=4)
    taken = await proxy.claim()

    assert outcome(refused)["refused"] == [("g", "later_epoch")]
    assert (outcome(taken)["claimed"], taken["groups"][0]["staleness"]) == (["g"], None)


class TestWithAnEngineThatReportsVersions:
    """Which is ahead of the announcement once it has new weights."""

    @pytest.fixture
    def engine_options(self):
        return Options(shape="sglang", weight_version="7")

    async def test_a_group_ahead_of_the_announced_version_is_fresh_within_the_epoch(self, proxy):
        await announce(proxy, 5)
        await proxy.group("g", 1)
        claimed = await proxy.claim(max_staleness=0)

        assert [
            (group["policy_version"], group["policy_epoch"], group["staleness"]) for group in claimed["groups"]
        ] == [("7", 0, -2)]

    async def test_its_versions_have_the_epoch_that_was_announced_when_the_call_was_sent(self, proxy):
        await announce(proxy, 7)
        await proxy.group("lost", 1)
        await announce(proxy, 5, run="b")
        await proxy.group("new", 1)

        assert outcome(await proxy.claim(groups=2, max_staleness=0)) == {
            "claimed": ["new"],
            "dropped": [("lost", "earlier_epoch")],
            "refused": [],
        }


class TestWithNamedPolicies:
    @pytest.fixture
    def sections(self):
        return {"policies": {"planner": {"models": ["planner"]}, "coder": {"models": ["coder"]}}}

    async def test_each_policy_has_its_own_epochs_and_runs(self, proxy):
        await announce(proxy, 7, policy="planner", run="a")
        await announce(proxy, 7, policy="coder", run="a")
        (member,) = [
            rollout["rollout_id"]
            for rollout in (await proxy.post("/groups", {"group_id": "g", "size": 1})).json["rollouts"]
        ]
        for model in ("planner", "coder"):
            await proxy.chat(member, model=model)
        await proxy.finish(member, reward=1)
        await announce(proxy, 5, policy="planner", run="b")
        claims = {policy: outcome(await proxy.claim(policy=policy)) for policy in ("planner", "coder")}
        listed = (await proxy.get("/policies")).json["policies"]

        assert [(policy["name"], policy["epoch"], policy["run"]) for policy in listed] == [
            ("planner", 1, "b"),
            ("coder", 0, "a"),
            ("default", 0, None),
        ]
        assert (claims["planner"]["dropped"], claims["coder"]["claimed"]) == ([("g", "earlier_epoch")], ["g"])
