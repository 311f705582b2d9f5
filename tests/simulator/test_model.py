"""Prompts in, tokens out."""

import pytest

from proxy.simulator.distribution import prefix_of
from proxy.simulator.errors import RefusedError
from proxy.simulator.model import Manner, load_model
from proxy.simulator.requests import Common

MODEL = load_model()
PROMPT = MODEL.tokenizer.encode("<|im_start|>user\nHi 🦊<|im_end|>\n<|im_start|>assistant\n")


def reply(seed=1, room=400, common=None, **manner):
    manner = Manner(room, **manner)
    return list(MODEL.reply(prefix_of(PROMPT), common or Common(), manner, seed))


def test_a_reply_ends_its_turn():
    """A reply ends of itself with the end of the turn."""
    tokens = reply()

    assert MODEL.tokenizer.id("<|im_end|>") == tokens[-1].id
    assert tokens[-1].finish_reason == "stop"


def test_a_reply_can_be_kept_from_ending():
    """With ignore_eos a reply goes on until its room is used up."""
    tokens = reply(common=Common(ignore_eos=True))

    assert len(tokens) == 400
    assert tokens[-1].finish_reason == "length"


def test_replies_are_the_same_everywhere():
    """A prompt and a seed give the same ids and logprobs on every machine, now and later."""
    prompt = MODEL.tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    tokens = list(MODEL.reply(prefix_of(prompt), Common(), Manner(6), 1))

    assert prompt == [2040, 1125, 10, 72, 105, 2041, 10, 2040, 1146, 10]
    assert [token.id for token in tokens] == [1079, 368, 319, 950, 419, 292]
    assert [t.scores[0] for t in tokens[:2]] == [("None", -3.107060670852661, 1079), (" if", -1.1080557107925415, 368)]


def test_greedy_replies_need_no_seed():
    """With temperature 0 a reply is the same whatever the seed."""
    assert reply(1, common=Common(temperature=0)) == reply(2, common=Common(temperature=0))


def test_scoring_a_reply_gives_its_logprobs():
    """Scored as a prompt, the sampled ids have the very logprobs of their sampling."""
    tokens = reply(call=lambda draws: [*b"{}"], thinking=True)
    again = MODEL.prompt_scores([*PROMPT, *(token.id for token in tokens)], 0)

    assert [token.scores for token in tokens] == again[-len(tokens) :]


def test_prompt_logprobs_tell_the_token_first():
    """An entry has the token itself, then the likeliest ones with their ranks; the first token has none."""
    entries = MODEL.prompt_logprobs(PROMPT, 2)

    assert entries[0] is None
    assert len(PROMPT) == len(entries)
    assert [str(token) for token in PROMPT[1:]] == [next(iter(entry)) for entry in entries[1:]]
    assert all({1, 2} <= {each["rank"] for each in entry.values()} for entry in entries[1:])


@pytest.mark.parametrize("unknown", [-1, 2_048])
def test_ids_must_be_tokens(unknown):
    """An id that is no token is refused by name."""
    with pytest.raises(RefusedError, match=f"{unknown} is out of vocabulary"):
        MODEL.check_ids([0, 2_047, unknown])
