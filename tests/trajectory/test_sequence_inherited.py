"""Sequences of playbacks: what they inherited is context, which their source trains."""

from collections import Counter
from dataclasses import replace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.forests import full_ids, make_choice, make_step, rollouts
from tests.support.playbacks import branched, families, inherit, origin_of

from proxy.trajectory.arrays import Experts
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.sequence import BranchPoint, Options, select, sequences
from proxy.trajectory.tree import grow

FACTS = RolloutFacts("r1")
MODES = ("prompt", "masked", "trained")
NOT_TRAINED = st.sampled_from(["prompt", "masked"])


def rows_of(steps, mode="prompt", **options):
    return sequences(steps, FACTS, Options(inherited=mode, **options)).rows


def skipped(steps, mode="prompt", **options):
    return [(left.step_id, left.why) for left in sequences(steps, FACTS, Options(inherited=mode, **options)).skipped]


def test_a_row_begins_with_the_prompt_of_its_first_live_token():
    """It has no spans of what it inherited, and names where it left it."""
    (row,) = rows_of(branched())

    assert row.token_ids == [1, 10, 9, 2, 11, 9, 3, 12, 9]
    assert row.mask == [0, 0, 0, 0, 0, 0, 0, 1, 1]
    assert (row.prompt_len, [span.step_id for span in row.spans]) == (7, ["c"])
    assert row.as_row()["inherited"] == {"of": "r0", "step_id": "b", "tokens": 4}
    assert skipped(branched()) == [("a", "inherited"), ("b", "inherited")]


def test_masked_rows_begin_with_the_first_prompt_and_do_not_train_what_they_inherited():
    """The ids and the mask are the same; inherited tokens have no logprob, and their spans are not owned."""
    (row,) = rows_of(branched(), "masked")
    (shorter,) = rows_of(branched())

    assert (shorter.token_ids, shorter.mask, shorter.logprobs) == (row.token_ids, row.mask, row.logprobs)
    assert (
        row.prompt_len, [(span.step_id, span.owned) for span in row.spans]
    ) == (1, [("a", False), ("b", False), ("c", True)])  # fmt: skip
    assert shorter.inherited == row.inherited
    assert skipped(branched(), "masked") == [("a", "inherited"), ("b", "inherited")]


def test_trained_rows_are_those_of_the_steps_as_if_they_were_live():
    """But they name what they inherited."""
    live = [replace(step, extra={"request_key": step.step_id}) for step in branched()]
    (row,), (expected,) = rows_of(branched(), "trained"), rows_of(live)

    assert BranchPoint("r0", "b", 4) == row.inherited
    assert replace(row, inherited=None) == expected
    assert skipped(branched(), "trained") == []


def test_the_origin_is_the_rollout_that_sampled_the_step_through_chains_of_playbacks():
    source = make_step("a", [1], [10], rollout_id="r0")
    middle = [inherit(source, "r1"), make_step("b", [1, 10, 2], [11], rollout_id="r1")]
    last = [inherit(step, "r2") for step in middle]
    live = make_step("d", [1, 10, 2, 11, 3], [12], rollout_id="r2")
    other = make_step("e", [1, 10, 4], [13], rollout_id="r2")

    assert [BranchPoint("r1", "b", 2), BranchPoint("r0", "a", 1)] == [
        row.inherited for row in rows_of([*last, live, other])
    ]


def test_what_was_inherited_of_a_rollout_without_rows_is_as_live():
    """The row begins with the prompt of its first token, and leaves what other rollouts train before it."""
    first, second, third = branched()
    second = inherit(replace(second, rollout_id="r2", extra={}), "r1")
    for mode, start in (("prompt", 4), ("masked", 1), ("trained", 1)):
        (row,) = rows_of([first, second, third], mode, own=frozenset({"r2"}))
        (other,) = rows_of([first, second, third], mode)

        assert (start, BranchPoint("r0", "a", 2), BranchPoint("r2", "b", 4)) == (
            row.prompt_len, row.inherited, other.inherited
        )  # fmt: skip
        assert [int(mode == "trained")] * 2 + [0, 1, 1, 0, 1, 1] == row.mask[1:]
        assert [
            entry for entry in skipped([first, second, third], mode, own=frozenset({"r2"})) if entry[0] != "a"
        ] == []
    (row,) = rows_of([first, second, third], own=frozenset({"r0", "r2"}))

    assert (row.prompt_len, row.inherited, sum(row.mask)) == (1, None, 6)


@pytest.mark.parametrize("mode", ["prompt", "masked"])
@pytest.mark.parametrize("branches", ["all", "one", "longest", "last"])
def test_a_path_without_a_live_token_is_no_row(mode, branches):
    """It is not the longest or last one either."""
    sub_agent = [
        inherit(make_step("a", [5], [50] * 20, rollout_id="r0"), "r1"),
        inherit(make_step("z", [6], [60], rollout_id="r0"), "r1"),
    ]
    (row,) = rows_of([*sub_agent, *branched()], mode, branches=branches)

    assert [span.step_id for span in row.spans if span.owned] == ["c"]
    assert {*skipped([*sub_agent, *branched()], mode, branches=branches)} == {
        ("a", "inherited"),
        ("b", "inherited"),
        ("z", "inherited"),
    }
    assert [
        rows_of(branched()[:2], mode), tuple(skipped(branched()[:2], mode))
    ] == [(), ((("a"), "inherited"), ("b", "inherited"))]  # fmt: skip


def test_inherited_ids_after_a_live_token_are_context_and_the_row_ends_with_a_live_one():
    """A live reply with the recorded ids is followed by inherited steps."""
    live, after = make_step("c", [1], [10, 9]), make_step("e", [1, 10, 9, 2, 11, 9, 3], [12])
    between = inherit(make_step("d", [1, 10, 9, 2], [11, 9], rollout_id="r0"), "r1")
    for mode in ("prompt", "masked"):
        (row,) = rows_of([live, between, after], mode)
        (shorter,) = rows_of([live, between], mode)

        assert (row.mask, row.inherited) == ([0, 1, 1, 0, 0, 0, 0, 1], None)
        assert shorter.token_ids == [1, 10, 9]


def test_a_row_within_max_len_has_a_live_token():
    live = make_step("d", [1, 10, 9, 2, 11, 9, 3, 12, 9, 4], [13])

    for mode in ("prompt", "masked"):
        (row,) = rows_of([*branched(), live], mode, max_len=9)
        assert (len(row.ids), row.truncated, [s.step_id for s in row.spans if s.owned]) == (9, True, ["c"])
        assert rows_of([*branched(), live], mode, max_len=8) == ()
        assert (skipped([*branched(), live], mode, max_len=8)) == [
            ("a", "inherited"),
            ("b", "inherited"),
            ("c", "longer than max_len=8"),
            ("d", "longer than max_len=8"),
        ]


@pytest.mark.parametrize("mode", MODES)
def test_experts_of_what_was_inherited_are_those_of_the_recorded_steps(mode):
    """Also if the engine returned those of later steps for new tokens only."""

    def with_experts(step, first, count):
        choice = step.choices[0]
        experts = Experts("int32", bytes(range(4 * first, 4 * (first + count))))
        extra = {**step.extra, "routed_experts_start": first}
        return replace(step, choices=(replace(choice, routed_experts=experts),), extra=extra)

    first, second, live = branched()
    steps = [with_experts(first, 0, 2), with_experts(second, 2, 3), with_experts(live, 5, 3)]
    (row,) = rows_of(steps, mode)

    assert row.experts.raw == bytes(range(32))


@given(families(rollouts()), NOT_TRAINED, st.sampled_from(["exact", "flagged"]))
def test_each_sampled_token_is_trained_at_most_once_over_a_source_and_its_playbacks(family, mode, include):
    """And every live token of each of them exactly once."""
    options = Options(inherited=mode, include=include)
    trained = Counter()
    for name, steps in family.items():
        by_id = {step.step_id: step for step in steps}
        own = Counter()
        for row in sequences(steps, RolloutFacts(name), options).rows:
            spans = [span for span in row.spans if span.owned]
            own.update((span.step_id, span.choice) for span in spans)
            trained.update((*origin_of(by_id[span.step_id]), span.choice) for span in spans)
            assert sum(row.mask) == sum(span.end - span.start for span in spans)
        tree = grow(steps)
        replaced = {tree.nodes[index].key for index in tree.superseded()}
        live = [(step.step_id, choice.index) for step, choice in select(steps, options)[0]]

        assert Counter(key for key in live if key not in replaced) == own
        assert all(by_id[step_id].inherited is None for step_id, _ in own)
    assert set(trained.values()) <= {1}


@given(families(rollouts()), st.sampled_from(MODES))
def test_the_ids_of_a_row_are_the_recorded_ids(family, mode):
    """Prompt and masked rows differ in the length of the prompt only."""
    for name, steps in family.items():
        recorded = {(step.step_id, choice.index): (step, choice) for step in steps for choice in step.choices}
        rows = sequences(steps, RolloutFacts(name), Options(inherited=mode)).rows
        for row in rows:
            for span in row.spans:
                step, choice = recorded[span.step_id, span.choice]
                assert full_ids(step, choice) == row.token_ids[: span.end]
            assert row.prompt_len == row.spans[0].start
            assert row.spans[-1].owned
        other = sequences(steps, RolloutFacts(name), Options(inherited="masked")).rows
        if mode == "prompt":
            assert [(row.token_ids, row.mask, row.logprobs) for row in rows] == [
                (row.token_ids, row.mask, row.logprobs) for row in other
            ]


@given(rollouts(), st.sampled_from(["all", "one", "longest", "last"]), st.sampled_from([None, 4, 8]))
def test_the_option_changes_nothing_of_a_rollout_that_inherited_nothing(steps, branches, max_len):
    each = [Options(inherited=mode, branches=branches, max_len=max_len) for mode in MODES]
    found = [sequences(steps, FACTS, options) for options in each]

    assert len({orjson.dumps([row.as_row() for row in one.rows]) for one in found}) == 1
    assert len({one.skipped for one in found}) == 1


def test_a_choice_of_an_inherited_step_is_context_of_the_choices_that_continue_it():
    """Of several choices, one was continued."""
    first = inherit(make_step("a", [1], make_choice(0, [10]), make_choice(1, [11]), rollout_id="r0"), "r1")
    (row,) = rows_of([first, make_step("b", [1, 11, 2], [12])], "masked")

    assert [(span.step_id, span.choice, span.owned) for span in row.spans] == [("a", 1, False), ("b", 0, True)]
    assert BranchPoint("r0", "a", 1) == row.inherited
