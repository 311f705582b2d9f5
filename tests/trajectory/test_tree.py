"""The tree: a step's parent is the step of its thread with the token ids that its prompt continues."""

import tracemalloc
from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.forests import forests, full_ids, make_choice, make_step, rollouts

from proxy.trajectory.arrays import Link, SharedIds
from proxy.trajectory.blocks import UNIT_BYTES, BlockReader
from proxy.trajectory.codec import decode, encode
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.sequence import sequences
from proxy.trajectory.tree import Prefixes, grow, plant

TWIN = {"extra": {"request_key": "same"}}


def parents(steps):
    """Return the parent key of each node key."""
    tree = grow(steps)
    return {node.key: None if node.parent is None else tree.nodes[node.parent].key for node in tree.nodes}


def superseded(*steps):
    tree = grow(steps)
    return {tree.nodes[index].key for index in tree.superseded()}


def parent_by_search(node, nodes):
    """Return the parent by definition: the longest full ids that are a prefix of the prompt; then trainable; then oldest."""
    prompt = list(node.prompt)
    before = [other for other in nodes if prompt[: other.end] == full_ids(other.step, other.choice)]
    return max(before, key=lambda other: (other.end, other.step.trainable, -other.position), default=None)


@given(rollouts())
def test_children_leaves_and_paths_agree_with_the_parents(steps):
    tree = grow(steps)
    for node in tree.nodes:
        path = tree.path(node)

        assert tree.children[node.position] == tuple(
            child.position for child in tree.nodes if child.parent == node.position
        )
        assert (None, node.position) == (path[0].parent, path[-1].position)
        assert [step.position for step in path[:-1]] == [step.parent for step in path[1:]]
    assert tree.leaves == [node for node in tree.nodes if not tree.children[node.position]]


@given(rollouts())
def test_nodes_are_ordered_by_age(steps):
    """In any order of steps; each step finds its nodes."""
    tree = grow(steps)

    assert sorted(node.key for node in tree.nodes) == [node.key for node in tree.nodes]
    assert all([node for node in tree.nodes if node.step is step] == tree.nodes_of(step) for step in steps)


def test_each_choice_of_a_call_is_a_node():
    """The continued choice has the child."""
    steps = [make_step("a", [1], [10, 11], [20, 21]), make_step("b", [1, 20, 21, 2], [30])]

    assert parents(steps) == {("a", 0): None, ("a", 1): None, ("b", 0): ("a", 1)}


def test_a_prompt_that_ends_within_the_sampled_ids_does_not_continue_them():
    steps = [make_step("a", [1], [10, 11]), make_step("b", [1, 10], [12]), make_step("c", [1, 10, 11], [13])]

    assert parents(steps) == {("a", 0): None, ("b", 0): None, ("c", 0): ("a", 0)}


def test_a_node_with_sampled_ids_that_extend_anothers_is_not_its_child():
    """The prompt itself must contain the parent's ids."""
    steps = [make_step("a", [1], [10], [10, 11]), make_step("b", [1], [10, 11, 12])]

    assert parents(steps) == {("a", 0): None, ("a", 1): None, ("b", 0): None}


def test_ids_are_compared_as_numbers_not_as_bytes():
    steps = [make_step("a", [1], [256]), make_step("b", [1, 65536], [2]), make_step("c", [257, 0, 1, 256], [3])]

    assert parents(steps) == {("a", 0): None, ("b", 0): None, ("c", 0): None}


def test_of_nodes_with_equal_ids_the_parent_is_the_oldest_trainable_one():
    lost = make_step("a", [1], [10], delivered=False)
    steps = [lost, make_step("b", [1], [10]), make_step("c", [1], [10]), make_step("d", [1, 10], [11])]

    assert parents(steps)["d", 0] == ("b", 0)


def test_choices_of_several_prompts_are_placed_by_their_own_prompt():
    first = make_step("a", [1], [10])
    several = make_step("b", [1, 10, 2], [20], make_choice(1, [30], prompt=1))
    several = replace(several, prompts=(*several.prompts, *first.prompts))

    assert parents([first, several]) == {("a", 0): None, ("b", 0): ("a", 0), ("b", 1): None}


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (make_step("a", [1], []), "no token was sampled"),
        (make_step("a", [1]), "no token was sampled"),
        (make_step("a", [1], status="error"), "the engine returned an error"),
        (make_step("a", [1], make_choice(0, [10], prompt=1)), "no token was sampled"),
    ],
)
def test_a_step_without_a_node_is_reported_with_the_reason(step, why):
    tree = grow([step])

    assert (tree.nodes, tree.unplaced) == ((), ((step, why),))


def test_a_step_without_prompt_ids_has_no_node():
    bare = replace(make_step("a", [1], [10]), prompts=())

    assert grow([bare]).unplaced == ((bare, "the engine returned no prompt ids"),)


def test_descendants_of_a_step_that_is_not_planted_are_children_of_its_parent():
    steps = [make_step("c", [1, 10, 20], [30]), make_step("b", [1, 10], [20]), make_step("a", [1], [10])]
    tree = plant([(step, step.choices[0]) for step in steps if step.step_id != "b"])

    assert parents(steps) == {("a", 0): None, ("b", 0): ("a", 0), ("c", 0): ("b", 0)}
    assert [(node.key, node.parent) for node in tree.nodes] == [(("a", 0), None), (("c", 0), 0)]


def test_of_two_calls_with_equal_request_and_prompt_the_one_that_is_not_continued_is_superseded():
    first, again = make_step("a", [1], [10], **TWIN), make_step("b", [1], [20], **TWIN)

    assert superseded(first, again, make_step("c", [1, 20], [30])) == {("a", 0)}
    assert superseded(first, again, make_step("c", [1, 10], [30])) == {("b", 0)}
    assert superseded(first, again) == set()


def test_an_undelivered_or_partial_leaf_is_superseded_by_a_delivered_retry():
    whole = make_step("b", [1], [20], **TWIN)
    lost = make_step("a", [1], [10], delivered=False, **TWIN)
    cut = make_step("a", [1], [10], status="partial", **TWIN)

    assert superseded(lost, whole) == {("a", 0)}
    assert superseded(cut, whole) == {("a", 0)}
    assert superseded(lost, make_step("b", [1], [20], delivered=False, **TWIN)) == set()


def test_a_retry_with_equal_ids_supersedes_the_undelivered_call():
    """Although the continuation fits both."""
    lost, again = make_step("a", [1], [10], delivered=False, **TWIN), make_step("b", [1], [10], **TWIN)

    assert superseded(lost, again, make_step("c", [1, 10], [30])) == {("a", 0)}


def test_calls_of_another_request_or_prompt_and_choices_of_one_call_do_not_supersede_each_other():
    child = make_step("c", [1, 10, 5], [30])

    assert superseded(make_step("a", [1], [10]), make_step("b", [1], [20]), child) == set()
    assert superseded(make_step("a", [1], [10], **TWIN), make_step("b", [2], [20], **TWIN), child) == set()
    assert superseded(make_step("a", [1], [10], [20], **TWIN), child) == set()


def test_a_call_with_a_continued_choice_is_not_superseded():
    """Nor are its other choices."""
    first, second = make_step("a", [1], [10], [11], **TWIN), make_step("b", [1], [20], [21], **TWIN)

    assert superseded(first, second, make_step("c", [1, 10], [30]), make_step("d", [1, 20], [40])) == set()
    assert superseded(first, second, make_step("c", [1, 10], [30])) == {("b", 0), ("b", 1)}


@st.composite
def long_rollouts(draw):
    """Draw steps with prompts that span several stored pieces and end near the end of a piece."""
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
    """Return the steps as read from the store, by one reader or by one reader per step."""
    blocks, read = {}, []
    for step in steps:
        record = encode(step)
        blocks.update(record.blocks)
        read.append(record.record)
    reader = BlockReader(blocks)
    return [decode(record, reader if readers == "one" else BlockReader(blocks)) for record in read]


@pytest.mark.parametrize("kept", ["arrays", "one", "several"])
@given(st.one_of(rollouts(), long_rollouts()))
def test_the_parent_is_the_node_with_the_longest_matching_full_ids(kept, steps):
    """For prompts in arrays, on chains of one reader and on chains of several readers."""
    read = steps if kept == "arrays" else read_back(steps, kept)
    tree = grow(read)
    found = [parent_by_search(node, tree.nodes) for node in tree.nodes]

    assert [parent and parent.position for parent in found] == [node.parent for node in tree.nodes]
    for node in tree.nodes:
        full = [*node.prompt, *node.choice.ids]
        beginnings = set(tree.beginnings(node))
        assert full == [*tree.nodes[tree.same(node)].prompt, *tree.nodes[tree.same(node)].choice.ids]
        for other in tree.nodes:
            begins = [*node.prompt][: other.end] == [*other.prompt, *other.choice.ids]
            assert begins == (tree.same(other) in beginnings)


@st.composite
def growing_rollouts(draw):
    """Draw steps. Most continue the step before, up to an id; some are retries."""
    run = st.builds(lambda token, count: [token] * count, st.sampled_from([1, 256]), st.sampled_from([0, 1, 255, 257]))
    steps, full = [], []
    for number in range(draw(st.integers(1, 6))):
        prompt = [*full[: len(full) - draw(st.sampled_from([0] * 9 + [1]))], *draw(run)]
        extra = draw(st.sampled_from([{}, {}, {"retry_of": "0"}, {"attempt": 1, "request_key": "same"}]))
        facts = draw(st.sampled_from([{}, {}, {"delivered": False}, {"problems": ("echo",)}]))
        steps.append(make_step(f"{number}", prompt, [3, *draw(run)], extra={"request_key": "same", **extra}, **facts))
        full = [*prompt, *steps[-1].choices[0].ids]
    return draw(st.permutations(steps))


@given(st.one_of(growing_rollouts(), rollouts(), long_rollouts()))
def test_the_tree_of_one_path_needs_no_index_and_is_the_same(steps):
    indexed, tree = grow(steps), grow(read_back(steps, "one"))

    assert [node.parent for node in indexed.nodes] == [node.parent for node in tree.nodes]
    assert (indexed.children, indexed.superseded()) == (tree.children, tree.superseded())
    for node, same in zip(tree.nodes, indexed.nodes, strict=True):
        assert (indexed.same(same), list(indexed.beginnings(same))) == (tree.same(node), list(tree.beginnings(node)))


@pytest.mark.parametrize(("prompt", "takes_index"), [([1] * 600 + [2, 3], False), ([1] * 600, True), ([2] * 601, True)])
def test_only_a_rollout_of_one_path_has_no_index(prompt, takes_index):
    tree = grow(read_back([make_step("a", [1] * 600, [2]), make_step("b", prompt, [5])], "one"))

    assert takes_index is (tree._index is not None)


def with_images(step_id, prompt, *names, token=9, **facts):
    """Return a step with these images and the placeholder `token`."""
    extra = {"request_key": step_id, "images": {"ids": list(names), "token": token}}
    return make_step(step_id, prompt, [int(step_id, 36)], **{"extra": extra, **facts})


def test_steps_with_different_images_do_not_join():
    """The ids of their prompts are equal: every image has the same placeholder."""
    first = with_images("a", [1, 9, 9, 2], "red")
    same = with_images("b", [1, 9, 9, 2, 10, 9, 3], "red", "blue")
    other = with_images("c", [1, 9, 9, 2, 10, 9, 3], "green", "blue")

    assert parents([first, same, other]) == {("a", 0): None, ("b", 0): ("a", 0), ("c", 0): None}


def test_a_call_with_another_image_is_no_retry():
    retry = {"request_key": "same"}
    first, second, third = (
        with_images(step_id, [1, 9], name, extra={**retry, "images": {"ids": [name], "token": 9}}, delivered=delivered)
        for step_id, name, delivered in (("a", "red", False), ("b", "blue", True), ("c", "red", True))
    )

    assert superseded(first, second) == set()
    assert superseded(first, second, third) == {("a", 0)}


def test_a_text_step_is_continued_by_one_with_images():
    steps = [
        make_step("a", [1], [2]),
        with_images("b", [1, 2, 9, 3], "red"),
        with_images("c", [1, 2, 9, 3, 11, 4], "red"),
    ]

    assert parents(steps) == {("a", 0): None, ("b", 0): ("a", 0), ("c", 0): ("b", 0)}


def test_steps_with_images_of_unknown_places_join_only_if_all_images_are_equal():
    first = with_images("a", [1, 9, 2], "red", token=None)
    equal = with_images("b", [1, 9, 2, 10, 3], "red", token=None)
    more = with_images("c", [1, 9, 2, 10, 3], "red", "blue", token=None)

    assert parents([first, equal, more]) == {("a", 0): None, ("b", 0): ("a", 0), ("c", 0): None}


LENGTHS = st.sampled_from([0, 0, 1, 2, 255, 256, 257, 511, 512, 513])
RUN = st.builds(lambda token, count: [token] * count, st.sampled_from([1, 256, -1]), LENGTHS)
IDS = st.lists(RUN, max_size=3).map(lambda runs: [token for run in runs for token in run])


def shared(ids, links):
    """Return the ids as a prompt read from the store, with links of its own reader or cut into other pieces."""
    raw = array("i", ids).tobytes()
    link, size = None, UNIT_BYTES if links is None else 512
    for start in range(0, len(raw) - len(raw) % size, size):
        link = Link(link, raw[start : start + size])
    return SharedIds(link, raw[len(raw) - len(raw) % size :])


def as_prompt(ids, how):
    return array("i", ids) if how == "array" else shared(ids, None if how == "chain" else how)


@given(
    st.lists(st.tuples(IDS, IDS, st.sampled_from(["array", "chain", "short pieces"])), max_size=6),
    IDS,
    st.sampled_from(["array", "chain", "short pieces"]),
)
def test_all_prefixes_of_a_prompt_are_found_longest_first(sequences, prompt, how):
    """In every representation of a prompt; of equal sequences the first one is found."""
    prefixes, fulls = Prefixes(), []
    for number, (start, sampled, kept) in enumerate(sequences):
        fulls.append([*start, *sampled])
        known = prefixes.add(prefixes.locate(as_prompt(start, kept)), array("i", sampled), number)
        assert fulls.index(fulls[number]) == known
    expected = {tuple(full): fulls.index(full) for full in fulls if prompt[: len(full)] == full}

    assert [expected[full] for full in sorted(expected, key=len, reverse=True)] == list(
        prefixes.beginnings(prefixes.locate(as_prompt(prompt, how)))
    )


@pytest.mark.parametrize("steps", [400])
def test_prompts_on_a_shared_chain_are_indexed_without_copies(steps):
    link, prompts = None, []
    for number in range(steps):
        link = Link(link, array("i", [number] * 256).tobytes())
        prompts.append(SharedIds(link, b""))
    tracemalloc.start()
    prefixes = Prefixes()
    located = [prefixes.locate(prompt) for prompt in prompts]
    for number, location in enumerate(located):
        prefixes.add(location, array("i", [number + 1, -1]), number)
    found = [list(prefixes.beginnings(location)) for location in located]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert found == [[]] * steps
    assert peak < 1500 * steps  # copies of the prompts would be 200 times as much


FACTS = RolloutFacts("r1")


@given(steps=forests(), data=st.data())
def test_the_rows_of_a_rollout_equal_the_rows_of_each_thread_alone(steps, data):
    """Each token is trained once, and the row names the thread."""
    threads = {step.step_id: data.draw(st.sampled_from(["main", "a"])) for step in steps}
    named = [replace(step, thread=threads[step.step_id]) for step in steps]
    alone = [sequences([step for step in named if step.thread == name], FACTS).rows for name in ("main", "a")]
    joined = sequences(named, FACTS).rows

    def contents(rows):
        return sorted((row.thread, row.token_ids, row.mask) for row in rows)

    assert contents([*alone[0], *alone[1]]) == contents(joined)
    assert {row.thread for row in joined} <= {"main", "a"}


@given(steps=forests())
def test_one_thread_changes_nothing(steps):
    named = grow([replace(step, thread="main") for step in steps])

    assert [node.parent for node in grow(steps).nodes] == [node.parent for node in named.nodes]
    assert grow(steps).superseded() == named.superseded()


@pytest.mark.parametrize("thread", [None, "main"])
def test_a_row_names_its_thread_if_it_is_known(thread):
    (row,) = sequences([replace(make_step("a", [1, 2], [3]), thread=thread)], FACTS).rows

    assert thread == row.as_row().get("thread")
