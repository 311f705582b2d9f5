"""What only the blocking client does; test_requests and test_async_client test what both do."""

import asyncio

import pytest

from tokentape import Client, ClientError


async def test_a_blocking_client_works_in_a_thread(url):
    """A trainer's data loader uses it like this: opens, finishes and lists rollouts in a `with`."""

    def work():
        with Client(url) as client:
            opened = client.open_rollout(metadata={"task": "sum"})
            client.finish_rollout(opened["rollout_id"], reward=1.0)
            return opened["rollout_id"], [rollout["rollout_id"] for rollout in client.rollouts(status="completed")]

    opened, listed = await asyncio.to_thread(work)

    assert [opened] == listed


async def test_rows_are_read_as_they_arrive(engine):
    """The first row is available before the last is sent; closing the iterator closes the connection."""
    engine.streams([b'{"row": 1}\n{"row"', b": 2}\n"], then="hang")

    def work():
        with Client(engine.url) as client:
            rows = client.export()
            first = next(rows), next(rows)
            rows.close()
            return first

    assert ({"row": 1}, {"row": 2}) == await asyncio.to_thread(work)
    await engine.aborted.wait()


async def test_a_request_without_a_response_times_out(engine):
    """After `timeout_s`."""
    engine.hangs()

    def work():
        with Client(engine.url, timeout_s=0.05) as client, pytest.raises(ClientError) as caught:
            client.rollout("r1")
        return caught.value.code

    assert "connection_lost" == await asyncio.to_thread(work)
