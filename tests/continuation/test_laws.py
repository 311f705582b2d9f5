"""The laws of exact continuation, over random rollouts with every chat template."""

from collections import Counter
from functools import cache

import orjson
from hypothesis import HealthCheck, Phase, given, seed, settings
from tests.support.bridge_oracle import (
    begins_with_the_recorded_ids,
    ends_as_rendered,
    keeps_the_history,
    not_shown,
    wrong_bridge,
)
from tests.support.continuation_table import Combination, Outcome, combinations, outcome, table
from tests.support.continued_rollouts import Boundary, Rollout
from tests.support.conversation_plans import NAMES, plans
from tests.support.equal_replies import ROLLOUTS, Siblings, decode, parse

from proxy.continuation.types import REASONS

PLANS_PER_TEMPLATE = 1
FIXED = settings(
    max_examples=PLANS_PER_TEMPLATE + 1,  # the first one is always the simplest
    database=None,
    deadline=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)


@cache
def boundaries() -> list[Boundary]:
    """Return the calls of a fixed sample of rollouts with each template; `make fuzz` draws new ones."""
    found: list[Boundary] = []
    for number, name in enumerate(NAMES):

        @FIXED
        @seed(number)
        @given(plans((name,)))
        def collect(plan):
            found.extend(Rollout(plan).run())

        collect()
    return found


def continued():
    return [boundary for boundary in boundaries() if boundary.is_continued]


def test_recorded_ids_come_first():
    """A prompt that is sent as ids begins with the prompt ids of the earlier turn and the ids that it sampled."""
    for boundary in continued():
        assert begins_with_the_recorded_ids(boundary), boundary.describe()


def test_the_bridge_is_rendered():
    """What follows the recorded ids is an end of the template's own rendering of the call's messages."""
    for boundary in continued():
        assert ends_as_rendered(boundary), boundary.describe()


def test_the_bridge_is_complete():
    """What follows the recorded ids is the whole text that the template writes after the turn, and nothing else."""
    for boundary in continued():
        wrong = wrong_bridge(boundary)
        assert wrong is None, f"{wrong}\n{boundary.describe()}"


def test_refusals_have_a_reason():
    """A call that continues a turn and is not sent as ids has a documented reason, and nothing is sent."""
    for boundary in boundaries():
        result = boundary.result
        if result is not None and result.ids is None:
            assert result.reason in REASONS, boundary.describe()
            assert (result.kept, result.bridge, result.rendering) == (0, 0, None), boundary.describe()
        elif result is None and boundary.reason is not None:
            assert boundary.reason in {*REASONS, "as_it_came"}, boundary.describe()


def test_linear_calls_find_their_turn():
    """A call that adds messages to the previous one continues its turn, unless its tools differ.

    `as_it_came` replaces the reason of a call that the plan does not continue.
    """
    for boundary in boundaries():
        if boundary.is_linear and boundary.found is None:
            assert boundary.reason in {"options", "as_it_came"}, boundary.describe()


def test_faithful_keeps_what_is_shown():
    """In mode `faithful`, a turn is continued only if the template keeps the history, and shows all parts of the turn."""
    for boundary in continued():
        if boundary.mode == "faithful":
            assert boundary.result.reason in {None, "stop_string"}, boundary.describe()
            assert keeps_the_history(boundary), boundary.describe()
            assert not_shown(boundary) == [], boundary.describe()


def test_the_sample_is_varied():
    """The sample contains continued calls of almost every template in both modes, and each reason of the algorithm."""
    by_template = Counter(boundary.engine.template.name for boundary in continued())
    assert len(by_template) >= len(NAMES) * 0.9, set(NAMES) - set(by_template)
    assert {boundary.mode for boundary in continued()} == {"append", "faithful"}
    reasons = {boundary.reason for boundary in boundaries()}
    expected = {"close", "other_stop", "history", "options", "reasoning_stripped", "hidden_output"}
    assert expected <= reasons, expected - reasons


def as_sent(messages):
    """Return what messages have that a prompt shows."""
    return [
        {
            "role": message["role"],
            "reasoning": message.get("reasoning") or "",
            "content": message["content"].strip(),
            "calls": [[call["function"]["name"], orjson.loads(call["function"]["arguments"])] for call in calls],
        }
        for message in messages
        for calls in [message.get("tool_calls") or ()]
    ]


@settings(max_examples=max(200, settings().max_examples))
@given(ROLLOUTS)
def test_the_ids_decode_to_the_messages_that_the_agent_sent(moves):
    """With replies that are equal in part, other choices, retries and agents in one rollout.

    Reasoning that the agent omits is restored; reasoning and ids of calls that it sends back equal the turn's.
    """
    rollout = Siblings()
    for move in moves:
        sent = rollout.make(move)
        if sent.result is None or sent.result.ids is None:
            continue
        shown, expected = parse(decode(sent.result.ids)), as_sent(sent.messages)
        for message, wanted in zip(shown, expected, strict=True):
            if not wanted["reasoning"]:
                message["reasoning"] = ""
        assert repr(expected) == repr(shown)  # 1, 1.0 and True differ
        turn = sent.found.turn
        ids = {call["id"] for call in sent.messages[turn.place[0]].get("tool_calls") or ()}
        assert not ids & rollout.turns.calls.keys() or ids <= turn.names


@cache
def outcomes() -> list[Outcome]:
    return [outcome(combination) for combination in combinations()]


def test_linear_rollouts_are_one_sequence():
    """In mode `append`, from the first turn of a process on.

    With and without tools, reasoning, and content beside calls; also if the limit or a stop string cuts a reply, if all of
    it is reasoning, and if the agent sends text parts as one text.
    """
    assert [one.combination for one in outcomes() if not one.is_one_sequence] == [], "\n".join(table(outcomes()))
    assert len({one.combination.template for one in outcomes()}) > 35


def test_no_linear_rollout_is_wrong():
    """No bridge of a linear rollout differs from what the template writes."""
    assert [one.combination for one in outcomes() if one.wrong] == []


def test_the_turns_of_gpt_oss_fork_in_faithful():
    """Its model ends an answer with another token than its template writes for it in the history."""
    assert outcome(Combination("gptoss"), "faithful").refused == {"other_stop": 5}
    assert outcome(Combination("gptoss", tools=True), "faithful").refused == {"other_stop": 1}
