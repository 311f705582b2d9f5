"""The responses of batches in docs/http-api.md."""

import re

import orjson
from tests.support.pages import ROOT, blocks_of

from proxy.telemetry.metrics import DROP_REASONS, REFUSAL_REASONS

PAGE = ROOT / "docs" / "http-api.md"
CLAIM, ENDS = (
    orjson.loads(block.text)
    for block in blocks_of(PAGE)
    if block.checked_by == "tests/api/control/test_batches_documented.py"
)


def shape(value):
    """Return the fields of a value at any depth; for a list, the fields of its first item."""
    if isinstance(value, dict):
        return {name: shape(inner) for name, inner in value.items()}
    return [shape(inner) for inner in value[:1]] if isinstance(value, list) else None


async def test_a_claim_has_the_documented_fields(proxy):
    """Refused and dropped groups, and members without rows, too."""
    opened = await proxy.post("/groups", {"group_id": "g1", "size": 3, "metadata": {"task": 7}})
    silent, *members = (rollout["rollout_id"] for rollout in opened.json["rollouts"])
    for member, reward in zip(members, (1.0, 0.0), strict=True):
        await proxy.chat(member)
        await proxy.finish(member, reward=reward)
    await proxy.finish(silent, reward=0)
    forked = await proxy.group("g2", 1, 0, finish=False)
    for member in forked:
        await proxy.chat(member, {"role": "user", "content": "another conversation"})
        await proxy.finish(member, reward=1)
    first, second = await proxy.open_group("g3", 2)
    await proxy.chat(first)
    await proxy.finish(first, reward=1)
    await proxy.finish(second, reward=1)
    claimed = await proxy.claim(groups=3, format="trl")
    found, expected = shape(claimed), shape(CLAIM)

    assert CLAIM["reasons"] == claimed["reasons"]
    assert {name for name in expected["groups"][0] if found["groups"][0][name] != expected["groups"][0][name]} == {
        "late"
    }
    assert {**expected, "groups": []} == {**found, "groups": []}
    assert [{"rollout_id": silent, "why": CLAIM["groups"][0]["skipped"][0]["why"]}] == claimed["groups"][0]["skipped"]


async def test_the_ends_of_a_batch_have_the_documented_fields(proxy):
    found = {}
    for verb in ("release", "extend", "ack"):
        if verb != "ack":
            await proxy.group(verb, 1, 0)
        batch = await proxy.claim()
        found[verb] = (await proxy.post(f"/batches/{batch['batch_id']}/{verb}", {})).json

    assert shape(ENDS) == shape({**found, "ack": found["ack"]})


def test_every_code_is_documented():
    """In the table of codes; metrics have the same."""
    rows = re.findall(r"^\| (`.*?) \| (refused|dropped)(.*?) \|", PAGE.read_text(), re.MULTILINE)
    codes = {outcome: set() for outcome in ("refused", "dropped")}
    for names, first, more in rows:
        for outcome in codes:
            if outcome in first + more:
                codes[outcome] |= set(re.findall(r"`(\w+)`", names))

    assert {"refused": set(REFUSAL_REASONS), "dropped": set(DROP_REASONS)} == codes
