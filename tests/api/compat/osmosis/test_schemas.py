"""What rollout servers send, read."""

import pytest

from proxy.api.compat.osmosis.schemas import FlatCallBody, InitAnswer, RolloutResult, validated
from proxy.errors import UnprocessableRequest


def test_keys_that_the_protocol_does_not_know_are_let_through():
    """As its own schemas do: what engines know beyond it is theirs."""
    call = validated(FlatCallBody, {"messages": [{"role": "user", "content": "x", "name": "y"}], "top_k": 3})

    assert (3, "y") == (call.model_extra["top_k"], call.messages[0].model_extra["name"])


@pytest.mark.parametrize("fields", [{"new": 1}, {"final_messages": None, "extra_fields": None, "reward": None}])
def test_a_result_may_say_null_or_nothing(fields):
    """Some of its clients leave nulls out."""
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
def test_a_refusal_names_the_field(model, body, named):
    """And says what is wrong with it."""
    with pytest.raises(UnprocessableRequest, match=f"^{named}") as refused:
        validated(model, body)

    assert named == refused.value.param


def test_a_refusal_of_many_faults_stays_short():
    """Five fields are named, the others counted; of a long list of wrong items the first one is named."""
    wrong = {name: [] for name in ("model", "temperature", "top_p", "max_tokens", "logprobs", "n", "stream")}
    with pytest.raises(UnprocessableRequest, match="and 2 more$"):
        validated(FlatCallBody, {"messages": [{"role": "user"}], **wrong})
    with pytest.raises(UnprocessableRequest, match=r"^messages\.0\.role: [^;]*$"):
        validated(FlatCallBody, {"messages": [{"role": "nobody"}] * 1000})
