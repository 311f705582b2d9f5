"""Bodies that rollout servers send."""

import pytest

from proxy.api.compat.osmosis.dispatch import InitAnswer, RolloutResult
from proxy.api.compat.osmosis.flat_call import FlatCallBody
from proxy.api.requests import validated
from proxy.errors import UnprocessableRequest


def test_unknown_fields_of_a_flat_call_are_accepted():
    """Osmosis' schemas accept them; engines may know them."""
    call = validated(FlatCallBody, {"messages": [{"role": "user", "content": "x", "name": "y"}], "top_k": 3})

    assert (3, "y") == (call.model_extra["top_k"], call.messages[0].model_extra["name"])


@pytest.mark.parametrize("fields", [{"new": 1}, {"final_messages": None, "extra_fields": None, "reward": None}])
def test_optional_fields_of_a_result_may_be_null_or_missing(fields):
    result = validated(RolloutResult, {"rollout_id": "r1", "status": "ERROR"} | fields)

    assert {"rollout_id": "r1", "status": "ERROR"} == result.model_dump(exclude_none=True)


@pytest.mark.parametrize(
    ("model", "body", "named"),
    [
        (RolloutResult, {"rollout_id": "r1", "status": "DONE"}, "status"),
        (RolloutResult, {"rollout_id": "", "status": "ERROR"}, "rollout_id"),
        (RolloutResult, {"rollout_id": "r1", "status": "ERROR", "reward": float("nan")}, "reward"),
        (InitAnswer, {"rollout_id": "r1", "tools": ["add"]}, "tools"),
        (FlatCallBody, {}, "messages"),
    ],
)
def test_an_error_names_the_invalid_field(model, body, named):
    with pytest.raises(UnprocessableRequest, match=f"^{named}") as refused:
        validated(model, body)

    assert named == refused.value.param


def test_an_error_lists_at_most_five_fields():
    """The others are counted; of a list with many invalid items the first is named."""
    wrong = {name: [] for name in ("model", "temperature", "top_p", "max_tokens", "logprobs", "n", "stream")}
    with pytest.raises(UnprocessableRequest, match="and 2 more$"):
        validated(FlatCallBody, {"messages": [{"role": "user"}], **wrong})
    with pytest.raises(UnprocessableRequest, match=r"^messages\.0\.role: [^;]*$"):
        validated(FlatCallBody, {"messages": [{"role": "unknown"}] * 1000})
