"""Problems of a step, by example and on recorded responses of real engines."""

from array import array
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from unittest.mock import patch

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.recorded import ROOTS, name_from

from proxy.trajectory.arrays import pack_ids, pack_logprobs
from proxy.trajectory.step import PROBLEMS, Choice, Evidence, _is_usual, check_fidelity, describe_problems


def choice(ids=(7, 8), logprobs=(-0.5, -1.5), finish_reason="stop", index=0, prompt=0):
    return Choice(index, pack_ids(list(ids)), pack_logprobs(list(logprobs)), finish_reason, None, prompt)


def evidence(*choices, **changed):
    facts = {
        "prompts": (array("i", [1, 2, 3]),),
        "choices": choices or (choice(),),
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
        "asked": None,
        "ended": True,
        "status": "complete",
    }
    return Evidence(**facts | changed)


EMPTY = choice((), (), index=1)
UNCOUNTED = {"usage": None}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (evidence(), ()),
        (evidence(asked=1, **UNCOUNTED), ()),
        (evidence(choice((), ()), **UNCOUNTED), ("no_token_ids", "no_logprobs")),
        (evidence(choice((), ())), ("no_token_ids", "no_logprobs", "completion_count")),
        (evidence(choice((), ()), usage={"completion_tokens": 0}), ()),
        (evidence(choice((), (-0.5, -1.5)), **UNCOUNTED), ("no_token_ids", "logprob_count")),
        (evidence(choices=(), **UNCOUNTED), ("no_token_ids", "no_logprobs")),
        (evidence(prompts=(), **UNCOUNTED), ("no_prompt_ids",)),
        (evidence(prompts=(array("i"),), **UNCOUNTED), ("no_prompt_ids",)),
        (evidence(choice(prompt=1)), ("no_prompt_ids",)),
        (evidence(choice(logprobs=())), ("no_logprobs",)),
        (evidence(choice(logprobs=()), wants_logprobs=False), ()),
        (evidence(choice((), ()), wants_logprobs=False, **UNCOUNTED), ("no_token_ids",)),
        (evidence(choice(logprobs=(-1.0,))), ("logprob_count",)),
        (evidence(choice(logprobs=(-1.0,)), wants_logprobs=False), ("logprob_count",)),
        (evidence(usage={"completion_tokens": 3}), ("completion_count",)),
        (evidence(usage={"prompt_tokens": 4}), ("prompt_count",)),
        (evidence(usage={"prompt_tokens": True, "completion_tokens": 3.0}), ()),
        (evidence(usage={"prompt_tokens": None, "completion_tokens": "3"}), ()),
        (evidence(usage="none"), ()),
        (evidence(choice((7, -1))), ("bad_token_id",)),
        (evidence(prompts=(array("i", [1, -2, 3]),)), ("bad_token_id",)),
        (evidence(choice(logprobs=(-0.5, None))), ("bad_logprob",)),
        (evidence(choice(logprobs=(nan, -0.5))), ("bad_logprob",)),
        (evidence(choice(logprobs=(-0.5, -inf))), ("bad_logprob",)),
        (evidence(choice(logprobs=(inf, -inf))), ("bad_logprob",)),
        (evidence(choice(logprobs=(-0.5, 0.01))), ("bad_logprob",)),
        (evidence(choice(logprobs=(-0.0, 1e-7))), ()),
        (evidence(choice(logprobs=(-0.5, -9999.0))), ("clamped_logprob",)),
        (evidence(choice(logprobs=(nan, -10000.0))), ("bad_logprob", "clamped_logprob")),
        (evidence(ended=False, status="partial"), ("stream_cut",)),
        (evidence(choice(finish_reason=None), ended=False, asked=2, status="partial"), ("stream_cut",)),
        (evidence(EMPTY, ended=False, status="partial", **UNCOUNTED), ("stream_cut",)),
        (evidence(asked=2), ("choice_count",)),
        (evidence(asked=10**18), ("choice_count",)),
        (evidence(choice(), choice(), asked=2, **UNCOUNTED), ("choice_count",)),
        (evidence(choice(), choice(index=2), asked=2, **UNCOUNTED), ("choice_count",)),
        (evidence(choice(), choice(index=1), asked=2, **UNCOUNTED), ()),
        (evidence(choice(finish_reason=None)), ("no_finish_reason",)),
        (evidence(choice(), EMPTY, **UNCOUNTED), ("empty_completion",)),
        (evidence(choice(), EMPTY), ()),
        (evidence(choice(), choice((), (), "abort", 1), **UNCOUNTED), ("aborted",)),
        (evidence(choice((), (), "abort"), **UNCOUNTED), ("aborted",)),
        (evidence(choice(finish_reason="abort")), ("aborted",)),
        (evidence(choice(finish_reason="error")), ("engine_error",)),
        (evidence(choices=(), prompts=(), status="error", ended=False), ("engine_error",)),
        (evidence(asked=2, special=("unparsed_event", "no_token_ids", "echo", "echo")),
         ("no_token_ids", "choice_count", "echo", "unparsed_event")),
    ],
)  # fmt: skip
def test_each_defect_of_a_response_has_its_flag(found, expected):
    assert check_fidelity(found) == expected


ODD = {
    "prompts": st.lists(st.lists(st.integers(-1, 5), max_size=3).map(lambda ids: array("i", ids)), max_size=2).map(
        tuple
    ),
    "choices": st.lists(
        st.builds(
            choice,
            st.lists(st.integers(-1, 5), max_size=3),
            st.lists(st.sampled_from([-0.5, 0.0, 0.1, -9999.0, -20000.0, nan, inf, -inf, None]), max_size=3),
            st.sampled_from(["stop", "length", "abort", "error", None]),
            st.integers(-1, 2),
            st.integers(-1, 2),
        ),
        max_size=2,
    ).map(tuple),
    "usage": st.none()
    | st.dictionaries(
        st.sampled_from(["prompt_tokens", "completion_tokens"]),
        st.sampled_from([0, 1, 2, 3, 2.0, True, None, "2", [], nan]),
    ),
    "asked": st.none() | st.integers(-1, 3),
    "ended": st.booleans(),
    "status": st.sampled_from(["complete", "partial", "error"]),
    "wants_logprobs": st.booleans(),
    "max_tokens": st.none() | st.integers(-1, 3),
    "counts_tokens": st.booleans(),
    "special": st.sampled_from([(), ("echo",)]),
}


@settings(max_examples=2000)
@given(st.data(), st.sets(st.sampled_from(sorted(ODD)), max_size=3))
def test_an_ordinary_step_has_the_flags_of_the_general_checks(data, changed):
    """An ordinary step passes at once; a step that differs from it in any facts is checked one by one."""
    found = replace(evidence(asked=1), **{name: data.draw(ODD[name], name) for name in sorted(changed)})
    with patch("proxy.trajectory.step._is_usual", return_value=False):
        expected = check_fidelity(found)

    assert check_fidelity(found) == expected
    assert changed or _is_usual(found)


def test_an_undocumented_flag_raises():
    with pytest.raises(KeyError, match="made_up"):
        check_fidelity(evidence(special=("made_up",)))


def test_each_flag_is_described_by_a_sentence():
    """A flag of another version is described as unknown."""
    sentences = describe_problems(PROBLEMS)

    assert list(PROBLEMS.values()) == sentences
    assert all(sentence.endswith(".") for sentence in sentences)
    assert describe_problems(["later"]) == ["later: unknown problem."]


def test_every_token_of_a_long_response_is_checked():
    """The last id and logprob are found."""
    many = 32_768
    long = Choice(0, array("i", [*range(many - 1), -1]), array("f", [*[-0.5] * (many - 1), nan]), "stop")
    usage = {"prompt_tokens": 1, "completion_tokens": many}

    assert check_fidelity(evidence(long, prompts=(array("i", [1]),), usage=usage)) == ("bad_token_id", "bad_logprob")


WITHHELD = ("no_token_ids", "no_logprobs", "completion_count")
ECHOED = ("logprob_count", "bad_logprob")
FLAGGED = {
    "abort/pause_abort_nonstream.response.json": ("aborted",),
    "abort/pause_abort_stream.response.sse": ("no_finish_reason",),
    "abort/pause_abort2_nonstream.response.json": ("aborted",),
    "abort/pause_abort2_stream.response.sse": ("aborted",),
    "abort/pause_abort_cmpl_stream.response.sse": ("aborted",),
    "cmpl_echo.response.json": ECHOED,
    "cmpl_echo_mt0.response.json": ECHOED,
    "cmpl_echo_stream.response.sse": ECHOED,
    "pairs_hermes/cmpl_echo_n_inj.response.json": ECHOED,
    "pairs_hermes/cmpl_echo_s_inj.response.sse": ECHOED,
    "pairs_hermes_qwen3/cmpl_echo_n_inj.response.json": ECHOED,
    "pairs_hermes_qwen3/cmpl_echo_s_inj.response.sse": ECHOED,
    "reasoning/r_include_reasoning_false.response.json": WITHHELD,
    "reasoning/r_include_reasoning_false_stream.response.sse": WITHHELD,
    "tool_include_reasoning_false.response.json": WITHHELD,
    "tool_include_reasoning_false_stream.response.sse": WITHHELD,
}


def chunks_from(response: Path) -> list[dict]:
    raw = response.read_bytes()
    texts = raw.removeprefix(b"data: ").split(b"\n\ndata: ") if response.suffix == ".sse" else [raw]
    return [orjson.loads(text) for text in texts if text.strip() != b"[DONE]"]


def evidence_from(response: Path) -> Evidence | None:
    """Return the evidence of a response with ids and logprobs that is not an error, or None."""
    request = orjson.loads((response.parent / f"{response.name.split('.response')[0]}.request.json").read_bytes())
    body = request.get("body")
    if request["path"] not in ("/v1/chat/completions", "/v1/completions") or not isinstance(body, dict):
        return None
    chunks = chunks_from(response)
    has_logprobs = body.get("logprobs") is not None and body["logprobs"] is not False
    if not (body.get("return_token_ids") and has_logprobs) or any("error" in chunk for chunk in chunks):
        return None
    n = body.get("n", 1)
    prompts, ids, logprobs, reasons = {}, {}, {}, {}
    for chunk in chunks:
        for part in chunk["choices"]:
            index, part_logprobs = part["index"], part["logprobs"] or {}
            prompt = 0 if "chat" in request["path"] else index // n
            prompts.setdefault(prompt, chunk.get("prompt_token_ids") or part.get("prompt_token_ids"))
            ids.setdefault(index, []).extend(part.get("token_ids") or [])
            values = [entry["logprob"] for entry in part_logprobs.get("content") or []]
            logprobs.setdefault(index, []).extend(values or part_logprobs.get("token_logprobs") or [])
            reasons[index] = part["finish_reason"]
    choices = [choice(ids[i], logprobs[i], reasons[i], i, 0 if len(prompts) == 1 else i // n) for i in sorted(ids)]
    return Evidence(
        prompts=tuple(pack_ids(prompts[prompt]) for prompt in sorted(prompts)),
        choices=tuple(choices),
        usage=next((chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage")), None),
        asked=n * len(prompts),
        ended=response.suffix != ".sse" or response.read_bytes().endswith(b"data: [DONE]\n\n"),
        status="complete",
    )


@pytest.mark.parametrize("suffix", ["json", "sse"])
def test_recorded_responses_of_vllm_are_exact_unless_listed(suffix):
    """Listed are those with withheld ids, echo or an abort."""
    paths = sorted(ROOTS["vllm"].rglob(f"*.response.{suffix}"))
    seen = {f"{name_from(path)}.response.{suffix}": found for path in paths if (found := evidence_from(path))}
    flagged = {name: codes for name, found in seen.items() if (codes := check_fidelity(found))}

    assert len(seen) >= 100
    assert {name: codes for name, codes in FLAGGED.items() if name.endswith(suffix)} == flagged
