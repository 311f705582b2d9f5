"""Changes as the blocking client follows them; test_events tests what both clients do."""

import asyncio
from contextlib import closing

from tokentape import Client
from tokentape.sync_events import CONNECTED


async def test_the_blocking_client_follows_changes_and_closes_its_connection(engine):
    """At the end of the loop."""
    engine.streams([CONNECTED + b"\n\n", b'event: changed\ndata: {"rollout_id": "r1"}\n\n'], then="hang")

    def work():
        with Client(engine.url) as client, closing(client.events("r1")) as events:
            return next(events), next(events)

    assert (None, {"rollout_id": "r1"}) == await asyncio.to_thread(work)
    await engine.aborted.wait()
