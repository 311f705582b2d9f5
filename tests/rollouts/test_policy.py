"""The policies: models, announced versions, and which of them exports and claims take."""

import asyncio

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policies import policies_of

from proxy.errors import NotFound, UnprocessableRequest
from proxy.rollouts.policy import POLICY_ANNOUNCEMENT, PolicyVersion, read_version
from storage.types import Announcement

TWO = {"planner": {"models": ["planner", "planner-*"]}, "judge": {"models": ["judge"], "train": False}}
NAMES = st.sampled_from(
    ["planner", "planner-", "planner-1", "a-planner", "Planner", "judge", "judge-2", "", "p*", "x" * 999]
)


def notices(version, number):
    return {POLICY_ANNOUNCEMENT: Announcement(orjson.dumps(version), number)}


def test_a_version_is_read_from_announcements():
    """It is None if none was announced."""
    assert None is read_version({})
    assert "7" == read_version(notices("7", 1))


def test_an_older_announcement_does_not_replace_a_newer_one():
    """Replies of the store may arrive out of order."""
    policy = PolicyVersion()
    versions = [policy.current]
    for announcements in ({}, notices("2", 2), notices("1", 1), notices("3", 3), {}):
        policy.apply(announcements)
        versions.append(policy.current)

    assert [None, None, "2", "2", "3", "3"] == versions


def test_each_policy_has_its_own_version():
    """That of the policy `default` is announced under the name that it had before policies had names."""
    announcements = notices("7", 1) | {"policy:planner": Announcement(orjson.dumps("2"), 3)}
    policies = policies_of(TWO)
    policies.apply(announcements)

    assert ["2", None, "7"] == [policy.version.current for policy in policies]
    assert ["2", None, "7"] == [read_version(announcements, policy.name) for policy in policies]


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
