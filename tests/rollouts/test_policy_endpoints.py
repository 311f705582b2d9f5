"""The announcement of the endpoints of a rolling update."""

import asyncio

import orjson
from hypothesis import given
from hypothesis import strategies as st

from proxy.rollouts.policy import (
    ENDPOINTS_ANNOUNCEMENT,
    EndpointUpdate,
    change_endpoints,
    held,
    latest_endpoints,
    released,
)
from storage.types import Announcement


def test_a_damaged_announcement_changes_nothing(caplog):
    """It is logged; without an announcement no endpoint is held."""
    known = latest_endpoints("default")
    values = [known.value]
    for number, value in enumerate(
        (b'{"a": {"is_held": true}}', b"", b"[]", b'{"a": 1}', b'{"a": {"is_held": "yes"}}'), 1
    ):
        assert known.apply({ENDPOINTS_ANNOUNCEMENT: Announcement(value, number)})
        values.append(known.value)

    assert values == [{}, *[{"a": EndpointUpdate(is_held=True)}] * 5]
    assert "endpoints" in caplog.text


@given(st.dictionaries(st.text(max_size=3), st.builds(EndpointUpdate, version=st.none() | st.text(max_size=3))))
def test_an_endpoint_that_is_held_and_released_is_as_before(known):
    """Whether it was named or not."""
    for labels in (list(known), None):
        assert known == released(held(known, known, is_last=True), labels, None)


async def test_changes_that_are_made_together_are_all_applied(store):
    """An endpoint that is not held and has no version of its own is dropped."""
    await asyncio.gather(
        *(
            change_endpoints(store.announcements, "p", lambda known, _, a=a: held(known, [a], is_last=False))
            for a in "abc"
        )
    )
    await change_endpoints(store.announcements, "p", lambda known, _: released(known, ["b"], None))
    announced, known = await store.announcements.read(), latest_endpoints("p")
    known.apply(announced)

    assert known.value == {"a": EndpointUpdate(is_held=True), "c": EndpointUpdate(is_held=True)}
    assert sorted(orjson.loads(announced["endpoints:p"].value)) == ["a", "c"]
