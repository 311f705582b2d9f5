"""Sequences: rows of token ids, mask and logprobs for training."""

from array import array
from dataclasses import replace
from math import inf, nan

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.forests import full_ids, make_choice, make_step, rollouts

from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.sequence import (
    Options,
    Scores,
    are_logprobs,
    decode_scores,
    encode_scores,
    select,
    sequences,
    temperature_of,
)
from proxy.trajectory.step import Span
from proxy.trajectory.tree import grow

FACTS = RolloutFacts("r1")
FLAGGED = Options(include="flagged")
TWIN = {"extra": {"request_key": "same"}}
ANY_OPTIONS = st.builds(
    Options,
    branches=st.sampled_from(["all", "one", "longest", "last"]),
    include=st.sampled_from(["exact", "flagged"]),
    max_len=st.one_of(st.none(), st.integers(1, 12)),
    overlong=st.sampled_from(["cut", "drop", "keep"]),
)


def spans(*steps, options=None):
    """Return the spans of each row as step, choice and whether the row owns them."""
    rows = sequences(steps, FACTS, options).rows
    return [[(span.step_id, span.choice, span.owned) for span in row.spans] for row in rows]


def test_tokens_without_requested_logprobs_are_trained_with_null_logprobs():
    """If logprobs were requested and the engine returned none, the step makes no row."""
    unlogged = make_choice(0, [20, 21], logprobs=array("f"))
    steps = [make_step("a", [1], [10]), make_step("b", [1, 10, 2], unlogged)]
    lost = make_step("c", [5], make_choice(0, [6], logprobs=array("f")), problems=("no_logprobs",))
    (row,) = sequences([*steps, lost], FACTS).rows

    assert row.token_ids == [1, 10, 2, 20, 21]
    assert row.mask == [0, 1, 0, 1, 1]
    assert row.logprobs == [None, -10 / 1024, None, None, None]
    assert skipped(*steps, lost, options=FLAGGED) == [("c", "no_logprobs")]


def skipped(*steps, options=None):
    return [(left.step_id, left.why) for left in sequences(steps, FACTS, options).skipped]


def exportable(steps, options):
    """Return the keys of the nodes to train: the selected ones without superseded ones."""
    tree = grow(steps)
    replaced = {tree.nodes[index].key for index in tree.superseded()}
    return {(step.step_id, choice.index) for step, choice in select(steps, options)[0]} - replaced


def owned(rows):
    return [(span.step_id, span.choice) for row in rows for span in row.spans if span.owned]


@given(rollouts(), st.sampled_from([Options(), FLAGGED]))
def test_each_sampled_token_is_trained_exactly_once(steps, options):
    """Over all sequences of a rollout."""
    rows = sequences(steps, FACTS, options).rows
    sampled = sorted(
        token
        for step in steps
        for choice in step.choices
        if (step.step_id, choice.index) in exportable(steps, options)
        for token in choice.ids
    )

    assert sorted(exportable(steps, options)) == sorted(owned(rows))
    assert sampled == sorted(
        token for row in rows for token, trained in zip(row.token_ids, row.mask, strict=True) if trained
    )


@given(rollouts(), ANY_OPTIONS)
def test_the_ids_of_a_sequence_are_the_recorded_ids_in_order(steps, options):
    recorded = {(step.step_id, choice.index): (step, choice) for step in steps for choice in step.choices}
    for row in sequences(steps, FACTS, options).rows:
        for span in row.spans:
            step, choice = recorded[span.step_id, span.choice]

            assert full_ids(step, choice) == row.token_ids[: span.end]
            assert list(choice.ids) == row.token_ids[span.start : span.end]
            if span.owned:
                assert choice.logprobs.tolist() == row.logprobs[span.start : span.end]
        assert row.spans[-1].end == len(row.token_ids)
        assert row.spans[0].start == row.prompt_len


@given(rollouts(), ANY_OPTIONS)
def test_the_mask_is_1_within_owned_spans_only(steps, options):
    """Exactly these tokens have a logprob, and all arrays have the same length."""
    for row in sequences(steps, FACTS, options).rows:
        within = {index for span in row.spans if span.owned for index in range(span.start, span.end)}

        assert [int(index in within) for index in range(len(row.token_ids))] == row.mask
        assert row.mask == [int(logprob is not None) for logprob in row.logprobs]


@given(rollouts(), st.randoms(), ANY_OPTIONS)
def test_rows_and_report_do_not_depend_on_the_order_of_steps(steps, random, options):
    shuffled = random.sample(steps, len(steps))
    in_order, in_disorder = sequences(steps, FACTS, options), sequences(shuffled, FACTS, options)

    assert orjson.dumps([row.as_row() for row in in_order.rows]) == orjson.dumps(
        [row.as_row() for row in in_disorder.rows]
    )
    assert in_order.skipped == in_disorder.skipped


@given(rollouts(), ANY_OPTIONS)
def test_tokens_that_the_options_drop_are_counted(steps, options):
    """They are those that are trained with the default branches and length."""

    def trained(found):
        return sum(len(node.choice.ids) for branch in found.branches for node in branch.owned_nodes)

    found = sequences(steps, FACTS, options)
    whole = sequences(steps, FACTS, replace(options, branches="all", max_len=None))

    assert trained(whole) == trained(found) + sum(entry.dropped_tokens for entry in found.skipped)


@given(rollouts(), ANY_OPTIONS)
def test_the_shares_of_rows_add_up_to_the_reward_and_the_advantage(steps, options):
    facts = replace(FACTS, reward=3.0, advantages=-1.5)
    rows = sequences(steps, facts, replace(options, row_weight="split")).rows

    assert {(3.0 / len(rows), -1.5 / len(rows)) for _ in rows} == {
        (row.facts.reward, row.facts.advantages) for row in rows
    }


@given(rollouts(), ANY_OPTIONS)
def test_every_sampled_choice_is_trained_or_reported(steps, options):
    """No choice is trained twice, with any options."""
    found = sequences(steps, FACTS, options)
    trained, reported = owned(found.rows), {left.step_id for left in found.skipped}
    everything = {(step.step_id, choice.index) for step in steps for choice in step.choices}

    assert len(set(trained)) == len(trained)
    assert {step_id for step_id, _ in everything - set(trained)} == reported
    assert list(range(len(found.rows))) == [row.branch for row in found.rows]
    assert all(any(row.mask) for row in found.rows)
    if options.max_len is not None and options.overlong != "keep":
        assert all(len(row.token_ids) <= options.max_len for row in found.rows)


def test_two_turns_with_a_tool_result_make_one_row():
    """Sampled tokens have mask 1."""
    v3, v4 = (Span(0, 3, "3"),), (Span(0, 2, "4"),)
    first = make_choice(
        0, [201, 202, 9], logprobs=array("f", [-0.5, -0.25, -0.125]), spans=v3, finish_reason="tool_calls"
    )
    second = make_choice(0, [203, 9], logprobs=array("f", [-1.0, -0.0625]), spans=v4)
    steps = [
        make_step("s0", [101, 102, 103], first),
        make_step("s1", [101, 102, 103, 201, 202, 9, 301, 302, 303, 304], second),
    ]
    facts = RolloutFacts("r1", "g1", reward=1.0, step_rewards={"s1": 1.0, "elsewhere": 0.5}, advantages=0.5)
    (row,) = sequences(steps, facts).rows

    assert row.as_row() == {
        "rollout_id": "r1",
        "group_id": "g1",
        "branch": 0,
        "token_ids": [101, 102, 103, 201, 202, 9, 301, 302, 303, 304, 203, 9],
        "mask": [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1],
        "logprobs": [None, None, None, -0.5, -0.25, -0.125, None, None, None, None, -1.0, -0.0625],
        "prompt_len": 3,
        "spans": [
            {
                "start": 3,
                "end": 6,
                "step_id": "s0",
                "choice": 0,
                "policy_version": "3",
                "temperature": 1.0,
                "owned": True,
                "constrained": None,
                "endpoint": "main",
                "engine": "vllm",
                "model": "policy",
                "logprobs_mode": None,
            },
            {
                "start": 10,
                "end": 12,
                "step_id": "s1",
                "choice": 0,
                "policy_version": "4",
                "temperature": 1.0,
                "owned": True,
                "constrained": None,
                "endpoint": "main",
                "engine": "vllm",
                "model": "policy",
                "logprobs_mode": None,
            },
        ],
        "finish_reason": "stop",
        "truncated": False,
        "stop_token_sampled": True,
        "reward": 1.0,
        "step_rewards": {"s1": 1.0},
        "advantages": 0.5,
        "owned": True,
        "metadata": {},
    }


def test_the_oldest_leaf_owns_shared_nodes_even_if_its_branch_began_later():
    root, early, other = make_step("a", [1], [10]), make_step("b", [1, 10], [20]), make_step("c", [1, 10], [30])
    late = make_step("d", [1, 10, 20], [40])

    assert spans(root, early, other, late) == [
        [("a", 0, True), ("c", 0, True)],
        [("a", 0, False), ("b", 0, True), ("d", 0, True)],
    ]


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"problems": ("echo", "prompt_count")}, "echo,prompt_count"),
        ({"status": "partial"}, "status partial"),
        ({"delivered": False}, "not delivered"),
        ({"late": True}, "ended after the rollout was finished"),
    ],
)
def test_steps_that_are_flagged_incomplete_or_undelivered_are_skipped_by_default(facts, why):
    """With include="flagged", their rows have these flags."""
    step = make_step("a", [1], [10], **facts)
    (row,) = sequences([step], FACTS, FLAGGED).rows
    marks = {
        "echo,prompt_count": ["echo", "prompt_count"],
        "status partial": ["partial"],
        "not delivered": ["undelivered"],
        "ended after the rollout was finished": ["late"],
    }[why]

    assert skipped(step) == [("a", why)]
    assert spans(step) == []
    assert marks == row.as_row()["problems"]


@given(rollouts(), st.data())
def test_late_steps_do_not_change_the_default_rows(steps, data):
    """Neither retries of earlier steps nor their continuations."""
    late = (
        data.draw(st.sets(st.sampled_from([step.step_id for step in steps]), max_size=len(steps))) if steps else set()
    )
    early = [step for step in steps if step.step_id not in late]
    marked = [replace(step, late=step.step_id in late) for step in steps]

    assert sequences(early, FACTS).rows == sequences(marked, FACTS).rows


def test_a_late_retry_supersedes_only_with_include_flagged():
    first = make_step("a", [1], [10])
    retry = make_step("b", [1], [20], late=True, extra={"retry_of": "a"})

    assert spans(first, retry) == [[("a", 0, True)]]
    assert skipped(first, retry) == [("b", "ended after the rollout was finished")]
    assert spans(first, retry, options=FLAGGED) == [[("b", 0, True)]]


@pytest.mark.parametrize(
    "logprobs",
    [array("f"), array("f", [-1.0]), array("f", [-1.0] * 3), array("f", [nan, -1.0]), array("d", [-inf, inf])],
)
def test_a_choice_without_one_finite_logprob_per_id_is_never_exported(logprobs):
    """Other choices of the step are."""
    step = make_step("a", [1], make_choice(0, [10, 11], logprobs=logprobs), [20], problems=("bad_logprob",))
    unnoticed = replace(step, problems=())

    assert spans(step, options=FLAGGED) == spans(unnoticed) == [[("a", 1, True)]]
    assert skipped(step, options=FLAGGED) == [("a", "bad_logprob")]
    assert skipped(unnoticed) == [("a", "token ids and logprobs do not match")]


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (make_step("a", [1]), "no token was sampled"),
        (make_step("a", [1], []), "no token was sampled"),
        (make_step("a", [1], [], problems=("no_ids",)), "no_ids"),
        (make_step("a", [1], status="error", problems=("engine_error",)), "engine_error"),
        (replace(make_step("a", [1], [10]), prompts=()), "the engine returned no prompt ids"),
        (replace(make_step("a", [1], [10], problems=("no_prompt_ids",)), prompts=()), "no_prompt_ids"),
    ],
)
def test_a_step_without_prompt_ids_or_sampled_ids_is_reported(step, why):
    assert (spans(step, options=FLAGGED), skipped(step, options=FLAGGED)) == ([], [("a", why)])


def test_the_tokens_of_a_skipped_step_are_context_in_later_ones():
    a, b, c = (
        make_step("a", [1], [10]),
        make_step("b", [1, 10], [20], problems=("echo",)),
        make_step("c", [1, 10, 20], [30]),
    )
    (row,) = sequences([a, b, c], FACTS).rows

    assert (row.token_ids, row.mask) == ([1, 10, 20, 30], [0, 1, 0, 1])


def test_a_row_has_the_flags_of_all_its_steps():
    """Each once, the oldest step's first."""
    steps = [
        make_step("a", [1], [10], problems=("echo",)),
        make_step("b", [1, 10], [20], problems=("prompt_count", "echo")),
        make_step("c", [1, 10, 20], [30]),
    ]
    (row,) = sequences(steps, FACTS, FLAGGED).rows

    assert row.problems == ("echo", "prompt_count")


def test_choices_of_several_prompts_are_rows_with_their_own_prompts():
    """Each can be continued."""
    both = replace(
        make_step("a", [1], [10], make_choice(1, [20], prompt=1)), prompts=(array("i", [1]), array("i", [2]))
    )
    rows = sequences([both, make_step("b", [2, 20, 3], [30])], FACTS).rows

    assert [row.token_ids for row in rows] == [[1, 10], [2, 20, 3, 30]]
    assert spans(both, make_step("b", [2, 20, 3], [30])) == [[("a", 0, True)], [("a", 1, True), ("b", 0, True)]]


def test_a_leaf_that_a_retry_replaced_is_skipped_and_reported():
    a, b, c = make_step("a", [1], [10], **TWIN), make_step("b", [1], [20], **TWIN), make_step("c", [1, 20], [30])

    assert spans(a, b, c) == [[("b", 0, True), ("c", 0, True)]]
    assert skipped(a, b, c) == [("a", "superseded by a retry")]


def test_a_superseded_leaf_is_skipped_even_if_the_retry_is_not_exported():
    a, b = make_step("a", [1], [10], **TWIN), make_step("b", [1], [20], problems=("echo",), **TWIN)
    c = make_step("c", [1, 20], [30])

    assert spans(a, b, c) == [[("c", 0, True)]]
    assert skipped(a, b, c) == [("b", "echo"), ("a", "superseded by a retry")]


def test_a_retry_with_the_same_ids_replaces_the_undelivered_call():
    a = make_step("a", [1], [10], delivered=False, **TWIN)
    b, c = make_step("b", [1], [10], **TWIN), make_step("c", [1, 10], [20], problems=("echo",))

    assert spans(a, b, c) == [[("b", 0, True)]]
    assert spans(a, b, c, options=FLAGGED) == [[("b", 0, True), ("c", 0, True)]]


BRANCHES = (make_step("a", [1], [10]), make_step("b", [1, 10, 2], [20, 21, 22]), make_step("c", [1, 10, 3], [30]))


@pytest.mark.parametrize(
    ("options", "expected", "left"),
    [
        (Options(branches="longest"), [["a", "b"]], [("c", "not on the longest branch")]),
        (Options(branches="last"), [["a", "c"]], [("b", "not on the last branch")]),
        (Options(max_len=4), [["a"], ["a", "c"]], [("b", "longer than max_len=4")]),
        (Options(max_len=4, overlong="drop"), [["a", "c"]], [("b", "longer than max_len=4")]),
        (Options(max_len=4, overlong="keep"), [["a", "b"], ["a", "c"]], []),
        (Options(max_len=3), [["a"]], [("b", "longer than max_len=3"), ("c", "longer than max_len=3")]),
        (Options(max_len=1), [], [(step, "longer than max_len=1") for step in "abc"]),
    ],
)
def test_branches_are_selected_first_and_then_cut_dropped_or_kept_by_max_len(options, expected, left):
    """Rows are cut at a span boundary."""
    assert [[step for step, _, _ in row] for row in spans(*BRANCHES, options=options)] == expected
    assert left == skipped(*BRANCHES, options=options)


def test_of_branches_of_equal_length_the_oldest_is_the_longest():
    assert spans(make_step("b", [2], [20]), make_step("a", [1], [10]), options=Options("longest")) == [[("a", 0, True)]]


def test_a_cut_row_ends_as_its_last_span_and_is_marked_truncated():
    call = make_step("a", [1], make_choice(0, [10], finish_reason="tool_calls"))
    (row,) = sequences([call, make_step("b", [1, 10, 2], [20])], FACTS, Options(max_len=3)).rows

    assert (row.token_ids, row.truncated, row.finish_reason) == ([1, 10], True, "tool_calls")


@pytest.mark.parametrize(
    ("finish_reason", "stop_reason", "sampled"),
    [
        ("stop", None, True),
        ("stop", 151645, True),
        ("stop", "###", None),
        ("tool_calls", 151645, True),
        ("tool_calls", None, None),
        ("length", None, False),
        ("abort", None, False),
        ("repetition", "repetition_detected", False),
        (None, None, None),
        ("content_filter", None, None),
    ],
)
def test_stop_token_sampled_is_null_if_the_engine_does_not_report_it(finish_reason, stop_reason, sampled):
    """A response that ended by length has no stop token."""
    step = make_step("a", [1], make_choice(0, [10], finish_reason=finish_reason, stop_reason=stop_reason))
    (row,) = sequences([step], FACTS).rows

    assert (row.stop_token_sampled, row.truncated) == (sampled, finish_reason in {"length", "abort"})


def test_a_row_with_an_interrupted_last_turn_is_truncated():
    """An interrupted turn before another one does not truncate the row."""
    broken = make_choice(0, [10], finish_reason=None)
    cut = make_step("a", [1], broken, status="partial", delivered=False)
    last, _ = sequences([cut, make_step("s", [0], [1])], FACTS, FLAGGED).rows
    (before,) = sequences([cut, make_step("b", [1, 10], [20])], FACTS, FLAGGED).rows

    assert (last.truncated, last.finish_reason, list(last.problems)) == (True, None, ["partial", "undelivered"])
    assert not before.truncated


@pytest.mark.parametrize(
    ("starts", "facts", "mixed"),
    [
        ({0: "7"}, {}, []),
        ({0: "7", 2: "8"}, {}, [2]),  # `continue`: the engine kept its cache
        ({0: "7", 2: "8", 3: "9"}, {}, [2, 3]),
        ({0: "7", 2: "8"}, {"extra": {"resumed": 1}}, []),
        ({0: "7", 2: "7"}, {"extra": {"resumed": 1}}, []),  # moved to another endpoint
        ({0: "7", 2: "8", 3: "9"}, {"extra": {"resumed": 1}}, [2, 3]),  # one of two changes was under the running call
        ({0: "7"}, {"policy_version": "7", "policy_version_end": "8"}, [0]),  # the engine does not report where
        ({0: "7"}, {"policy_version": "7", "policy_version_end": "8", "extra": {"resumed": 1}}, [0]),
        ({0: "7", 2: "8"}, {"policy_version": "7", "policy_version_end": "8", "extra": {"resumed": 1}}, []),
        ({0: "7", 2: "8"}, {"policy_version": "7", "policy_version_end": "9", "extra": {"resumed": 1}}, [2]),
        ({0: "7", 2: "8"}, {"extra": {"resumed": "1"}}, [2]),
    ],
)
def test_spans_have_how_often_their_call_was_resumed_and_whether_they_were_sampled_over_a_mixed_cache(
    starts, facts, mixed
):
    """A change of the version is over the old cache unless the call was resumed there."""
    ends = [*list(starts)[1:], 4]
    spans = tuple(Span(start, end, version) for (start, version), end in zip(starts.items(), ends, strict=True))
    (row,) = sequences([make_step("S1", [1, 2], make_choice(0, [3, 4, 5, 6], spans=spans), **facts)], FACTS).rows
    found = row.as_row()["spans"]

    assert mixed == [span["start"] - 2 for span in found if span.get("mixed")]
    assert {span.get("resumed") for span in found} == {1 if facts.get("extra") == {"resumed": 1} else None}


@pytest.mark.parametrize("constrained", [True, False, None])
def test_spans_have_the_recorded_constrained_flag(constrained):
    """Null if the step has none."""
    sampling = {"temperature": 1.0} | ({} if constrained is None else {"constrained": constrained})
    (row,) = sequences([make_step("a", [1], [10], sampling=sampling)], FACTS).rows

    assert [span["constrained"] for span in row.as_row()["spans"]] == [constrained]


def test_a_choice_has_one_span_per_policy_version():
    """Without spans of the engine, the step's policy version applies."""
    both = make_choice(0, [10, 11, 12], spans=(Span(0, 2, "7"), Span(2, 3, "8")))
    steps = [make_step("a", [1], both), make_step("b", [2], [20], policy_version="9")]

    assert [
        [(span.start, span.end, span.policy_version) for span in row.spans] for row in sequences(steps, FACTS).rows
    ] == [[(1, 3, "7"), (3, 4, "8")], [(1, 2, "9")]]


def test_a_reason_is_reported_once_per_step():
    flagged = make_step("a", [1], [10], [20], problems=("echo",))
    lost, again = make_step("b", [2], [10], [20], **TWIN), make_step("c", [2], [30], **TWIN)

    assert skipped(flagged, lost, again, make_step("d", [2, 30], [40])) == [
        ("a", "echo"),
        ("b", "superseded by a retry"),
    ]


LOGPROB = st.floats(-100, 0, width=32)


@st.composite
def scored(draw):
    count, top_k = draw(st.integers(0, 8)), draw(st.integers(0, 3))
    return Scores(
        draw(st.text()),
        draw(st.none() | st.text()),
        draw(st.none() | st.text()),
        array("f", draw(st.lists(LOGPROB, min_size=count, max_size=count))),
        top_k,
        array("i", draw(st.lists(st.integers(0, 2**31 - 1), min_size=count * top_k, max_size=count * top_k))),
        array("f", draw(st.lists(LOGPROB, min_size=count * top_k, max_size=count * top_k))),
    )


@given(scored())
def test_scores_are_equal_after_encoding(scores):
    """Any names, and any number of likely tokens."""
    assert scores == decode_scores(encode_scores(scores))


@given(scored(), st.binary(max_size=20), st.integers(0, 200))
def test_other_bytes_are_no_scores(scores, other, cut):
    """A value of another version is computed again."""
    encoded = encode_scores(scores)
    assert None is decode_scores(encoded.replace(b"[", b"[[],", 1))
    assert None is decode_scores(encode_scores(replace(scores, model=5)))
    assert cut >= len(encoded) or None is decode_scores(encoded[:cut])
    decode_scores(other)


@given(scored(), st.data())
def test_values_are_at_the_trained_positions(scores, data):
    """Other positions have the fill value; the likely tokens are lists of equal length."""
    mask = data.draw(st.permutations([1] * len(scores.logprobs) + [0] * data.draw(st.integers(0, 5))))
    filled = scores.filled(mask, None)

    assert [bit == 0 for bit in mask] == [value is None for value in filled]
    assert scores.logprobs.tolist() == [value for value in filled if value is not None]
    if scores.top_k:
        ids, logprobs = scores.filled_top(mask, None)
        assert scores.top_ids.tolist() == [token for entry in ids if entry is not None for token in entry]
        assert scores.top_logprobs.tolist() == [value for entry in logprobs if entry is not None for value in entry]
        assert {scores.top_k} >= {len(entry) for entry in ids if entry is not None}


def test_logprobs_are_finite_and_not_above_zero():
    """Apart from rounding; vLLM's -9999 is a probability of 0."""
    assert are_logprobs([-0.5, 0.0, 1e-7])
    for value in (float("nan"), float("-inf"), 0.1, -9999.0):
        assert not are_logprobs([-0.5, value])


@pytest.mark.parametrize(
    ("value", "expected"), [(1, 1), (0.5, 0.5), (True, None), ("1", None), (float("inf"), None), ([], None)]
)
def test_only_a_finite_number_is_a_temperature(value, expected):
    assert temperature_of(make_step("a", [1], [2], sampling={"temperature": value})) == expected


@pytest.mark.parametrize(
    ("sampling", "shown"),
    [
        ({"top_p": 0.9, "top_k": 20, "min_p": 0.1}, {"top_p": 0.9, "top_k": 20, "min_p": 0.1}),
        ({"top_p": 1, "top_k": -1, "min_p": 0}, {}),
        ({"top_p": "0.9", "top_k": 2.5, "min_p": nan}, {}),
        ({"top_p": True, "top_k": 2**40, "min_p": None}, {}),
    ],
)
def test_spans_have_the_settings_that_truncated_their_sampling(sampling, shown):
    """Values that are no numbers of the setting have no effect."""
    (row,) = sequences([make_step("a", [1], [10], sampling={"temperature": 1.0} | sampling)], FACTS).rows
    (span,) = row.as_row()["spans"]

    assert shown == {name: span[name] for name in ("top_p", "top_k", "min_p") if name in span}
