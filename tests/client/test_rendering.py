"""Texts of ids and messages, for people."""

import pytest
from scripted import BOS, EOS, Words

from proxy.client import ManagedServer
from proxy.client.rendering import begins_with_bos, dummy_text, render, text_behind

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
    assert "user: hi\nassistant: yes" == render(None, [USER, REPLY], None)


def test_a_conversation_of_text_alone_is_told_as_such():
    """Paragraphs, as Atropos' placeholder has them."""
    assert "user:hi\n\nassistant:yes" == dummy_text([USER], "yes")
    assert "user:hi\n\nassistant:" == dummy_text([USER], None)


def test_a_text_behind_a_prompt_is_what_the_ids_add():
    """A tokenizer whose words lose their space at the beginning of a text keeps it here."""

    class Stripping(Words):
        def decode(self, ids, skip_special_tokens=False):
            return super().decode(ids).lstrip()

    words = Stripping()
    prompt, ids = words.encode("Say", False), words.encode(f" it{EOS}", False)

    assert f" it{EOS}" == text_behind(words, prompt, ids, " it")
    assert " it" == text_behind(None, prompt, ids, " it")


def test_a_text_whose_beginning_reads_otherwise_alone_is_read_from_its_own_ids():
    """Half a character, say."""

    class Halving(Words):
        def decode(self, ids, skip_special_tokens=False):
            return "�" if len(ids) == 1 else "ab"

    assert "�" == text_behind(Halving(), [1], [2], "told")


@pytest.mark.parametrize(("text", "spelled"), [(f"{BOS}Say", True), ("Say", False)])
def test_a_beginning_of_sequence_is_seen_where_it_is_spelled(text, spelled):
    """By a tokenizer that has one."""
    words = Words()

    assert spelled == begins_with_bos(words, text)
    words.bos_token = None
    assert not begins_with_bos(words, text)
    assert not begins_with_bos(None, text)


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
    translator.learn(reply, reply.step, words)
    replayed = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}, {"id": "2"}]}
    other = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}, {"id": "3"}]}

    assert ManagedServer(None, words)._get_translator() is None
    assert [USER, {"role": "assistant", "content": "<call>a<call>b"}, other] == (
        translator.convert_messages_for_template([USER, replayed, other])
    )
