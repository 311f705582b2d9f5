"""What only the blocking client has; test_verbs and test_awaiting ask the rest of both."""

import asyncio

import pytest

from tokentape import Client, ClientError


async def test_a_blocking_client_works_in_a_thread_of_its_own(url):
    """As a trainer's data loader uses it: opened, finished and listed in a `with`."""

    def work():
        with Client(url) as client:
            opened = client.open_rollout(metadata={"task": "sum"})
            client.finish_rollout(opened["rollout_id"], reward=1.0)
            return opened["rollout_id"], [rollout["rollout_id"] for rollout in client.rollouts(status="completed")]

    opened, listed = await asyncio.to_thread(work)

    assert [opened] == listed


async def test_rows_are_read_as_they_come(engine):
    """The first row is there before the last is sent; leaving early closes the connection."""
    engine.streams([b'{"row": 1}\n{"row"', b": 2}\n"], then="hang")

    def work():
        with Client(engine.url) as client:
            rows = client.export()
            first = next(rows), next(rows)
            rows.close()
            return first

    assert ({"row": 1}, {"row": 2}) == await asyncio.to_thread(work)
    await engine.aborted.wait()


async def test_a_silent_proxy_is_not_waited_for_for_ever(engine):
    """`timeout_s` is how long an answer may take to begin."""
    engine.hangs()

    def work():
        with Client(engine.url, timeout_s=0.05) as client, pytest.raises(ClientError) as caught:
            client.rollout("r1")
        return caught.value.code

    assert "connection_lost" == await asyncio.to_thread(work)
