"""Playbacks built by hand and by hypothesis: steps that a rollout inherited, and families of a source and its playbacks."""

from dataclasses import replace

from hypothesis import strategies as st
from tests.support.forests import full_ids, make_choice, make_step

from proxy.rollouts.recorder import entry_of
from proxy.trajectory.codec import encode
from proxy.trajectory.step import INHERITED, Span, Step


def inherit(step: Step, rollout_id: str) -> Step:
    """Return this step as a playback has it: its origin is where it was sampled, through chains of playbacks."""
    of = step.inherited or (step.rollout_id, step.step_id)
    origin = {"rollout_id": of[0], "step_id": of[1]}
    return replace(step, rollout_id=rollout_id, extra={**step.extra, INHERITED: origin})


def origin_of(step: Step) -> tuple[str, str]:
    """Return the rollout and the step that sampled the tokens of a step."""
    return step.inherited or (step.rollout_id, step.step_id)


@st.composite
def families(draw: st.DrawFn, sources: st.SearchStrategy[list[Step]], *, repeats: bool = True) -> dict[str, list[Step]]:
    """Draw the steps of a source and of its playbacks, also of playbacks of these, by rollout.

    A playback uses some steps of its tape, and samples others, which continue what it has or repeat steps of the tape, with
    `repeats` also with the same ids, so that inherited steps continue live ones.
    """
    family = {"r0": [replace(step, rollout_id="r0") for step in draw(sources)]}
    for number in range(1, draw(st.integers(1, 3)) + 1):
        name, of = f"r{number}", draw(st.sampled_from([*family]))
        tape = family[of][: draw(st.integers(0, len(family[of])))]
        steps = [inherit(step, name) for step in tape if draw(st.integers(0, 3))]
        prompts = [list(prompt) for step in tape for prompt in step.prompts]
        samples = [choice for step in tape for choice in step.choices]
        histories = [[], *prompts, *(full_ids(step, choice) for step in steps for choice in step.choices)]
        for live in range(draw(st.integers(0, 4))):
            prompt = [*draw(st.sampled_from(histories)), *draw(st.sampled_from([[], [number]]))]
            fresh = [10_000 * number + 10 * live, 10_000 * number + 10 * live + 1]
            again = [list(draw(st.sampled_from(samples)).ids)] if repeats and samples and draw(st.booleans()) else []
            choices = [make_choice(index, ids) for index, ids in enumerate([*again, fresh])]
            # Usually, live steps are younger than inherited ones.
            step_id = f"{draw(st.sampled_from(['9', '9', '9', '05']))}-{number}-{live}"
            facts = draw(st.sampled_from([{}, {}, {}, {"delivered": False}, {"problems": ("echo",)}]))
            steps.append(make_step(step_id, prompt, *choices, rollout_id=name, **facts))
            histories += [prompt, *([*prompt, *choice.ids] for choice in choices)]
        family[name] = draw(st.permutations(steps))
    return family


def branched(origin: str = "r0", **live: object) -> list[Step]:
    """Return a playback that inherited [1] → [10, 9] and [1, 10, 9, 2] → [11, 9], and sampled [..., 3] → [12, 9]."""
    first = make_step("a", [1], [10, 9], rollout_id=origin, policy_version="1")
    second = make_step("b", [1, 10, 9, 2], [11, 9], rollout_id=origin, policy_version="2")
    third = make_step("c", [1, 10, 9, 2, 11, 9, 3], [12, 9], **{"policy_version": "7", **live})
    return [inherit(first, "r1"), inherit(second, "r1"), third]


def at(step: Step, version: str | None, epoch: int = 0) -> Step:
    """Return this step as this version of the policy sampled it."""
    choices = [replace(choice, spans=(Span(0, len(choice.ids), version, epoch),)) for choice in step.choices]
    return replace(step, choices=tuple(choices), policy_version=version)


async def record(store, *steps: Step) -> None:
    """Store steps, in rollouts that exist."""
    for step in steps:
        stored = await store.get(step.rollout_id)
        await store.append(entry_of(step, stored.incarnation, encode(step)), now_ms=1)
