"""The tree: which step goes on from which, by ids alone."""

from dataclasses import replace
from time import process_time

import pytest
from forests import full_ids, make_choice, make_step, rollouts
from hypothesis import given
from hypothesis import strategies as st

from proxy.trajectory.blocks import BlockReader
from proxy.trajectory.codec import decode, encode
from proxy.trajectory.tree import grow, plant

TWIN = {"extra": {"request_key": "same"}}


def parents(steps):
    """The parent of each node, both by name."""
    tree = grow(steps)
    return {node.key: None if node.parent is None else tree.nodes[node.parent].key for node in tree.nodes}


def superseded(*steps):
    tree = grow(steps)
    return {tree.nodes[place].key for place in tree.superseded()}


def parent_by_search(node, nodes):
    """The rule, word by word: the longest full ids that the prompt begins with; then trainable; then the oldest."""
    prompt = list(node.prompt)
    before = [other for other in nodes if prompt[: other.end] == full_ids(other.step, other.choice)]
    return max(before, key=lambda other: (other.end, other.step.trainable, -other.place), default=None)


@given(rollouts())
def test_longest_prefix(steps):
    """A node hangs under the node whose full ids are the longest prefix of its prompt; else it is a root."""
    nodes = grow(steps).nodes
    found = [parent_by_search(node, nodes) for node in nodes]

    assert [parent and parent.place for parent in found] == [node.parent for node in nodes]


@given(rollouts())
def test_children_and_paths(steps):
    """Children are the nodes that name the parent, leaves have none, and paths go up by parents to a root."""
    tree = grow(steps)
    for node in tree.nodes:
        path = tree.path(node)

        assert tree.children[node.place] == tuple(child.place for child in tree.nodes if child.parent == node.place)
        assert (None, node.place) == (path[0].parent, path[-1].place)
        assert [step.place for step in path[:-1]] == [step.parent for step in path[1:]]
    assert tree.leaves == [node for node in tree.nodes if not tree.children[node.place]]


@given(rollouts())
def test_age(steps):
    """Nodes are in order of age, whatever order the steps came in, and each step finds its own."""
    tree = grow(steps)

    assert sorted(node.key for node in tree.nodes) == [node.key for node in tree.nodes]
    assert all([node for node in tree.nodes if node.step is step] == tree.nodes_of(step) for step in steps)


def test_every_choice_is_a_node():
    """Each choice of an n > 1 call is a node of its own, and the one that went on has the child."""
    steps = [make_step("a", [1], [10, 11], [20, 21]), make_step("b", [1, 20, 21, 2], [30])]

    assert {("a", 0): None, ("a", 1): None, ("b", 0): ("a", 1)} == parents(steps)


def test_part_of_a_sample():
    """A prompt that ends within what was sampled does not go on from it."""
    steps = [make_step("a", [1], [10, 11]), make_step("b", [1, 10], [12]), make_step("c", [1, 10, 11], [13])]

    assert {("a", 0): None, ("b", 0): None, ("c", 0): ("a", 0)} == parents(steps)


def test_sample_that_begins_like_another():
    """A node does not go on from one whose full ids end within what it sampled itself."""
    steps = [make_step("a", [1], [10], [10, 11]), make_step("b", [1], [10, 11, 12])]

    assert {("a", 0): None, ("a", 1): None, ("b", 0): None} == parents(steps)


def test_bytes_are_not_ids():
    """Ids whose bytes look alike are different ids."""
    steps = [make_step("a", [1], [256]), make_step("b", [1, 65536], [2]), make_step("c", [257, 0, 1, 256], [3])]

    assert {("a", 0): None, ("b", 0): None, ("c", 0): None} == parents(steps)


def test_identical_samples():
    """Of nodes with the same ids, a step goes on from one that may be trained, then from the oldest."""
    lost = make_step("a", [1], [10], delivered=False)
    steps = [lost, make_step("b", [1], [10]), make_step("c", [1], [10]), make_step("d", [1, 10], [11])]

    assert ("b", 0) == parents(steps)["d", 0]


def test_prompts_of_one_call():
    """Choices of a call with several prompts hang each by its own."""
    first = make_step("a", [1], [10])
    several = make_step("b", [1, 10, 2], [20], make_choice(1, [30], prompt=1))
    several = replace(several, prompts=(*several.prompts, *first.prompts))

    assert {("a", 0): None, ("b", 0): ("a", 0), ("b", 1): None} == parents([first, several])


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (make_step("a", [1], []), "no token was sampled"),
        (make_step("a", [1]), "no token was sampled"),
        (make_step("a", [1], status="error"), "the engine returned an error"),
        (make_step("a", [1], make_choice(0, [10], prompt=1)), "no token was sampled"),
    ],
)
def test_unplaced(step, why):
    """A step without a node is named with the reason."""
    tree = grow([step])

    assert ((), ((step, why),)) == (tree.nodes, tree.unplaced)


def test_no_prompt_ids():
    """A step whose prompt ids are not known has no place."""
    bare = replace(make_step("a", [1], [10]), prompts=())

    assert ((bare, "the engine returned no prompt ids"),) == grow([bare]).unplaced


def test_left_out():
    """What is left out of a tree is context to those after it, which hang under what remains."""
    steps = [make_step("c", [1, 10, 20], [30]), make_step("b", [1, 10], [20]), make_step("a", [1], [10])]
    tree = plant([(step, step.choices[0]) for step in steps if step.step_id != "b"])

    assert {("a", 0): None, ("b", 0): ("a", 0), ("c", 0): ("b", 0)} == parents(steps)
    assert [(("a", 0), None), (("c", 0), 0)] == [(node.key, node.parent) for node in tree.nodes]


def test_retry_then_continued():
    """Of two calls with the same request and prompt, the one that did not go on is superseded."""
    first, again = make_step("a", [1], [10], **TWIN), make_step("b", [1], [20], **TWIN)

    assert {("a", 0)} == superseded(first, again, make_step("c", [1, 20], [30]))
    assert {("b", 0)} == superseded(first, again, make_step("c", [1, 10], [30]))
    assert set() == superseded(first, again)


def test_retry_of_what_did_not_arrive():
    """A leaf that was not delivered, or broke off, is superseded by a twin that was delivered whole."""
    whole = make_step("b", [1], [20], **TWIN)
    lost = make_step("a", [1], [10], delivered=False, **TWIN)
    cut = make_step("a", [1], [10], status="partial", **TWIN)

    assert {("a", 0)} == superseded(lost, whole)
    assert {("a", 0)} == superseded(cut, whole)
    assert set() == superseded(lost, make_step("b", [1], [20], delivered=False, **TWIN))


def test_identical_retry():
    """A retry that sampled the same ids supersedes the lost call, though both lead to what comes after."""
    lost, again = make_step("a", [1], [10], delivered=False, **TWIN), make_step("b", [1], [10], **TWIN)

    assert {("a", 0)} == superseded(lost, again, make_step("c", [1, 10], [30]))


def test_no_twins():
    """Calls of another request, of another prompt, and choices of one call do not supersede each other."""
    child = make_step("c", [1, 10, 5], [30])

    assert set() == superseded(make_step("a", [1], [10]), make_step("b", [1], [20]), child)
    assert set() == superseded(make_step("a", [1], [10], **TWIN), make_step("b", [2], [20], **TWIN), child)
    assert set() == superseded(make_step("a", [1], [10], [20], **TWIN), child)


def test_search_by_several_calls():
    """A call that went on in one of its choices was not replaced, and none of its other choices was."""
    first, second = make_step("a", [1], [10], [11], **TWIN), make_step("b", [1], [20], [21], **TWIN)

    assert set() == superseded(first, second, make_step("c", [1, 10], [30]), make_step("d", [1, 20], [40]))
    assert {("b", 0), ("b", 1)} == superseded(first, second, make_step("c", [1, 10], [30]))


def test_long_rollout():
    """A rollout of 2,000 steps that grows to 22,000 tokens is joined in well under a second."""
    steps = [make_step(f"{turn:04}", range(turn * 11 + 1), range(turn * 11 + 1, turn * 11 + 9)) for turn in range(2000)]
    started = process_time()
    tree = grow(steps[::-1])
    spent_s = process_time() - started

    assert (1, 2000, frozenset()) == (len(tree.leaves), len(tree.path(tree.nodes[-1])), tree.superseded())
    assert spent_s < 2  # 0.1 s on a quiet machine


def parents_by_comparing(placed):
    """The parent of each node by its full ids, all of them at once: one sort and one sweep."""
    fulls = [step.prompts[choice.prompt].tobytes() + choice.ids.tobytes() for step, choice in placed]
    order = sorted(range(len(placed)), key=lambda place: (fulls[place], not placed[place][0].trainable, place))
    parents = [None] * len(placed)
    inside = []
    for place in order:
        full = fulls[place]
        while inside and not full.startswith(fulls[inside[-1]]):
            inside.pop()
        room = len(full) - 4 * len(placed[place][1].ids)
        fitting = [prefix for prefix in inside if len(fulls[prefix]) <= room]
        parents[place] = fitting[-1] if fitting else None
        if not inside or fulls[inside[-1]] != full:
            inside.append(place)
    return parents


@st.composite
def long_rollouts(draw):
    """Steps whose prompts reach over several stored pieces, and end near the end of one."""
    run = st.builds(
        lambda token, count: [token] * count,
        st.sampled_from([1, 256]),
        st.sampled_from([1, 2, 254, 255, 256, 257, 512]),
    )
    steps, histories = [], [[]]
    for number in range(draw(st.integers(1, 7))):
        prompt = [*draw(st.sampled_from(histories)), *draw(st.just([]) | run)]
        choices = [make_choice(index, draw(st.just([3]) | run)) for index in range(draw(st.integers(1, 2)))]
        facts = draw(st.sampled_from([{}, {}, {"problems": ("echo",)}]))
        steps.append(make_step(f"{number}", prompt, *choices, **facts))
        histories += [[*prompt, *choice.ids] for choice in choices]
    return draw(st.permutations(steps))


def read_back(steps, readers):
    """The steps as they are read from the store, by one reader or by one for each."""
    one, read = {}, []
    for step in steps:
        record = encode(step)
        one.update(record.blocks)
        read.append(record.record)
    reader = BlockReader(one)
    return [decode(record, reader if readers == "one" else BlockReader(one)) for record in read]


@pytest.mark.parametrize("kept", ["arrays", "one", "several"])
@given(st.one_of(rollouts(), long_rollouts()))
def test_parents_are_those_of_comparing_all_full_ids(kept, steps):
    """Whether prompts are arrays, or on chains of one reader or of several."""
    read = steps if kept == "arrays" else read_back(steps, kept)
    tree = grow(read)
    placed = [(node.step, node.choice) for node in tree.nodes]

    assert parents_by_comparing(placed) == [node.parent for node in tree.nodes]
    for node in tree.nodes:
        full = [*node.prompt, *node.choice.ids]
        beginnings = set(tree.beginnings(node))
        assert full == [*tree.nodes[tree.same(node)].prompt, *tree.nodes[tree.same(node)].choice.ids]
        for other in tree.nodes:
            begins = [*node.prompt][: other.end] == [*other.prompt, *other.choice.ids]
            assert begins == (tree.same(other) in beginnings)
