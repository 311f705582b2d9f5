"""SGLang's native generate endpoint: options, sampling parameters, bodies, and both forms of its streams."""

import copy
from itertools import pairwise

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.recorded import cut, load, names, plan_of, play

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects import DIALECTS
from proxy.protocols.dialects.generate import SglangGenerate
from proxy.protocols.engines.base import CallOptions
from proxy.protocols.sampling import Sampling

PATH = "/generate"
DIALECT = SglangGenerate()
RECORDED = [name.removesuffix("_n_plain") for name in names("recorded/native_*_n_plain", "sglang")]
STREAMED = [name for name in RECORDED if not name.endswith("err")]
# What differs between any two calls.
VOLATILE = {"id", "e2e_latency", "response_sent_to_client_ts", "cached_tokens", "cached_tokens_details"}


def plan(body, **options):
    return plan_of(PATH, body, CallOptions(**options), kind="sglang")


def payloads_of(response):
    """Return the JSON of a response: of each event of a stream, or of the body."""
    if not response.startswith(b"data: "):
        return [orjson.loads(response)]
    events = response.split(b"\n\n")[:-1]
    assert events.pop() == b"data: [DONE]"
    return [orjson.loads(event.removeprefix(b"data: ")) for event in events]


def comparable(value):
    """Return JSON without what differs between any two calls; logprobs are rounded, as batches change their last digits."""
    if isinstance(value, dict):
        return {key: comparable(inner) for key, inner in value.items() if key not in VOLATILE}
    if isinstance(value, list):
        return [comparable(inner) for inner in value]
    return round(value, 3) if isinstance(value, float) else value


@pytest.mark.parametrize(
    ("body", "read"),
    [
        ({"text": "a"}, (False, False, 1, 1)),
        ({"text": ["a", "b", "c"]}, (False, False, 1, 3)),
        ({"text": []}, (False, False, 1, None)),
        ({"input_ids": [1, 2]}, (False, False, 1, 1)),
        ({"input_ids": [[1, 2], [3]], "sampling_params": {"n": 2}}, (False, False, 2, 4)),
        ({"input_ids": []}, (False, False, 1, None)),
        ({"input_embeds": [[0.5], [0.5]]}, (False, False, 1, 1)),
        ({"input_embeds": [[[0.5]], [[0.5]]]}, (False, False, 1, 2)),
        ({"text": ["a", "b"], "sampling_params": [{"n": 3}, {"n": 3}]}, (False, False, 3, 6)),
        ({"text": "a", "sampling_params": {"n": "x"}}, (False, False, None, None)),
        ({"text": "a", "sampling_params": 7, "n": 5}, (False, False, 1, 1)),
        ({"text": "a", "return_logprob": True, "return_prompt_token_ids": True}, (True, True, 1, 1)),
        ({"text": ["a", "b"], "return_logprob": [False, True]}, (False, True, 1, 2)),
        ({"text": ["a", "b"], "return_logprob": [False, False]}, (False, False, 1, 2)),
        ({}, (False, False, 1, None)),
    ],
)
def test_response_options_are_read_from_a_request(body, read):
    """A body with an unknown number of prompts is refused by the engine."""
    options = DIALECT.response_options(body)

    assert (options.token_ids, options.logprobs, options.samples, options.choices) == read
    assert not options.usage


def test_sampling_parameters_have_the_names_of_other_dialects():
    params = {"temperature": 0.5, "max_new_tokens": 9, "min_new_tokens": 2, "sampling_seed": 7, "regex": "a"}

    assert DIALECT.sampling({"text": "a", "sampling_params": params, "temperature": 1.0}) == {
        "temperature": 0.5,
        "max_tokens": 9,
        "min_tokens": 2,
        "seed": 7,
        "regex": "a",
    }
    assert DIALECT.sampling({"text": "a"}) == {}
    assert DIALECT.sampling({"custom_logit_processor": "p"}) == {"custom_logit_processor": "p"}


def test_of_a_list_of_sampling_parameters_those_that_are_equal_are_recorded():
    params = [{"temperature": 0.5, "max_new_tokens": 9, "top_k": 1}, {"temperature": 0.5, "max_new_tokens": 8}]

    assert DIALECT.sampling({"text": ["a", "b"], "sampling_params": params}) == {"temperature": 0.5}


def test_rules_of_a_rollout_are_applied_by_the_engines_names():
    """A rule for the model has no field; the client's body is unchanged."""
    body = {"text": "a", "sampling_params": {"temperature": 0.2, "top_p": 0.9, "max_new_tokens": 500}}
    before = copy.deepcopy(body)
    rules = Sampling({"temperature": 1.0, "model": "m"}, {"seed": 3}, {"max_tokens": 40})
    made = plan(body, sampling=rules)

    assert made.body["sampling_params"] == {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": 40, "sampling_seed": 3}
    assert ("model" in made.body, before) == (False, body)
    assert (made.sampling["temperature"], made.sampling["max_tokens"]) == (1.0, 40)


def test_rules_are_applied_to_a_list_of_equal_parameters_and_refused_for_others():
    equal = [{"temperature": 0.2}, {"temperature": 0.2}]
    other = [{"temperature": 0.2}, {"temperature": 0.3}]
    rules = Sampling({"temperature": 1.0})

    assert plan({"text": ["a", "b"], "sampling_params": equal}, sampling=rules).body["sampling_params"] == {
        "temperature": 1.0
    }
    with pytest.raises(UnprocessableRequest, match="list of different sampling_params"):
        plan({"text": ["a", "b"], "sampling_params": other}, sampling=rules)
    assert other == plan({"text": ["a", "b"], "sampling_params": other}).body["sampling_params"]


@pytest.mark.parametrize(
    ("body", "prompts"),
    [
        ({"input_ids": [1, 2]}, [[1, 2]]),
        ({"input_ids": [[1, 2], [3]]}, [[1, 2], [3]]),
        ({"text": "a", "input_ids": [1, 2]}, None),  # the text wins
        ({"text": "a"}, None),
        ({"input_ids": "x"}, None),
    ],
)
def test_the_prompts_of_a_body_with_ids_are_compared_with_the_engines(body, prompts):
    assert DIALECT.prompt_ids(body) == prompts


def choice(text, ids, **more):
    return {"text": text, "output_ids": ids, "meta_info": {"id": "x", "completion_tokens": len(ids)}, **more}


def test_a_single_object_and_a_list_of_one_remain_what_they_are():
    """SGLang returns a list for a list, of any length."""
    for body in (choice("a", [1]), [choice("a", [1])], [choice("a", [1]), choice("b", [2])]):
        assert body == DIALECT.write_body(DIALECT.read_body(body))


@pytest.mark.parametrize("body", [{}, [], [7], {"choices": []}, {"meta_info": 1}, [choice("a", [1]), {}], "a", None])
def test_another_body_is_no_response(body):
    assert DIALECT.read_body(body) is None


@pytest.mark.parametrize("framing", ["n", "s"])
@pytest.mark.parametrize("name", RECORDED)
def test_a_client_sees_what_sglang_alone_responds(name, framing):
    """The recorded response with the injected fields, stripped, is the recorded response without."""
    plain = load(f"{name}_{framing}_plain", "sglang")
    if name.endswith("err"):
        assert plain.response == b"".join(play(plan(plain.body), plain)[:2])
        return
    injected = load(f"{name}_{framing}_inj", "sglang")
    made = plan(plain.body)
    assert injected.body == {key: value for key, value in made.body.items() if key != "rid"} | (
        {"rid": injected.body["rid"]} if "rid" in injected.body else {}
    )
    shown = b"".join(play(made, injected)[:2])

    if framing == "n":
        assert comparable(payloads_of(plain.response)) == comparable(payloads_of(shown))
    else:  # two streams are cut into different events
        assert ends_of(plain.response) == ends_of(shown)
        assert keys_of(plain.response) == keys_of(shown)


def ends_of(response):
    """Return the last event of each choice, which has all of it."""
    return {event.get("index"): comparable(event) for event in payloads_of(response)}


def keys_of(response):
    """Return the keys of all events."""
    return {(*event, *sorted(event["meta_info"].keys() - VOLATILE)) for event in payloads_of(response)}


@pytest.mark.parametrize("framing", ["n", "s"])
@pytest.mark.parametrize("name", STREAMED)
def test_a_recorded_response_is_an_exact_step(name, framing):
    """Whole or streamed: the ids, prompts and logprobs of each choice, the counts, and the version of each token."""
    cassette = load(f"{name}_{framing}_inj", "sglang")
    plain = load(f"{name}_n_plain", "sglang")
    step = play(plan(plain.body | ({"stream": True} if framing == "s" else {})), cassette)[2]
    whole = orjson.loads(load(f"{name}_n_inj", "sglang").response)
    choices = whole if isinstance(whole, list) else [whole]
    metas = [each["meta_info"] for each in choices]

    assert step.problems == ()
    if name.endswith(("stop", "utf8")):  # sampled
        return
    assert [each["output_ids"] for each in choices] == [each.ids.tolist() for each in step.choices]
    for each, meta in zip(step.choices, metas, strict=True):
        logprobs = [round(entry[0], 3) for entry in meta["output_token_logprobs"]]
        assert logprobs == [round(logprob, 3) for logprob in each.logprobs]
        assert len(step.prompts[each.prompt]) == meta["prompt_tokens"]
        assert [(0, len(each.ids), "default")] * bool(each.ids) == [
            (span.start, span.end, span.policy_version) for span in each.spans
        ]
    assert step.usage.keys() == {"prompt_tokens", "completion_tokens", "total_tokens"}
    assert sum(map(len, step.prompts)) == step.usage["prompt_tokens"]
    assert sum(len(each.ids) for each in step.choices) == step.usage["completion_tokens"]


@pytest.mark.parametrize(
    ("start", "sent"),
    [(None, None), (-1, -1), (0, -1), (5, -1)],
)
def test_logprobs_of_the_prompt_are_not_computed_for_a_client_that_requests_none(start, sent):
    """Its `logprob_start_len` has no effect without `return_logprob`."""
    body = {"text": "a"} if start is None else {"text": "a", "logprob_start_len": start}
    made = plan(body)

    assert (made.body["return_logprob"], made.body.get("logprob_start_len")) == (True, sent)


def test_flags_of_several_prompts_are_completed_and_stripped_one_by_one():
    """Only the second prompt's logprobs are shown, with its own start."""
    body = {"text": ["a", "b"], "return_logprob": [False, True], "logprob_start_len": [4, 0]}
    made = plan(body)
    metas = [{"id": str(n), "completion_tokens": 1, "output_token_logprobs": [[-1.0, n, None]]} for n in (5, 6)]
    response = {"choices": [choice("t", [n]) | {"meta_info": metas[n - 5], "index": n - 5} for n in (5, 6)]}
    shown = made.view.whole(response)[0]["choices"]

    assert (made.body["return_logprob"], made.body["logprob_start_len"]) == (True, [-1, 0])
    assert ["output_token_logprobs" in each["meta_info"] for each in shown] == [False, True]
    assert all("output_token_logprobs" in each["meta_info"] for each in response["choices"])


@pytest.mark.parametrize(
    "body",
    [{"text": ["a"], "return_logprob": [False], "sampling_params": {"n": 2}}, {"text": "a", "return_logprob": [7]}],
)
def test_flags_that_sglang_may_refuse_are_not_replaced(body):
    assert "return_logprob" not in plan(body).sent["set"] or body["return_logprob"] == [7]


def test_a_stream_with_ids_as_its_prompt_does_not_repeat_them_in_each_event():
    """The step has the ids of the request; the engine confirms their number."""
    body = {"input_ids": [5, 6, 7], "stream": True}
    meta = {"id": "x", "completion_tokens": 1, "prompt_tokens": 3, "finish_reason": {"type": "length", "length": 1},
            "output_token_logprobs": [[-0.5, 9, None]]}  # fmt: skip
    made, event = plan(body), {"text": "t", "output_ids": [9], "meta_info": meta}
    cassette = load("recorded/native_ids_s_inj", "sglang")
    steps = []
    for count in (3, 4):
        stream = (
            b"data: " + orjson.dumps(event | {"meta_info": meta | {"prompt_tokens": count}}) + b"\n\ndata: [DONE]\n\n"
        )
        steps.append(play(made, cassette, [stream])[2])

    assert "return_prompt_token_ids" not in made.body
    assert [step.problems for step in steps] == [(), ("prompt_count",)]
    assert [prompt.tolist() for prompt in steps[0].prompts] == [[5, 6, 7]]


def test_prompt_ids_are_not_requested_of_a_call_that_has_none():
    """SGLang fails to return ids for embeddings, and refuses a call without any prompt."""
    assert plan({"input_embeds": [[0.5]]}).sent["set"].keys() == {"return_logprob", "rid"}
    assert plan({}).sent["set"] == {}


def test_beam_search_is_flagged():
    assert plan({"text": "a", "sampling_params": {"beam_width": 4}}).problems == ("beam_search",)


# Streams: of each choice, its ids with a text each, and where it is cut into events.
CHOICES = st.lists(
    st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.lists(st.integers(0, 12), max_size=6)),
    min_size=1,
    max_size=3,
)


def event_of(index, ids, start, end, *, is_last, is_single, is_continued, surplus=0):
    """Return an event after `end` tokens; one that repeats has `surplus` more ids than it counts."""
    shown = ids[start if is_continued else 0 : end + surplus]
    meta = {
        "id": f"id-{index}",
        "finish_reason": {"type": "length", "length": end} if is_last else None,
        "prompt_tokens": 2,
        "output_token_logprobs": [[-float(token), token, None] for token in shown],
        "output_top_logprobs": [[[-1.0, token, None]] for token in shown],
        "completion_tokens": end,
    }
    event = {"text": "".join(map(str, shown)), "output_ids": shown, "meta_info": meta}
    return event if is_single else event | {"index": index}


def stream_of(choices, *, is_continued, surplus):
    """Return the events of choices, in turns."""
    queues = []
    for index, (ids, cuts) in enumerate(choices):
        bounds = sorted({0, len(ids), *(cut for cut in cuts if 0 < cut < len(ids))})
        queues.append(
            [
                event_of(
                    index, ids, start, end, is_last=end == len(ids), is_single=len(choices) == 1,
                    is_continued=is_continued, surplus=0 if is_continued or end == len(ids) else surplus,
                )
                for start, end in pairwise(bounds)
            ]
        )  # fmt: skip
    events = []
    while any(queues):
        events += [queue.pop(0) for queue in queues if queue]
    return events


@given(CHOICES, st.booleans(), st.integers(0, 2))
def test_an_accumulated_stream_equals_the_whole_response(choices, is_continued, surplus):
    """Whether its events repeat or continue their choices, and however they are cut. Events are not modified."""
    events = stream_of(choices, is_continued=is_continued, surplus=surplus)
    before = copy.deepcopy(events)
    accumulator = DIALECT.accumulator()
    finished = [accumulator.feed(event) for event in events]
    whole = [
        event_of(index, ids, 0, len(ids), is_last=True, is_single=len(choices) == 1, is_continued=False)
        for index, (ids, _) in enumerate(choices)
    ]

    assert accumulator.finish() == {"choices": whole}
    assert (before, set()) == (events, accumulator.problems)
    assert (len(choices), len(choices)) == (sum(finished), accumulator.finished)


@given(CHOICES, st.booleans(), st.integers(0, 2), st.lists(st.integers(0, 400), max_size=20), st.integers(1, 30))
def test_a_stream_that_breaks_off_has_the_tokens_until_then(choices, is_continued, surplus, sizes, left):
    """Each choice has as many ids and logprobs as its last event counts, for every split of the bytes."""
    events = stream_of(choices, is_continued=is_continued, surplus=surplus)[:left]
    counted = {event.get("index", 0): event["meta_info"]["completion_tokens"] for event in events}
    body = {"text": ["a"] * len(choices)} if len(choices) > 1 else {"text": "a"}
    text = b"".join(b"data: " + orjson.dumps(event | {"prompt_token_ids": [1, 2]}) + b"\n\n" for event in events)
    step = play(plan(body | {"stream": True}), load("recorded/native_text_s_inj", "sglang"), cut(text, sizes))[2]

    assert counted == {choice.index: len(choice.ids) for choice in step.choices}
    assert counted == {choice.index: len(choice.logprobs) for choice in step.choices}
    assert all(choices[choice.index][0][: len(choice.ids)] == choice.ids.tolist() for choice in step.choices)


def test_the_repeated_token_of_an_aborted_choice_is_counted_once():
    """A continued stream may end with an event that has the last token again (serving_chat.py:2537)."""
    ids = [3, 4, 5]
    events = [
        event_of(0, ids, 0, 2, is_last=False, is_single=True, is_continued=True),
        event_of(0, ids, 2, 3, is_last=False, is_single=True, is_continued=True),
        event_of(0, ids, 2, 3, is_last=True, is_single=True, is_continued=True),
    ]
    accumulator = DIALECT.accumulator()
    for event in events:
        accumulator.feed(event)
    (choice,) = accumulator.finish()["choices"]

    assert (ids, set()) == (choice["output_ids"], accumulator.problems)
    assert ids == [entry[1] for entry in choice["meta_info"]["output_token_logprobs"]]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_event_of_a_continued_stream_is_noticed(lost):
    events = stream_of([([1, 2, 3, 4], [1, 2, 3])], is_continued=True, surplus=0)
    del events[1 + lost]
    accumulator = DIALECT.accumulator()
    for event in events:
        accumulator.feed(event)

    assert "running_count" in accumulator.problems


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"meta_info": {"id": "other"}}, "changed_midstream"),
        ({"prompt_token_ids": [7]}, "changed_midstream"),
        ({"output_ids": [8, 2]}, "running_count"),
    ],
)
def test_events_of_a_choice_that_contradict_each_other_are_a_problem(change, problem):
    """Another id, another prompt, or other tokens than before."""
    first, second = (event_of(0, [1, 2], 0, end, is_last=False, is_single=True, is_continued=False) for end in (1, 2))
    first |= {"prompt_token_ids": [5]}
    second |= {"prompt_token_ids": [5]} | change | {"meta_info": second["meta_info"] | change.get("meta_info", {})}
    accumulator = DIALECT.accumulator()
    accumulator.feed(first)
    accumulator.feed(second)

    assert accumulator.problems == {problem}


def test_an_event_after_the_end_of_its_choice_is_a_problem():
    last = event_of(0, [1], 0, 1, is_last=True, is_single=True, is_continued=False)
    accumulator = DIALECT.accumulator()

    assert [accumulator.feed(last), accumulator.feed(last)] == [True, False]
    assert accumulator.problems == {"content_after_end"}


@pytest.mark.parametrize(
    "malformed",
    [
        {},
        {"meta_info": {"completion_tokens": 1, "finish_reason": None}},
        {"meta_info": {"completion_tokens": True, "finish_reason": None}, "output_ids": [1]},
        {"meta_info": {"completion_tokens": 1}, "output_ids": [1]},
        {"meta_info": {"completion_tokens": 1, "finish_reason": None}, "output_ids": "1"},
        {"meta_info": {"completion_tokens": 1, "finish_reason": None}, "output_ids": [1], "index": True},
        {"meta_info": {"completion_tokens": 1, "finish_reason": None}, "output_ids": [1], "text": 7},
        {"meta_info": 7, "output_ids": [1]},
    ],
)
def test_a_malformed_event_raises(malformed):
    """The caller expects these exceptions."""
    with pytest.raises((TypeError, KeyError, AttributeError)):
        DIALECT.accumulator().feed(malformed)


def test_the_route_determines_the_dialect():
    assert isinstance(DIALECTS[PATH], SglangGenerate)


def whole_response(**meta):
    """Return a faultless response of one choice, with other values in its `meta_info`."""
    known = {
        "id": "x", "finish_reason": {"type": "stop", "matched": 7}, "prompt_tokens": 2, "completion_tokens": 2,
        "output_token_logprobs": [[-0.5, 6, None], [-0.25, 7, None]],
        "weight_versions": [{"version": "a", "start": 0, "end": 2}],
    }  # fmt: skip
    return {"text": "ab", "output_ids": [6, 7], "prompt_token_ids": [1, 2], "meta_info": known | meta}


def problems_of(response, *, stream):
    cassette = load("recorded/native_text_s_inj" if stream else "recorded/native_text_n_inj", "sglang")
    text = orjson.dumps(response)
    body = b"data: " + text + b"\n\ndata: [DONE]\n\n" if stream else text
    return play(plan({"text": "a", "stream": stream}), cassette, [body])[2].problems


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"completion_tokens": 3}, "completion_count"),
        ({"prompt_tokens": 3}, "prompt_count"),
        ({"output_token_logprobs": [[-0.5, 6, None], [-0.25, 8, None]]}, "ids_disagree"),
        ({"output_token_logprobs": [[-0.5, 6, None]]}, "logprob_count"),
        ({"output_token_logprobs": [[-0.5, 6, None], [0.25, 7, None]]}, "bad_logprob"),
        ({"output_token_logprobs": None}, "no_logprobs"),
        ({"finish_reason": {"type": "abort", "message": "", "status_code": None}}, "aborted"),
        ({"finish_reason": {"type": "odd"}}, "unknown_finish_reason"),
        ({"finish_reason": "odd"}, "unknown_finish_reason"),
        ({"finish_reason": {"type": "stop", "matched": [7]}}, "unparsed_event"),
        ({"weight_versions": [{"version": "a", "start": 0, "end": 1}]}, "version_spans"),
        ({"prompt_tokens": "2"}, "prompt_count"),
    ],
)
def test_a_response_that_contradicts_itself_is_flagged(change, problem, stream):
    """Whole and streamed alike; a list of logprobs may be shorter than it was, but is not padded."""
    problems = problems_of(whole_response(**change), stream=stream)

    if stream and change.get("completion_tokens"):
        assert {"running_count", "completion_count"} & set(problems)
    else:
        assert problem is None or problem in problems
        assert problem is not None or problems == ()


def test_counts_are_required():
    """A response without them may have lost tokens."""
    response = whole_response()
    del response["meta_info"]["completion_tokens"]

    assert "no_usage" in problems_of(response, stream=False)
    assert "unparsed_event" in problems_of(response, stream=True)


ODD = st.sampled_from([None, True, -1, 2**40, 0.5, "x", [], {}, [None], [[]], {"a": []}])
PLACES = [("output_ids",), ("text",), ("prompt_token_ids",), ("meta_info",), ("index",)] + [
    ("meta_info", name) for name in whole_response()["meta_info"]
]


@given(st.sampled_from(PLACES), ODD, st.booleans(), st.booleans())
def test_any_value_in_a_response_is_survived(place, value, stream, in_list):
    """The step is complete or an error, and exact only if nothing that matters was changed."""
    response = whole_response()
    inner = response
    for name in place[:-1]:
        inner = inner[name]
    before, inner[place[-1]] = inner.get(place[-1]), value
    problems = problems_of([response] if in_list and not stream else response, stream=stream)

    harmless = {
        ("text",),
        ("index",),
        ("meta_info", "id"),
        ("meta_info", "weight_versions"),
        ("meta_info", "prompt_tokens"),
    }
    assert problems or before == value or place in harmless
