"""The policies: models, announced versions, and which of them exports and claims take."""

import asyncio

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.policies import policies_of

from proxy.errors import LowerVersion, NotFound, UnprocessableRequest
from proxy.rollouts.policy import NOTHING, POLICY_ANNOUNCEMENT, Announced, PolicyVersion, read_announced
from storage.types import Announcement

TWO = {"planner": {"models": ["planner", "planner-*"]}, "judge": {"models": ["judge"], "train": False}}
NAMES = st.sampled_from(
    ["planner", "planner-", "planner-1", "a-planner", "Planner", "judge", "judge-2", "", "p*", "x" * 999]
)


def notices(version, number):
    return {POLICY_ANNOUNCEMENT: Announcement(orjson.dumps(version), number)}


def test_a_version_is_read_from_announcements():
    """It is None if none was announced."""
    assert NOTHING == read_announced({})
    assert Announced("7", highest=7) == read_announced(notices("7", 1))


def test_an_older_announcement_does_not_replace_a_newer_one():
    """Replies of the store may arrive out of order."""
    policy = PolicyVersion()
    versions = [policy.announced.version]
    for announcements in ({}, notices("2", 2), notices("1", 1), notices("3", 3), {}):
        policy.apply(announcements)
        versions.append(policy.announced.version)

    assert [None, None, "2", "2", "3", "3"] == versions


def test_each_policy_has_its_own_version():
    """That of the policy `default` is announced under the name that it had before policies had names."""
    announcements = notices("7", 1) | {"policy:planner": Announcement(orjson.dumps("2"), 3)}
    policies = policies_of(TWO)
    policies.apply(announcements)

    assert ["2", None, "7"] == [policy.version.announced.version for policy in policies]
    assert ["2", None, "7"] == [read_announced(announcements, policy.name).version for policy in policies]


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


async def test_an_announcement_whose_response_is_lost_begins_one_epoch():
    policy, store = PolicyVersion(), Store(lost=2)
    await policy.announce(store, "9", new_epoch=True)

    assert 1 == policy.announced.epoch == read_announced(await store.read()).epoch


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
        if following.warning is None:
            assert int(version) >= highest
            highest = int(version)
        known = following


@given(VERSIONS, st.integers(0, 2), VERSIONS, st.integers(0, 2))
def test_staleness_is_the_distance_of_numbers_in_one_epoch(version, epoch, announced, now):
    expected = int(announced) - int(version) if epoch == now and {version, announced} <= set("0123456789") else None

    assert expected == Announced(announced, now).staleness(version, epoch)


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

    assert ["narrow", "wide"] == [policies_of(both).of(model).name for model in ("m-1", "m-2")]
    assert "wide" == policies_of(dict(reversed(both.items()))).of("m-1").name


@given(NAMES | st.none())
def test_without_named_policies_every_model_belongs_to_the_default_policy(model):
    """It is the only one, and trained."""
    policies = policies_of()

    assert policies.default is policies.only is policies.of(model) is policies.claimed(None)
    assert (None, ("default",)) == (policies_of(TWO).only, policies.trained)


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

    assert ["other", None, "x" * 100] == first
    assert 100 == len(caplog.records)


def test_no_model_is_logged_if_calls_of_the_default_policy_are_expected(caplog):
    for policies in (policies_of(), policies_of({**TWO, "default": {}})):
        policies.of_call("other")

    assert [] == caplog.records


def test_a_policy_has_a_name_or_is_not_found():
    """The message lists the names."""
    policies = policies_of(TWO)

    assert ["planner", "judge", "default"] == [policies.named(policy.name).name for policy in policies]
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


async def test_heartbeats_of_all_policies_stop_at_once():
    """A store that does not answer delays the shutdown by the time of one policy."""
    policies = policies_of({f"p{number}": {"models": [f"m{number}"]} for number in range(8)})
    closing, gate = [], asyncio.Event()

    class Hanging:
        async def close(self) -> None:
            closing.append(self)
            if len(closing) == 9:
                gate.set()
            await gate.wait()

    for policy in policies:
        object.__setattr__(policy, "pause", Hanging())
    async with asyncio.timeout(50):
        await policies.close()

    assert 9 == len(closing)
