"""The table of known defects of engines, and the choice of live or replayed streams by it."""

import pytest

from proxy.protocols.engines import ENGINES
from proxy.protocols.engines.base import QUIRK_CODES, CallOptions, Traits
from proxy.trajectory.fidelity import PROBLEMS

STREAM = {"stream": True}


def framing(streaming: str, body: dict, kind: str = "llamacpp") -> str:
    return ENGINES[kind].framing("chat", body, CallOptions(streaming=streaming, traits=Traits(kind)))


def test_every_quirk_has_an_engine_flags_and_a_source():
    """docs/fidelity.md prints them."""
    for quirk in (quirk for engine in ENGINES.values() for quirk in engine.quirks):
        assert quirk.codes
        assert set(quirk.codes) <= PROBLEMS.keys()
        assert quirk.what.endswith(".")
        assert quirk.source
    assert set(QUIRK_CODES) <= PROBLEMS.keys()


def test_an_unstreamed_request_is_never_replayed():
    assert {"whole"} == {framing(how, {}) for how in ("auto", "live", "replay")}
    assert "whole" == framing("replay", {"stream": False})


@pytest.mark.parametrize(("streaming", "framed"), [("auto", "replay"), ("live", "live"), ("replay", "replay")])
def test_auto_replays_the_streams_of_engines_with_quirks(streaming, framed):
    """llama.cpp's streams always lose tokens."""
    assert framed == framing(streaming, STREAM)


def test_vllm_streams_are_live_unless_replay_is_configured():
    assert ("live", "replay") == (framing("auto", STREAM, "vllm"), framing("replay", STREAM, "vllm"))


@pytest.mark.parametrize(
    "body",
    [
        {"stream": 1},
        {"stream": "yes"},
        STREAM | {"stream_options": "x"},
        STREAM | {"stream_options": {"continuous_usage_stats": True}},
    ],
)
def test_streams_with_unknown_options_are_not_replayed(body):
    """The engine validates them."""
    assert "live" == framing("replay", body)


def test_a_stream_that_the_engine_rejects_is_not_replayed():
    """The 400 is forwarded."""
    assert "live" == framing("replay", STREAM | {"prompt_logprobs": 1}, "vllm")


@pytest.mark.parametrize(
    ("kind", "dialect", "body", "codes"),
    [
        ("vllm", "chat", {}, set()),
        ("vllm", "chat", {"include_reasoning": False}, {"reasoning_withheld"}),
        ("vllm", "completions", {"echo": True}, {"echo"}),
        ("vllm", "completions", {"max_tokens": 0}, {"phantom_token"}),
        ("vllm", "chat", {"top_logprobs": 2}, {"no_logprobs"}),
        ("vllm", "chat", {"top_logprobs": 2, "logprobs": True}, set()),
        ("llamacpp", "chat", {"n": 2}, {"uncounted", "logprob_count", "completion_count", "no_logprobs"}),
        ("plain", "chat", {}, {"no_token_ids"}),
        ("sglang", "chat", {"messages": 7}, set()),  # the engine refuses it
        ("sglang", "chat", {"messages": [{"content": [{"type": "image_url"}]}]}, {"prompt_count"}),
    ],
)
def test_the_quirks_of_a_call_are_found_by_engine_and_request(kind, dialect, body, codes):
    """Known defects are not logged as new ones."""
    options = CallOptions(traits=Traits(kind), keep_reasoning=False)

    assert codes == {
        code for quirk in ENGINES[kind].expected_quirks(dialect, body, options, live=False) for code in quirk.codes
    }
