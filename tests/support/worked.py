"""The example rollout of all formats: two turns, with one tool result between them.

Turn 1 samples 201 202 9 after 101 102 103; turn 2 continues with 301 302 303 304 and samples 203 9. 9 ends a turn.
"""

from array import array

from tests.support.forests import make_choice, make_step

from proxy.export import FORMATS
from proxy.export.base import PLAIN
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.sequence import Options

P, S1, T, S2 = [101, 102, 103], [201, 202, 9], [301, 302, 303, 304], [203, 9]
L1, L2 = [-0.5, -0.25, -0.125], [-1.0, -0.0625]

QUESTION = [{"role": "user", "content": "What is 2 + 2?"}]
REPLY = {"role": "assistant", "content": "Let me see."}
TOOL = {"role": "tool", "content": "4"}
ANSWER = {"role": "assistant", "content": "Four."}

FACTS = RolloutFacts("r1", "g1", status="completed", reward=1.0, advantages=0.5, metadata={"env_name": "demo"})


def sampled(ids, logprobs, **facts):
    """Return a choice of these ids and logprobs."""
    return make_choice(0, ids, logprobs=array("f", logprobs), **facts)


def first(choice=None, **facts):
    """Return turn 1, with the ID "a"."""
    response = {"choices": [{"index": 0, "message": REPLY, "finish_reason": "stop"}]}
    defaults = {"policy_version": "3", "request": {"messages": QUESTION}, "response": response}
    return make_step("a", P, choice or sampled(S1, L1), **{**defaults, **facts})


def second(choice=None, **facts):
    """Return turn 2, with the ID "b"; its client claimed that 4 tokens were added."""
    response = {"choices": [{"index": 0, "message": ANSWER, "finish_reason": "stop"}]}
    request = {"messages": [*QUESTION, REPLY, TOOL]}
    defaults = {"policy_version": "4", "request": request, "response": response}
    extra = {"request_key": "b", "mask_claim": 4}
    return make_step("b", [*P, *S1, *T], choice or sampled(S2, L2), **{**defaults, "extra": extra, **facts})


STEPS = [first(), second()]


def rows(name, steps=STEPS, facts=FACTS, options=None, fill=PLAIN):
    """Return the rows of a format."""
    return FORMATS[name].rows(facts, steps, options or Options(), fill).rows


def gathered(name, *members, options=None, fill=PLAIN):
    """Return the group of these members' facts; each member has the example's steps."""
    form = FORMATS[name]
    return form.gather([form.rows(facts, STEPS, options or Options(), fill) for facts in members or (FACTS,)])
