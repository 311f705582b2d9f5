"""What the agents of each group do, and the reward of each rollout: functions of the seed and of IDs alone."""

from dataclasses import dataclass
from hashlib import blake2b
from random import Random

SIZE = 8
POLICIES = {"planner": "planner-7b", "solver": "solver-7b", "judge": "judge"}
"""The model of each policy, as its engines serve it."""
TRAINED = ("planner", "solver")
ASKED = {"planner": "planner-7b", "solver": "gpt-5-mini", "judge": "judge"}
"""The model of each policy, as agents name it."""
FIRST_VERSION = {"planner": 1000, "solver": 5000}

DEADS = ("never_calls", "dies_between_calls", "dies_in_a_call", "hangs_with_an_open_stream")
"""Agents that never finish their rollouts."""
BEHAVIORS = [
    *["steady"] * 16, *DEADS, "fails", "fails", "finishes_twice", "finishes_twice", "rewards_late", "rewards_late",
    "loses_an_answer", "loses_an_answer", "loses_an_answer", "finishes_in_a_call",
]  # fmt: skip


@dataclass(frozen=True)
class AgentPlan:
    """One agent: its behavior, its number of turns, the turn at which it deviates, and the seed of its choices."""

    behavior: str
    turns: int
    deviates_at: int
    seed: int


@dataclass(frozen=True)
class GroupPlan:
    """A group: the options with which it is opened, and its agents. In every tenth group all rewards are equal."""

    group_id: str
    over_sample: int | None
    replace: int | None
    deadline_s: float
    idle_s: float
    agents: tuple[AgentPlan, ...]


def group_plan(seed: int, number: int, idle_s: float) -> GroupPlan:
    """Return the plan of a group. Every eighth group loses all agents but one, so that too few members are left."""
    dice = Random(f"{seed} {number}")
    over_sample = dice.choice((None, None, 1, 2))
    behaviors = DEADS if number % 8 == 7 else BEHAVIORS
    agents = [agent_plan(dice, dice.choice(behaviors)) for _ in range(SIZE + (over_sample or 0))]
    if number % 8 == 7:
        agents[0] = agent_plan(dice, "steady")
    return GroupPlan(
        group_id=f"g{number:04}{'-equal' if number % 10 == 9 else ''}",
        over_sample=over_sample,
        replace=1 if number % 8 != 7 and dice.random() < 0.5 else None,
        deadline_s=idle_s * dice.choice((5, 10)),
        idle_s=idle_s * dice.choice((1, 1.5)),
        agents=tuple(agents),
    )


def agent_plan(dice: Random, behavior: str) -> AgentPlan:
    turns = dice.randint(1, 4)
    return AgentPlan(behavior, turns, dice.randrange(turns), dice.getrandbits(48))


def reward_of(group_id: str, rollout_id: str) -> float:
    """Return the reward that the agent of a rollout earns."""
    digest = blake2b(rollout_id.encode(), digest_size=4).digest()
    return 1.0 if group_id.endswith("-equal") else int.from_bytes(digest) % 1000 / 999
