"""The tokens that truncated sampling kept, from a real SGLang, and what rows name where an engine reports none."""

from math import exp

import pytest

from .through import through_proxy

SAMPLED = 60
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Count to three."}],
    "max_tokens": SAMPLED,
    "extra_body": {"ignore_eos": True},
}
TRUNCATED = {
    "top_k": {"temperature": 0.7, "extra_body": {"ignore_eos": True, "top_k": 20}},
    "all": {"temperature": 1.3, "top_p": 0.9, "extra_body": {"ignore_eos": True, "top_k": 50, "min_p": 0.01}},
    "most": {"temperature": 1, "extra_body": {"ignore_eos": True, "top_k": 4000}},
    "stream": {"temperature": 0.7, "stream": True, "extra_body": {"ignore_eos": True, "top_k": 20}},
}
# SGLang refuses to report a mask of these.
WITHOUT = {
    "unbounded": {"temperature": 1, "top_p": 0.9},
    "too many": {"temperature": 1, "extra_body": {"ignore_eos": True, "top_k": 4001}},
}
ONLY_SGLANG = pytest.mark.parametrize("engine", ["sglang"], indirect=True)


async def row_of(through, rollout: str, request: dict) -> dict:
    """Return the row of one call, with its scores now."""
    async with through.agent(rollout) as agent:
        response = await agent.chat.completions.create(**CHAT | request)
        if request.get("stream"):
            assert [chunk async for chunk in response]
    (row,) = (await through.get(f"/rollouts/{rollout}/export?format=sequences&rescore=policy"))["rows"]
    assert sum(row["mask"]) == SAMPLED
    return row


def differences(row: dict) -> list[float]:
    """Return how much the recorded logprobs of sampled tokens differ from the scores."""
    pairs = zip(row["logprobs"], row["rescored_logprobs"], strict=True)
    return [abs(own - scored) for own, scored in pairs if own is not None]


@ONLY_SGLANG
@pytest.mark.parametrize("name", TRUNCATED)
async def test_logprobs_over_the_mask_equal_the_scores_over_it(engine, tmp_path, audited, name):
    """Each token is in its mask, and its recorded logprob equals the engine's scores over the mask, within 1e-4."""
    request = TRUNCATED[name]
    async with through_proxy(engine.url, tmp_path, record={"sampling_masks": True}) as through:
        row = await row_of(through, "r", request)
    masks = [ids for bit, ids in zip(row["mask"], row["sampling_mask"], strict=True) if bit]
    (span,) = row["spans"]
    report = await audited(row)

    assert span["logprobs_over"] == "mask"
    assert all(0 < len(ids) <= request["extra_body"]["top_k"] for ids in masks)
    for bit, token, ids in zip(row["mask"], row["token_ids"], row["sampling_mask"], strict=True):
        assert token in ids if bit else ids == []
    assert max(differences(row)) < 1e-4
    assert (report["verdicts"], report["tokens"]) == ({"aligned": 1}, SAMPLED)
    assert report["max"] < 1e-4


@ONLY_SGLANG
async def test_the_scores_over_all_tokens_are_others(engine, tmp_path, audited):
    """Without its mask, the row of the same call is not aligned: the mask is required."""
    async with through_proxy(engine.url, tmp_path, record={"sampling_masks": True}) as through:
        row = await row_of(through, "r", {"temperature": 1, "extra_body": {"ignore_eos": True, "top_k": 5}})
    (span,) = row["spans"]
    report = await audited(row | {"sampling_mask": None, "spans": [{**span, "logprobs_over": None}]})

    assert max(differences(row)) < 1e-4
    assert not report["aligned"]


@ONLY_SGLANG
@pytest.mark.parametrize("name", WITHOUT)
async def test_without_a_mask_sglangs_logprobs_are_over_all_tokens(engine, tmp_path, name):
    """So the row names no truncation: trainers normalize over all tokens as well."""
    async with through_proxy(engine.url, tmp_path, record={"sampling_masks": True}) as through:
        row = await row_of(through, "r", WITHOUT[name])
    (span,) = row["spans"]

    assert "sampling_mask" not in row
    assert span.get("logprobs_over") is None
    assert max(differences(row)) < 1e-4


async def test_a_row_without_a_mask_names_truncated_logprobs(processed, tmp_path):
    """They are over tokens that no response has: the probabilities are higher than those over all tokens."""
    masks = {"record": {"sampling_masks": True}}
    async with through_proxy(processed.url, tmp_path, logprobs_mode="processed_logprobs", **masks) as through:
        row = await row_of(through, "r", TRUNCATED["top_k"] | {"temperature": 1})
        plain = await row_of(through, "plain", {"temperature": 1})
    sampled = [
        (own, scored) for own, scored in zip(row["logprobs"], row["rescored_logprobs"], strict=True) if own is not None
    ]

    assert [each["spans"][0].get("logprobs_over") for each in (row, plain)] == ["truncated", None]
    assert "sampling_mask" not in row
    assert all(exp(own) > 1.5 * exp(scored) for own, scored in sampled)
    assert max(differences(plain)) < 1e-3
