"""Threads in exports, trees and rewards: which are exported, what their rows name, and which reward they have."""

import pytest
from tests.support.threaded import TASK, WORK, record_threads, user


async def rows(proxy, query, rollout="r"):
    response = await proxy.get(f"/rollouts/{rollout}/export?{query}")
    assert response.status == 200, response.text
    return response.json


def by_kind(tree):
    return {thread["kind"]: thread["name"] for thread in tree["threads"]}


async def test_the_tree_has_the_thread_of_each_step(proxy):
    """They are provisional until the rollout is finished."""
    open_tree = await record_threads(proxy, finish=False)
    await proxy.finish("r")
    tree = (await proxy.get("/rollouts/r/tree")).json
    names = by_kind(tree)

    assert (open_tree["threads_final"], tree["threads_final"]) == (False, True)
    assert open_tree["threads"] == tree["threads"]
    assert [thread["kind"] for thread in tree["threads"]] == ["main", "auxiliary", "sub-agent"]
    assert [names["auxiliary"], "main", "main", names["sub-agent"]] == [node["thread"] for node in tree["nodes"]]
    assert tree["threads"][2]["title"] == "Paint it."


async def test_an_export_has_the_threads_that_are_requested(proxy):
    """Others are in `skipped`, by name; rows name their threads."""
    names = by_kind(await record_threads(proxy))
    found = {wanted: await rows(proxy, f"threads={wanted}&report=true") for wanted in ("main", "agents", "all")}
    plain = await rows(proxy, "format=sequences")

    assert {wanted: len({row["thread"] for row in given["rows"]}) for wanted, given in found.items()} == {
        "main": 1,
        "agents": 2,
        "all": 3,
    }
    assert {row["thread"] for row in found["main"]["rows"]} == {"main"}
    skipped = found["agents"]["report"]["skipped"]
    assert [(names["auxiliary"], "threads=agents: its thread is auxiliary")] == [
        (each["thread"], each["why"]) for each in skipped
    ]
    assert {names["sub-agent"], names["auxiliary"]} == {each["thread"] for each in found["main"]["report"]["skipped"]}
    assert all("thread" not in row for row in plain["rows"])
    assert [{**row, "thread": None} for row in plain["rows"]] == [
        {**row, "thread": None} for row in found["all"]["rows"]
    ]


async def test_the_main_thread_of_a_forked_rollout_is_one_row_in_trls_format(proxy):
    await record_threads(proxy)
    refused = await proxy.get("/rollouts/r/export?format=trl")
    exported = await rows(proxy, "format=trl&threads=main")

    assert refused.status == 409
    assert "Use threads=main" in refused.json["error"]["message"]
    assert len(exported["rows"][0]["prompt_ids"]) == 1


async def test_branches_one_counts_the_rows_of_each_thread(proxy):
    await record_threads(proxy)
    one_each = await rows(proxy, "branches=one&threads=all")
    await proxy.chat("s", WORK, TASK)
    await proxy.chat("s", WORK, user("Build another one."))
    forked = await proxy.get("/rollouts/s/export?branches=one&threads=main")

    assert len(one_each["rows"]) == 3
    assert (409, "has 2 sequences" in forked.json["error"]["message"]) == (forked.status, True)


async def test_other_threads_are_refused_with_those_that_exist(proxy):
    await proxy.chat("r")
    refused = [await proxy.get(f"/rollouts/r/export?threads={threads}") for threads in ("some", "", "MAIN")]

    assert [response.status for response in refused] == [400] * 3
    assert all("all, agents, main" in response.json["error"]["message"] for response in refused)


async def test_columns_of_tables_include_the_thread_if_it_is_requested(proxy):
    pyarrow = pytest.importorskip("pyarrow")
    await record_threads(proxy)
    columns = []
    for query in ("", "&threads=all", "&threads=main&format=steps"):
        exported = await proxy.get(f"/rollouts/r/export?container=arrow{query}")
        columns.append("thread" in pyarrow.ipc.open_stream(exported.text).read_all().column_names)

    assert columns == [False, True, True]


async def test_an_agent_that_the_client_names_is_a_thread_and_the_engine_does_not_see_its_name(proxy):
    """The name is recorded with the step."""
    made = await proxy.post(
        "/rollouts/r/v1/chat/completions", {"model": "policy", "messages": [TASK]}, headers={"X-Agent-Name": "planner"}
    )
    step = (await proxy.get(f"/rollouts/r/steps/{made.headers['X-Step-Id']}")).json
    (thread,) = (await proxy.get("/rollouts/r/tree")).json["threads"]

    assert (step["extra"]["agent"], thread["name"], thread["kind"]) == ("planner", "planner", "main")


async def test_an_invalid_name_of_an_agent_is_an_error_of_the_dialect_and_nothing_is_recorded(proxy):
    body = {"model": "policy", "messages": [TASK], "max_tokens": 8}
    for route in ("chat/completions", "messages"):
        for name in ("", "-x", "a b", "Ã©", "a" * 65, "x:y"):
            refused = await proxy.post(f"/rollouts/r/v1/{route}", body, headers={"X-Agent-Name": name})
            assert refused.status == 400
            assert "X-Agent-Name" in refused.json["error"]["message"]

    assert (await proxy.get("/rollouts/r")).json["counts"]["steps"] == 0


async def test_rewards_of_threads_are_the_rewards_of_their_rows(proxy):
    """Other rows have the reward of the rollout; a repeated request changes nothing."""
    names = by_kind(await record_threads(proxy))
    given = {"thread_rewards": {names["sub-agent"]: 0.25}}
    set_twice = [(await proxy.patch("/rollouts/r", given)).json["thread_rewards"] for _ in range(2)]
    await proxy.patch("/rollouts/r", {"thread_rewards": {"main": 0.5}})
    found = await rows(proxy, "threads=all&report=true&row_weight=split")
    slime = await rows(proxy, "format=slime&threads=agents")
    rewards = {row["thread"]: row["reward"] for row in found["rows"]}
    tree = (await proxy.get("/rollouts/r/tree")).json

    assert [{names["sub-agent"]: 0.25}] * 2 == set_twice
    assert {"main": 0.5, names["sub-agent"]: 0.25, names["auxiliary"]: 1.0} == rewards
    assert rewards == {row["thread"]: row["reward"] for row in found["report"]["rows"]}
    assert {row["reward"] for row in slime["rows"]} == {0.5, 0.25}
    assert [thread.get("reward") for thread in tree["threads"]] == [0.5, None, 0.25]


async def test_other_rewards_of_threads_are_refused(proxy):
    """Values that are no numbers, and threads that the rollout does not have."""
    await proxy.chat("r")
    for given in ({"main": None}, {"main": "1"}, {"main": 1e300}, {"other": 1}, [1], {"main": [1]}):
        refused = await proxy.patch("/rollouts/r", {"thread_rewards": given})
        assert refused.status == 422
        assert "thread_rewards" in refused.json["error"]["message"]

    assert "thread_rewards" not in (await proxy.get("/rollouts/r")).json


class TestConfigured:
    @pytest.fixture
    def sections(self):
        return {"threads": {"presets": ["codex"], "rules": [{"kind": "sub-agent", "system": "You write*"}]}}

    async def test_presets_export_agents_by_default_and_rules_decide_kinds(self, proxy):
        await record_threads(proxy)
        found = await rows(proxy, "report=true")
        everything = await rows(proxy, "threads=all")
        tree = (await proxy.get("/rollouts/r/tree")).json

        assert [thread["kind"] for thread in tree["threads"]] == ["main", "sub-agent", "sub-agent"]
        assert len({row["thread"] for row in found["rows"]}) == len({row["thread"] for row in everything["rows"]}) == 3
        assert found["report"]["skipped"] == []
