"""Drawn groups of rollouts with their steps, and their rows as if a store had them."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

from hypothesis import strategies as st
from tests.support.forests import make_choice, make_step
from tests.support.policies import policies_of

from proxy.api.control.export_query import ExportQuery
from proxy.api.control.group_rows import read_group_rows
from proxy.api.control.schemas import ExportOptions, GroupFilter
from proxy.errors import DamagedStep
from proxy.export import FORMATS, Fill
from proxy.export.containers import CONTAINERS
from proxy.rollouts.group import Group
from proxy.rollouts.rollout import Rollout, no_rollout
from proxy.trajectory.sequence import Options
from proxy.trajectory.thread_rules import ThreadOptions

EOS = 9
FILL = Fill(prompt_length=64, response_length=64)
PROMPTS = ([1, 2], [1, 2], [3], [4, 5])  # shared by several rollouts


@st.composite
def members(draw):
    """Draw rollouts with their steps, or the reason why they are unreadable; every sampled id is unique in the group."""
    fresh = iter(range(100, 1_000_000))
    rewards = draw(st.sampled_from([st.floats(0, 1), st.none(), st.sampled_from([None, 1.0])]))
    group = []
    for number in range(draw(st.sampled_from([1, 2, 2, 3, 4]))):
        rollout = Rollout(
            f"r{number}",
            "b",
            1,
            1,
            reward=draw(rewards),
            advantages=draw(st.sampled_from([0.5, 0.5, -1.0, None])),
            group_id="g",
            metadata={"env_name": "demo"},
        )
        fault = draw(st.sampled_from([None] * 6 + ["deleted", "deleted before", "damaged"]))
        group.append((rollout, fault or draw(conversations(rollout.rollout_id, fresh))))
    return group


@st.composite
def conversations(draw, name, fresh):
    """Draw up to five steps: continuations, repeated prompts, several choices, and steps without a row."""
    steps, histories = [], []
    for number in range(draw(st.sampled_from([0, 1, 2, 3, 4, 5]))):
        prompt = list(PROMPTS[0]) if not steps else [*draw(st.sampled_from([*histories, *PROMPTS])), EOS]
        choices = [
            make_choice(index, [next(fresh) for _ in range(draw(st.sampled_from([0, 1, 2, 2])))])
            for index in range(draw(st.sampled_from([1, 1, 1, 2])))
        ]
        odd = [{"delivered": False}, {"problems": ("echo",)}, {"status": "error", "choices": ()}]
        facts = draw(st.sampled_from([*[{}] * (6 if steps else 20), *odd]))
        response = {"choices": [{"index": choice.index, "message": {"content": "x"}} for choice in choices]}
        step = make_step(
            f"{name}-{number}", prompt, *choices, policy_version="3", rollout_id=name, response=response,
            request={"messages": []},
        )  # fmt: skip
        if steps and draw(st.integers(0, 9)) == 0:  # an engine that returned no ids
            step = replace(step, prompts=(), choices=tuple(make_choice(choice.index, []) for choice in choices))
        steps.append(replace(step, **facts))
        histories += [[*prompt, *choice.ids] for choice in choices if choice.ids]
    return steps


async def read_rows(group, query, conditions=GroupFilter(), *, size=None, whole=False):  # noqa: B008 - it is frozen
    """Read the rows of a group as if a store had these steps."""
    by_name = {rollout.rollout_id: steps for rollout, steps in group}

    async def read_steps(_store, rollout, **_):
        match by_name[rollout.rollout_id]:
            case "deleted":
                raise no_rollout(rollout.rollout_id)
            case "damaged":
                raise DamagedStep(f"the step at index 0 of rollout {rollout.rollout_id!r} cannot be read")
            case steps:
                return steps

    present = [rollout for rollout, steps in group if steps != "deleted before"]
    with (
        patch("proxy.api.control.export_query.read_steps", read_steps),
        patch("proxy.api.control.group_rows.read_short", nothing),
        patch("proxy.api.control.outcomes.read_values", no_values),
    ):
        return await read_group_rows(
            CONTEXT, query, Group("g", "b", 1, size, members=tuple(by_name)), present, conditions, whole=whole
        )


async def nothing(_store, _rollouts):
    return {}


async def no_values(*_, **__):
    return []


async def no_tokenizer(_name):
    return None


# What read_group_rows uses of the context.
CONTEXT = SimpleNamespace(
    store=None,
    metrics=None,
    policies=policies_of(),
    tokenizers=SimpleNamespace(get=no_tokenizer),
    threads=ThreadOptions(),
)


def query_for(name, advantage="given", **options):
    return ExportQuery(FORMATS[name], CONTAINERS["json"], Options(**options), FILL, ExportOptions(advantage=advantage))


def rollouts(*rewards):
    return [
        Rollout(f"r{n}", "b", 1, 1, reward=reward, advantages=9, metadata={"env_name": "demo"})
        for n, reward in enumerate(rewards)
    ]
