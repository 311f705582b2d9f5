"""Nodes grow by ids: laws over every tree of turns, and the cases that texts get wrong."""

from hypothesis import given
from hypothesis import strategies as st

from proxy.client.nodes import Nodes, Sample, SequenceNode


def sample(*ids, text="text", finish_reason="stop"):
    return Sample(text, ids, [-token / 8 for token in ids], finish_reason)


def grown(*turns, track_tree=False) -> Nodes:
    nodes = Nodes(track_tree=track_tree)
    for prompt, *samples in turns:
        nodes.grow(prompt, samples)
    return nodes


def test_a_first_turn_is_a_node_a_sample_in_their_order():
    """Prompt masked, sample trained."""
    nodes = grown(([1, 2], sample(3, text="a"), sample(4, text="b", finish_reason="length")))

    assert [
        SequenceNode("a", [1, 2, 3], [-100, -100, 3], [1.0, 1.0, -0.375], {"finish_reason": "stop"}),
        SequenceNode("b", [1, 2, 4], [-100, -100, 4], [1.0, 1.0, -0.5], {"finish_reason": "length"}),
    ] == nodes.current


def test_a_turn_replaces_what_it_goes_on_from_and_its_further_samples_come_last():
    """Choice 0 in the parent's place; what the parent sampled stays trained in each."""
    nodes = grown(([1], sample(2), sample(3)), ([1, 2, 9], sample(4), sample(5)))

    assert [[1, 2, 9, 4], [1, 3], [1, 2, 9, 5]] == [node.tokens for node in nodes.current]
    assert [[-100, 2, -100, 4], [-100, 3], [-100, 2, -100, 5]] == [node.masked_tokens for node in nodes.current]


def test_the_longest_beginning_is_gone_on_from():
    """Not the first."""
    nodes = grown(([1], sample(2)), ([5], sample(6)), ([1, 2, 3], sample(4)), ([1, 2, 3, 4, 7], sample(8)))

    assert [[-100, 2, -100, 4, -100, 8], [-100, 6]] == [node.masked_tokens for node in nodes.current]


def test_of_equal_nodes_one_that_nothing_went_on_from():
    """So that equal samples are each gone on from in turn."""
    nodes = grown(([1], sample(2), sample(2)), ([1, 2, 3], sample(4)), ([1, 2, 3], sample(5)))

    assert [[1, 2, 3, 4], [1, 2, 3, 5]] == [node.tokens for node in nodes.current]


def test_a_branch_off_a_replaced_node_is_one_more():
    """What was sampled before the branch is trained there too, as with two samples of one call."""
    nodes = grown(([1], sample(2)), ([1, 2, 3], sample(4)), ([1, 2, 5], sample(6)))

    assert [[-100, 2, -100, 4], [-100, 2, -100, 6]] == [node.masked_tokens for node in nodes.current]


def test_the_tree_keeps_every_node():
    """By its text; texts alike are told apart by a number."""
    nodes = grown(([1], sample(2), sample(2), sample(3)), ([1, 2, 4], sample(5, text="more")), track_tree=True)

    assert ["text", "text\x002", "text\x003", "more"] == list(nodes.sequences)
    assert [-100, 2, -100, 5] == nodes.sequences["more"].masked_tokens
    assert [] == nodes.current


def test_the_node_with_the_longest_text_is_found():
    """One without a text begins nothing; of equals, one that nothing went on from."""
    nodes = grown(([1], sample(2, text="A b"), sample(3, text="A"), sample(4, text="")))
    twins = grown(([1], sample(2, text="A"), sample(3, text="A")), ([1, 2, 9], sample(4, text="A c")))

    assert [1, 2] == nodes.that_begins("A b c").tokens
    assert [1, 3] == nodes.that_begins("A c").tokens
    assert nodes.that_begins("B") is None
    assert [1, 3] == twins.that_begins("A d").tokens


def test_a_copy_is_a_nodes_own():
    """And as a dict it has the five names."""
    node = SequenceNode("a", [1], [-100], [1.0], {"finish_reason": None})
    copy = node.copy()
    copy.tokens.append(2)
    copy.metadata["x"] = 1

    assert SequenceNode("a", [1], [-100], [1.0], {"finish_reason": None}) == node
    assert ["full_text", "tokens", "masked_tokens", "logprobs", "metadata"] == list(node.model_dump())


IDS = st.lists(st.integers(1, 3), max_size=3)
TURNS = st.lists(st.tuples(st.integers(0, 5), IDS, st.lists(IDS, min_size=1, max_size=3)), min_size=1, max_size=8)


@given(TURNS, st.booleans())
def test_whatever_the_turns_every_sample_is_trained_as_it_was(turns, track_tree):
    """Of equal lengths; each call's sample ends a node that was there; masked exactly where nothing was sampled."""
    nodes = Nodes(track_tree=track_tree)
    count = 0
    for base, rest, samples in turns:
        known = nodes._known
        prompt = [*(known[base % len(known)].tokens if known else ()), *rest]
        nodes.grow(prompt, [sample(*ids) for ids in samples])
        count += len(samples)
        for node, ids in zip(nodes._known[-len(samples) :], samples, strict=True):
            assert [*prompt, *ids] == node.tokens
            assert ids == node.masked_tokens[len(prompt) :]
    assert count == len(nodes._known)
    if track_tree:
        assert count == len(nodes.sequences)
    for node in nodes._known:
        lists = (node.tokens, node.masked_tokens, node.logprobs)
        for token, masked, logprob in zip(*lists, strict=True):
            assert (masked, logprob) in ((-100, 1.0), (token, -token / 8))
