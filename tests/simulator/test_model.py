"""The simulated model."""

import pytest

from proxy.simulator.errors import RequestError
from proxy.simulator.model import GenerationOptions, load_model
from proxy.simulator.requests import CommonFields
from proxy.simulator.sampler import prefix_from

MODEL = load_model()
PROMPT = MODEL.tokenizer.encode("<|im_start|>user\nHi 🦊<|im_end|>\n<|im_start|>assistant\n")


def generated(seed=1, max_tokens=400, common=None, **options):
    options = GenerationOptions(max_tokens, **options)
    return list(MODEL.generate(prefix_from(PROMPT), common or CommonFields(), options, seed))


def test_a_reply_ends_its_turn():
    """A reply ends with the end-of-turn token and the finish reason stop."""
    tokens = generated()

    assert MODEL.tokenizer.id("<|im_end|>") == tokens[-1].id
    assert tokens[-1].finish_reason == "stop"


def test_ignore_eos_generates_max_tokens():
    """With ignore_eos a reply has max_tokens tokens."""
    tokens = generated(common=CommonFields(ignore_eos=True))

    assert len(tokens) == 400
    assert tokens[-1].finish_reason == "length"


def test_replies_are_the_same_on_every_machine():
    """A prompt and a seed give these ids and logprobs on every machine and in every version."""
    prompt = MODEL.tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    tokens = list(MODEL.generate(prefix_from(prompt), CommonFields(), GenerationOptions(6), 1))

    assert prompt == [2040, 1125, 10, 72, 105, 2041, 10, 2040, 1146, 10]
    assert [token.id for token in tokens] == [1079, 368, 319, 950, 419, 292]
    assert [t.logprobs[0] for t in tokens[:2]] == [
        ("None", -3.107060670852661, 1079),
        (" if", -1.1080557107925415, 368),
    ]


def test_greedy_replies_need_no_seed():
    """At temperature 0 a reply is the same with every seed."""
    assert generated(1, common=CommonFields(temperature=0)) == generated(2, common=CommonFields(temperature=0))


def test_scoring_a_reply_gives_its_logprobs():
    """The sampled ids, scored as a prompt, have exactly the logprobs of their sampling."""
    tokens = generated(make_call=lambda stream: [*b"{}"], reasoning=True)
    scored = MODEL.score([*PROMPT, *(token.id for token in tokens)], 0)

    assert [token.logprobs for token in tokens] == scored[-len(tokens) :]


def test_prompt_logprobs_begin_with_the_token():
    """An entry has the token itself, then the most likely tokens with their ranks; the first token has no entry."""
    entries = MODEL.prompt_logprobs(PROMPT, 2)

    assert entries[0] is None
    assert len(PROMPT) == len(entries)
    assert [str(token) for token in PROMPT[1:]] == [next(iter(entry)) for entry in entries[1:]]
    assert all({1, 2} <= {value["rank"] for value in entry.values()} for entry in entries[1:])


@pytest.mark.parametrize("unknown", [-1, 2_048])
def test_ids_must_be_in_the_vocabulary(unknown):
    """The error for an id outside the vocabulary names the id."""
    with pytest.raises(RequestError, match=f"{unknown} is out of vocabulary"):
        MODEL.check_ids([0, 2_047, unknown])
