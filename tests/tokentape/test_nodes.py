"""Nodes grow by ids: laws over every tree of turns, and the cases that texts get wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import BOS, EOS, Words

from tokentape import ManagedServer
from tokentape.nodes import (
    Nodes,
    Sample,
    SequenceNode,
    completion_text,
    dummy_text,
    render_prompt,
    starts_with_bos,
)


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

    assert [1, 2] == nodes.longest_text_prefix("A b c").tokens
    assert [1, 3] == nodes.longest_text_prefix("A c").tokens
    assert nodes.longest_text_prefix("B") is None
    assert [1, 3] == twins.longest_text_prefix("A d").tokens


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
        known = nodes._all
        prompt = [*(known[base % len(known)].tokens if known else ()), *rest]
        nodes.grow(prompt, [sample(*ids) for ids in samples])
        count += len(samples)
        for node, ids in zip(nodes._all[-len(samples) :], samples, strict=True):
            assert [*prompt, *ids] == node.tokens
            assert ids == node.masked_tokens[len(prompt) :]
    assert count == len(nodes._all)
    if track_tree:
        assert count == len(nodes.sequences)
    for node in nodes._all:
        lists = (node.tokens, node.masked_tokens, node.logprobs)
        for token, masked, logprob in zip(*lists, strict=True):
            assert (masked, logprob) in ((-100, 1.0), (token, -token / 8))


USER = {"role": "user", "content": "hi"}
REPLY = {"role": "assistant", "content": "yes"}


def test_messages_are_rendered_by_the_chat_template():
    """Asking for a reply unless the last message is one; tools too."""
    managed = ManagedServer(None, Words())

    assert f"{BOS}<user>hi{EOS}<assistant>" == managed._convert_messages_to_prompt([USER])
    assert f"{BOS}<user>hi{EOS}<assistant>yes{EOS}" == managed._convert_messages_to_prompt([USER, REPLY])
    assert f"{BOS}<tools 1><user>hi{EOS}<assistant>" == managed._convert_messages_to_prompt([USER], tools=[{}])


def test_without_a_chat_template_messages_are_lines():
    """For people to read; nothing is sampled from it."""
    assert "user: hi\nassistant: yes" == render_prompt(None, [USER, REPLY], None)


def test_a_conversation_of_text_alone_is_told_as_such():
    """Paragraphs, as Atropos' placeholder has them."""
    assert "user:hi\n\nassistant:yes" == dummy_text([USER], "yes")
    assert "user:hi\n\nassistant:" == dummy_text([USER], None)


def test_a_completion_text_a_prompt_is_what_the_ids_add():
    """A tokenizer whose words lose their space at the beginning of a text keeps it here."""

    class Stripping(Words):
        def decode(self, ids, skip_special_tokens=False):
            return super().decode(ids).lstrip()

    words = Stripping()
    prompt, ids = words.encode("Say", False), words.encode(f" it{EOS}", False)

    assert f" it{EOS}" == completion_text(words, prompt, ids, " it")
    assert " it" == completion_text(None, prompt, ids, " it")


def test_a_text_whose_beginning_reads_otherwise_alone_is_read_from_its_own_ids():
    """Half a character, say."""

    class Halving(Words):
        def decode(self, ids, skip_special_tokens=False):
            return "�" if len(ids) == 1 else "ab"

    assert "�" == completion_text(Halving(), [1], [2], "told")


@pytest.mark.parametrize(("text", "spelled"), [(f"{BOS}Say", True), ("Say", False)])
def test_a_beginning_of_sequence_is_seen_where_it_is_spelled(text, spelled):
    """By a tokenizer that has one."""
    words = Words()

    assert spelled == starts_with_bos(words, text)
    words.bos_token = None
    assert not starts_with_bos(words, text)
    assert not starts_with_bos(None, text)


class Call:
    """A reply with tool calls, and its step, as far as the translator looks."""

    def __init__(self, words, text, *calls) -> None:
        message = type("Message", (), {"tool_calls": [{"id": call} for call in calls]})
        self.choices = [type("Choice", (), {"message": message})]
        self.step = {"fidelity": {"exact": True}, "choices": [{"ids": words.encode(text + EOS, False)}]}


def test_a_replayed_tool_call_is_the_text_that_was_sampled():
    """By all of its calls' ids; what was not sampled here is left to the template."""
    words = Words()
    translator = ManagedServer(None, words, tool_parser="hermes")._get_translator()
    reply = Call(words, "<call>a<call>b", "1", "2")
    translator.remember(reply, reply.step, words)
    replayed = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}, {"id": "2"}]}
    other = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}, {"id": "3"}]}

    assert ManagedServer(None, words)._get_translator() is None
    assert [USER, {"role": "assistant", "content": "<call>a<call>b"}, other] == (
        translator.convert_messages_for_template([USER, replayed, other])
    )
