"""What the API shows of playbacks: their source, how many calls were answered, and which steps are inherited."""

from dataclasses import replace

from msgspec import structs
from tests.support.stored import stored_steps

from proxy.rollouts.recorder import entry_of
from proxy.rollouts.rollout import write_fields
from proxy.trajectory.codec import encode

TAPE = {"of": "r1", "before": "s3", "on_mismatch": "branch", "answerable": 2, "unanswerable": 1}
FIRST = {"step_id": "s3", "path": "messages[1].content", "value": "b", "recorded": "a"}


async def play(proxy, store) -> dict[str, str]:
    """Store a playback `p1` of the rollout `r1`, with an inherited step and a live one; return where the first was sampled."""
    await proxy.turns("r1", 1)
    (step,) = await stored_steps(store, "r1")
    playback = {"of": "r1", "incarnation": "x", "end": 3, "answerable": 2, "before": "s3", "on_mismatch": "branch"}
    fields = {"playback": playback, "has_branched": True, "mismatch": {"count": 2, "first": FIRST}}
    opened = await store.open("p1", write_fields(fields), now_ms=1)
    origin = {"rollout_id": "r1", "step_id": step.step_id}
    inherited = replace(step, rollout_id="p1", extra={"inherited": origin})
    entry = entry_of(inherited, opened.incarnation, encode(inherited))
    counts = {"steps": 1, "exact": 1, "inherited": 1, "inherited_tokens": 16}
    await store.append(structs.replace(entry, counts=counts), now_ms=1)
    await proxy.chat("p1")
    return origin


async def test_a_playback_has_its_source_and_its_counts(proxy, store):
    """In its own response, in the list and in its tree."""
    await play(proxy, store)
    shown = (await proxy.get("/rollouts/p1")).json
    progress = {"answered": 1, "live": 1, "branched": True, "mismatches": 2, "first_mismatch": FIRST}

    assert {**TAPE, **progress} == shown["playback"]
    assert (2, 1, 16) == tuple(shown["counts"][name] for name in ("steps", "inherited", "inherited_tokens"))
    listed = (await proxy.get("/rollouts")).json["rollouts"]
    assert {"p1": shown["playback"], "r1": None} == {row["rollout_id"]: row.get("playback") for row in listed}
    assert shown["playback"] == (await proxy.get("/rollouts/p1/tree")).json["playback"]


async def test_other_rollouts_have_no_fields_of_playbacks(proxy):
    await proxy.chat("r1")
    shown, tree = (await proxy.get("/rollouts/r1")).json, (await proxy.get("/rollouts/r1/tree")).json

    assert "playback" not in shown
    assert "playback" not in tree
    assert "inherited" not in shown["counts"]


async def test_an_inherited_step_names_where_it_was_sampled(proxy, store):
    """In the tree and in its own response; a live step has no such field."""
    origin = await play(proxy, store)
    nodes = (await proxy.get("/rollouts/p1/tree")).json["nodes"]

    assert [origin, None] == [node.get("inherited") for node in nodes]
    assert [origin, None] == [step.get("inherited") for step in await proxy.steps("p1")]
