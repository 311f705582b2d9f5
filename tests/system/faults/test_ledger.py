"""The trainers of the soak detect wrong rows: they compare them with what the engines sampled."""

import copy

import orjson
import pytest
from tests.system.faults.training.ledger import Sampled, check_members, check_rewards, digest_of, rows_of
from tests.system.faults.training.plan import reward_of

IDS, MASK, LOGPROBS = [1, 2, 7, 8, 3, 9], [0, 0, 1, 1, 0, 1], [None, None, -0.5, -0.25, None, -1.5]
REWARDS = {name: reward_of("g1", name) for name in ("r1", "r2")}
MEMBERS = [{"rollout_id": name, "reward": reward} for name, reward in REWARDS.items()]
HIGHER = max(REWARDS, key=REWARDS.__getitem__)


def group() -> dict:
    """Return a claimed group of two rollouts with two turns each, in the format `sequences`."""
    advantages = {name: 1.0 if name == HIGHER else -1.0 for name in REWARDS}
    return {
        "group_id": "g1",
        "rollouts": ["r1", "r2"],
        "skipped": [],
        "rows": [
            {"rollout_id": name, "step_ids": [f"{name}-1", f"{name}-2"], "reward": REWARDS[name], "advantage": advantages[name]}
            for name in REWARDS
        ],
        "data": [
            {
                "token_ids": IDS, "mask": MASK, "logprobs": LOGPROBS, "reward": REWARDS[name], "advantages": advantages[name]
            }
            for name in REWARDS
        ],
    }  # fmt: skip


@pytest.fixture
def sampled(tmp_path) -> Sampled:
    calls = [
        {"call": f"{name}/x", "model": "planner-7b", "prompt": digest_of(IDS[:start]), "ids": ids, "logprobs": logprobs}
        for name in REWARDS
        for start, ids, logprobs in ((2, [7, 8], [-0.5, -0.25]), (5, [9], [-1.5]))
    ]
    (tmp_path / "engine").write_bytes(b"".join(orjson.dumps(call) + b"\n" for call in calls) + b'{"call": "cut')
    found = Sampled([tmp_path / "engine"])
    found.read()
    return found


def check(sampled: Sampled, claimed: dict, policy: str = "planner") -> None:
    rows = rows_of(claimed, "sequences")
    sampled.check_rows(policy, rows)
    check_members(claimed, MEMBERS)
    check_rewards(claimed, rows, MEMBERS)


def test_rows_that_were_sampled_pass(sampled):
    """Each run of trained tokens is one call of the rollout."""
    check(sampled, group())


def wrong_row(**changes):
    def change(claimed):
        claimed["data"][0] = {**claimed["data"][0], **changes}

    return change


def wrong_fact(**changes):
    def change(claimed):
        claimed["rows"][0] |= changes

    return change


def trained_twice(claimed):
    claimed["data"][0] |= {
        "token_ids": [1, 2, 7, 8, 1, 2, 7, 8],
        "mask": [0, 0, 1, 1] * 2,
        "logprobs": LOGPROBS[:4] * 2,
    }
    claimed["data"].append(claimed["data"][1])
    claimed["rows"].append({**claimed["rows"][1], "step_ids": ["r2-3", "r2-4"]})


def omitted_member(claimed):
    claimed["rollouts"].pop()
    del claimed["rows"][1], claimed["data"][1]


@pytest.mark.parametrize(
    "change",
    [
        wrong_row(token_ids=[1, 2, 7, 7, 3, 9]),
        wrong_row(token_ids=[2, 2, 7, 8, 3, 9]),
        wrong_row(mask=[0, 1, 1, 0, 0, 1]),
        wrong_row(mask=[0, 0, 1, 1, 1, 1]),
        wrong_row(logprobs=[None, None, -0.5, -0.26, None, -1.5]),
        wrong_row(reward=REWARDS["r2"]),
        wrong_row(advantages=0.5),
        wrong_fact(rollout_id="r3"),
        wrong_fact(reward=REWARDS["r2"]),
        wrong_fact(step_ids=["r1-1"]),
        wrong_fact(step_ids=["r1-1", "r2-1"]),
        trained_twice,
        omitted_member,
    ],
)
def test_wrong_rows_are_detected(sampled, change):
    """A different id, prompt, mask, logprob, rollout, reward, advantage or step; a call in two rows; a missing member."""
    claimed = copy.deepcopy(group())
    change(claimed)
    with pytest.raises(AssertionError):
        check(sampled, claimed)


def test_rows_of_another_policy_are_detected(sampled):
    """The same ids were not sampled by the model of that policy."""
    with pytest.raises(AssertionError, match="no engine of solver sampled"):
        check(sampled, group(), "solver")
