"""The simulated model: choices, stops and scores."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.simulator.errors import RequestError
from proxy.simulator.model import GenerationOptions, StopConditions, Token, generate, load_model
from proxy.simulator.requests import CommonFields
from proxy.simulator.sampler import load_next_token_model, prefix_from
from proxy.simulator.tokenizer import load_tokenizer

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


TOKENIZER = load_tokenizer()
END, SECOND_END = TOKENIZER.id("<|im_end|>"), TOKENIZER.id("<|endoftext|>")
TEXT = "Return the current file. It is a list of objects"


def sampled_tokens(text: str, alternatives: int = 0, **conditions) -> list[Token]:
    ids = TOKENIZER.encode(text)
    distribution = load_next_token_model().distribution(prefix_from([]))
    conditions = {"max_tokens": len(ids), "eos_ids": (END, SECOND_END), **conditions}
    return list(
        generate([(token, distribution) for token in ids], TOKENIZER, StopConditions(**conditions), alternatives)
    )


def text_from(tokens: list[Token]) -> str:
    return "".join(token.text for token in tokens)


def reasons(tokens: list[Token]) -> tuple[str | None, int | str | None]:
    return tokens[-1].finish_reason, tokens[-1].stop_reason


def test_the_length_ends_a_choice():
    """At max_tokens a choice ends with the finish reason length."""
    tokens = sampled_tokens(TEXT, max_tokens=3)

    assert len(tokens) == 3
    assert reasons(tokens) == ("length", None)


def test_the_end_of_turn_token_has_no_text():
    """The end-of-turn token is among the ids, but not in the text."""
    tokens = sampled_tokens("It is<|im_end|>", max_tokens=9)

    assert [*TOKENIZER.encode("It is"), END] == [token.id for token in tokens]
    assert text_from(tokens) == "It is"
    assert reasons(tokens) == ("stop", None)


def test_the_end_of_the_turn_precedes_the_length():
    """An end-of-turn token at max_tokens gives the finish reason stop."""
    assert reasons(sampled_tokens("It<|im_end|>")) == ("stop", None)


def test_a_second_end_token_is_the_stop_reason():
    """Another end token of the model is the stop reason."""
    assert reasons(sampled_tokens("It<|endoftext|>")) == ("stop", SECOND_END)


def test_a_stop_token_ends_a_choice():
    """A stop token is among the ids but not in the text, and it is the stop reason."""
    stop = TOKENIZER.encode(" file")[0]
    tokens = sampled_tokens(TEXT, stop_token_ids=frozenset([stop]))

    assert text_from(tokens) == "Return the current"
    assert stop == tokens[-1].id
    assert ("stop", stop) == reasons(tokens)


def test_the_text_of_a_stop_token_can_be_included():
    """With include_stop_str_in_output the text of a stop token is in the text."""
    stop = frozenset(TOKENIZER.encode(" file"))

    assert text_from(sampled_tokens(TEXT, stop_token_ids=stop, include_stop=True)) == "Return the current file"


def test_nothing_stops_before_min_tokens():
    """Before min_tokens, neither end tokens nor stop tokens nor stop strings end a choice."""
    tokens = sampled_tokens("It<|im_end|> is", min_tokens=3, stop_strings=("t",), max_tokens=3)

    assert reasons(tokens) == ("length", None)


def test_a_stop_string_cuts_the_text_but_not_the_ids():
    """A stop string ends a choice: the text ends before it, and all sampled ids are kept."""
    tokens = sampled_tokens(TEXT, stop_strings=("nowhere", "le. I"))

    assert text_from(tokens) == "Return the current fi"
    assert TOKENIZER.encode("Return the current file. I") == [token.id for token in tokens]
    assert reasons(tokens) == ("stop", "le. I")


def test_a_stop_string_can_be_included():
    """With include_stop_str_in_output the text ends after the stop string."""
    assert text_from(sampled_tokens(TEXT, stop_strings=("le. I",), include_stop=True)) == "Return the current file. I"


def test_text_is_held_back_for_stop_strings():
    """The end of the text is held back while it may be the beginning of the longest stop string."""
    tokens = sampled_tokens("Return the", stop_strings=("xyz",))

    assert [token.text for token in tokens] == ["Retu", "rn the"]


@given(st.lists(st.sampled_from([" the", "le", ".", " I", "t", "\u00e9", "zz"]), min_size=1), st.integers(1, 5))
def test_the_pieces_are_the_text(pieces, size):
    """The pieces of text that were released, joined, are the text up to the stop string."""
    text = "".join(pieces)
    stop = "le. It"[:size]

    assert text.partition(stop)[0] == text_from(sampled_tokens(text, stop_strings=(stop,)))


@pytest.mark.parametrize("count", [1, 4])
def test_alternatives_follow_the_token(count):
    """The first logprob is the token's; the most likely tokens follow, each token once."""
    logprobs = sampled_tokens("It", count)[0].logprobs

    assert logprobs[0][0] == "It"
    assert len(logprobs) == len(set(logprobs))
    assert count <= len(logprobs) <= count + 1


def test_without_alternatives_there_is_one_logprob():
    """Without alternatives a token has its own logprob only."""
    assert [len(token.logprobs) for token in sampled_tokens("It")] == [1]
