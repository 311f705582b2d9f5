"""A trainer of one policy in numpy: `python -m … POLICY CONSUMER FOLDER SEED URL…`.

It checks each row against what the engines sampled, trains, announces a new version, and acknowledges. Its journal has what it
trained, so that all trainers can be compared at the end. It may be killed at any point, and continues when it starts again.
"""

import asyncio
import fcntl
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import orjson
from tests.system.faults.training.ledger import Row, Sampled, check_members, check_rewards, rows_of
from tests.system.faults.training.plan import FIRST_VERSION

from tokentape import AsyncClient, ClientError

VOCABULARY = 2**16
LEASE_S = 3.0
CLAIMS: dict[str, list[dict[str, Any]]] = {
    "planner": [
        {"format": "sequences", "groups": 3, "max_staleness": 20},
        {"format": "sequences", "groups": 2, "order": "newest", "members": "rewarded"},
    ],
    "solver": [
        {"format": "trl", "branches": "longest", "groups": 2, "only_mixed": True},
        {"format": "trl", "branches": "longest", "groups": 2, "exact": True, "only_mixed": True},
    ],
}
"""The claims of the consumers of each policy."""


class Trainer:
    """One consumer. `weights` is a bias for each token, moved along the policy gradient."""

    def __init__(self, policy: str, number: int, folder: Path, dice: Random, client: AsyncClient) -> None:
        self._policy, self._number, self._folder, self._dice, self._client = policy, number, folder, dice, client
        self._sampled = Sampled(sorted(folder.glob("engine-*.jsonl")))
        self._journal = (folder / f"trainer-{policy}-{number}.jsonl").open("ab", buffering=0)
        self._weights = np.zeros(VOCABULARY)

    async def run(self) -> None:
        """Train on one batch after another, until the process is killed."""
        await self.update("continue")  # ends the pause of a trainer that was killed in an update
        claim = CLAIMS[self._policy][self._number]
        while True:
            try:
                batches = self._client.batches(
                    consumer=f"{self._policy}-{self._number}",
                    policy=self._policy,
                    lease_s=LEASE_S,
                    advantage="grpo",
                    **claim,
                )
                async with aclosing(batches):
                    async for batch in batches:
                        await self.train(batch, claim["format"])
            except ClientError as error:
                if not is_temporary(error) and error.code not in ("lease_lost", "unknown_batch"):
                    raise
                self.note("failed", why=str(error))

    async def train(self, batch: Any, form: str) -> None:
        """Check, train, announce and acknowledge one batch."""
        self._sampled.read()
        for group in batch.groups:
            rows = rows_of(group, form)
            members = (await self._client.group(group["group_id"]))["rollouts"]
            self._sampled.check_rows(self._policy, rows)
            check_members(group, members)
            check_rewards(group, rows, members)
            for row in rows:
                self.learn(row)
            self.note(
                "trained",
                batch=batch.batch_id,
                group=group["group_id"],
                rows=[[row.facts["rollout_id"], row.facts["step_ids"], int(row.mask.sum())] for row in rows],
                skipped=group["skipped"],
                versions=versions_of(group["data"]) if form == "sequences" else [],
            )
        await asyncio.sleep(self._dice.random() / 4)  # a kill may arrive with a batch in hand
        await self.update(self._dice.choice(("continue", "drain", "abort")))
        self.note("acking", batch=batch.batch_id)
        await batch.ack()
        self.note("acked", batch=batch.batch_id, groups=[group["group_id"] for group in batch.groups])

    def learn(self, row: Row) -> None:
        """Add the policy gradient of a row's trained tokens, relative to their recorded probabilities."""
        trained = row.mask.astype(bool)
        ratio = np.exp(row.logprobs[trained] - row.logprobs[trained])
        np.add.at(self._weights, row.ids[trained], 0.01 * row.advantage * ratio)

    async def update(self, in_flight: str) -> None:
        """Announce the next version; one consumer of a policy at a time."""
        async with self._alone():
            while True:
                try:
                    shown = await self._client.policy(policy=self._policy)
                    version = int(shown["version"] or FIRST_VERSION[self._policy]) + 1
                    self.note("announcing", version=version)
                    await self._client.update_policy(
                        version, lambda: None, drain_s=0.5, in_flight=in_flight, policy=self._policy
                    )
                    self.note("announced", version=version)
                    return
                except ClientError as error:
                    if error.code == "not_drained":
                        in_flight = "abort"
                    elif not is_temporary(error):
                        raise
                    self.note("failed", why=str(error))
                    await asyncio.sleep(0.1)

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Lock the policy. The lock of a process that is killed ends with it."""
        with (self._folder / f"{self._policy}.lock").open("w") as lock:
            await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
            yield

    def note(self, event: str, **values: Any) -> None:
        self._journal.write(orjson.dumps({"event": event, "at": time.time(), **values}) + b"\n")


def versions_of(data: list[dict[str, Any]]) -> list[tuple[str, str | None]]:
    """Return the policy version of each step that rows in the format `sequences` train."""
    return [(span["step_id"], span["policy_version"]) for row in data for span in row["spans"] if span["owned"]]


def is_temporary(error: ClientError) -> bool:
    """Return whether an error is the effect of a process that was killed or of a store that is unreachable."""
    return error.status in (None, 429, 502, 503)


async def main() -> None:
    policy, number, folder, seed, *urls = sys.argv[1:]
    dice = Random(f"{seed} {policy} {number} {os.getpid()}")
    async with AsyncClient(dice.choice(urls), attempts=3) as client:
        await Trainer(policy, int(number), Path(folder), dice, client).run()


if __name__ == "__main__":
    asyncio.run(main())
