"""What the engines sampled, and whether the rows of a claimed group are made of it."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from tests.system.faults.training.plan import POLICIES, reward_of


def digest_of(ids: Sequence[int]) -> str:
    return blake2b(np.asarray(ids, np.int32).tobytes(), digest_size=12).hexdigest()


def lines_of(path: Path, start: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Return the complete lines of a log from this offset, and the offset behind them."""
    if not path.exists():
        return [], start
    with path.open("rb") as log:
        log.seek(start)
        whole, _, _ = log.read().rpartition(b"\n")
    return [orjson.loads(line) for line in whole.splitlines()], start + len(whole) + (1 if whole else 0)


@dataclass(frozen=True)
class Row:
    """A row of any format: all its ids, which of them are trained, and their logprobs; facts are the claim's `rows[i]`."""

    ids: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    reward: float | None
    advantage: float | None
    facts: dict[str, Any]

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield the start and the end of each run of trained tokens."""
        edges = np.flatnonzero(np.diff(np.concatenate(([0], self.mask, [0]))))
        yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def rows_of(group: dict[str, Any], form: str) -> list[Row]:
    """Read the rows of a claimed group in the format `sequences` or `trl`."""
    if form == "sequences":
        return [
            _row(row["token_ids"], row["mask"], row["logprobs"], row["reward"], row["advantages"], facts)
            for row, facts in zip(group["data"], group["rows"], strict=True)
        ]
    data = group["data"]
    columns = [data[name] for name in ("prompt_ids", "completion_ids", "env_mask", "logprobs", "reward")]
    rows = []
    for prompt, ids, mask, logprobs, reward, facts in zip(*columns, group["rows"], strict=True):
        zeros = [0] * len(prompt)
        rows.append(_row(prompt + ids, zeros + mask, zeros + logprobs, reward, facts["advantage"], facts))
    return rows


def _row(ids, mask, logprobs, reward, advantage, facts) -> Row:
    values = [0.0 if value is None else value for value in logprobs]
    assert len(ids) == len(mask) == len(values), (
        f"{facts}: {len(ids)} ids, {len(mask)} of the mask, {len(values)} logprobs"
    )
    return Row(np.array(ids, np.int32), np.array(mask, np.int8), np.array(values, np.float32), reward, advantage, facts)


class Sampled:
    """What the engines sampled, by rollout and model; `read` adds what they have written since."""

    def __init__(self, logs: Iterable[Path]) -> None:
        self._offsets = dict.fromkeys(logs, 0)
        self._calls: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)

    def read(self) -> None:
        for path, offset in self._offsets.items():
            lines, self._offsets[path] = lines_of(path, offset)
            for line in lines:
                self._calls[line["call"].partition("/")[0], line["model"]].append(line)

    def calls(self) -> Iterator[dict[str, Any]]:
        for calls in self._calls.values():
            yield from calls

    def check_rows(self, policy: str, rows: Sequence[Row]) -> None:
        """Assert that the trained tokens come from calls of the rows' own rollouts to the policy, each call once."""
        used: Counter[tuple[str, str, bytes]] = Counter()
        steps: Counter[str] = Counter()
        for row in rows:
            rollout = row.facts["rollout_id"]
            runs = list(row.runs())
            steps.update(row.facts["step_ids"])
            assert len(runs) == len(row.facts["step_ids"]), (
                f"{rollout}: {len(runs)} runs of tokens, {row.facts['step_ids']}"
            )
            for start, end in runs:
                prompt, ids, logprobs = digest_of(row.ids[:start]), row.ids[start:end], row.logprobs[start:end]
                found = [
                    call
                    for call in self._calls[rollout, POLICIES[policy]]
                    if call["prompt"] == prompt
                    and np.array_equal(call["ids"], ids)
                    and np.array_equal(np.array(call["logprobs"], np.float32), logprobs)
                ]
                assert found, f"{rollout}: no engine of {policy} sampled {ids.tolist()} at {start} with these logprobs"
                key = rollout, prompt, ids.tobytes()
                used[key] += 1
                assert used[key] <= len(found), f"{rollout}: {ids.tolist()} at {start} is trained {used[key]} times"
        assert not (twice := [step for step, count in steps.items() if count > 1]), f"steps in two rows: {twice}"


def check_rewards(group: dict[str, Any], rows: Sequence[Row], members: Sequence[dict[str, Any]]) -> None:
    """Assert that each row has its own rollout's reward, and GRPO's advantage among the members that count.

    `members` are the group's rollouts as `GET /groups/{id}` shows them.
    """
    name = group["group_id"]
    for member in members:
        earned = reward_of(name, member["rollout_id"])
        assert member["reward"] in (None, earned), f"{member['rollout_id']}: reward {member['reward']}, not {earned}"
    uncounted = {
        entry["rollout_id"] for entry in group["skipped"] if entry["why"].startswith(("its over", "it failed"))
    }
    rewards = [m["reward"] for m in members if m["reward"] is not None and m["rollout_id"] not in uncounted]
    mean, spread = np.mean(rewards), np.std(rewards)
    for row in rows:
        rollout = row.facts["rollout_id"]
        earned = reward_of(name, rollout)
        assert earned == row.facts["reward"] == row.reward, (
            f"{rollout}: {row.facts['reward']}, {row.reward}, not {earned}"
        )
        advantage = (earned - mean) / spread if spread > 1e-9 else 0.0
        assert np.isclose(row.advantage, advantage, rtol=1e-6, atol=1e-9), (
            f"{rollout}: {row.advantage}, not {advantage}"
        )
        assert row.facts["advantage"] == row.advantage, f"{rollout}: {row.facts['advantage']}, not {row.advantage}"


def check_members(group: dict[str, Any], members: Sequence[dict[str, Any]]) -> None:
    """Assert that each member has rows, or is named in `skipped`; and never both."""
    omitted = {entry["rollout_id"] for entry in group["skipped"] if "step_id" not in entry}
    named = Counter([*group["rollouts"], *omitted])
    expected = {member["rollout_id"] for member in members}
    assert named.keys() == expected, f"{group['group_id']}: {named.keys() ^ expected} are not named, or not its members"
    assert max(named.values()) == 1, f"{group['group_id']}: rollouts with rows are skipped: {named.most_common(3)}"
    strange = {row["rollout_id"] for row in group["rows"]} ^ set(group["rollouts"])
    assert not strange, f"{group['group_id']}: rows and rollouts differ: {strange}"
