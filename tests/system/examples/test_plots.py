"""examples/plots.py: plots of exported rows."""

import asyncio

import aiohttp
import plots
import pytest
from openai import AsyncOpenAI

from tokentape import AsyncClient


async def played(url):
    """Record two groups with rewards under two policy versions."""
    async with AsyncClient(url) as client, AsyncOpenAI(base_url=url, api_key="none") as agents:
        for version in (9, 10):
            await client.put_policy(version)
            for number, rollout in enumerate((await client.open_group(2))["rollouts"]):
                agent = agents.with_options(base_url=rollout["base_url"], api_key=rollout["api_key"])
                messages = [{"role": "user", "content": "Hello"}]
                for _ in range(2):
                    reply = await agent.chat.completions.create(model="policy", messages=messages, max_tokens=20)
                    messages += [reply.choices[0].message.model_dump(exclude_none=True), messages[0]]
                await client.finish_rollout(rollout["rollout_id"], reward=float(number + version))
        return [row async for row in client.export(format="sequences")]


@pytest.mark.parametrize("which", [[], ["--rewards"]])
async def test_the_rows_of_a_proxy_are_plotted(simulated, run, tmp_path, which):
    """The program prints the number of sampled tokens."""
    url, _ = simulated
    rows = await played(url)
    _, output = await run(plots.main, "--url", url, "--out", tmp_path / "plots.png", *which)

    sampled = sum(sum(row["mask"]) for row in rows)
    assert output == f"{tmp_path / 'plots.png'}: 4 rows, {sampled} sampled tokens, 2 policy versions\n"
    assert (tmp_path / "plots.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("container", "name"), [("parquet", "rows.parquet"), ("ndjson", "rows.ndjson")])
async def test_the_rows_of_a_file_equal_the_proxys(simulated, tmp_path, container, name):
    """As it exports them, in either container."""
    url, _ = simulated
    rows = await played(url)
    query = {"format": "sequences", "container": container}
    async with aiohttp.ClientSession() as http, http.get(f"{url}/export", params=query) as response:
        (tmp_path / name).write_bytes(await response.read())

    assert vars(plots.Seen(rows)) == vars(plots.Seen(plots.rows_of(None, tmp_path / name)))


async def test_each_sampled_token_is_plotted_once(simulated):
    """By its index in its turn, its turn in the sequence, and rewards by version and group."""
    rows = await played(simulated[0])
    seen = plots.Seen(rows)

    assert sorted(reward for version in seen.rewards.values() for group in version.values() for reward in group) == [
        9.0,
        10.0,
        10.0,
        11.0,
    ]
    assert {version: len(groups) for version, groups in seen.rewards.items()} == {"9": 1, "10": 1}
    assert {turn: len(lengths) for turn, lengths in seen.turns.items()} == {0: 4, 1: 4}
    assert sorted(seen.logprobs) == sorted(
        logprob for row in rows for logprob, mask in zip(row["logprobs"], row["mask"], strict=True) if mask
    )
    assert max(seen.places) == max(max(lengths) for lengths in seen.turns.values()) - 1


def test_a_span_shared_by_branches_is_counted_once():
    """In the branch that trains it."""

    def row(*owned):
        spans = [{"start": 1, "end": 3, "owned": owned[0]}, {"start": 4, "end": 5, "owned": owned[1]}]
        fields = {"logprobs": [None, -1.0, -2.0, None, -3.0], "reward": None, "group_id": None, "rollout_id": "r"}
        return fields | {"spans": [{**span, "policy_version": None} for span in spans]}

    seen = plots.Seen([row(True, True), row(False, True)])

    assert seen.logprobs == [-1.0, -2.0, -3.0, -3.0]


async def test_without_rows_the_exit_status_is_1(simulated, capsys):
    """And stderr has the reason."""
    with pytest.raises(SystemExit, match="1"):
        await asyncio.to_thread(plots.main, ["--url", simulated[0]])

    assert "There is nothing to plot" in capsys.readouterr().err


def test_a_group_of_equal_rewards_is_plotted():
    """Its mean can be less than each of them, by rounding."""
    spans = [{"start": 0, "end": 1, "owned": True, "policy_version": "0"}]
    row = {"logprobs": [-1.0], "reward": 0.4, "group_id": "g", "rollout_id": "r", "spans": spans}
    figure, axes = plots.plt.subplots()
    plots.plot_rewards(axes, plots.Seen([row] * 3))
    plots.plt.close(figure)

    assert axes.get_ylabel() == "reward"
