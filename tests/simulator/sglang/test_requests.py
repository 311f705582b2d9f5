"""What SGLang's protocol asks, and what it refuses."""

import pytest

from proxy.simulator.errors import RefusedError
from proxy.simulator.options import Options
from proxy.simulator.requests import read_common
from proxy.simulator.sglang.requests import read_flags, read_native, read_sglang_chat, read_shared, sglang_room

OPTIONS = Options(shape="sglang", max_model_len=100)
MESSAGES = [{"role": "user", "content": "Hi"}]


def test_flags_come_in_bodies_and_headers():
    """`sglext` ids are asked for in the body or by headers; the framing by a header alone."""
    by_body = read_flags({"return_input_ids_in_sglext": True, "framed": True}, {}, OPTIONS)
    by_header = read_flags({}, {"x-sglext-return-input-ids": "1", "x-sglext-ids-framed": "1"}, OPTIONS)

    assert (by_body.return_input_ids_in_sglext, by_body.framed) == (True, False)
    assert (by_header.return_input_ids_in_sglext, by_header.framed) == (True, True)


def test_an_older_server_knows_no_flag():
    """A server that does not know the flags reads the prompt of ids and the name, and nothing more."""
    body = {"return_token_ids": True, "return_meta_info": True, "input_ids": [1], "rid": "r"}
    flags = read_flags(body, {"x-sglext-ids-framed": "1"}, Options(shape="sglang", knows_ids_flags=False))

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
def test_what_only_vllm_refuses_is_taken(body):
    """Fields that vLLM refuses and SGLang does not know, or does not mind, are no fault."""
    flags = read_flags(body, {}, OPTIONS)
    read_shared(body, OPTIONS)
    chat = read_sglang_chat({"messages": MESSAGES, **body}, flags)

    assert chat.messages == MESSAGES
    assert not chat.top_logprobs


@pytest.mark.parametrize("flag", ["return_token_ids", "return_prompt_token_ids", "return_meta_info"])
def test_a_stream_tells_no_ids_in_its_choices(flag):
    """Each of the three flags is refused with a stream, by its own name."""
    body = {"messages": MESSAGES, "stream": True, flag: True}
    with pytest.raises(RefusedError, match=flag) as refusal:
        read_sglang_chat(body, read_flags(body, {}, OPTIONS))

    assert (refusal.value.status, refusal.value.kind) == (400, "BadRequest")


def test_sampling_parameters_have_other_names():
    """Parameters of `/generate` are read by SGLang's names; 128 tokens are the default."""
    _, common = read_native(
        {"text": "a", "sampling_params": {"max_new_tokens": 3, "sampling_seed": 5, "no_stop_trim": True}}, OPTIONS
    )
    _, silent = read_native({"text": "a"}, OPTIONS)

    assert (common.max_tokens, common.seed, common.include_stop_str_in_output) == (3, 5, True)
    assert silent.max_tokens == 128


@pytest.mark.parametrize(
    ("length", "asked", "min_tokens", "said"),
    [
        (100, None, 0, "longer than the model's context length"),
        (90, 11, 0, "You requested a total of 101 tokens"),
        (90, 0, 0, "at least 1"),
        (90, 5, 6, "min_new_tokens"),
    ],
)
def test_what_does_not_fit_is_refused(length, asked, min_tokens, said):
    """A prompt that fills the window, and more tokens than are left, are refused in SGLang's words."""
    common = read_common({"min_tokens": min_tokens}, OPTIONS)
    with pytest.raises(RefusedError, match=said):
        sglang_room(length, asked, common, OPTIONS)


def test_what_is_left_is_the_room():
    """Without a bound a reply may fill the window."""
    common = read_common({}, OPTIONS)

    assert (sglang_room(90, None, common, OPTIONS), sglang_room(90, 10, common, OPTIONS)) == (10, 10)
