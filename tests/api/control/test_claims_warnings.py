"""Warnings of claims: trained tokens with importance ratios that are wrong by how they were recorded."""

import pytest
from tests.support.session import session_with

from proxy.server.listener import simulating
from proxy.simulator.options import Options

NAMES = ("code", "tokens", "of")


async def claim_one(session, *, version=None, claim=None, **sampling):
    """Claim a group with one call of five tokens at these parameters."""
    if version is not None:
        await session.put("/policy", {"version": version})
    (rollout,) = await session.open_group("g")
    await session.chat(rollout, max_tokens=5, **sampling)
    await session.finish(rollout, reward=1)
    return await session.claim(**{"format": "sequences", **(claim or {})})


def warned(claimed):
    return [tuple(warning[name] for name in NAMES) for warning in claimed.get("warnings", [])]


@pytest.mark.parametrize(
    ("sampling", "code"),
    [
        ({}, None),
        ({"temperature": 1.0, "top_p": 1, "top_k": -1}, None),
        ({"temperature": 0.7}, "raw_temperature"),
        ({"temperature": 0}, "greedy"),
        ({"presence_penalty": 0.5}, "raw_penalties"),
        ({"top_p": 0.9}, "untruncated_logprobs"),
    ],
)
async def test_a_claim_warns_of_raw_logprobs_of_another_distribution(proxy, sampling, code):
    """vLLM's are, by default. A claim without warnings has no such field."""
    claimed = await claim_one(proxy, **sampling)

    assert ([(code, 5, 5)] if code else []) == warned(claimed)
    assert bool(code) == ("warnings" in claimed)


@pytest.mark.parametrize("form", ["steps", "trl", "verl", "training_examples", "sequences"])
async def test_a_claim_in_any_format_for_trainers_warns(proxy, form):
    assert warned(await claim_one(proxy, temperature=0.7, claim={"format": form})) == [("raw_temperature", 5, 5)]


@pytest.mark.parametrize(
    ("shape", "mode", "sampling", "code"),
    [
        ("sglang", None, {"temperature": 0.7}, None),
        ("sglang", None, {"top_k": 20}, "untruncated_logprobs"),
        ("vllm", "processed_logprobs", {"temperature": 0.7, "presence_penalty": 0.5}, None),
        ("vllm", "processed_logprobs", {"top_p": 0.9}, "no_sampling_mask"),
        ("vllm", "raw_logits", {}, "logits"),
    ],
)
async def test_a_claim_warns_according_to_the_logprobs_mode(store, shape, mode, sampling, code):
    async with simulating("127.0.0.1:0", Options(shape=shape)) as engine:
        endpoint = {"url": engine, **({} if mode is None else {"logprobs_mode": mode})}
        async with session_with(None, store, engines={"endpoints": [endpoint]}) as session:
            assert ([(code, 5, 5)] if code else []) == warned(await claim_one(session, **sampling))


async def test_a_claim_counts_the_tokens_of_all_its_groups_and_only_these(proxy):
    """Neither those of groups that it refuses nor those that `max_len` cuts."""
    for name, temperature in (("hot", 1.5), ("default", 1), ("cut", 0.5)):
        (rollout,) = await proxy.open_group(name)
        await proxy.chat(rollout, max_tokens=5 if name != "cut" else 300, ignore_eos=True, temperature=temperature)
        await proxy.finish(rollout, reward=1)
    claimed = await proxy.claim(groups=10, format="sequences", max_len=100, overlong="drop")

    assert {*warned(claimed)} == {("raw_temperature", 5, 10)}
    assert "temperature 1.5," in claimed["warnings"][0]["why"]


async def test_a_claim_warns_of_tokens_of_an_earlier_epoch_that_it_takes(proxy):
    await proxy.put("/policy", {"version": 5})
    await proxy.group("lost", 1)
    await proxy.put("/policy", {"version": 4, "new_epoch": True})
    await proxy.group("new", 1)
    claimed = await proxy.claim(groups=2, format="sequences", earlier_epochs="take")
    lost = next(group for group in claimed["groups"] if group["group_id"] == "lost")["data"]
    tokens = [
        sum(sum(row["mask"]) for row in rows)
        for rows in (lost, [row for group in claimed["groups"] for row in group["data"]])
    ]

    assert warned(claimed) == [("earlier_epoch", *tokens)]


class TestWithAnEngineThatReportsVersions:
    @pytest.fixture
    def engine_options(self):
        return Options(shape="sglang", weight_version="7")

    @pytest.mark.parametrize(("announced", "warns"), [(7, False), (6, False), (8, True), ("x", False)])
    async def test_a_claim_warns_of_an_endpoint_with_an_older_version_than_the_announced_one(
        self, proxy, announced, warns
    ):
        claimed = await claim_one(proxy, version=announced)

        assert ([("older_version", 5, 5)] if warns else []) == warned(claimed)
        assert not warns or "fake: 7 after 8" in claimed["warnings"][0]["why"]


async def test_the_training_page_counts_the_tokens_of_warnings(proxy):
    """Those of the policy, by code."""
    assert (await proxy.get("/training")).json["warnings"] == {}
    await claim_one(proxy, temperature=0.7)
    assert (await proxy.get("/training")).json["warnings"] == {"raw_temperature": 5}
