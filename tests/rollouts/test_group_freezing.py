"""Frozen rewards: claims of several policies and changes of rewards, in every order, on a real store."""

import asyncio
from contextlib import suppress

import orjson
from hypothesis import given
from hypothesis import strategies as st

from proxy.clock import SystemClock
from proxy.rollouts.group import freeze, supersede, unfreeze
from proxy.rollouts.rollout import ClaimId, read_rollout
from storage.errors import FieldsChanged

CLOCK = SystemClock()
PLANNER, CODER, DEFAULT = (ClaimId(policy, f"b-{policy}") for policy in ("planner", "coder", "default"))


async def opened(store, name="r"):
    return read_rollout(await store.open(name, {"reward": b"0"}, now_ms=1))


async def read(store, name="r"):
    return read_rollout(await store.get(name))


async def frozen_by(store, claim):
    """Freeze the rollout for a claim; return it, or None if it does not exist."""
    found = await freeze(store, CLOCK, ["r"], claim)
    return found[0] if found else None


async def test_a_claim_of_the_default_policy_is_stored_as_the_id_of_its_batch(store):
    """As without named policies."""
    await opened(store)
    frozen = await frozen_by(store, DEFAULT)

    assert (b'"b-default"', DEFAULT.batch_id) == ((await store.get("r")).fields["claimed_by"], frozen.claimed_by)


async def test_the_rewards_stay_frozen_until_every_claim_is_undone(store):
    """In any order; undoing again has no effect."""
    await opened(store)
    for claim in (DEFAULT, PLANNER, CODER):
        rollout = await frozen_by(store, claim)
    shown = [rollout.claims]
    for claim in (PLANNER, DEFAULT, DEFAULT, CODER):
        await unfreeze(store, CLOCK, "r", claim)
        shown.append((await read(store)).claims)

    assert shown == [(DEFAULT, PLANNER, CODER), (DEFAULT, CODER), (CODER,), (CODER,), ()]
    assert "claimed_by" not in (await store.get("r")).fields


async def test_a_freeze_keeps_the_other_claims(store):
    """A freeze that is repeated returns the rollout."""
    await opened(store)
    await frozen_by(store, PLANNER)
    both = await frozen_by(store, CODER)
    again = await frozen_by(store, CODER)

    assert both.claims == again.claims == (await frozen_by(store, PLANNER)).claims == (PLANNER, CODER)


async def test_rollouts_are_frozen_together(store):
    """In the order of their names; one that does not exist is omitted."""
    for name in "ab":
        await opened(store, name)
    await freeze(store, CLOCK, ["b"], PLANNER)
    found = await freeze(store, CLOCK, ["b", "gone", "a"], CODER)

    assert [(rollout.rollout_id, rollout.claims) for rollout in found] == [("b", (PLANNER, CODER)), ("a", (CODER,))]


async def test_a_deleted_rollout_is_not_frozen(store):
    await opened(store)
    await store.delete("r")
    await unfreeze(store, CLOCK, "r", PLANNER)

    assert await frozen_by(store, PLANNER) is None
    assert await store.get("r") is None


async def test_a_claim_that_is_never_undone_supersedes_those_after_the_first_of_its_policy(store):
    """So their number does not grow when a group is claimed and released again and again."""
    await opened(store)
    for number in range(4):
        claim = ClaimId("planner", f"b{number}")
        rollout = await frozen_by(store, claim)
        if number == 0:
            rollout = await frozen_by(store, CODER)
        await supersede(store, CLOCK, "r", rollout.claims, claim)
    await supersede(store, CLOCK, "r", rollout.claims, PLANNER)  # it has no claim

    assert (ClaimId("planner", "b0"), CODER, claim) == (await read(store)).claims


class Turns:
    """A store that delays changes until a test permits them; `waiting` has a future for each client."""

    def __init__(self, store) -> None:
        self._store = store
        self.waiting: dict[str, asyncio.Future] = {}

    def of(self, name: str) -> "Turn":
        return Turn(self, name)

    async def has_turn(self, name):
        self.waiting[name] = asyncio.get_running_loop().create_future()
        await self.waiting[name]
        return self._store


class Turn:
    """The store as one client has it."""

    def __init__(self, turns: Turns, name: str) -> None:
        self._turns, self._name = turns, name

    async def update_if(self, *args, **named):
        return await (await self._turns.has_turn(self._name)).update_if(*args, **named)

    async def update_each(self, *args, **named):
        return await (await self._turns.has_turn(self._name)).update_each(*args, **named)


class Claimant:
    """A claim: it freezes, reads the reward, and is then returned to its client (and supersedes others) or undone."""

    def __init__(self, claim: ClaimId, *, is_returned: bool) -> None:
        self.claim, self.is_returned = claim, is_returned
        self.reward: float | None = None
        self.is_permanent = False

    async def run(self, store) -> None:
        frozen = await frozen_by(store, self.claim)
        self.reward = frozen.reward
        if self.is_returned:
            self.is_permanent = True
            await supersede(store, CLOCK, "r", frozen.claims, self.claim)
        else:
            await unfreeze(store, CLOCK, "r", self.claim)
            self.reward = None


async def change_reward(store, value: int) -> None:
    """Change the reward as PATCH does, if no claim relies on it."""
    with suppress(FieldsChanged):
        await store.update_if("r", {"reward": orjson.dumps(value)}, expect={"claimed_by": None}, now_ms=1)


CLAIMANTS = st.lists(st.tuples(st.sampled_from(["default", "planner", "coder"]), st.booleans()), min_size=1, max_size=5)


@given(CLAIMANTS, st.integers(0, 3), st.data())
async def test_no_reward_changes_after_a_claim_has_read_it_unless_it_is_undone(store, drawn, changes, data):
    """For every interleaving of claims, their undoing and changes; if all are undone, the reward can be changed."""
    await store.delete("r")
    await opened(store)
    turns = Turns(store)
    claimants = [
        Claimant(ClaimId(policy, f"b{number}"), is_returned=is_returned)
        for number, (policy, is_returned) in enumerate(drawn)
    ]
    running = {f"c{n}": asyncio.ensure_future(one.run(turns.of(f"c{n}"))) for n, one in enumerate(claimants)}
    running |= {f"p{n}": asyncio.ensure_future(change_reward(turns.of(f"p{n}"), n + 1)) for n in range(changes)}
    try:
        await interleave(store, turns, running, claimants, data)
    finally:
        for task in running.values():
            task.cancel()
    await change_reward(store, 99)
    last = await read(store)

    assert (last.reward == 99) == (not last.claims) == (not any(one.is_permanent for one in claimants))


async def interleave(store, turns, running, claimants, data):
    """Let one of the changes that wait happen after the other, in a drawn order."""
    while not all(task.done() for task in running.values()):
        while not all(task.done() or name in turns.waiting for name, task in running.items()):
            await asyncio.sleep(0)
        if turns.waiting:
            turns.waiting.pop(data.draw(st.sampled_from(sorted(turns.waiting)))).set_result(None)
        while not all(task.done() or name in turns.waiting for name, task in running.items()):
            await asyncio.sleep(0)
        now = await read(store)
        for one in claimants:
            assert one.reward in (None, now.reward)
            assert not one.is_permanent or now.claims
    await asyncio.gather(*running.values())
