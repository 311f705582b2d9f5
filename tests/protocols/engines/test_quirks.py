"""What engines are known to lose: the table, and how it decides whether a stream is replayed."""

import pytest

from proxy.protocols.engines import ENGINES, Traits
from proxy.protocols.engines.quirks import QUIRK_CODES, QUIRKS, CallTraits, applicable, choose_framing
from proxy.trajectory.fidelity import PROBLEMS

STREAM = {"stream": True}


def framing(streaming: str, body: dict, kind: str = "llamacpp", *, can_replay: bool = True) -> str:
    return choose_framing(streaming, kind, CallTraits("chat", body, Traits(kind)), can_replay=can_replay)


def test_every_line_names_an_engine_problems_and_a_source():
    """All three are what docs/exactness.md prints."""
    for loss in QUIRKS:
        assert loss.engine in ENGINES
        assert loss.codes
        assert set(loss.codes) <= PROBLEMS.keys()
        assert loss.what.endswith(".")
        assert loss.source
    assert set(QUIRK_CODES) <= PROBLEMS.keys()


def test_what_is_no_stream_is_whole():
    """Whatever is configured."""
    assert {"whole"} == {framing(how, {}) for how in ("auto", "live", "replay")}
    assert "whole" == framing("replay", {"stream": False})


@pytest.mark.parametrize(("streaming", "framed"), [("auto", "replay"), ("live", "live"), ("replay", "replay")])
def test_a_stream_goes_as_configured_or_as_the_table_advises(streaming, framed):
    """llama.cpp's streams always lose something."""
    assert framed == framing(streaming, STREAM)


def test_vllm_streams_are_live_and_may_be_replayed():
    """They lose nothing."""
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
def test_only_what_we_can_tell_ourselves_is_replayed(body):
    """Odd values and options are the engine's to judge."""
    assert "live" == framing("replay", body)


def test_what_the_engine_would_refuse_is_not_replayed():
    """A 400 stays one."""
    assert "live" == framing("replay", STREAM, can_replay=False)


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
    ],
)
def test_a_call_meets_the_lines_that_are_about_it(kind, dialect, body, codes):
    """So that what is known is not logged as new."""
    at = CallTraits(dialect, body, Traits(kind), keep_reasoning=False)

    assert codes == {code for loss in applicable(kind, at, live=False) for code in loss.codes}
