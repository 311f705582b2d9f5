"""The registry of endpoints, which processes announce to each other."""

import orjson
import pytest

from proxy.config.engines import EndpointSettings
from proxy.upstream.registry import ENGINES_ANNOUNCEMENT, EndpointRegistry
from storage.types import Announcement

CONFIGURED = [EndpointSettings(url="http://127.0.0.1:1", name="configured")]
PUT = [
    EndpointSettings(
        url="http://127.0.0.1:2",
        name="put",
        api_key="planted",
        kind="vllm",
        max_in_flight=8,
        headers={"X-Key": "planted"},
    )
]


@pytest.fixture
def registry(store):
    applied = []
    registry = EndpointRegistry(store.announcements, CONFIGURED, [applied.append])
    registry.applied = applied
    return registry


async def test_endpoints_that_are_put_are_announced_with_their_keys(store, registry):
    """None restores the configured endpoints."""
    await registry.put(PUT)
    assert (registry.applied, registry.is_overridden) == ([PUT], True)
    assert registry.applied[0][0].api_key.get_secret_value() == "planted"

    later = EndpointRegistry(store.announcements, CONFIGURED, [])
    later.apply(await store.announcements.read())
    assert later.is_overridden
    assert registry.applied[0][0].headers["X-Key"].get_secret_value() == "planted"
    await registry.put(None)
    assert (registry.applied[-1], registry.is_overridden) == (CONFIGURED, False)


async def test_older_announcements_are_ignored(registry):
    """Responses of the store may arrive out of order."""
    await registry.put(PUT)
    registry.apply({ENGINES_ANNOUNCEMENT: Announcement(b"null", registry.number)})
    registry.apply({})

    assert (registry.applied, registry.is_overridden) == ([PUT], True)


async def test_an_unreadable_announcement_is_ignored_and_logged_without_keys(registry, caplog):
    """A process of a later version may write fields that this version does not have."""
    announced = orjson.dumps([{"url": "http://x", "api_key": "planted", "weight": "planted-too"}])
    registry.apply({ENGINES_ANNOUNCEMENT: Announcement(announced, 7)})

    assert (registry.applied, registry.is_overridden, registry.number) == ([], False, 7)
    assert "0.weight" in caplog.text
    assert "planted" not in caplog.text
