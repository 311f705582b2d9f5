"""SGLang's own request fields and limits."""

import pytest

from proxy.simulator.errors import RequestError
from proxy.simulator.options import Options
from proxy.simulator.prompts import max_tokens_after
from proxy.simulator.requests import (
    read_common,
    read_native,
    read_sglang_chat,
    read_sglang_common,
    read_sglang_fields,
)

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
        max_tokens_after(length, requested, common, OPTIONS)


def test_a_reply_may_fill_the_context_window():
    """Without max_tokens a reply may have all tokens that the context window leaves."""
    common = read_common({}, OPTIONS)

    assert (max_tokens_after(90, None, common, OPTIONS), max_tokens_after(90, 10, common, OPTIONS)) == (10, 10)
