"""Rollouts built by hand and by hypothesis: steps from token ids, random forests, and crowds of similar steps."""

from array import array
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from proxy.trajectory.step import Choice, EngineFacts, Step, Timing

ENGINE = EngineFacts("main", "vllm", "0.32.0", "http://engine")


def make_choice(index: int, ids: Sequence[int], **facts) -> Choice:
    """Return a choice of these ids; the logprob of each is unique: the negated id in 1,024ths."""
    logprobs = array("f", [-token / 1024 for token in ids])
    return Choice(**{"index": index, "ids": array("i", ids), "logprobs": logprobs, "finish_reason": "stop", **facts})


def make_step(step_id: str, prompt: Sequence[int], *sampled: Sequence[int] | Choice, **facts) -> Step:
    """Return a step of one prompt; each of `sampled` is a choice, or the ids of one."""
    choices = [ids if isinstance(ids, Choice) else make_choice(position, ids) for position, ids in enumerate(sampled)]
    defaults = {
        "rollout_id": "r1",
        "dialect": "chat",
        "endpoint": "/v1/chat/completions",
        "engine": ENGINE,
        "model_asked": "policy",
        "model_served": "policy",
        "request": {},
        "sent": {},
        "response": None,
        "usage": None,
        "sampling": {"temperature": 1.0},
        "timing": Timing(0.0),
        "status": "complete",
        "extra": {"request_key": step_id},
    }
    return Step(step_id=step_id, prompts=(array("i", prompt),), choices=tuple(choices), **{**defaults, **facts})


def call(
    step_id: str, prompt: Sequence[int], sampled: Sequence[Sequence[int]], messages: list, *replies, **facts
) -> Step:
    """Return a chat step of these messages; each reply is the message of one choice."""
    response = {"choices": [{"index": index, "message": reply} for index, reply in enumerate(replies)]}
    return make_step(step_id, prompt, *sampled, request={"messages": messages}, response=response, **facts)


def full_ids(step: Step, choice: Choice) -> list[int]:
    """Return a node's full ids."""
    return [*step.prompts[choice.prompt], *choice.ids]


@st.composite
def forests(draw: st.DrawFn) -> list[Step]:
    """Draw the steps of one rollout, in any order: continuations, branches, retries, rollbacks, edits, repeats, aborts."""
    fresh = iter(range(1, 1_000_000))
    steps: list[Step] = []
    grown: list[list[int]] = [[]]
    for number in range(draw(st.integers(1, 10))):
        base = draw(st.sampled_from(grown))
        cut = draw(st.sampled_from([0, 0, 0, 1, 2]))  # an edited history ends within the sampled ids
        prompt = [*base[: len(base) - cut], *(next(fresh) for _ in range(draw(st.integers(0, 2))))]
        retried = draw(st.sampled_from([None, None, *steps]))
        if retried is not None:
            prompt = list(retried.prompts[0])
        choices = [_draw_choice(draw, index, fresh, steps) for index in range(draw(st.integers(1, 3)))]
        key = str(number) if retried is None else retried.extra["request_key"]
        facts = draw(
            st.sampled_from([{}, {}, {}, {"delivered": False}, {"status": "partial"}, {"problems": ("echo",)}])
        )
        step = make_step(f"{number:02}", prompt, *choices, extra={"request_key": key}, **facts)
        steps.append(step)
        grown += [full_ids(step, choice) for choice in choices] + [prompt]
    return draw(st.permutations(steps))


def _draw_choice(draw: st.DrawFn, index: int, fresh, steps: list[Step]) -> Choice:
    ids = [next(fresh) for _ in range(draw(st.integers(0, 3)))]
    if steps and draw(st.integers(0, 3)) == 0:
        ids = list(draw(st.sampled_from(steps)).choices[0].ids)  # identical samples occur
    finish = draw(st.sampled_from(["stop", "length", None]))
    return make_choice(index, ids, finish_reason=finish)


@st.composite
def crowds(draw: st.DrawFn) -> list[Step]:
    """Draw steps from three ids only, so that most share prefixes; with several prompts, and choices in any order."""
    ids = st.lists(st.sampled_from([1, 256, 65536]), max_size=3)
    steps = []
    for number in range(draw(st.integers(1, 10))):
        prompts = [array("i", draw(ids)) for _ in range(draw(st.integers(1, 2)))]
        choices = [
            make_choice(index, draw(ids), prompt=draw(st.integers(0, len(prompts) - 1)))
            for index in draw(st.permutations(range(draw(st.integers(1, 3)))))
        ]
        facts = draw(st.sampled_from([{}, {}, {"delivered": False}, {"problems": ("echo",)}]))
        extra = {"request_key": draw(st.sampled_from("xyz"))}
        step = make_step(f"{number:02}", [], *choices, extra=extra, **facts)
        steps.append(replace(step, prompts=tuple(prompts)))
    return draw(st.permutations(steps))


def rollouts() -> st.SearchStrategy[list[Step]]:
    """Draw forests or crowds."""
    return st.one_of(forests(), crowds())


@st.composite
def unique_forests(draw: st.DrawFn) -> list[Step]:
    """Draw steps in any order in which every id occurs in one prompt or sample: an id shows its origin.

    Calls continue, branch, roll back, edit, are retried (marked as retries or not), abort; no two samples are alike.
    """
    fresh = iter(range(1, 1_000_000))
    steps: list[Step] = []
    histories: list[list[int]] = [[]]
    names = draw(st.permutations(range(12)))  # several replicas with different clocks: IDs do not show the order
    for number in range(draw(st.integers(1, 12))):
        base = draw(st.sampled_from(histories))
        cut = draw(st.sampled_from([0, 0, 0, 0, 1, 2]))
        prompt = [*base[: len(base) - cut], *(next(fresh) for _ in range(draw(st.integers(0 if base else 1, 2))))]
        extra = {"request_key": str(number)}
        retried = draw(st.sampled_from([None, None, None, *steps]))
        if retried is not None:
            prompt = list(retried.prompts[0])
            extra = {"request_key": retried.extra["request_key"], **draw(_retry_marks(retried))}
        choices = [
            make_choice(index, [next(fresh) for _ in range(draw(st.integers(0, 3)))])
            for index in range(draw(st.integers(1, 3)))
        ]
        facts = draw(
            st.sampled_from([{}, {}, {}, {"delivered": False}, {"status": "partial"}, {"problems": ("echo",)}])
        )
        step = make_step(f"{names[number]:02}", prompt, *choices, extra=extra, **facts)
        steps.append(step)
        histories += [full_ids(step, choice) for choice in choices if choice.ids]
    return draw(st.permutations(steps))


def _retry_marks(retried: Step) -> st.SearchStrategy[dict]:
    """Draw how a client marks its retry: not at all, as a retry, or as a retry of a certain call."""
    attempt = retried.extra.get("attempt", 0) + 1
    return st.sampled_from([{}, {"attempt": attempt}, {"attempt": attempt, "retry_of": retried.step_id}])
