"""The parts of a resumed call, for its client."""

from array import array

import pytest

from proxy.protocols.parts import Before, PartsDiffer

RESPONSE = {
    "id": "a",
    "created": 1,
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "ab"}}],
    "metadata": {"weight_versions": [{"version": "1", "start": 0, "end": 2}]},
}
BEFORE = Before(RESPONSE, 3, 2, array("i", [1, 2, 3, 4, 5]))
USAGE = {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
WHOLE_USAGE = {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}


def chunk(**delta):
    return {"id": "b", "created": 2, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


def test_an_event_has_the_head_of_the_first_part():
    shown = BEFORE.chunk(chunk(content="c"))

    assert (shown["id"], shown["created"], shown["choices"][0]["delta"]) == ("a", 1, {"content": "c"})


def test_the_role_is_written_once():
    assert BEFORE.chunk(chunk(role="assistant", content="")) is None
    assert BEFORE.chunk(chunk(role="assistant", content="c"))["choices"][0]["delta"] == {"content": "c"}


def test_usage_counts_all_parts():
    assert BEFORE.chunk({"id": "b", "choices": [], "usage": USAGE})["usage"] == WHOLE_USAGE
    assert Before(RESPONSE).usage(USAGE) == USAGE


@pytest.mark.parametrize(("first", "sum_of_both"), [(2, 5), (None, None)])
def test_usage_has_the_thoughts_of_all_parts_or_of_none(first, sum_of_both):
    own = {} if first is None else {"completion_tokens_details": {"reasoning_tokens": first}, "reasoning_tokens": first}
    before = Before({**RESPONSE, "usage": own}, 3, 2)
    usage = {**USAGE, "completion_tokens_details": {"reasoning_tokens": 3}, "reasoning_tokens": 3}

    assert before.usage(usage) == {
        **WHOLE_USAGE,
        "completion_tokens_details": {"reasoning_tokens": sum_of_both},
        "reasoning_tokens": sum_of_both,
    }


def test_a_whole_response_has_the_texts_and_versions_of_all_parts():
    last = {"id": "b", "created": 2, "choices": [{"index": 0, "message": {"role": "assistant", "content": "c"}}]}
    shown = BEFORE.whole(
        {**last, "usage": USAGE, "metadata": {"weight_versions": [{"version": "2", "start": 0, "end": 4}]}}
    )

    assert (shown["id"], shown["created"], shown["usage"]) == ("a", 1, WHOLE_USAGE)
    assert shown["choices"][0]["message"]["content"] == "abc"
    assert [(span["start"], span["end"]) for span in shown["metadata"]["weight_versions"]] == [(0, 2), (2, 6)]


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content", "tool_calls"])
def test_a_part_that_is_parsed_differs(field):
    with pytest.raises(PartsDiffer):
        BEFORE.chunk(chunk(**{field: "x"}))
    with pytest.raises(PartsDiffer):
        BEFORE.whole({"choices": [{"index": 0, "message": {"content": None, field: ["x"]}}]})


def test_a_part_with_another_prompt_differs():
    BEFORE.check_prompt({"prompt_token_ids": [1, 2, 3, 4, 5], "choices": []})
    BEFORE.check_prompt({"choices": [{"prompt_token_ids": None}]})
    with pytest.raises(PartsDiffer):
        BEFORE.check_prompt({"choices": [{"prompt_token_ids": [1, 2, 3]}]})


def test_a_whole_response_of_ids_has_the_ids_and_counts_of_all_parts():
    """The prompt is that of the first part; SGLang counts in `meta_info`."""

    def choice(ids, **meta):
        count = len(ids)
        lists = {"output_token_logprobs": [[-1.0, token, None] for token in ids], "input_token_logprobs": [count]}
        versions = [{"version": "1", "start": 0, "end": count}]
        counts = {
            "completion_tokens": count,
            "prompt_tokens": 9 - count,
            "cached_tokens": count,
            "weight_versions": versions,
        }
        return {
            "text": "a" * count,
            "output_ids": ids,
            "prompt_token_ids": [7] * (9 - count),
            "meta_info": {**lists, **counts, **meta},
        }

    first, last = choice([4, 5, 6], id="a"), choice([8, 9], id="b", finish_reason={"type": "length", "length": 2})
    (shown,) = Before({"choices": [first]}, 6, 3).whole({"choices": [last]})["choices"]
    meta = shown["meta_info"]

    assert (shown["text"], shown["output_ids"], shown["prompt_token_ids"]) == ("aaaaa", [4, 5, 6, 8, 9], [7] * 6)
    assert (
        meta["id"],
        meta["prompt_tokens"],
        meta["completion_tokens"],
        meta["cached_tokens"],
        len(meta["output_token_logprobs"]),
    ) == ("a", 6, 5, 3, 5)
    assert (meta["input_token_logprobs"], meta["finish_reason"]) == ([3], {"type": "length", "length": 5})
    assert meta["weight_versions"] == [{"version": "1", "start": 0, "end": 5}]


def test_a_part_that_was_aborted_in_the_queue_loses_nothing_of_the_others():
    """SGLang (0.5.23, tokenizer_manager.py) returns it without most of `meta_info`."""

    def choice(ids, reason):
        counts = {"completion_tokens": len(ids), "output_token_logprobs_length": len(ids), "prompt_tokens": 6}
        lists = {
            name: [[-1.0, token, None] for token in ids] for name in ("output_token_logprobs", "output_top_logprobs")
        }
        versions = [{"version": "1", "start": 0, "end": len(ids)}]
        meta = {**counts, **lists, "weight_versions": versions, "finish_reason": {"type": reason}}
        return {"text": "a" * len(ids), "output_ids": ids, "meta_info": meta}

    queued = {"id": "b", "completion_tokens": 0, "finish_reason": {"type": "abort"}, "weight_version": "1"}
    cut = Before({"choices": [choice([4, 5, 6], "abort")]}, 6, 3).whole(
        {"choices": [{"text": "", "output_ids": [], "meta_info": queued}]}
    )
    (shown,) = Before(cut, 6, 3).whole({"choices": [choice([8, 9], "stop")]})["choices"]

    assert cut["choices"][0]["meta_info"]["finish_reason"] == {"type": "abort"}
    assert {**choice([4, 5, 6, 8, 9], "stop")["meta_info"], "weight_version": "1", "id": "b"} == {
        "weight_version": "1",
        **shown["meta_info"],
    }


def test_versions_of_a_part_are_not_those_of_the_whole():
    """A part that names none has a whole that names none."""
    choice = {"index": 0, "message": {"role": "assistant", "content": "c"}}
    versions = {"weight_version": "2", "weight_versions": [{"version": "2", "start": 0, "end": 4}]}
    shown = Before({**RESPONSE, "metadata": {"weight_version": "1"}}, 3, 2).whole(
        {"choices": [choice], "metadata": versions}
    )

    assert shown["metadata"] == {"weight_version": "2", "weight_versions": None}


def test_the_experts_of_a_part_are_not_those_of_the_whole():
    with pytest.raises(PartsDiffer):
        Before({"choices": [{"index": 0, "token_ids": [1]}]}, 3, 1).whole(
            {"choices": [{"index": 0, "token_ids": [2], "routed_experts": "x"}]}
        )
