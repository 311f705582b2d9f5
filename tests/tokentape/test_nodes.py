"""Nodes grow by token ids, for every tree of turns; texts of nodes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.scripted import BOS, EOS, Words

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


def test_a_first_turn_makes_a_node_per_sample():
    """The prompt is masked, the completion is trained."""
    nodes = grown(([1, 2], sample(3, text="a"), sample(4, text="b", finish_reason="length")))

    assert [
        SequenceNode("a", [1, 2, 3], [-100, -100, 3], [1.0, 1.0, -0.375], {"finish_reason": "stop"}),
        SequenceNode("b", [1, 2, 4], [-100, -100, 4], [1.0, 1.0, -0.5], {"finish_reason": "length"}),
    ] == nodes.current


def test_a_turn_replaces_the_node_it_continues_and_appends_its_further_samples():
    """Completion tokens of the parent stay trained in each."""
    nodes = grown(([1], sample(2), sample(3)), ([1, 2, 9], sample(4), sample(5)))

    assert [node.tokens for node in nodes.current] == [[1, 2, 9, 4], [1, 3], [1, 2, 9, 5]]
    assert [node.masked_tokens for node in nodes.current] == [[-100, 2, -100, 4], [-100, 3], [-100, 2, -100, 5]]


def test_a_turn_continues_the_node_with_the_longest_prefix():
    """Not the first one with any prefix."""
    nodes = grown(([1], sample(2)), ([5], sample(6)), ([1, 2, 3], sample(4)), ([1, 2, 3, 4, 7], sample(8)))

    assert [node.masked_tokens for node in nodes.current] == [[-100, 2, -100, 4, -100, 8], [-100, 6]]


def test_of_equal_nodes_a_turn_continues_one_that_no_turn_has_continued():
    """Each of several equal samples can be continued."""
    nodes = grown(([1], sample(2), sample(2)), ([1, 2, 3], sample(4)), ([1, 2, 3], sample(5)))

    assert [node.tokens for node in nodes.current] == [[1, 2, 3, 4], [1, 2, 3, 5]]


def test_a_branch_from_a_replaced_node_adds_a_node():
    """Completion tokens before the branch are trained there too, as with two samples of one call."""
    nodes = grown(([1], sample(2)), ([1, 2, 3], sample(4)), ([1, 2, 5], sample(6)))

    assert [node.masked_tokens for node in nodes.current] == [[-100, 2, -100, 4], [-100, 2, -100, 6]]


def test_the_tree_keeps_every_node():
    """By its text; keys of equal texts get a number."""
    nodes = grown(([1], sample(2), sample(2), sample(3)), ([1, 2, 4], sample(5, text="more")), track_tree=True)

    assert list(nodes.sequences) == ["text", "text\x002", "text\x003", "more"]
    assert nodes.sequences["more"].masked_tokens == [-100, 2, -100, 5]
    assert nodes.current == []


def test_the_node_with_the_longest_text_prefix_is_found():
    """An empty text is no prefix; of equal texts, a node that no turn has continued."""
    nodes = grown(([1], sample(2, text="A b"), sample(3, text="A"), sample(4, text="")))
    twins = grown(([1], sample(2, text="A"), sample(3, text="A")), ([1, 2, 9], sample(4, text="A c")))

    assert nodes.longest_text_prefix("A b c").tokens == [1, 2]
    assert nodes.longest_text_prefix("A c").tokens == [1, 3]
    assert nodes.longest_text_prefix("B") is None
    assert twins.longest_text_prefix("A d").tokens == [1, 3]


def test_a_copy_shares_no_list_with_its_node():
    """As a dict, a node has the five fields of Atropos."""
    node = SequenceNode("a", [1], [-100], [1.0], {"finish_reason": None})
    copy = node.copy()
    copy.tokens.append(2)
    copy.metadata["x"] = 1

    assert SequenceNode("a", [1], [-100], [1.0], {"finish_reason": None}) == node
    assert list(node.model_dump()) == ["full_text", "tokens", "masked_tokens", "logprobs", "metadata"]


IDS = st.lists(st.integers(1, 3), max_size=3)
TURNS = st.lists(st.tuples(st.integers(0, 5), IDS, st.lists(IDS, min_size=1, max_size=3)), min_size=1, max_size=8)


@given(TURNS, st.booleans())
def test_every_sample_of_any_turns_is_trained_with_its_ids_and_logprobs(turns, track_tree):
    """The lists have equal lengths, each sample ends a node, and exactly the tokens of prompts are masked."""
    nodes = Nodes(track_tree=track_tree)
    count = 0
    for base, rest, samples in turns:
        earlier = nodes._all
        prompt = [*(earlier[base % len(earlier)].tokens if earlier else ()), *rest]
        nodes.grow(prompt, [sample(*ids) for ids in samples])
        count += len(samples)
        for node, ids in zip(nodes._all[-len(samples) :], samples, strict=True):
            assert node.tokens == [*prompt, *ids]
            assert ids == node.masked_tokens[len(prompt) :]
    assert count == len(nodes._all)
    if track_tree:
        assert count == len(nodes.sequences)
    for node in nodes._all:
        lists = (node.tokens, node.masked_tokens, node.logprobs)
        for token, masked, logprob in zip(*lists, strict=True):
            assert (masked, logprob) in ((-100, 1.0), (token, -token / 8))


USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "yes"}


def test_messages_are_rendered_by_the_chat_template():
    """With tools, and with a generation prompt unless the last message is the assistant's."""
    managed = ManagedServer(None, Words())

    assert managed._convert_messages_to_prompt([USER]) == f"{BOS}<user>hi{EOS}<assistant>"
    assert managed._convert_messages_to_prompt([USER, ANSWER]) == f"{BOS}<user>hi{EOS}<assistant>yes{EOS}"
    assert managed._convert_messages_to_prompt([USER], tools=[{}]) == f"{BOS}<tools 1><user>hi{EOS}<assistant>"


def test_without_a_chat_template_messages_are_lines():
    """They are for people; nothing is sampled from them."""
    assert render_prompt(None, [USER, ANSWER], None) == "user: hi\nassistant: yes"


def test_the_text_of_a_placeholder_is_paragraphs():
    """As in Atropos."""
    assert dummy_text([USER], "yes") == "user:hi\n\nassistant:yes"
    assert dummy_text([USER], None) == "user:hi\n\nassistant:"


def test_the_text_of_a_completion_is_what_its_ids_add_to_the_prompt():
    """Some tokenizers remove the space at the start of a text; it is kept here."""

    class Stripping(Words):
        def decode(self, ids, skip_special_tokens=False):
            return super().decode(ids).lstrip()

    words = Stripping()
    prompt, ids = words.encode("Say", False), words.encode(f" it{EOS}", False)

    assert completion_text(words, prompt, ids, " it") == f" it{EOS}"
    assert completion_text(None, prompt, ids, " it") == " it"


def test_a_completion_is_decoded_alone_if_the_prompt_decodes_differently_with_it():
    """Half a character at the end of the prompt, for example."""

    class Halving(Words):
        def decode(self, ids, skip_special_tokens=False):
            return "�" if len(ids) == 1 else "ab"

    assert completion_text(Halving(), [1], [2], "engine") == "�"


@pytest.mark.parametrize(("text", "expected"), [(f"{BOS}Say", True), ("Say", False)])
def test_a_text_starts_with_bos_if_the_tokenizer_has_one(text, expected):
    """The engine is then requested not to add another."""
    words = Words()

    assert starts_with_bos(words, text) == expected
    words.bos_token = None
    assert not starts_with_bos(words, text)
    assert not starts_with_bos(None, text)


class Call:
    """A response with tool calls and its step, with the fields that the translator reads."""

    def __init__(self, words, text, *calls) -> None:
        message = type("Message", (), {"tool_calls": [{"id": call} for call in calls]})
        self.choices = [type("Choice", (), {"message": message})]
        self.step = {"fidelity": {"exact": True}, "choices": [{"ids": words.encode(text + EOS, False)}]}


def test_a_replayed_tool_call_is_rendered_as_its_sampled_text():
    """Found by the ids of all calls of the message; other messages are rendered by the template."""
    words = Words()
    translator = ManagedServer(None, words, tool_parser="hermes")._get_translator()
    response = Call(words, "<call>a<call>b", "1", "2")
    translator.remember(response, response.step, words)
    replayed = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}, {"id": "2"}]}
    other = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}, {"id": "3"}]}

    assert ManagedServer(None, words)._get_translator() is None
    assert [USER, {"role": "assistant", "content": "<call>a<call>b"}, other] == (
        translator.convert_messages_for_template([USER, replayed, other])
    )
