"""Responses of the simulator have the shapes of recorded ones: their keys, the order of these, and their nulls."""

import orjson
import pytest
from tests.support.recorded import find, load
from tests.support.simulated import exchanged, skeleton

from proxy.simulator.options import Options

TINY = Options(model="tiny", max_model_len=2048)
SMOL = Options(model="smollm2", max_model_len=2048, shape="sglang")
UNPARSED = Options(model="smollm2", max_model_len=2048, shape="sglang", has_parser=False)
LONG, THINKS = {"max_tokens": 200}, {"chat_template_kwargs": {"enable_thinking": True}}
FULL = {"ignore_eos": True}  # a reply of the recorded length


def generated(name):
    """Return what differs from a recorded body of generate: ids of the simulator's vocabulary, and FULL."""
    body = load(name).body
    ids = [token % 2_000 for token in body["token_ids"]]
    return (TINY, name, {"token_ids": ids, "sampling_params": body["sampling_params"] | FULL})


def each(options, form, more, names):
    return [(options, form.format(name), more) for name in names.split()]


WHOLE = [
    *each(TINY, "chat_{}", FULL, "plain ids lp ids_lp ids_lp_top1 n3 promptlp prompt_text"),
    *each(TINY, "tool_{}", FULL, "auto_text auto_truncated include_reasoning_false"),
    *each(
        TINY, "{}", {}, "tool_auto_regex tool_auto_regex_noflags tool_auto_default tool_none_regex tool_named chat_eos"
    ),
    *each(TINY, "cmpl_{}", FULL, "plain ids lp1 ids_lp0 ids_lp1 ids_in n3 multi_prompt promptlp echo echo_mt0"),
    *map(generated, ("scale_out/generate", "scale_out/generate_text", "scale_out/generate_from_render")),
    *map(generated, ("scale_out/generate_weightversion", "processed/kvtp_cmp_gen")),
    *each(
        SMOL, "recorded/chat_{}_plain", LONG, "short_n token_ids_n prompt_token_ids_n sglext_n sglext_header_n rid_n"
    ),
    *each(SMOL, "recorded/chat_{}", LONG, "short_n_inj top_logprobs_n_plain tool_call_n_inj"),
    *each(SMOL, "recorded/err_{}_n_plain", LONG, "top_without_logprobs unknown_field"),
    (SMOL, "recorded/chat_thought_n_inj", LONG | THINKS),
    (SMOL, "recorded/cmpl_utf8_n_inj", LONG | {"prompt": "Return the"}),
    (SMOL, "recorded/cmpl_token_ids_n_plain", LONG | {"prompt": [350, 261]}),
]
STREAMS = [
    *each(TINY, "chat_{}_stream", FULL, "plain ids lp ids_lp n3 cont_usage prompt_text"),
    (TINY, "tool_include_reasoning_false_stream", FULL | {"tool_choice": "none"}),
    *each(TINY, "tool_{}_stream", {}, "auto_regex auto_regex_noflags auto_ids_only auto_lp_only named"),
    *each(TINY, "{}_eos_stream", {}, "chat cmpl"),
    *each(TINY, "cmpl_{}_stream", FULL, "plain ids ids_lp0 ids_lp1 n3 multi_prompt echo"),
    generated("scale_out/generate_stream"),
    *each(UNPARSED, "unparsed/chat_{}", LONG, "short_s_plain sglext_s_plain short_s_inj"),
    *each(SMOL, "each_token/chat_{}_s_inj", LONG, "short tool_call utf8"),
    (SMOL, "each_token/chat_thought_s_inj", LONG | THINKS),
    (SMOL, "each_token/cmpl_greedy_s_inj", {"prompt": "Return the", "max_tokens": 5}),
]


@pytest.mark.parametrize(("options", "name", "more"), WHOLE, ids=lambda value: value if isinstance(value, str) else "")
async def test_a_response_has_the_recorded_shape(start, options, name, more):
    """It has as many choices, which end for the same reason."""
    recorded, simulated = await exchanged(await start(options), name, options.shape, **more)

    assert skeleton(simulated) == skeleton(recorded)
    assert ends_of(simulated) == ends_of(recorded)
    if "token_ids" in more:
        assert simulated["usage"] == recorded["usage"]
        assert simulated["choices"][0]["weight_versions"][0]["end"] == simulated["usage"]["completion_tokens"]


def ends_of(response):
    return [choice["finish_reason"] for choice in response["choices"]]


@pytest.mark.parametrize(
    ("options", "name", "more"), STREAMS, ids=lambda value: value if isinstance(value, str) else ""
)
async def test_chunks_have_the_recorded_shapes(start, options, name, more):
    """So do the first one and SGLang's last two. Completions, generate and thoughts have all of the recorded shapes."""
    recorded, simulated = (
        [skeleton(chunk) for chunk in chunks]
        for chunks in await exchanged(await start(options), name, options.shape, **more)
    )
    last = -2 if options.shape == "sglang" else -1

    assert set(simulated) <= set(recorded)
    assert set(simulated) == set(recorded) or ("chat" in name and "thought" not in name) or "tool" in name
    assert (simulated[0], simulated[last:]) == (recorded[0], recorded[last:])


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_has_the_recorded_shape(start, stream):
    """Also a tool call after it."""
    recorded, simulated = await exchanged(await start(TINY), "reasoning/r_regex_after" + "_stream" * stream, **THINKS)
    recorded, simulated = (chunks if stream else [chunks] for chunks in (recorded, simulated))

    assert {skeleton(chunk["choices"]) for chunk in simulated} == {skeleton(chunk["choices"]) for chunk in recorded}


REFUSED = (
    "err_404 err_auto_notools err_badmodel err_ctype err_empty_body err_emptymsgs err_exact_len_ids err_long_chat "
    "err_long_chat_stream err_long_cmpl err_maxtok_over err_method err_n0 err_nomsgs err_stream_opts_nostream err_temp "
    "err_tok_neg err_tok_oov err_toplp err_toplp_nolp err_topp err_type chat_promptlp_stream"
)
REFUSED_BY_SGLANG = ("chat_token_ids_s", "chat_prompt_token_ids_s", "chat_meta_info_s", "err_no_messages_n")


@pytest.mark.parametrize("name", REFUSED.split())
async def test_errors_of_vllm_equal_the_recorded_ones(start, name):
    """Requests that it rejects get the same status and body."""
    recorded, request = load(name), orjson.loads(find(name, ".request.json").read_bytes())
    headers = {"Content-Type": "application/json", **request.get("headers", {})}
    body = request["raw_body"].encode() if "raw_body" in request else orjson.dumps(request["body"])
    body = None if request["method"] == "GET" else body
    client = (await start(Options(model="tiny", max_model_len=2048, strict_models=True))).client
    async with client.request(request["method"], recorded.path, data=body, headers=headers) as response:
        assert recorded.status == response.status
        assert orjson.loads(recorded.response) == orjson.loads(await response.read())


@pytest.mark.parametrize("name", REFUSED_BY_SGLANG)
async def test_errors_of_sglang_equal_the_recorded_ones(sglang, name):
    recorded = load(f"recorded/{name}_plain", "sglang")

    assert (recorded.status, recorded.response) == await sglang.answer(recorded.path, recorded.body)


@pytest.mark.parametrize("name", ["nomodel", "err_unknown_field", "err_role", "err_priority"])
async def test_a_missing_model_and_unknown_fields_and_roles_are_accepted_as_recorded(start, name):
    recorded = load(name)

    assert (await (await start(TINY))(recorded.path, **recorded.body))["choices"]
