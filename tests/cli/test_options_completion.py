"""What a shell completes."""

import asyncio
from types import SimpleNamespace

import pytest
from fakes import proxying

from proxy.cli.options import rollout_ids

KEYS = {"agents": {"api_keys": ["a"]}, "control": {"api_keys": ["c"]}}


async def offered(url: str | None, begun: str = "", key: str | None = None) -> list[str]:
    context = SimpleNamespace(params={"url": url, "api_key": key})
    return await asyncio.to_thread(rollout_ids, context, begun)


async def test_ids_that_begin_so_are_offered_newest_first(call_proxy, address):
    """None that a shell would obey: they land on the command line as they are."""
    for name in ("a/1", "a-2", "b", "$(reboot)", "a b", "a;ls", "a\u202e"):
        await call_proxy("POST", "/rollouts", {"rollout_id": name})

    assert ["a-2", "a/1"] == await offered(address.url, "a")
    assert ["b", "a-2", "a/1"] == await offered(address.url)


async def test_the_key_of_the_command_line_is_shown(http, store):
    """Without it nothing is offered, and nothing is said."""
    async with proxying(None, store, **KEYS) as served:
        headers = {"Authorization": "Bearer c"}
        async with http.post(f"{served.url}/rollouts", json={"rollout_id": "r"}, headers=headers) as response:
            assert 201 == response.status

        assert ["r"] == await offered(served.url, key="c")
        assert [] == await offered(served.url)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "file:///etc", None, "http://[", "https://127.0.0.1:9"])
async def test_where_nobody_answers_nothing_is_offered(url):
    """A shell must not see a traceback."""
    assert [] == await offered(url)
