"""What the API shows of playbacks: their source, how many calls were answered, and which steps are inherited."""

import re

import pytest

OTHER = {"model": "policy", "messages": [{"role": "user", "content": "another turn"}], "seed": 1}
CALLS = "/rollouts/{}/v1/chat/completions"
RESULTS = ("answered", "again", "live", "refused", "gone")


async def metrics_of(proxy) -> dict[str, float]:
    """Return how many calls of playbacks had each result, and how many tokens engines sampled."""
    text = (await proxy.get("/metrics")).text.decode()
    found = {
        result: float(value) for result, value in re.findall(r'playback_calls_total\{result="(\w+)"\} (\S+)', text)
    }
    return found | {"tokens": sum(map(float, re.findall(r"completion_tokens_total\{.*\} (\S+)", text)))}


@pytest.fixture
async def played(proxy):
    """Play `r1` back as `p1`, with a call that is refused, an inherited step and a live one; return the steps of `r1`."""
    steps = await proxy.turns("r1", 2)
    await proxy.open("p1", playback={"of": "r1", "before": steps[1], "ignore": ["a *"]})
    assert (await proxy.post("/rollouts/p1/v1/chat/completions", OTHER)).status == 422
    assert steps[0] == (await proxy.turns("p1", 2))[0]
    return steps


async def test_a_playback_has_its_source_and_its_counts(proxy, played):
    """In its own response, in the list and in its tree."""
    shown = (await proxy.get("/rollouts/p1")).json
    first = {"step_id": played[0], "path": "messages[0].content", "value": "another turn", "recorded": "turn 0"}
    tape = {
        "of": "r1",
        "before": played[1],
        "on_mismatch": "branch",
        "ignore": ["a *"],
        "answerable": 1,
        "unanswerable": 0,
    }
    progress = {"answered": 1, "live": 1, "branched": True, "mismatches": 1, "first_mismatch": first}
    sampled = sum(len(choice["ids"]) for choice in (await proxy.steps("p1"))[0]["choices"])

    assert shown["playback"] == {**tape, **progress}
    assert tuple(shown["counts"][name] for name in ("steps", "inherited", "inherited_tokens")) == (2, 1, sampled)
    listed = (await proxy.get("/rollouts")).json["rollouts"]
    assert {"p1": shown["playback"], "r1": None} == {row["rollout_id"]: row.get("playback") for row in listed}
    assert shown["playback"] == (await proxy.get("/rollouts/p1/tree")).json["playback"]


async def test_a_member_of_a_group_has_its_source_and_its_counts(proxy, played):
    (member,) = await proxy.open_group("g", rollout={"playback": {"of": "r1", "through": played[0]}})
    await proxy.turns(member, 1)
    (shown,) = (await proxy.get("/groups/g")).json["rollouts"]

    assert shown["playback"] == (await proxy.get(f"/rollouts/{member}")).json["playback"]
    assert (played[0], 1, 0) == tuple(shown["playback"][name] for name in ("through", "answered", "live"))


async def test_the_opening_has_what_does_not_change(proxy, played):
    """So a retry gets the same response."""
    opening = {"rollout_id": "p2", "playback": {"of": "r1"}}
    opened = (await proxy.post("/rollouts", opening)).json
    await proxy.turns("p2", 1)
    assert (await proxy.post("/rollouts/p2/v1/chat/completions", OTHER)).status == 422

    assert opened["playback"] == {"of": "r1", "on_mismatch": "refuse", "answerable": 2, "unanswerable": 0}
    assert opened == (await proxy.post("/rollouts", opening)).json


async def test_the_calls_of_playbacks_are_counted_by_result(proxy, played):
    """A repeated answer is counted as such, and the tokens that are answered are not counted as the engine's."""
    before = await metrics_of(proxy)
    await proxy.open("p2", playback={"of": "r1"})
    await proxy.turns("p2", 1)
    first = {"model": "policy", "messages": [{"role": "user", "content": "turn 0"}], "seed": 1}
    again = await proxy.call("POST", CALLS.format("p2"), json=first, headers={"X-Stainless-Retry-Count": "1"})
    await proxy.delete("/rollouts/r1")
    gone = await proxy.post(CALLS.format("p2"), OTHER)
    after = await metrics_of(proxy)

    assert (again.status, gone.status) == (200, 410)
    assert {name: before[name] for name in RESULTS} == {"answered": 1, "again": 0, "live": 1, "refused": 1, "gone": 0}
    assert {name: after[name] for name in RESULTS} == {"answered": 2, "again": 1, "live": 1, "refused": 1, "gone": 1}
    assert before["tokens"] == after["tokens"] > 0


async def test_other_rollouts_have_no_fields_of_playbacks(proxy):
    await proxy.chat("r1")
    shown, tree = (await proxy.get("/rollouts/r1")).json, (await proxy.get("/rollouts/r1/tree")).json

    assert "playback" not in shown
    assert "playback" not in tree
    assert "inherited" not in shown["counts"]


async def test_an_inherited_step_names_where_it_was_sampled(proxy, played):
    """In the tree and in its own response, also in a playback of a playback; a live step has no such field."""
    origin = {"rollout_id": "r1", "step_id": played[0]}
    await proxy.open("p2", playback={"of": "p1"})
    await proxy.turns("p2", 2)
    live = {"rollout_id": "p1", "step_id": (await proxy.steps("p1"))[1]["step_id"]}
    for rollout, expected in (("p1", [origin, None]), ("p2", [origin, live])):
        nodes = (await proxy.get(f"/rollouts/{rollout}/tree")).json["nodes"]
        assert [node.get("inherited") for node in nodes] == expected
        assert [step.get("inherited") for step in await proxy.steps(rollout)] == expected
