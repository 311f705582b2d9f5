"""The policies: models, announced versions, and which of them exports and claims take."""

import asyncio
from contextlib import AsyncExitStack
from unittest.mock import patch

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.policies import policies_of

from proxy.errors import LowerVersion, NotFound, Paused, UnprocessableRequest
from proxy.rollouts.policy import (
    ABORT_ANNOUNCEMENT,
    INTERRUPT_ANNOUNCEMENT,
    NOTHING,
    POLICY_ANNOUNCEMENT,
    Announced,
    Heartbeats,
    Pause,
    PolicyVersion,
    read_announced,
    unknown_staleness,
)
from proxy.rollouts.rollout import of_policy
from storage.types import Announcement, Beat

TWO = {"planner": {"models": ["planner", "planner-*"]}, "judge": {"models": ["judge"], "train": False}}
NAMES = st.sampled_from(
    ["planner", "planner-", "planner-1", "a-planner", "Planner", "judge", "judge-2", "", "p*", "x" * 999]
)


def notices(version, number):
    return {POLICY_ANNOUNCEMENT: Announcement(orjson.dumps(version), number)}


def test_a_version_is_read_from_announcements():
    """It is None if none was announced."""
    assert read_announced({}) == NOTHING
    assert Announced("7", highest=7) == read_announced(notices("7", 1))


def test_an_older_announcement_does_not_replace_a_newer_one():
    """Replies of the store may arrive out of order."""
    policy = PolicyVersion()
    versions = [policy.announced.version]
    for announcements in ({}, notices("2", 2), notices("1", 1), notices("3", 3), {}):
        policy.apply(announcements)
        versions.append(policy.announced.version)

    assert versions == [None, None, "2", "2", "3", "3"]


def test_each_policy_has_its_own_version():
    """The version of the policy `default` is announced under the same name as before policies had names."""
    announcements = notices("7", 1) | {"policy:planner": Announcement(orjson.dumps("2"), 3)}
    policies = policies_of(TWO)
    policies.apply(announcements)

    assert [policy.version.announced.version for policy in policies] == ["2", None, "7"]
    assert [read_announced(announcements, policy.name).version for policy in policies] == ["2", None, "7"]


class Store:
    """Announcements of one store. `lost`: responses of writes that are lost. `others`: what others write before each write."""

    def __init__(self, lost=0, others=()):
        self.held, self.lost, self.others = {}, lost, list(others)

    async def read(self):
        return dict(self.held)

    async def announce_if(self, name, value, number):
        for other in self.others[:1]:
            del self.others[0]
            self.write(name, other)
        if number != (self.held[name].number if name in self.held else 0):
            return None
        self.write(name, value)
        if self.lost:
            self.lost -= 1
            return None
        return self.held[name]

    def write(self, name, value):
        self.held[name] = Announcement(value, self.held[name].number + 1 if name in self.held else 1)


async def test_an_announcement_follows_what_another_process_announces_at_the_same_time():
    """None is lost: the epoch counts both beginnings, and a lower version is refused."""
    policy, store = PolicyVersion(), Store()
    await policy.announce(store, "9")
    store.others = [orjson.dumps({"version": "7", "epoch": 1, "run": "b", "highest": 7})]
    both = await policy.announce(store, "5", run="c")
    store.others = [orjson.dumps({"version": "8", "epoch": 2, "run": "c", "highest": 8})]

    assert Announced("5", 2, "c", 5) == both == policy.announced
    with pytest.raises(LowerVersion, match="6 is lower than 8"):
        await policy.announce(store, "6")
    assert Announced("5", 2, "c", 5) == policy.announced


async def test_an_announcement_begins_one_epoch_if_its_response_is_lost():
    policy, store = PolicyVersion(), Store(lost=2)
    await policy.announce(store, "9", new_epoch=True)

    assert policy.announced.epoch == read_announced(await store.read()).epoch == 1


VERSIONS = st.integers(0, 9).map(str) | st.sampled_from(["main", "-1", "9" * 19, ""])
STEPS = st.lists(st.tuples(VERSIONS, st.sampled_from([None, "a", "b"]), st.booleans()))


@given(STEPS)
def test_numbers_never_fall_within_an_epoch_and_epochs_never_fall(announcements):
    """What is written is read again, and the same announcement again changes nothing unless it begins an epoch."""
    known, highest = NOTHING, -1
    for version, run, new_epoch in announcements:
        try:
            following = known.advanced(version, run=run, new_epoch=new_epoch)
        except LowerVersion:
            assert int(version) < highest
            assert not new_epoch
            assert run in (None, known.run) or known is NOTHING
            continue
        begins = following.epoch > known.epoch
        assert begins == (new_epoch or (run not in (None, known.run) and known.version is not None))
        assert following == Announced.read(Announcement(following.written(), 1), "policy")
        assert following == following.advanced(version, run=run)
        highest = -1 if begins else highest
        if unknown_staleness(following.version) is None:
            assert int(version) >= highest
            highest = int(version)
        known = following


@given(VERSIONS, st.integers(0, 2), VERSIONS, st.integers(0, 2))
def test_staleness_is_the_distance_of_numbers_in_one_epoch(version, epoch, announced, now):
    expected = int(announced) - int(version) if epoch == now and {version, announced} <= set("0123456789") else None

    assert Announced(announced, now).staleness(version, epoch) == expected


@pytest.mark.parametrize(
    ("model", "policy"),
    [
        ("planner", "planner"),
        ("planner-7b", "planner"),
        ("a-planner", "default"),
        ("Planner", "default"),
        ("judge", "judge"),
        ("judge-2", "default"),
        ("", "default"),
        (None, "default"),
    ],
)
def test_the_policy_of_a_model_is_the_one_that_lists_it(model, policy):
    """A star is any characters, and case matters. Other models, and calls without a model, belong to `default`."""
    assert policy == policies_of(TWO).of(model).name


def test_the_first_policy_in_the_settings_has_a_model_that_several_list():
    both = {"narrow": {"models": ["m-1"]}, "wide": {"models": ["m-*"]}}

    assert [policies_of(both).of(model).name for model in ("m-1", "m-2")] == ["narrow", "wide"]
    assert policies_of(dict(reversed(both.items()))).of("m-1").name == "wide"


@given(NAMES | st.none())
def test_without_named_policies_every_model_belongs_to_the_default_policy(model):
    """It is the only one, and trained."""
    policies = policies_of()

    assert policies.default is policies.only is policies.of(model) is policies.claimed(None)
    assert (policies_of(TWO).only, policies.trained) == (None, ("default",))


@given(st.lists(NAMES | st.none(), max_size=10))
def test_every_model_has_exactly_one_policy_in_any_order_of_calls(models):
    """Calls of models that no policy lists are logged once per model, and have the policy `default`."""
    policies = policies_of(TWO, logs_unlisted=True)

    for model in models:
        owners = [policy for policy in policies if model is not None and policy.has(model)]
        assert (owners or [policies.default]) == [policies.of_call(model)]


def test_a_model_that_no_policy_lists_is_logged_once(caplog):
    """The name is truncated, and at most 100 names are logged, because clients choose them."""
    policies = policies_of(TWO, logs_unlisted=True)
    for model in ("planner", "judge", "other", "other", None, None, "x" * 5000, "x" * 6000):
        policies.of_call(model)
    first = [record.fields["model"] for record in caplog.records]
    for number in range(500):
        policies.of_call(f"m{number}")

    assert first == ["other", None, "x" * 100]
    assert len(caplog.records) == 100


def test_no_model_is_logged_if_calls_of_the_default_policy_are_expected(caplog):
    for policies in (policies_of(), policies_of({**TWO, "default": {}})):
        policies.of_call("other")

    assert caplog.records == []


def test_a_policy_has_a_name_or_is_not_found():
    """The message lists the names."""
    policies = policies_of(TWO)

    assert [policies.named(policy.name).name for policy in policies] == ["planner", "judge", "default"]
    with pytest.raises(NotFound, match="The policies are planner, judge, default"):
        policies.named("critic")


@pytest.mark.parametrize(
    ("name", "exported"),
    [
        (None, ["planner", "gone"]),
        ("planner", ["planner"]),
        ("judge", ["judge"]),
        ("default", ["default"]),
        ("gone", ["gone"]),
    ],
)
def test_an_export_has_the_steps_of_the_named_policy_or_of_those_not_excluded_from_training(name, exported):
    """Steps of a policy that the settings no longer have are exported, too: no setting excludes them."""
    policies = policies_of(TWO)

    assert exported == [own for own in ("planner", "judge", "default", "gone") if policies.exports(name, own)]


THREE = {**TWO, "critic": {"models": ["critic"]}}


@pytest.mark.parametrize(("settings", "name", "policy"), [(TWO, None, "planner"), (THREE, "critic", "critic")])
def test_a_claim_takes_groups_of_the_named_policy_or_of_the_only_trained_one(settings, name, policy):
    assert policy == policies_of(settings).claimed(name).name


@pytest.mark.parametrize(
    ("settings", "name", "error", "message"),
    [
        (TWO, "judge", UnprocessableRequest, "'judge' is not trained"),
        (TWO, "default", UnprocessableRequest, "'default' is not trained"),
        (TWO, "gone", NotFound, "'gone' not found"),
        (THREE, None, UnprocessableRequest, "trained: planner, critic. Name one"),
        ({"judge": TWO["judge"]}, None, UnprocessableRequest, "No policy is trained"),
    ],
)
def test_a_claim_without_exactly_one_trained_policy_is_refused(settings, name, error, message):
    with pytest.raises(error, match=message):
        policies_of(settings).claimed(name)


@pytest.fixture
def timeout_s():
    """How long a call may wait; tests override it."""
    return 600.0


@pytest.fixture
async def pauses(store, timeout_s):
    """The pauses of two processes with one store, each with room for one waiting call."""
    processes = [Heartbeats(store.announcements, name) for name in "ab"]
    pauses = [Pause(process, max_waiting=1, timeout_s=timeout_s) for process in processes]
    for process in processes:
        await process.beat()
    yield pauses
    for process in processes:
        await process.close()


async def test_a_heartbeat_counts_the_calls_of_all_processes_and_the_processes_without_the_pause(pauses):
    """A process that has ended is not counted."""
    first, second = pauses
    second.in_flight = 1
    await second.beat()
    await first.announce("wait")
    assert await first.beat() == (1, 1)
    await second.beat()  # reads the announcement
    await second.beat()  # reports it
    assert await first.beat() == (1, 0)
    await second._heartbeats.close()

    assert await first.beat() == (0, 0)


async def test_a_call_above_max_paused_is_rejected(pauses):
    """The error names the setting; calls that wait already continue to wait."""
    pause, _ = pauses
    await pause.passed()
    await pause.announce("wait")
    waiting = asyncio.create_task(pause.passed())
    await asyncio.sleep(0)

    with pytest.raises(Paused, match="agents.max_paused"):
        await pause.passed()
    assert not waiting.done()
    waiting.cancel()


@pytest.mark.parametrize("timeout_s", [0.01])
async def test_a_waiting_call_is_rejected_after_pause_timeout_s(pauses):
    """The error names the setting."""
    pause, _ = pauses
    await pause.announce("wait")

    with pytest.raises(Paused, match="agents.pause_timeout_s"):
        await pause.passed()


async def test_waiting_calls_are_rejected_when_the_mode_becomes_reject(pauses):
    """Another process may set the mode."""
    first, second = pauses
    first._heartbeats.start()
    await first.announce("wait")
    waiting = asyncio.create_task(first.passed())
    await asyncio.sleep(0)
    await second.announce("reject")

    with pytest.raises(Paused, match="while the weights change"):
        await waiting


@pytest.mark.parametrize("mode", ["wait", "reject"])
async def test_a_call_that_was_interrupted_waits_in_every_mode_and_is_not_in_flight_meanwhile(pauses, mode):
    """The limit on waiting calls, which is 1 here, is one on new calls."""
    pause, _ = pauses
    pause.in_flight = 3
    await pause.announce(mode)
    waiting = [asyncio.create_task(pause.passed(60, is_resumed=True)) for _ in range(3)]
    await asyncio.sleep(0)
    counts = [pause.in_flight, (await pause.beat())[0]]
    waiting.pop().cancel()
    await asyncio.sleep(0)
    counts.append(pause.in_flight)  # of the call that was cancelled
    assert not any(task.done() for task in waiting)
    await pause.announce(None)
    await asyncio.gather(*waiting)

    assert (counts, pause.in_flight) == ([0, 0, 1], 3)


async def test_calls_that_wait_go_on_over_several_iterations_of_the_event_loop(pauses):
    """Between them it serves others; those that a new pause finds waiting wait for its end."""
    pause, _ = pauses
    pause.in_flight = 50
    await pause.announce("wait")
    waiting = [asyncio.create_task(pause.passed(60, is_resumed=True)) for _ in range(50)]
    await asyncio.sleep(0)
    pause.mode = None
    pause._note_change()
    counts = [pause.in_flight]
    while pause.in_flight < 32:
        await asyncio.sleep(0)
        counts.append(pause.in_flight)
    pause.mode = "wait"
    for _ in range(9):
        await asyncio.sleep(0)
    counts.append(pause.in_flight)
    pause.mode = None
    pause._note_change()
    await asyncio.gather(*waiting)

    assert sorted({*counts}) == [0, 16, 32]
    assert pause.in_flight == 50


async def test_calls_that_give_up_during_a_pause_leave_nothing_behind(pauses):
    pause, _ = pauses
    await pause.announce("wait")
    for _ in range(3):
        with pytest.raises(Paused):
            await pause.passed(0.001)

    assert not pause._waiters


async def test_a_call_that_was_interrupted_waits_no_longer_than_resume_timeout_s(pauses):
    pause, _ = pauses
    await pause.announce("reject")

    with pytest.raises(Paused, match=r"after 0.01 s \(agents.resume_timeout_s\)"):
        await pause.passed(0.01, is_resumed=True)
    assert pause.in_flight == 0


@pytest.mark.parametrize("most", [False, True])
async def test_a_pause_that_resumes_interrupts_at_once_and_the_others_once_drain_s_has_passed(
    pauses, most, monkeypatch
):
    """`most`: all calls can be interrupted at once; then nothing is announced after `drain_s`."""
    monkeypatch.setattr("proxy.rollouts.policy._AWARE_TIMEOUT_S", 60)
    first, second = pauses
    second._heartbeats.start()
    second.in_flight, lasts = 3, []

    def interrupt(labels, *, is_last):
        lasts.append((labels, is_last))
        second.in_flight = 1 if most or is_last else 2  # one is completed; the interrupted ones wait to be resumed
        return second.in_flight - 1, 1

    second.interrupt_calls = interrupt
    drained = await first.drained("wait", drain_s=60 if most else 0.2, in_flight="resume")
    await second.announce(None)
    lasts_of_pause = list(lasts)
    await second.beat()

    assert drained == (0, True)
    assert ([(None, False)] if most else [(None, False), (None, True)]) == list(dict.fromkeys(lasts_of_pause))
    assert lasts == lasts_of_pause


class Shared:
    """The announcements and heartbeats of a store, without its network."""

    def __init__(self) -> None:
        self.announced, self.beats = {}, {}

    async def announce(self, name, value):
        self.announced[name] = Announcement(value, self.announced[name].number + 1 if name in self.announced else 1)
        return self.announced[name]

    async def announce_if(self, name, value, number):
        present = self.announced[name].number if name in self.announced else 0
        return await self.announce(name, value) if number == present else None

    async def read(self):
        return dict(self.announced)

    async def beat(self, process, states, *, lifetime_ms, known):
        self.beats[process] = states
        others = {policy: [sent[policy] for sent in self.beats.values() if policy in sent] for policy in states}
        counts = {
            policy: (sum(calls for _, calls in sent), sum(number < states[policy][0] for number, _ in sent))
            for policy, sent in others.items()
        }
        number = sum(announcement.number for announcement in self.announced.values())
        return Beat(counts, number, None if number == known else dict(self.announced))


@given(st.lists(st.sampled_from(["pause", "resume", "abort", "interrupt", "last", "beat"]), max_size=12))
def test_a_pause_ends_calls_if_it_is_announced_to_and_no_other_pause_does(actions):
    """Every heartbeat of a process ends calls while the pause that it knows is the one that aborts or interrupts them."""

    async def run():
        shared, ended, announced = Shared(), [], {}
        here, there = (Pause(Heartbeats(shared, name), max_waiting=1, timeout_s=1) for name in "ab")
        there.abort_calls = lambda: ended.append((there.number, "abort")) or 0
        there.interrupt_calls = lambda _labels, *, is_last: (
            ended.append((there.number, "last" if is_last else "interrupt")) or (0, 0)
        )
        for action in actions:
            if action == "beat":
                ended.clear()
                await there.beat()
                assert here.number == there.number
                assert all(kind in announced.get(number, ()) for number, kind in ended)
                kinds = announced.get(here.number, [])
                expected = ["abort"] if "abort" in kinds else kinds[-1:]
                assert [kind for number, kind in ended if number == here.number][-1:] == expected
            elif action in {"pause", "resume"}:
                await here.announce("wait" if action == "pause" else None)
            elif here.number:
                is_abort = action == "abort"
                value = here.number if is_abort else {"pause": here.number, "is_last": action == "last"}
                await shared.announce(ABORT_ANNOUNCEMENT if is_abort else INTERRUPT_ANNOUNCEMENT, orjson.dumps(value))
                announced.setdefault(here.number, []).append(action)

    asyncio.run(run())


LABELS = ("a", "b", "c")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["hold", "release", "update", "epoch"]), st.sampled_from(LABELS)),
        st.tuples(st.sampled_from(["announce", "resume", "pause"]), st.none()),
    ),
    max_size=12,
)


@given(STEPS)
def test_an_endpoint_has_its_own_version_from_its_release_until_the_next_version_of_the_policy(steps):
    """Every process that has read the announcements has the same versions, and holds the same endpoints."""

    async def run():
        shared, own, expected, version, epoch = Shared(), {}, set(), None, 0
        versions = [PolicyVersion() for _ in "ab"]
        pauses = [Pause(Heartbeats(shared, name), max_waiting=1, timeout_s=1) for name in "ab"]
        for pause, known in zip(pauses, versions, strict=True):
            pause._heartbeats.followers.append(known.apply)
        here = pauses[0]
        for number, (action, label) in enumerate(steps, 1):
            if action == "hold":
                await here.hold([label], drain_s=0)
                expected.add(label)
            elif action in {"release", "update", "epoch"}:
                new = (str(number), epoch + (action == "epoch"))
                await here.release([label], None if action == "release" else new[0], new_epoch=action == "epoch")
                expected.discard(label)
                own |= {} if action == "release" else {label: new}
            elif action == "announce":
                await versions[0].announce(shared, str(number))
                version, own = str(number), {}
            elif action == "resume":
                await here.release(None)
                expected.clear()
            else:
                await here.announce("wait")
            for pause in pauses:
                await pause.beat()
            for pause, known in zip(pauses, versions, strict=True):
                assert pause.held == expected
                assert {name: own.get(name, (version, 0)) for name in LABELS} == {
                    name: known.at(name) for name in LABELS
                }
                others = {name: held for name, (held, _) in own.items() if held != version}
                assert others == known.endpoints

    with patch.multiple(
        "proxy.rollouts.policy", _AWARE_TIMEOUT_S=0, _ABORT_TIMEOUT_S=0
    ):  # the other one learns of it below
        asyncio.run(run())


async def test_a_lower_version_of_an_endpoint_is_refused_and_it_stays_held(pauses):
    pause, other = pauses
    other._heartbeats.start()
    await PolicyVersion().announce(pause._heartbeats.announcements, "5")
    await pause.hold(["a"], drain_s=0)
    with pytest.raises(LowerVersion, match="Version 4 is lower than 5"):
        await pause.release(["a"], "4")
    still = pause.held
    await pause.release(["a"], "4", run="other")

    assert ({"a"}, frozenset()) == (still, pause.held)


async def test_calls_at_a_held_endpoint_are_interrupted_at_once_and_the_others_once_drain_s_has_passed(pauses):
    """Only they are counted, of all processes; calls elsewhere continue. A released endpoint interrupts none."""
    first, second = pauses
    second._heartbeats.start()
    second.in_flight, seen = 9, []

    def interrupt(labels, *, is_last):
        seen.append((tuple(labels), is_last))
        return (0 if is_last else 2), 1

    second.interrupt_calls = interrupt
    assert await first.hold(["a"], drain_s=0.2) == (0, True)
    assert list(dict.fromkeys(seen)) == [(("a",), False), (("a",), True)]
    await first.release(["a"])
    await second.beat()
    seen.clear()

    assert (await second.beat(), seen) == ((9, 0), [])


async def test_a_hold_that_does_not_drain_reports_the_calls_that_are_left(pauses, monkeypatch):
    """So does one that another pause or hold has replaced."""
    monkeypatch.setattr("proxy.rollouts.policy._ABORT_TIMEOUT_S", 0.1)
    first, second = pauses
    first.interrupt_calls = lambda labels, *, is_last: (len(labels), 0)
    await second.beat()
    second._heartbeats.start()
    assert await first.hold(["a"], drain_s=0) == (1, False)
    holding = asyncio.create_task(first.hold(["b"], drain_s=60))
    async with asyncio.timeout(50):
        while "b" not in second.held:
            await asyncio.sleep(0.01)
    await second.hold(["a"], drain_s=0)

    assert await holding == (2, False)


async def test_a_process_of_0_1_0_that_cannot_hold_counts_with_all_of_its_calls(store, pauses, monkeypatch):
    """It ignores the announcement, and knows the number of the pause: the hold does not drain."""
    monkeypatch.setattr("proxy.rollouts.policy._ABORT_TIMEOUT_S", 0.1)
    first, second = pauses
    second._heartbeats.start()
    await store.announcements.beat("old", {"default": (10**6, 4)}, lifetime_ms=60_000, known=0)

    assert await first.hold(["a"], drain_s=0) == (4, False)


async def test_a_call_waits_while_all_of_its_endpoints_are_held_and_is_not_in_flight_meanwhile(pauses):
    """It was admitted before; the limits of waiting calls apply to it."""
    pause, other = pauses
    other._heartbeats.start()
    pause.in_flight = 1
    await pause.hold(["a", "b"], drain_s=0)
    await pause.passed(labels=["a", "b", "c"])
    waiting = asyncio.create_task(pause.passed(labels=["a", "b"]))
    resumed = asyncio.create_task(pause.passed(60, is_resumed=True, labels=["a"]))
    await asyncio.sleep(0)
    with pytest.raises(Paused, match="agents.max_paused"):
        await pause.passed(labels=["b"])
    counts = [pause.in_flight]
    await pause.release(["b"], "7")
    await waiting
    counts.append(pause.in_flight)
    assert not resumed.done()
    await pause.release(None)
    await resumed

    assert [*counts, pause.in_flight] == [-1, 0, 1]


ACTIONS = ("call", "end", "pause", "reject", "resume", "abort", "beat")


class Processes:
    """Two processes that share announcements and heartbeats, with a pause for each policy, and calls in flight."""

    def __init__(self, policies) -> None:
        self.shared = Shared()
        self.stopped, self.calls = [], {}
        self.heartbeats = {process: Heartbeats(self.shared, process) for process in "ab"}
        for process, heartbeats in self.heartbeats.items():
            for name in policies:
                pause = Pause(heartbeats, policy=name, max_waiting=1, timeout_s=1)
                pause.abort_calls = lambda key=(process, name): self.stopped.append(key) or 0
                self.calls[process, name] = (pause, [])

    async def act(self, process, policy, action):
        """Return what the action changes, as its process sees it."""
        pause, calls = self.calls[process, policy]
        if action == "call" and pause.mode is None:
            calls.append(pause)
            pause.in_flight += 1
        elif action == "end" and calls:
            calls.pop().in_flight -= 1
        elif action in {"pause", "reject", "resume"}:
            await pause.announce({"pause": "wait", "reject": "reject", "resume": None}[action])
        elif action == "abort":
            await self.shared.announce(of_policy(ABORT_ANNOUNCEMENT, policy), orjson.dumps(pause.number))
        return pause.mode

    async def beat(self, process):
        """Return what a heartbeat of a process returns for each policy, and the mode in which it then is."""
        counts = await self.heartbeats[process].beat()
        return {policy: (count, self.calls[process, policy][0].mode) for policy, count in counts.items()}


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from(["default", "planner"]), st.sampled_from(ACTIONS)), max_size=30
    )
)
def test_a_policy_is_paused_counted_and_aborted_as_if_it_were_alone(actions):
    """Actions on one policy have the same effects with those on the other between them as without.

    A heartbeat is one of all policies.
    """

    async def run(policies):
        processes = Processes(policies)
        seen = {policy: [] for policy in policies}
        for process, policy, action in actions:
            if action == "beat":
                for own, found in (await processes.beat(process)).items():
                    seen[own].append(found)
            elif policy in policies:
                seen[policy].append(await processes.act(process, policy, action))
        return seen, processes.stopped

    async def law():
        seen, stopped = await run(["default", "planner"])
        for policy in ("default", "planner"):
            alone, stopped_alone = await run([policy])
            assert alone[policy] == seen[policy]
            assert stopped_alone == [key for key in stopped if key[1] == policy]

    asyncio.run(law())


async def test_two_policies_of_one_store_are_paused_independently(store):
    """Calls of the other policy are neither held nor counted, in any process; every heartbeat is one of its policy."""
    processes = {name: Heartbeats(store.announcements, name) for name in "ab"}
    made = {
        (name, policy): Pause(heartbeats, policy=policy, max_waiting=1, timeout_s=60)
        for name, heartbeats in processes.items()
        for policy in ("default", "planner")
    }
    async with AsyncExitStack() as stack:
        for heartbeats in processes.values():
            heartbeats.start()
            stack.push_async_callback(heartbeats.close)
        made["b", "default"].in_flight = 1
        assert await made["a", "planner"].drained("wait", drain_s=0) == (0, True)
        assert await made["a", "default"].drained("reject", drain_s=0) == (1, False)
        assert [pause.mode for pause in made.values()] == ["reject", "wait"] * 2
        waiting = asyncio.create_task(made["b", "planner"].passed())
        await made["b", "default"].announce(None)
        await made["b", "default"].passed()
        assert not waiting.done()
        await made["a", "planner"].announce(None)
        await waiting
