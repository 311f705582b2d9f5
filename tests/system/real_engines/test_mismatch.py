"""Verdicts about a trainer in plain torch and real engines: each cause is brought about, and has its verdict and no other.

Agents sample conversations through the proxy; the trainer claims them, computes logprobs of their trained tokens with the
weights of a version, and reports them as two ranks.
"""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from contextlib import asynccontextmanager
from functools import partial
from statistics import fmean

import openai
import orjson
import pytest
from typer.testing import CliRunner

from proxy.cli.main import app
from proxy.config.settings import load
from proxy.server.listener import running
from tokentape import AsyncClient

from . import environment
from .calls import THINKING_OFF
from .conftest import VARIABLES
from .test_leaving import until
from .test_weights import load as load_weights

pytestmark = pytest.mark.timeout(600, func_only=True)

TURNS, TOKENS = 4, 40
RATE = 2e-4  # of AdamW: three updates change a logprob by a tenth
RAW, PROCESSED = "raw_logprobs", "processed_logprobs"
FAULTS = {
    None: [("numeric", None)],
    "mask": [("shifted", None)],
    "logits": [("other_tokens", None)],
    "ids": [("other_tokens", None)],
    "positions": [("boundaries", "later")],
}


class Trainer:
    """The program torch_trainer.py."""

    def __init__(self, process: subprocess.Popen) -> None:
        self._process = process

    async def score(self, rows, *, version=0, dtype="bfloat16", temperature=1.0, fault=None):
        """Return the logprobs of the trained tokens of rows."""
        return await self._ask(rows, version=version, dtype=dtype, temperature=temperature, fault=fault)

    async def update(self, rows, folder):
        """Make a small update, and write the weights into a folder."""
        await self._ask(rows, folder=str(folder))

    async def _ask(self, rows, **question):
        line = orjson.dumps({"rows": [(row["token_ids"], row["mask"]) for row in rows], **question})
        return orjson.loads(await asyncio.to_thread(self._answer, line))

    def _answer(self, line: bytes) -> bytes:
        self._process.stdin.write(line + b"\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    """A trainer that starts with the weights of the engines."""
    made = environment.ensure()
    command = [str(made.python), str(environment.HERE / "torch_trainer.py"), str(made.model), str(RATE)]
    with subprocess.Popen(
        command, env=os.environ | VARIABLES, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        yield Trainer(process)
        process.stdin.close()


@asynccontextmanager
async def proxied(folder, **endpoints):
    """A client of a proxy with these endpoints, each a URL and the mode of its logprobs."""
    described = [{"name": name, "url": url, "logprobs_mode": mode} for name, (url, mode) in endpoints.items()]
    settings = load(
        listen="127.0.0.1:0", engines={"endpoints": described}, store={"url": f"embedded:{folder / 'store'}"}
    )
    async with running(settings) as served, AsyncClient(served.url) as client:

        async def kinds():
            return {each["kind"] for each in (await client.send("GET", "/engines"))["engines"]}

        await until(lambda known: known == {"vllm"}, kinds)
        await client.put_policy(0)
        yield client


async def play(client, rollouts, *turns):
    """Sample a group of conversations. Each turn is parameters of a call, or a function of the endpoint of the first one."""
    group = await client.open_group(rollouts, rollout={"continuation": "append"})

    async def converse(rollout, number):
        name, messages, endpoint = rollout["rollout_id"], [], None
        async with openai.AsyncOpenAI(base_url=rollout["base_url"], api_key=rollout["api_key"], max_retries=0) as agent:
            for turn, how in enumerate(turns):
                messages.append({"role": "user", "content": f"Tell part {turn} of story {number}."})
                call = {"max_tokens": TOKENS, "extra_body": {"ignore_eos": True, **THINKING_OFF}}
                call |= how(endpoint) if callable(how) else how
                reply = await agent.chat.completions.create(model="tiny", messages=messages, **call)
                messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
                if endpoint is None:
                    (step,) = [step async for step in client.steps(name)]
                    endpoint = step["engine"]["name"]
        await client.finish_rollout(name, reward=float(number % 2))

    await asyncio.gather(*(converse(rollout, number) for number, rollout in enumerate(group["rollouts"])))
    return group["group_id"]


async def claimed_by(client):
    """Claim all groups for the trainer; return the batch and its rows."""
    claimed = await client.claim_batch(consumer="trainer", groups=100, format="sequences")
    return claimed["batch_id"], [row for group in claimed["groups"] for row in group["data"]]


async def judged(client, score, version=0):
    """Report all groups as two ranks; return the mean |d|, and the verdicts with what they are about, as the CLI has them."""
    batch, rows = await claimed_by(client)
    logprobs = await score(rows)
    for rank in range(2):
        await client.mismatch(batch, rows[rank::2], logprobs[rank::2], policy_version=version, rank=rank)
    shown = await client.batch_mismatch(batch)
    printed = await asyncio.to_thread(CliRunner().invoke, app, ["mismatch", batch, "--url", client.url])
    await client.release_batch(batch)
    found = [(verdict["verdict"], verdict["of"]) for verdict in shown["verdicts"]]
    heads = [verdict if of is None else f"{verdict} ({of})" for verdict, of in found]
    assert heads == [line.partition(":")[0] for line in printed.stdout.splitlines()[: len(found)]]
    assert shown["tokens"] >= 2000
    return shown["cells"]["all"]["all"]["abs_mean"], found


async def test_a_forward_pass_of_the_same_weights_is_numeric_and_a_faulty_one_is_named(vllm, trainer, tmp_path):
    """In float32 logprobs are within 1e-4; faults are found below the noise of bfloat16."""
    async with proxied(tmp_path, engine=(vllm.url, RAW)) as client:
        await play(client, 14, *[{}] * TURNS)
        exact, verdict = await judged(client, partial(trainer.score, dtype="float32"))
        seen = {fault: await judged(client, partial(trainer.score, fault=fault)) for fault in FAULTS}

    assert verdict == [("numeric", None)]
    assert exact < 1e-4 < seen[None][0] < 0.05
    assert {fault: found for fault, (_, found) in seen.items()} == FAULTS


async def test_a_temperature_on_one_side_is_named_in_both_directions(vllm, processed, trainer, tmp_path):
    """Also beside logprobs over the kept tokens, which have a verdict of their own."""
    seen = {}
    for name, engine, mode, sampling in (
        ("raw", vllm, RAW, {}),
        ("processed", processed, PROCESSED, {}),
        ("top-p", processed, PROCESSED, {"top_p": 0.9}),
    ):
        async with proxied(tmp_path / name, engine=(engine.url, mode)) as client:
            await play(client, 14, *[{"temperature": 0.7, **sampling}] * TURNS)
            for temperature in (0.7, 1.0):
                _, seen[name, temperature] = await judged(client, partial(trainer.score, temperature=temperature))

    assert seen == {
        ("raw", 0.7): [("temperature", "0.7")],
        ("raw", 1.0): [("numeric", None)],
        ("processed", 0.7): [("numeric", None)],
        ("processed", 1.0): [("temperature", "0.7")],
        ("top-p", 0.7): [("truncated_support", "top_p=0.9 over truncated")],
        ("top-p", 1.0): [("truncated_support", "top_p=0.9 over truncated"), ("temperature", "0.7")],
    }


async def test_less_certain_tasks_and_first_tokens_are_no_fault(vllm, trainer, tmp_path):
    """An endpoint, and short replies, sample less likely tokens than the others."""
    other = vllm.url.replace("127.0.0.1", "localhost")
    warmer, sampled = {"engine": 0.0, "other": 0.5}, []

    def short(endpoint):
        return {"temperature": 1.1 + warmer[endpoint], "max_tokens": 8}

    def long(endpoint):
        return {"temperature": 0.5 + warmer[endpoint]}

    async def score(rows):
        sampled.extend((span, row["logprobs"][span["start"] : span["end"]]) for row in rows for span in row["spans"])
        return await trainer.score(rows)

    async with proxied(tmp_path, engine=(vllm.url, RAW), other=(other, RAW)) as client:
        await play(client, 20, {"max_tokens": 1}, short, long, short, long, short, long)
        _, found = await judged(client, score)
    certain, uncertain = (
        fmean(value for span, values in sampled if span["endpoint"] == name for value in values) for name in warmer
    )
    first, rest = (
        fmean(value for _, values in sampled for value in values[part]) for part in (slice(8), slice(8, None))
    )

    assert found == [("numeric", None)]
    assert uncertain < certain - 0.3
    assert first < rest - 0.3


async def test_older_weights_are_named(vllm, processed, trainer, tmp_path):
    """Of earlier rows, of one of two endpoints, and not if no row is of the reported version."""
    seen, folders = {}, [tmp_path / str(version) for version in range(4)]
    try:
        async with proxied(tmp_path / "lag", engine=(vllm.url, RAW)) as client:
            for version in range(4):
                if version:
                    await client.update_policy(version, partial(load_weights, vllm, folders[version], version))
                await play(client, 6, *[{}] * TURNS)
                if version < 3:
                    batch, rows = await claimed_by(client)
                    await trainer.update(rows, folders[version + 1])
                    await client.release_batch(batch)
            seen["lag"] = await judged(client, partial(trainer.score, version=3), 3)
            await client.put_policy(4)
            seen["unknown"] = await judged(client, partial(trainer.score, version=3), 4)
        async with proxied(tmp_path / "stale", new=(vllm.url, RAW), old=(processed.url, PROCESSED)) as client:
            await client.put_policy(3)
            await play(client, 20, *[{}] * TURNS)
            seen["stale"] = await judged(client, partial(trainer.score, version=3), 3)
    finally:
        await load_weights(vllm, environment.ensure().model, 0)

    assert {name: found for name, (_, found) in seen.items()} == {
        "lag": [("lag", None)],
        "unknown": [("unknown", None)],
        "stale": [("stale_endpoint", "old")],
    }
