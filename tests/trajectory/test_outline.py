"""The outline: nodes, branches and counts of a rollout's tree, as the UI draws them."""

from array import array
from dataclasses import asdict, replace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.forests import call, forests, make_choice, make_step

from proxy.trajectory.drift import Drift
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.outline import KINDS, Fork, find_forks, outline
from proxy.trajectory.sequence import sequences
from proxy.trajectory.step import Span, Timing
from proxy.trajectory.tree import grow

FACTS = RolloutFacts("r1")


def test_a_node_has_its_parent_id_range_branches_owner_and_flags():
    twin = {"extra": {"request_key": "same"}}
    steps = [
        make_step("a", [1], [10], **twin),
        make_step("b", [1], [20], **twin),
        make_step("c", [1, 20, 2], [30]),
        make_step("d", [1, 20, 3], [40, 41]),
        make_step("e", [5], [50], problems=("echo",), delivered=False),
        make_step("f", [6], status="error"),
    ]
    drawn = outline(steps, FACTS)
    fields = ["step_id", "parent", "start", "end", "superseded", "branches", "owner", "exact", "delivered", "problems"]

    assert [[node[name] for name in fields] for node in drawn["nodes"]] == [
        ["a", None, 1, 2, True, [], None, True, True, []],
        ["b", None, 1, 2, False, [0, 1], 0, True, True, []],
        ["c", 1, 3, 4, False, [0], 0, True, True, []],
        ["d", 1, 3, 5, False, [1], 1, True, True, []],
        ["e", None, 1, 2, False, [], None, False, False, ["echo"]],
    ]
    (unplaced,) = drawn["unplaced"]
    assert tuple(unplaced[name] for name in ("step_id", "status", "why")) == (
        "f",
        "error",
        "the engine returned an error",
    )
    assert drawn["counts"] == {
        "steps": 6,
        "nodes": 5,
        "roots": 3,
        "leaves": 4,
        "sequences": 2,
        "drift": 0,
        "unplaced": 1,
    }


def test_a_node_with_two_policy_versions_is_in_its_branch_once():
    both = make_choice(0, [10, 11], spans=(Span(0, 1, "7"), Span(1, 2, "8")))
    (node,) = outline([make_step("a", [1], both)], FACTS)["nodes"]

    assert (node["branches"], node["owner"]) == ([0], 0)


def test_a_node_has_start_and_end_in_milliseconds_and_the_opening_of_its_text():
    timing = Timing(received=9.5, sent=10.0, first_byte=10.2, last_byte=11.5, stored=11.6)
    response = {"choices": [{"index": 0, "message": {"content": "x" * 500}}]}
    complete, without_response = outline(
        [make_step("a", [1], [10, 11], timing=timing, response=response), make_step("b", [2], [3], timing=Timing(9.5))],
        FACTS,
    )["nodes"]
    fields = ("started_ms", "ended_ms", "sampled", "opening")

    assert tuple(complete[name] for name in fields) == (10_000, 11_500, 2, "x" * 80)
    assert tuple(without_response[name] for name in fields) == (9_500, None, 1, None)


def test_the_opening_of_a_reply_without_text_is_its_first_tool_call():
    calls = [{"function": {"name": "find", "arguments": '{"q": 1}'}}, {"function": {"name": "other"}}]
    for message, opening in (
        ({"content": None, "tool_calls": calls}, 'calls find {"q": 1}'),
        ({"content": "text", "tool_calls": calls}, "text"),
        ({"content": None, "tool_calls": [7]}, None),
        ({"tool_calls": [{"function": 7}]}, None),
    ):
        response = {"choices": [{"index": 0, "message": message}]}
        assert opening == outline([make_step("a", [1], [2], response=response)], FACTS)["nodes"][0]["opening"]


def test_a_node_has_the_cached_tokens_that_the_engine_reported():
    usage = {"prompt_tokens_details": {"cached_tokens": 1}}
    reported, other = outline([make_step("a", [1, 2], [3], usage=usage), make_step("b", [4], [5])], FACTS)["nodes"]

    assert reported["cached_tokens"] == 1
    assert "cached_tokens" not in other


CONTINUED = {
    "step_id": "a", "choice": 0, "kept": 2, "bridge": 1, "rendered": 4, "rendered_digest": "00ff", "rendered_last": 9,
}  # fmt: skip
REASONS = {"history": "The template renders earlier turns differently."}


def test_a_node_shows_how_its_step_was_continued_or_why_it_was_not():
    """Without the facts that identify a rendering, and with a sentence for the reason. Other nodes do not have the field."""
    facts = [
        CONTINUED,
        {**CONTINUED, "reason": "history"},
        {"reason": "unknown"},
        {"step_id": "a", "choice": 0, "reason": "history"},
    ]
    steps = [make_step(str(number), [1], [2], extra={"continuation": fact}) for number, fact in enumerate(facts)]
    refused = make_step("x", [], status="error", extra={"continuation": facts[2]})
    drawn = outline([*steps, make_step("y", [1], [3]), refused], FACTS, reasons=REASONS)
    shown = {"step_id": "a", "choice": 0, "kept": 2, "bridge": 1, "rendered": 4}
    reason = {"reason": "history", "why": "The template renders earlier turns differently."}
    unknown = {"reason": "unknown", "why": "unknown"}

    assert [node["continuation"] for node in drawn["nodes"][:4]] == [
        shown,
        {**shown, **reason},
        unknown,
        {"step_id": "a", "choice": 0, **reason},
    ]
    assert "continuation" not in drawn["nodes"][4]
    assert [step["continuation"] for step in drawn["unplaced"]] == [unknown]


def test_an_inherited_step_names_the_step_that_was_sampled():
    """So does a failed one; a live step has no such field, but names the step with its call."""
    repeated = {"branched_from": {"rollout_id": "r0", "step_id": "b", "ids": True}}
    inherited = {"inherited": {"rollout_id": "r0", "step_id": "a"}}
    steps = [make_step("a", [1], [2], extra=inherited | repeated), make_step("b", [1, 2, 3], [4], extra=repeated)]
    drawn = outline([*steps, make_step("x", [], status="error", extra=inherited)], FACTS)

    assert [inherited["inherited"], None] == [node.get("inherited") for node in drawn["nodes"]]
    assert "inherited" not in drawn["nodes"][1]
    assert [None, repeated["branched_from"]] == [node.get("branched_from") for node in drawn["nodes"]]
    assert [inherited["inherited"]] == [step["inherited"] for step in drawn["unplaced"]]
    assert sum(drawn["logprobs"]["counts"]) == 1  # without its tokens


def test_a_drift_boundary_shows_why_its_step_was_not_continued():
    boundary = Drift("b", "a", 0, 1, 0, (1,), (2,))
    steps = [make_step("a", [1], [2]), make_step("b", [1, 3], [4], extra={"continuation": {"reason": "history"}})]
    (shown,) = outline(steps, FACTS, [boundary], reasons=REASONS)["drift"]
    (other,) = outline(steps, FACTS, [replace(boundary, step_id="a")], reasons=REASONS)["drift"]

    assert asdict(boundary) | {"reason": "history", "why": REASONS["history"]} == shown
    assert asdict(boundary).keys() == other.keys()


@pytest.mark.parametrize("response", [None, {}, {"choices": None}, {"choices": [None, {"index": 1}, {"message": []}]}])
def test_a_malformed_response_has_no_opening(response):
    assert None is outline([make_step("a", [1], [2], response=response)], FACTS)["nodes"][0]["opening"]


def test_logprobs_are_counted_in_bins_of_half_a_unit():
    """Below -10 they share a bin; NaN is not counted."""
    values = array("d", [0.0, 0.25, -0.49, -0.5, -9.99, -10.0, -1e308, float("nan"), float("-inf")])
    histogram = outline([make_step("a", [1], make_choice(0, list(range(9)), logprobs=values))], FACTS)["logprobs"]

    assert histogram["width"] == 0.5
    assert histogram["counts"] == [3, 1, *[0] * 17, 1, 2]


@given(forests())
def test_a_branch_owns_the_nodes_that_the_export_trains_in_it(steps):
    """The outline is JSON."""
    drawn = outline(steps, FACTS)
    trained = {
        (span.step_id, span.choice): row.branch
        for row in sequences(steps, FACTS).rows
        for span in row.spans
        if span.owned
    }

    assert trained == {
        (node["step_id"], node["choice"]): node["owner"] for node in drawn["nodes"] if node["owner"] is not None
    }
    assert drawn == orjson.loads(orjson.dumps(drawn))


SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "17 times 23?"}
TOOL = {"role": "tool", "content": "391", "tool_call_id": "c1"}


def reply(text: str) -> dict:
    return {"role": "assistant", "content": text}


def called(step_id, prompt, sampled, messages, answer, **facts):
    return call(step_id, prompt, [sampled], messages, {**reply(answer), "refusal": None}, **facts)


FIRST = called("a", [1], [10], [SYSTEM, ASK], "391")
SECOND = called("b", [1, 10, 2], [20], [SYSTEM, ASK, reply("391"), {"role": "user", "content": "Sure?"}], "Yes.")


@pytest.mark.parametrize(
    ("step", "fork"),
    [
        (called("c", [1], [11], [SYSTEM, ASK], "400"), Fork("repeated", "a")),
        (
            called("c", [1, 10, 3], [30], [SYSTEM, ASK, reply("391"), {"role": "user", "content": "Why?"}], "So."),
            Fork("branch", "b", 3, "Sure?", "Why?"),
        ),
        (
            called("c", [5], [30], [SYSTEM, {"role": "user", "content": "Search."}], "Found."),
            Fork("conversation", "a"),
        ),
        (
            called("c", [6], [30], [SYSTEM, ASK, reply("390"), TOOL], "So."),
            Fork("edited", "b", 2, "391", "390"),
        ),
        (called("c", [7], [30], [SYSTEM, ASK, reply("391")], "So."), Fork("rewound", "b")),
        (called("c", [8], [30], [SYSTEM, ASK], "391", extra={"retry_of": "b"}), Fork("retry", "b")),
    ],
)
def test_a_fork_has_its_kind_and_the_texts_that_differ(step, fork):
    """Messages are compared as agents send them back: fields that engines add to a reply are no difference."""
    assert {step.step_id: fork} == {name: found for (name, _), found in find_forks(grow([FIRST, SECOND, step])).items()}


def test_drift_and_choices_are_named_first():
    """Drift has its own report of both texts; the choices of a call have the same prompt."""
    drifted = called("c", [9], [30], [SYSTEM, ASK, reply("391"), TOOL], "So.")
    two = make_step("d", [4], [1], [2])

    assert Fork("drift", "b") == find_forks(grow([FIRST, SECOND, drifted]), {"c"})["c", 0]
    assert Fork("choice", "d") == find_forks(grow([two]))["d", 1]


SHAPES = [None, 7, "text", [], {}, SYSTEM, ASK, TOOL, reply("391"), {"role": "user"}, {"role": [], "content": [{}, 3]}]


@given(forests(), st.lists(st.lists(st.sampled_from(SHAPES), max_size=4), max_size=10))
def test_every_fork_of_any_tree_has_a_kind(steps, bodies):
    """Also with requests of any shape: each node but the oldest child of its parent has one."""
    bodies += [[]] * len(steps)
    tree = grow([replace_request(step, body) for step, body in zip(steps, bodies, strict=False)])
    oldest = {min((node.key for node in tree.nodes if node.parent == each.parent), default=None) for each in tree.nodes}
    forks = find_forks(tree)

    assert {node.key for node in tree.nodes} - oldest == forks.keys()
    assert all(fork.kind in KINDS for fork in forks.values())


def replace_request(step, messages):
    return replace(step, request={"messages": messages})
