"""Exports of rollouts with several policies."""

import io

import orjson
import pyarrow.ipc
import pyarrow.parquet
import pytest
from tests.support.fakes import settings_for
from tests.support.session import Session

from proxy.export import FORMATS
from proxy.server.listener import running, simulating
from proxy.simulator.options import Options

POLICIES = {
    "planner": {"models": ["planner"]},
    "solver": {"models": ["solver-*"]},
    "judge": {"models": ["judge"], "train": False},
}
JUDGED = "its policy judge is not trained"


@pytest.fixture
def sections():
    return {"policies": POLICIES}


async def record(proxy, rollout, *models):
    """Record a call of each of these models, with the same messages and seed; return the step IDs."""
    return [(await proxy.chat(rollout, model=model)).step_id for model in models]


async def rows(proxy, path, **query):
    """Return the rows and the skipped entries of an export."""
    query = "&".join(f"{name}={value}" for name, value in {"report": "true", **query}.items())
    answer = await proxy.get(f"{path}?{query}")
    assert answer.status == 200, answer.text
    return answer.json["rows"], answer.json["report"]["skipped"]


async def test_steps_of_policies_that_are_not_trained_are_skipped_with_the_reason(proxy):
    planned, judged, solved = await record(proxy, "r1", "planner", "judge", "solver-1")
    found, skipped = await rows(proxy, "/rollouts/r1/export")

    assert [(row["policy"], row["spans"][0]["step_id"]) for row in found] == [("planner", planned), ("solver", solved)]
    assert skipped == [{"step_id": judged, "why": JUDGED}]
    answer = await proxy.get("/rollouts/r1/export")
    assert answer.headers["X-Export-Skipped"] == f"1; {JUDGED} (1)"


async def test_policy_selects_the_steps_of_one_policy(proxy):
    """The policy may be untrained, or `default`, which rows do not name."""
    steps = await record(proxy, "r1", "planner", "judge", "other")
    for policy, step in zip(("planner", "judge", "default"), steps, strict=True):
        for form in ("sequences", "steps"):
            (row,), skipped = await rows(proxy, "/rollouts/r1/export", policy=policy, format=form)

            assert policy == row.get("policy", "default")
            assert {other for other in steps if other != step} == {entry["step_id"] for entry in skipped}
    assert {e["why"] for e in skipped} == {"its policy is planner, not default", "its policy is judge, not default"}


async def test_many_rollouts_and_groups_are_exported_by_policy(proxy):
    opened = await proxy.post("/groups", {"group_id": "g", "size": 1})
    first = opened.json["rollouts"][0]["rollout_id"]
    await record(proxy, first, "planner", "judge")
    await proxy.finish(first, reward=1.0)
    await record(proxy, "alone", "judge")
    found, skipped = await rows(proxy, "/export", policy="judge")
    assert {row["rollout_id"] for row in found} == {first, "alone"}
    found, skipped = await rows(proxy, "/export")
    assert [row["policy"] for row in found if "policy" in row] == ["planner"]
    assert {"why": "none of its steps has a row", "rollout_id": "alone"} in skipped
    answer = (await proxy.get("/groups/g/export?policy=judge&container=ndjson&report=true")).text.splitlines()

    assert [orjson.loads(row)["policy"] for row in answer[:-1]] == ["judge"]
    assert [entry["why"] for entry in orjson.loads(answer[-1])["report"]["skipped"]] == [
        "its policy is planner, not judge"
    ]


@pytest.mark.parametrize("path", ["/rollouts/r1/export", "/export", "/groups/g/export"])
async def test_an_unknown_policy_is_404(proxy, path):
    await proxy.group("g", 1.0)
    await record(proxy, "r1", "planner")
    answer = await proxy.get(f"{path}?policy=critic")

    assert (answer.status, answer.json["error"]["param"]) == (404, "policy")
    assert "The policies are planner, solver, judge, default." in answer.json["error"]["message"]


async def test_a_format_with_one_row_names_policy_if_there_are_several(proxy):
    """Also with branches=longest, which selects a branch of each policy."""
    await record(proxy, "r1", "planner", "judge", "solver-1")
    await proxy.finish("r1", reward=1.0)
    for more in ("", "&branches=longest", "&branches=last"):
        answer = await proxy.get(f"/rollouts/r1/export?format=trl{more}")

        assert answer.status == 409
        assert (
            "2 sequences. They are of the policies planner, solver: export them one by one with policy=."
            in (answer.json["error"]["message"])
        )
    assert len((await rows(proxy, "/rollouts/r1/export", format="trl", policy="planner"))[0]) == 1
    assert len((await rows(proxy, "/rollouts/r1/export", branches="longest"))[0]) == 2


@pytest.mark.parametrize("form", [name for name in FORMATS if name not in {"verl_dataproto", "marin"}])
async def test_rewards_and_advantages_of_steps_of_other_policies_change_nothing(proxy, form):
    """The response does not change when steps of the other policy get rewards and advantages."""
    planned, judged = await record(proxy, "r1", "planner", "judge")
    await proxy.patch("/rollouts/r1", {"reward": 1.0, "metadata": {"env_name": "test"}})
    await proxy.put("/policies/planner", {"version": 1})
    values = {"step_rewards": {planned: 0.5}, "advantages": {planned: 0.25}}
    assert (await proxy.patch("/rollouts/r1", values)).status == 200
    path = f"/rollouts/r1/export?format={form}&policy=planner"
    before = await proxy.get(path)
    values = {"step_rewards": {planned: 0.5, judged: [9.0]}, "advantages": {planned: 0.25, judged: [9.0] * 3}}
    sampled = len((await proxy.get(f"/rollouts/r1/steps/{judged}")).json["choices"][0]["ids"])
    values["step_rewards"][judged] *= sampled
    assert (await proxy.patch("/rollouts/r1", values)).status == 200
    after = await proxy.get(path)

    assert (before.status, before.text) == (after.status, after.text)


@pytest.mark.parametrize(("container", "read"), [("arrow", "ipc"), ("parquet", "parquet")])
@pytest.mark.parametrize("form", ["sequences", "steps"])
async def test_columns_have_the_policy(proxy, container, read, form):
    """It is null for the policy `default`."""
    await record(proxy, "r1", "planner", "solver-1")
    await record(proxy, "r2", "other")
    found = []
    for query in ("", "&policy=default"):
        body = io.BytesIO((await proxy.get(f"/export?format={form}&container={container}{query}")).text)
        table = pyarrow.ipc.open_stream(body).read_all() if read == "ipc" else pyarrow.parquet.read_table(body)
        found.append(table.column("policy").to_pylist())

    assert found == [["planner", "solver"], [None]]


async def test_returns_of_turns_count_the_policys_turns_only(proxy):
    """The turns of other policies are not between its turns."""
    await record(proxy, "r1", "planner", "judge", "planner")
    await proxy.finish("r1", reward=1.0)
    found, _ = await rows(proxy, "/rollouts/r1/export", advantage="step", discount=0.5, policy="planner")

    assert [value for row in found for value in row["advantages"].values()] == [0.5, 1.0]


async def test_a_step_of_a_policy_that_the_settings_no_longer_have_counts_as_trained(proxy, store):
    """Rows name its policy, so that nothing is missing silently."""
    await record(proxy, "r1", "judge")
    async with simulating("127.0.0.1:0", Options()) as engine, running(settings_for(engine), store) as served:
        (row,), skipped = await rows(Session(proxy.http, served.url), "/rollouts/r1/export")

    assert (row["policy"], skipped) == ("judge", [])


async def test_steps_and_nodes_of_the_tree_name_their_policy_and_model(proxy):
    """The policy `default` is not named. Branches and owners equal the default export's."""
    await record(proxy, "r1", "planner", "judge", "other")
    steps = await proxy.steps("r1")
    nodes = (await proxy.get("/rollouts/r1/tree")).json["nodes"]

    assert [(step.get("policy"), step["model"]["served"]) for step in steps] == [
        ("planner", "planner"),
        ("judge", "judge"),
        (None, "other"),
    ]
    assert [(node.get("policy"), node.get("model")) for node in nodes] == [
        ("planner", "planner"),
        ("judge", "judge"),
        (None, None),
    ]
    assert [node["owner"] for node in nodes] == [0, None, None]
