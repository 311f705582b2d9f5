"""SGLang's own request fields, limits and errors, and what its responses share."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.simulator.errors import RequestError, invalid_value
from proxy.simulator.model import Token
from proxy.simulator.options import Options
from proxy.simulator.requests import read_common
from proxy.simulator.sampler import load_next_token_model, prefix_from
from proxy.simulator.sglang_wire import (
    LogprobFormatter,
    error_body,
    matched_stop,
    read_native,
    read_sglang_chat,
    read_sglang_common,
    read_sglang_fields,
    sglang_max_tokens,
    tempered,
)
from proxy.simulator.tokenizer import load_tokenizer, load_vocabulary

OPTIONS = Options(shape="sglang", max_model_len=100)
MESSAGES = [{"role": "user", "content": "Hi"}]


def test_flags_are_in_bodies_or_headers():
    """`sglext` ids are requested in the body or by headers, framing by a header only."""
    by_body = read_sglang_fields({"return_input_ids_in_sglext": True, "framed": True}, {}, OPTIONS)
    by_header = read_sglang_fields({}, {"x-sglext-return-input-ids": "1", "x-sglext-ids-framed": "1"}, OPTIONS)

    assert (by_body.return_input_ids_in_sglext, by_body.framed) == (True, False)
    assert (by_header.return_input_ids_in_sglext, by_header.framed) == (True, True)


def test_an_older_server_ignores_the_flags():
    """A server without the flags reads `input_ids` and `rid` only."""
    body = {"return_token_ids": True, "return_meta_info": True, "input_ids": [1], "rid": "r"}
    flags = read_sglang_fields(body, {"x-sglext-ids-framed": "1"}, Options(shape="sglang", supports_ids_flags=False))

    assert (flags.return_token_ids, flags.return_meta_info, flags.framed) == (False, False, False)
    assert (flags.input_ids, flags.rid) == ([1], "r")


@pytest.mark.parametrize(
    "body",
    [
        {"top_logprobs": 2},
        {"tool_choice": "auto"},
        {"stream_options": {"include_usage": True}},
        {"prompt_logprobs": 1, "stream": True},
    ],
)
def test_fields_that_only_vllm_rejects_are_accepted(body):
    """Fields that vLLM rejects and SGLang ignores are accepted."""
    flags = read_sglang_fields(body, {}, OPTIONS)
    read_sglang_common(body, OPTIONS)
    chat = read_sglang_chat({"messages": MESSAGES, **body}, flags)

    assert chat.messages == MESSAGES
    assert not chat.top_logprobs


@pytest.mark.parametrize("flag", ["return_token_ids", "return_prompt_token_ids", "return_meta_info"])
def test_a_stream_with_ids_in_its_choices_is_an_error(flag):
    """Each of the three flags is an error with a stream; the message names the flag."""
    body = {"messages": MESSAGES, "stream": True, flag: True}
    with pytest.raises(RequestError, match=flag) as error:
        read_sglang_chat(body, read_sglang_fields(body, {}, OPTIONS))

    assert (error.value.status, error.value.kind) == (400, "BadRequest")


def test_sampling_parameters_have_other_names():
    """`/generate` has SGLang's names of sampling parameters; the default length is 128 tokens."""
    _, common = read_native(
        {"text": "a", "sampling_params": {"max_new_tokens": 3, "sampling_seed": 5, "no_stop_trim": True}}, OPTIONS
    )
    _, default = read_native({"text": "a"}, OPTIONS)

    assert (common.max_tokens, common.seed, common.include_stop_str_in_output) == (3, 5, True)
    assert default.max_tokens == 128


@pytest.mark.parametrize(
    ("length", "requested", "min_tokens", "message"),
    [
        (100, None, 0, "longer than the model's context length"),
        (90, 11, 0, "You requested a total of 101 tokens"),
        (90, 0, 0, "at least 1"),
        (90, 5, 6, "min_new_tokens"),
    ],
)
def test_a_request_that_does_not_fit_is_an_error(length, requested, min_tokens, message):
    """A prompt or a length that does not fit into the context window is an error in SGLang's words."""
    common = read_common({"min_tokens": min_tokens}, OPTIONS)
    with pytest.raises(RequestError, match=message):
        sglang_max_tokens(length, requested, common, OPTIONS)


def test_a_reply_may_fill_the_context_window():
    """Without max_tokens a reply may have all tokens that the context window leaves."""
    common = read_common({}, OPTIONS)

    assert (sglang_max_tokens(90, None, common, OPTIONS), sglang_max_tokens(90, 10, common, OPTIONS)) == (10, 10)


SIZE = len(load_vocabulary()["counts"])
IDS = st.lists(st.integers(0, SIZE - 1), max_size=5)
DISTRIBUTION = load_next_token_model().distribution(prefix_from([5]))


def token(token_id=7, finish=None, stop=None):
    return Token(token_id, "", (), DISTRIBUTION, finish, stop)


def test_an_error_is_flat():
    """An error body is not nested and has no param."""
    assert list(error_body(invalid_value("No.", "x")).items()) == [
        ("object", "error"),
        ("message", "No. (parameter=x)"),
        ("type", "BadRequestError"),
        ("param", None),
        ("code", 400),
    ]


@pytest.mark.parametrize(
    ("last", "matched"),
    [
        (token(finish="stop"), 7),
        (token(finish="stop", stop="end"), "end"),
        (token(finish="length"), None),
        (token(), None),
    ],
)
def test_matched_stop_is_an_id_or_a_string(last, matched):
    """matched_stop is the id of an end token, a stop string, or None."""
    assert matched == matched_stop(last)


def test_an_incomplete_character_has_its_own_bytes():
    """The `bytes` of a token are its own, even if they are not valid UTF-8; its text then is U+FFFD."""
    formatter = LogprobFormatter(load_tokenizer(), 1.0)
    entry = formatter.chat_entry(token(0xF0), 0)

    assert (entry["bytes"], entry["token"], entry["top_logprobs"]) == ([0xF0], "\ufffd", [])


def test_entries_have_texts_on_request():
    """An entry is a logprob, an id, and the text or null; alternatives are ordered by probability."""
    formatter = LogprobFormatter(load_tokenizer(), 1.0)
    keys = formatter.output([token()], 3, with_text=False)
    likely = [logprob for logprob, _, _ in keys["output_top_logprobs"][0]]

    assert keys["output_token_logprobs"] == [[DISTRIBUTION.logprob(7), 7, None]]
    assert formatter.sampled(token(), with_text=True)[2] == load_tokenizer().decode([7])
    assert likely == sorted(likely, reverse=True)
    assert keys["output_token_logprobs_length"] == 1


@given(IDS, st.sampled_from([0.3, 0.7, 1.0, 1.5]))
def test_probabilities_sum_to_one(ids, temperature):
    """At any temperature the probabilities of the whole vocabulary sum to one."""
    logprob = tempered(load_next_token_model().distribution(prefix_from(ids)), temperature)

    assert math.fsum(math.exp(logprob(token)) for token in range(SIZE)) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_temperatures_0_and_1_change_nothing(temperature):
    """At temperatures 0 and 1 logprobs are exactly the model's own."""
    distribution = load_next_token_model().distribution(prefix_from([5]))
    logprob = tempered(distribution, temperature)

    assert all(distribution.logprob(token) == logprob(token) for token in range(SIZE))


def test_a_low_temperature_raises_the_most_likely_token():
    """The lower the temperature, the higher the logprob of the most likely token."""
    distribution = load_next_token_model().distribution(prefix_from([5]))
    (top,) = distribution.top(1)
    logprobs = [tempered(distribution, temperature)(top) for temperature in (0.0001, 0.5, 1.0, 2.0)]

    assert logprobs == sorted(logprobs, reverse=True)
    assert logprobs[0] == pytest.approx(0, abs=1e-6)
