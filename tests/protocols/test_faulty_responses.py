"""Responses of real engines, each changed to contradict itself: the step is flagged."""

from collections.abc import Callable
from copy import deepcopy

import orjson
import pytest
from tests.support.recorded import Cassette, load, plan_of, play

from proxy.protocols.exchange import Exchange
from proxy.trajectory.step import FINISH_REASONS, PROBLEMS, Timing

STREAM, WHOLE = "chat_ids_lp_stream", "chat_ids_lp"
TEXT_STREAM, TEXT = "cmpl_ids_lp0_stream", "cmpl_ids_lp0"
SEVERAL, COUNTED = "chat_n3_stream", "chat_cont_usage_stream"

Change = Callable[[list[dict]], object]


def problems(cassette: Cassette, response: bytes) -> tuple[str, ...]:
    body = cassette.body
    return play(plan_of(cassette.path, body, kind=cassette.kind), cassette, [response])[2].problems


def events(cassette: Cassette) -> list[dict]:
    payloads = [event.removeprefix(b"data: ") for event in cassette.response.split(b"\n\n")]
    return [orjson.loads(payload) for payload in payloads if payload.startswith(b"{")]


def streamed(chunks: list[dict]) -> bytes:
    return b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def repeat(position: int) -> Change:
    return lambda chunks: chunks.insert(position, deepcopy(chunks[position]))


def lose(position: int) -> Change:
    return lambda chunks: chunks.pop(position)


def swap(position: int) -> Change:
    return lambda chunks: chunks.insert(position, chunks.pop(position + 1))


def put(position: int, **fields: object) -> Change:
    return lambda chunks: chunks[position].update(fields)


def choice(position: int, **fields: object) -> Change:
    return lambda chunks: chunks[position]["choices"][0].update(fields)


def usage(**fields: object) -> Change:
    return lambda chunks: chunks[-1]["usage"].update(fields)


def usage_before(**fields: object) -> Change:
    """Insert another usage event before the one that the stream has."""
    return lambda chunks: chunks.insert(-1, {**chunks[-1], "usage": {**chunks[-1]["usage"], **fields}})


def cumulative(chunks: list[dict]) -> None:
    """Give each event the token ids of all events so far, instead of its own."""
    seen: list[int] = []
    for chunk in chunks:
        for item in chunk["choices"]:
            if item.get("token_ids"):
                seen = [*seen, *item["token_ids"]]
                item["token_ids"] = seen


def after_the_finish(**fields: object) -> Change:
    def change(chunks: list[dict]) -> None:
        late = deepcopy(chunks[-2])
        late["choices"][0].update({"finish_reason": None, "token_ids": [], "logprobs": None, "delta": {}} | fields)
        chunks.insert(-1, late)

    return change


STREAMS: list[tuple[str, str, Change]] = [
    (STREAM, "completion_count", repeat(3)),
    (STREAM, "completion_count", lose(3)),
    (STREAM, "completion_count", cumulative),
    (TEXT_STREAM, "completion_count", repeat(3)),
    (TEXT_STREAM, "completion_count", lose(3)),
    (SEVERAL, "completion_count", lose(9)),
    (COUNTED, "running_count", repeat(3)),
    (COUNTED, "running_count", lose(3)),
    (COUNTED, "running_count", swap(3)),
    (COUNTED, "running_count", lambda chunks: chunks[5]["usage"].update(completion_tokens=1)),
    (COUNTED, "bad_usage", lambda chunks: chunks[5]["usage"].update(completion_tokens="5")),
    (STREAM, "changed_midstream", put(4, id="chatcmpl-another")),
    (STREAM, "changed_midstream", put(4, model="another")),
    (STREAM, "changed_midstream", put(4, prompt_token_ids=[1, 2, 3])),
    (SEVERAL, "changed_midstream", put(1, prompt_token_ids=[1, 2, 3])),
    (TEXT_STREAM, "changed_midstream", choice(4, prompt_token_ids=[1, 2, 3])),
    (STREAM, "content_after_end", after_the_finish(delta={"content": "more"})),
    (STREAM, "content_after_end", after_the_finish(delta={"reasoning": "more"})),
    (STREAM, "content_after_end", after_the_finish(token_ids=[7])),
    (TEXT_STREAM, "content_after_end", after_the_finish(text="more")),
    (STREAM, "two_finish_reasons", after_the_finish(finish_reason="stop")),
    (STREAM, "two_finish_reasons", after_the_finish(finish_reason="length")),
    (STREAM, "completion_count", usage(completion_tokens=23)),
    (STREAM, "prompt_count", usage(prompt_tokens=32)),
    (STREAM, "bad_usage", usage(completion_tokens="24")),
    (STREAM, "bad_usage", usage(completion_tokens=24.0)),
    (STREAM, "bad_usage", usage(prompt_tokens=True)),
    (STREAM, "bad_usage", put(-1, usage=[24])),
    (STREAM, "usage_sum", usage(total_tokens=1)),
    (STREAM, "bad_usage", put(-1, usage={})),
    (STREAM, "bad_usage", put(-1, usage={"prompt_tokens": 33})),
    (STREAM, "bad_usage", usage(completion_tokens=None)),
    (STREAM, "changed_midstream", usage_before(completion_tokens=23)),
    (STREAM, "changed_midstream", usage_before(prompt_tokens=None)),
    (STREAM, "no_usage", lose(-1)),
    (TEXT_STREAM, "no_usage", lose(-1)),
    (STREAM, "unknown_finish_reason", choice(-2, finish_reason="because")),
    (STREAM, "unknown_finish_reason", choice(-2, finish_reason=7)),
    (STREAM, "unparsed_event", choice(-2, index=-1)),
    (STREAM, "unparsed_event", choice(3, index=True)),
    (STREAM, "unparsed_event", choice(-2, stop_reason={"no": "reason"})),
    (STREAM, "unparsed_event", choice(3, token_ids={"7": 8})),
    (STREAM, "engine_error", put(3, error={"message": "beside choices"})),
]


@pytest.mark.parametrize(
    ("name", "code", "change"), STREAMS, ids=[f"{code}-{number}" for number, (_, code, _) in enumerate(STREAMS)]
)
def test_a_stream_that_contradicts_itself_is_flagged(name, code, change):
    """Without the change, the stream has no flag."""
    cassette = load(name)
    chunks = events(cassette)
    assert problems(cassette, streamed(chunks)) == ()

    change(chunks)

    assert code in problems(cassette, streamed(chunks))


def under(other: int) -> Change:
    """Move the token ids and logprobs of an event to another choice."""

    def change(chunks: list[dict]) -> None:
        moved = next(chunk for chunk in chunks if chunk["choices"] and chunk["choices"][0].get("token_ids"))
        moved["choices"][0]["index"] = other

    return change


def with_running_counts(chunks: list[dict]) -> None:
    """Add to each event the count of its choice, as an engine does that was requested to."""
    counts: dict[int, int] = {}
    for chunk in chunks:
        for item in chunk["choices"]:
            counts[item["index"]] = counts.get(item["index"], 0) + len(item.get("token_ids") or ())
            chunk["usage"] = {"prompt_tokens": 33, "completion_tokens": counts[item["index"]]}


def test_choices_that_the_engine_does_not_count_although_it_was_requested_are_flagged():
    """The sum cannot show that an event was sent with the index of another choice."""
    cassette = load(SEVERAL)
    plan = plan_of(cassette.path, cassette.body, kind=cassette.kind)
    found = []
    for changes in [(), (under(1),), (with_running_counts,), (with_running_counts, under(1))]:
        chunks = events(cassette)
        for change in changes:
            change(chunks)
        exchange = Exchange(plan, 200, cassette.content_type)
        exchange.response.feed(streamed(chunks))
        found.append(exchange.finish(Timing(received=1.0)).step.problems)

    assert ["uncounted" in codes for codes in found[:3]] == [True, True, False]
    assert (found[2], "running_count" in found[3]) == ((), True)


def test_usage_without_counts_is_flagged_in_a_whole_response():
    cassette = load(WHOLE)
    response = orjson.loads(cassette.response)

    assert problems(cassette, orjson.dumps(response | {"usage": {}})) == ("bad_usage",)


def of_message(**fields: object) -> Callable[[dict], object]:
    return lambda response: response["choices"][0]["message"].update(fields)


def of_choice(**fields: object) -> Callable[[dict], object]:
    return lambda response: response["choices"][0].update(fields)


def of_logprob(**fields: object) -> Callable[[dict], object]:
    return lambda response: response["choices"][0]["logprobs"]["content"][2].update(fields)


WHOLES: list[tuple[str, str, Callable[[dict], object]]] = [
    (WHOLE, "no_usage", lambda answer: answer.pop("usage")),
    (TEXT, "no_usage", lambda answer: answer.update(usage=None)),
    (WHOLE, "bad_usage", lambda answer: answer["usage"].update(completion_tokens=False)),
    (WHOLE, "bad_usage", lambda answer: answer["usage"].update(prompt_tokens_details={"a": {"b": {"c": 1}}})),
    (WHOLE, "completion_count", lambda answer: answer["usage"].update(completion_tokens=-24)),
    (WHOLE, "bad_logprob", of_logprob(logprob=False)),
    (WHOLE, "bad_logprob", of_logprob(logprob="-1.5")),
    (TEXT, "bad_logprob", lambda answer: answer["choices"][0]["logprobs"]["token_logprobs"].__setitem__(2, True)),
    (WHOLE, "ids_disagree", of_logprob(token="token_id:1")),
    (TEXT, "ids_disagree", lambda answer: answer["choices"][0]["logprobs"]["tokens"].__setitem__(2, "token_id:1")),
    (WHOLE, "unknown_finish_reason", of_choice(finish_reason=["stop"])),
    (WHOLE, "unknown_finish_reason", of_choice(finish_reason={"type": 7})),
    (WHOLE, "unknown_finish_reason", of_choice(finish_reason="because")),
    (TEXT, "unparsed_event", of_choice(index=-1)),
    (TEXT, "unparsed_event", of_choice(index=2**40)),
    (WHOLE, "engine_error", lambda answer: answer.update(error={"message": "beside choices"})),
    (WHOLE, "no_message", lambda answer: answer["choices"][0].pop("message")),
    (WHOLE, "no_message", of_choice(message="text")),
    (TEXT, "no_message", of_choice(text=None)),
    (WHOLE, "unparsed_event", of_message(tool_calls=5)),
    (WHOLE, "unparsed_event", of_message(tool_calls=[5])),
    (WHOLE, "unparsed_event", of_message(content={"no": "text"})),
    (WHOLE, "unparsed_event", of_message(role=5)),
]


@pytest.mark.parametrize(
    ("name", "code", "change"), WHOLES, ids=[f"{code}-{number}" for number, (_, code, _) in enumerate(WHOLES)]
)
def test_an_unstreamed_response_that_contradicts_itself_is_flagged(name, code, change):
    """Without the change, the response has no flag."""
    cassette = load(name)
    assert problems(cassette, cassette.response) == ()
    response = orjson.loads(cassette.response)

    change(response)

    assert code in problems(cassette, orjson.dumps(response))


@pytest.mark.parametrize("bound", ["max_tokens", "max_completion_tokens"])
def test_more_tokens_than_the_request_allows_are_flagged(bound):
    """If a request has both bounds, the higher one counts: engines differ in the one that they apply."""
    cassette = load(WHOLE)
    body = {key: value for key, value in cassette.body.items() if key != "max_tokens"}

    def flags(**bounds: object) -> tuple[str, ...]:
        return play(plan_of(cassette.path, body | bounds), cassette)[2].problems

    assert flags(**{bound: 23}) == ("too_many_tokens",)
    assert flags(**{bound: 24}) == ()
    assert flags(max_tokens=23, max_completion_tokens=24) == ()
    assert flags(**{bound: 0.5}) == ()


def test_an_event_after_done_is_flagged_and_not_recorded():
    """It is forwarded if it arrives in the same read as [DONE]; nothing is read after that."""
    cassette = load(STREAM)
    late = b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null,"token_ids":[7]}]}\n\n'
    _, end, step = play(plan_of(cassette.path, cassette.body), cassette, [cassette.response + late])

    assert (step.problems, step.sampled, end.endswith(late)) == (("content_after_end",), 24, True)


def test_sglangs_finish_reason_object_is_read_by_its_type():
    """SGLang's own endpoints return an object instead of a string."""
    cassette = load("recorded/chat_utf8_n_inj", "sglang")
    native = cassette.response.replace(b'"finish_reason":"stop"', b'"finish_reason":{"type":"stop","matched":4087}', 1)
    assert native != cassette.response
    step = play(plan_of(cassette.path, cassette.body, kind="sglang"), cassette, [native])[2]

    assert (step.choices[0].finish_reason, step.problems) == ("stop", ())


@pytest.mark.parametrize("field", ["response_token_ids", "token_ids"])
def test_token_ids_that_differ_between_two_fields_of_sglang_are_flagged(field):
    """SGLang returns ids in lists of the choice, with the logprobs, and in `sglext`."""
    cassette = load("recorded/chat_utf8_n_inj", "sglang")
    response = orjson.loads(cassette.response)
    choice = response["choices"][0]
    choice[field] = [*choice["response_token_ids"][:-1], 999]

    step = play(plan_of(cassette.path, cassette.body, kind="sglang"), cassette, [orjson.dumps(response)])[2]

    assert "ids_disagree" in step.problems


@pytest.mark.parametrize("reason", sorted(FINISH_REASONS - {"abort", "error"}))
def test_a_known_finish_reason_is_not_flagged(reason):
    cassette = load(WHOLE)
    response = orjson.loads(cassette.response)
    response["choices"][0]["finish_reason"] = reason

    assert problems(cassette, orjson.dumps(response)) == ()


def test_a_malformed_response_is_recorded_under_unparsed():
    """The step shows it; exports, drift and the tree do not read it as a response."""
    cassette = load(WHOLE)
    response = orjson.loads(cassette.response)
    response["choices"][0]["message"]["tool_calls"] = 5
    step = play(plan_of(cassette.path, cassette.body), cassette, [orjson.dumps(response)])[2]

    assert step.response.keys() == {"unparsed"}
    assert step.response["unparsed"]["choices"][0]["message"]["tool_calls"] == 5
    assert step.sampled == 24


def test_each_flag_of_these_tests_is_documented():
    """docs/fidelity.md prints PROBLEMS."""
    assert {code for _, code, _ in (*STREAMS, *WHOLES)} <= PROBLEMS.keys()
