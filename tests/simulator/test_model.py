"""The simulated model: choices, stops and scores."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.simulator.errors import RequestError
from proxy.simulator.model import GenerationOptions, Token, generate, load_model
from proxy.simulator.requests import CommonFields
from proxy.simulator.sampler import load_next_token_model, prefix_from
from proxy.simulator.tokenizer import load_tokenizer

MODEL = load_model()
PROMPT = MODEL.tokenizer.encode("<|im_start|>user\nHi 🦊<|im_end|>\n<|im_start|>assistant\n")


def generated(seed=1, max_tokens=400, common=None, **options):
    options = GenerationOptions(max_tokens, **options)
    return list(MODEL.generate(PROMPT, common or CommonFields(), options, seed))


def test_a_reply_ends_its_turn():
    """With the end-of-turn token and the finish reason stop; with ignore_eos it has max_tokens tokens."""
    last, unending = generated()[-1], generated(common=CommonFields(ignore_eos=True))

    assert (MODEL.tokenizer.id("<|im_end|>"), "stop") == (last.id, last.finish_reason)
    assert (len(unending), unending[-1].finish_reason) == (400, "length")


def test_replies_are_the_same_on_every_machine():
    """A prompt and a seed give these ids and logprobs on every machine and in every version."""
    prompt = MODEL.tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    tokens = list(MODEL.generate(prompt, CommonFields(), GenerationOptions(6), 1))

    assert prompt == [2040, 1125, 10, 72, 105, 2041, 10, 2040, 1146, 10]
    assert [token.id for token in tokens] == [1079, 368, 319, 950, 419, 292]
    assert [t.logprobs[0] for t in tokens[:2]] == [
        ("None", -3.107060670852661, 1079),
        (" if", -1.1080557107925415, 368),
    ]


def test_greedy_replies_need_no_seed():
    assert generated(1, common=CommonFields(temperature=0)) == generated(2, common=CommonFields(temperature=0))


def test_scoring_a_reply_gives_its_logprobs():
    """The sampled ids, scored as a prompt, have exactly the logprobs of their sampling."""
    tokens = generated(make_reply=lambda stream: [*b"{}"], reasoning=True)
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


TOKENIZER = load_tokenizer()
END, SECOND_END = TOKENIZER.id("<|im_end|>"), TOKENIZER.id("<|endoftext|>")
TEXT = "Return the current file. It is a list of objects"


def sampled_tokens(text: str, alternatives: int = 0, **conditions) -> list[Token]:
    ids = TOKENIZER.encode(text)
    distribution = load_next_token_model().distribution(prefix_from([]))
    max_tokens = conditions.pop("max_tokens", len(ids))
    sampled, eos_ids = [(token, distribution) for token in ids], (END, SECOND_END)
    common = CommonFields(**conditions)
    return list(generate(sampled, TOKENIZER, common, max_tokens, eos_ids=eos_ids, alternatives=alternatives))


def text_from(tokens: list[Token]) -> str:
    return "".join(token.text for token in tokens)


FILE = TOKENIZER.encode(" file")
STRINGS = {"stop": ["nowhere", "le. I"]}


@pytest.mark.parametrize(
    ("text", "conditions", "shown", "sampled", "reasons"),
    [
        (TEXT, {"max_tokens": 3}, "Return the current", "Return the current", ("length", None)),
        ("It is<|im_end|>", {"max_tokens": 9}, "It is", "It is<|im_end|>", ("stop", None)),
        ("It<|im_end|>", {}, "It", "It<|im_end|>", ("stop", None)),  # at max_tokens
        ("It<|endoftext|>", {}, "It", "It<|endoftext|>", ("stop", SECOND_END)),
        (TEXT, {"stop_token_ids": FILE}, "Return the current", "Return the current file", ("stop", *FILE)),
        (
            TEXT,
            {"stop_token_ids": FILE, "include_stop_str_in_output": True},
            *["Return the current file"] * 2,
            ("stop", *FILE),
        ),
        (TEXT, STRINGS, "Return the current fi", "Return the current file. I", ("stop", "le. I")),
        (TEXT, {**STRINGS, "include_stop_str_in_output": True}, *["Return the current file. I"] * 2, ("stop", "le. I")),
        # Before min_tokens, neither end tokens nor stop strings end a choice.
        ("It<|im_end|> is", {"min_tokens": 3, "stop": "t"}, "It is", "It<|im_end|> is", ("length", None)),
    ],
)
def test_a_choice_ends_for_a_reason(text, conditions, shown, sampled, reasons):
    """By its length, an end token, a stop token or a stop string, which is in the text only if that is requested.

    All sampled ids are kept.
    """
    tokens = sampled_tokens(text, **conditions)

    assert shown == text_from(tokens)
    assert TOKENIZER.encode(sampled) == [token.id for token in tokens]
    assert reasons == (tokens[-1].finish_reason, tokens[-1].stop_reason)


def test_text_is_held_back_for_stop_strings():
    """The end of the text is held back while it may be the beginning of the longest stop string."""
    tokens = sampled_tokens("Return the", stop="xyz")

    assert [token.text for token in tokens] == ["Retu", "rn the"]


@given(st.lists(st.sampled_from([" the", "le", ".", " I", "t", "\u00e9", "zz"]), min_size=1), st.integers(1, 5))
def test_the_pieces_are_the_text(pieces, size):
    """The pieces of text that were released, joined, are the text up to the stop string."""
    text = "".join(pieces)
    stop = "le. It"[:size]

    assert text.partition(stop)[0] == text_from(sampled_tokens(text, stop=stop))


@pytest.mark.parametrize("count", [0, 1, 4])
def test_alternatives_follow_the_token(count):
    """The first logprob is the token's; the most likely tokens follow, each token once."""
    logprobs = sampled_tokens("It", count)[0].logprobs

    assert logprobs[0][0] == "It"
    assert len(logprobs) == len(set(logprobs))
    assert max(count, 1) <= len(logprobs) <= count + 1
