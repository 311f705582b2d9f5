"""The assertions at the end of the soak: from the API, the journals of the trainers and the engines' logs."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Any

import aiohttp
from tests.system.faults.training.agents import Attempt
from tests.system.faults.training.ledger import Sampled, lines_of
from tests.system.faults.training.plan import FIRST_VERSION, TRAINED
from tests.system.faults.training.system import TrainingSystem

from tokentape import AsyncClient

ENDED = ("done", "dropped")


def states_of(group: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the state of a group for each policy; for an open group, the open state under no name."""
    return group.get("policies") or {"": group}


async def open_things(url: str, groups: int) -> list[str]:
    """Return what has not ended, as sentences."""
    found = []
    async with AsyncClient(url) as client:
        shown = [group async for group in client.groups(page=1000)]
        if len(shown) != groups:
            found.append(f"{len(shown)} groups of {groups} exist")
        for group in shown:
            states = {policy: state["status"] for policy, state in states_of(group).items()}
            if not set(states.values()) <= set(ENDED):
                rollouts = (await client.group(group["group_id"]))["rollouts"]
                members = [(rollout["rollout_id"], rollout["status"], rollout["reward"]) for rollout in rollouts]
                found.append(f"group {group['group_id']} {states}: {members}")
        found += [
            f"rollout {rollout['rollout_id']} is open" async for rollout in client.rollouts(status="open", page=1000)
        ]
        paused = [policy["name"] for policy in (await client.policies())["policies"] if policy["mode"] is not None]
        found += [f"policy {name} is paused" for name in paused]
    return found


async def judge(system: TrainingSystem, attempts: Mapping[str, Attempt], groups: int) -> dict[str, Any]:
    """Assert that all has ended, that nothing was trained twice, and that what agents received is trained or named."""
    for kept in system.trainers:
        kept.kill()  # what it journals is complete: no group is left
    statuses, dropped = await _ended_groups(system)
    await _nothing_left(system)
    trained = Trained(system.folder)
    trained.check_once(statuses)
    await _are_late(system, trained.untrained(attempts))
    trained.check_rewarded(attempts)
    trained.check_versions(attempts)
    sampled = Sampled(sorted(system.folder.glob("engine-*.jsonl")))
    sampled.read()
    return {
        "groups": dict(Counter(statuses.values())),
        "dropped": dict(dropped),
        "sampled calls": sum(1 for _ in sampled.calls()),
        **trained.counts(),
    }


async def _ended_groups(system: TrainingSystem) -> tuple[dict[tuple[str, str], str], Counter[str]]:
    statuses, dropped = {}, Counter()
    async with AsyncClient(system.urls[0]) as client:
        async for group in client.groups(page=1000):
            for policy, state in states_of(group).items():
                statuses[group["group_id"], policy] = state["status"]
                if state["status"] == "dropped":
                    assert state["why"], f"{group['group_id']} is dropped for {policy} without a reason"
                    dropped[f"{policy} {state['code']}"] += 1
    return statuses, dropped


async def _nothing_left(system: TrainingSystem) -> None:
    """Assert that no group is queued or leased, and that no replica has a call or an unstored step."""
    for url in system.urls:
        async with AsyncClient(url) as client:
            for policy in TRAINED:
                claimed = await client.claim_batch(consumer="last", groups=1, policy=policy)
                assert claimed["batch_id"] is None, f"{policy}: {claimed['groups']}"
                assert set(claimed["waiting"].values()) == {0}, f"{policy}: {claimed['waiting']}"
        async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as response:
            metrics = dict(line.rsplit(" ", 1) for line in (await response.text()).splitlines() if line[0] != "#")
        for name in ("tokentape_in_flight_calls", "tokentape_in_flight_rollouts", "tokentape_journal_steps"):
            assert float(metrics[name]) == 0, f"{url}: {name} {metrics[name]}"


async def _are_late(system: TrainingSystem, steps: Iterable[tuple[str, str]]) -> None:
    """Assert that no step is missing, except those that waited in a journal until their group was claimed."""
    async with AsyncClient(system.urls[0]) as client:
        for rollout, step_id in steps:
            step = await client.step(rollout, step_id)
            assert (system.has_journals, step["late"]) == (True, True), (
                f"{step_id} is not trained, and not named: {step}"
            )


class Trained:
    """What the trainers journaled: the batches that they trained, and whether they were acknowledged."""

    def __init__(self, folder: Path) -> None:
        self._events: dict[str, list[dict[str, Any]]] = {policy: [] for policy in TRAINED}
        for policy in TRAINED:
            for path in sorted(folder.glob(f"trainer-{policy}-*.jsonl")):
                self._events[policy] += lines_of(path)[0]
        self._of_batch: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        for policy, event in self._all("trained"):
            self._of_batch[policy, event["batch"]].append(event)
        self._acknowledged: dict[tuple[str, str], dict[str, Any]] = {}

    def _all(self, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
        for policy, events in self._events.items():
            yield from ((policy, event) for event in events if event["event"] == name)

    def check_once(self, statuses: Mapping[tuple[str, str], str]) -> None:
        """Assert that each group that is done for a policy was acknowledged in one batch, and no other group in any.

        A trainer that was killed during its acknowledgement does not know whether it succeeded; the group's status does.
        """
        acked = Counter((policy, group) for policy, event in self._all("acked") for group in event["groups"])
        acking = defaultdict(list)
        for policy, event in self._all("acking"):
            for group in self._of_batch[policy, event["batch"]]:
                acking[policy, group["group"]].append(group)
        for policy, event in self._all("acked"):
            for group in self._of_batch[policy, event["batch"]]:
                self._acknowledged[policy, group["group"]] = group
        assert not (twice := [name for name, count in acked.items() if count > 1]), f"acknowledged twice: {twice}"
        done = {(policy, group) for (group, policy), status in statuses.items() if status == "done"}
        assert not (undone := acked.keys() - done), f"acknowledged, but not done: {undone}"
        for name in done - acked.keys():
            assert acking[name], f"done, but no trainer acknowledged it: {name}"
            self._acknowledged[name] = acking[name][-1]
        steps = Counter(
            step for event in self._acknowledged.values() for _, step_ids, _ in event["rows"] for step in step_ids
        )
        assert not (twice := [step for step, count in steps.items() if count > 1]), f"steps trained twice: {twice}"

    def untrained(self, attempts: Mapping[str, Attempt]) -> list[tuple[str, str]]:
        """Return the steps, with their rollouts, that an agent received to the end, and that are neither trained nor named.

        Asserts that the trained ones are trained by their policies alone.
        """
        found = []
        for (policy, group), event in self._acknowledged.items():
            trained = {step for _, steps, _ in event["rows"] for step in steps}
            named = {entry["step_id"] for entry in event["skipped"] if "step_id" in entry}
            omitted = {entry["rollout_id"] for entry in event["skipped"] if "step_id" not in entry}
            for rollout in {name for name, *_ in event["rows"]} - omitted:
                for of, step in attempts[rollout].delivered if rollout in attempts else ():
                    assert of == policy or step not in trained, f"{group}: {step} of {of} is trained by {policy}"
                    if of == policy and step not in trained | named:
                        found.append((rollout, step))
        return found

    def check_rewarded(self, attempts: Mapping[str, Attempt]) -> None:
        """Assert that the rollouts in rows are those for which an agent set a reward."""
        for event in self._acknowledged.values():
            for rollout, *_ in event["rows"]:
                assert attempts[rollout].is_rewarded, f"{rollout} has a row, and its agent set no reward"

    def check_versions(self, attempts: Mapping[str, Attempt]) -> int:
        """Assert that each trained step has a version that its policy had between its first sending and its training."""
        announced = {policy: [] for policy in TRAINED}
        for policy, event in self._all("announced"):
            announced[policy].append((event["at"], event["version"]))
        began = dict.fromkeys(FIRST_VERSION.items(), 0.0)
        for policy, event in self._all("announcing"):
            began.setdefault((policy, event["version"]), event["at"])
        sent_at = {step: at for attempt in attempts.values() for step, at in attempt.sent_at.items()}
        checked = 0
        for (policy, _), event in self._acknowledged.items():
            for step, version in event["versions"]:
                assert began.get((policy, int(version)), inf) < event["at"], (
                    f"{step}: version {version} of {policy} was not announced"
                )
                before = [number for at, number in announced[policy] if at < sent_at.get(step, 0)]
                assert int(version) >= max(before, default=FIRST_VERSION[policy]), (
                    f"{step}: {version} after {max(before)}"
                )
                checked += 1
        return checked

    def counts(self) -> dict[str, Any]:
        rows = [row for event in self._acknowledged.values() for row in event["rows"]]
        again = sum(len(events) for events in self._of_batch.values()) - len(self._acknowledged)
        return {
            "batches": len(self._of_batch), "trained groups": len(self._acknowledged), "trained again after a kill": again,
            "rows": len(rows), "trained tokens": sum(tokens for *_, tokens in rows),
            "versions": {policy: len({e["version"] for of, e in self._all("announced") if of == policy}) for policy in TRAINED},
        }  # fmt: skip
