"""Marin's InferenceContext (a3109ee, 004f4a5) through the proxy: its calls, the responses, and exported rollouts."""

from types import SimpleNamespace

import pytest
from openai import AsyncOpenAI
from tests.support.fakes import proxying, settings_for
from tests.support.simulated_tokenizer import make_simulated_tokenizer

from proxy.export import FORMATS, Inexpressible
from proxy.export.base import Rows
from proxy.server.listener import running, simulating
from proxy.simulator.options import Options
from proxy.upstream.tokenizers import load

PROMPT = [{"role": "user", "content": "What is 2 + 2?"}]
# All arguments of Marin's `batch_completions`.
ARGUMENTS = {"logprobs": True, "max_tokens": 12, "temperature": 1.0, "n": 1, "stop": None, "timeout": 30}
BOTH = {"X-Reply-Tokens": "pieces", "X-Reply-Ids": "choices"}
METADATA = {"env_name": "math", "env_example_id": "e7"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_simulated_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def vocabulary(folder):
    """The vocabulary that Marin's `convert_tokens_to_ids` and `get_vocab()[token]` use."""
    return load(folder)._loaded.get_vocab()


@pytest.fixture(params=["vllm", "sglang"])
async def marin(store, http, folder, request):
    """A proxy in front of a simulated engine: `call` calls as Marin does, `export` finishes a rollout and returns its
    rows.
    """
    async with simulating("127.0.0.1:0", Options(shape=request.param, weight_version="7")) as engine:
        settings = settings_for(None, engines={"endpoints": [{"url": engine, "name": "e", "tokenizer": folder}]})
        async with running(settings, store) as served:
            yield _Marin(http, served.url)


class _Marin:
    def __init__(self, http, url):
        self.http, self.url = http, url

    async def call(self, rollout="r1", *, headers=None, messages=PROMPT, **changes):
        base_url = f"{self.url}/rollouts/{rollout}/v1"
        async with AsyncOpenAI(base_url=base_url, api_key="marin", default_headers=headers) as client:
            return await client.chat.completions.create(model="policy", messages=messages, **ARGUMENTS | changes)

    async def steps(self, rollout="r1"):
        async with self.http.get(f"{self.url}/rollouts/{rollout}/steps") as response:
            return (await response.json())["steps"]

    async def export(self, rollout="r1", *, status=200):
        finish = {"status": "completed", "reward": 1.0, "metadata": METADATA}
        async with self.http.post(f"{self.url}/rollouts/{rollout}/finish", json=finish) as finished:
            assert finished.status == 200
        async with self.http.get(f"{self.url}/rollouts/{rollout}/export?format=marin&report=true") as response:
            exported = SimpleNamespace(**await response.json())
            assert status == response.status
            return exported


def completion_of(ids, entries, text):
    """Return an engine's response with these sampled ids and entries of logprobs."""
    tokens = {"token_ids": ids, "logprobs": {"content": entries}, "finish_reason": "stop"}
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, **tokens}
    usage = {"prompt_tokens": 2, "completion_tokens": len(ids), "total_tokens": 2 + len(ids)}
    head = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "usage": usage}
    return {**head, "prompt_token_ids": [1, 2], "choices": [choice]}


async def test_ma_1_the_arguments_of_marin_return_a_chat_completion_with_logprobs(marin):
    """It has no fields that OpenAI's API does not have."""
    completion = await marin.call()
    (choice,) = completion.choices

    assert completion.object == "chat.completion"
    assert completion.usage.completion_tokens == len(choice.logprobs.content) > 0
    assert choice.message.content
    assert getattr(choice, "response_token_ids", None) is None


async def test_ma_2_the_export_has_the_recorded_ids_and_logprobs(marin):
    """Nothing is tokenized again."""
    completion = await marin.call()
    ((step,), exported) = await marin.steps(), await marin.export()
    (row,), (choice,) = exported.rows, step["choices"]

    assert (step["prompt_ids"], choice["ids"]) == (row["prompt_tokens"], row["response_tokens"])
    assert [entry.logprob for entry in completion.choices[0].logprobs.content] == pytest.approx(
        row["response_logprobs"]
    )
    assert any(row["response_logprobs"])
    assert ([1.0] * len(choice["ids"]), 1.0) == (row["token_rewards"], row["episode_reward"])


async def test_ma_3_four_choices_of_a_call_are_one_group(marin):
    await marin.call(n=4)
    exported = await marin.export()
    (group,) = FORMATS["marin"].gather([Rows(exported.rows, [])])

    assert len(group["rollouts"]) == 4
    assert len({tuple(row["prompt_tokens"]) for row in group["rollouts"]}) == 1
    assert len({tuple(row["response_tokens"]) for row in group["rollouts"]}) > 1


@pytest.mark.parametrize(("max_tokens", "truncated"), [(1, True), (2000, False)])
async def test_ma_4_a_rollout_is_truncated_if_its_finish_reason_is_length(marin, max_tokens, truncated):
    completion = await marin.call(max_tokens=max_tokens)
    (row,) = (await marin.export()).rows

    assert ("length" if truncated else "stop") == completion.choices[0].finish_reason
    assert row["is_truncated"] is truncated


@pytest.mark.parametrize("stream", [False, True])
async def test_ma_5_with_pieces_every_token_string_is_in_the_vocabulary(marin, vocabulary, stream):
    """Their ids are those sampled, and equal those in the choice, which Marin's vLLM context reads."""
    response = await marin.call(headers=BOTH, max_tokens=2000, stream=stream)
    chunks = [chunk async for chunk in response] if stream else [response]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    (step,) = await marin.steps()

    assert step["choices"][0]["ids"] == [vocabulary[entry.token] for entry in entries]
    assert any(entry.token.startswith("Ġ") for entry in entries)
    assert entries[-1].token == "<|im_end|>"
    assert (step["prompt_ids"], step["choices"][0]["ids"]) == (
        choices[-1].prompt_token_ids,
        choices[-1].response_token_ids,
    )


async def test_ma_5_special_tokens_and_parts_of_a_character_have_their_own_pieces(
    store, engine, http, folder, vocabulary
):
    """The engine's text of such a token is empty or the replacement character."""
    ids = [*"né 🙂".encode(), vocabulary["<think>"], vocabulary["<|im_end|>"]]  # a byte's id is the byte
    content = [{"token": "�", "logprob": -0.5, "bytes": None, "top_logprobs": []} for _ in ids]
    engine.answers(completion_of(ids, content, "né 🙂"))
    endpoints = [{"url": engine.url, "name": "e", "tokenizer": folder}]
    async with proxying(None, store, engines={"endpoints": endpoints}) as served:
        completion = await _Marin(http, served.url).call(headers=BOTH)

    assert ids == [vocabulary[entry.token] for entry in completion.choices[0].logprobs.content]


async def test_ma_6_rollouts_with_different_prompts_are_not_a_group(marin):
    await marin.call("r1")
    await marin.call("r2", messages=[{"role": "user", "content": "What is 3 + 3?"}])
    members = [Rows((await marin.export(name)).rows, []) for name in ("r1", "r2")]

    with pytest.raises(Inexpressible, match="all rollouts of a group begin with the same prompt"):
        FORMATS["marin"].gather(members)


async def test_ma_6_a_response_without_sampled_tokens_has_no_row(store, engine, http):
    """The report has the reason: a mask of zeros stops Marin's trainer."""
    engine.answers(completion_of([], [], ""))
    async with proxying(engine.url, store) as served:
        marin = _Marin(http, served.url)
        await marin.call()
        exported = await marin.export()

    assert exported.rows == []
    assert [entry["why"] for entry in exported.report["skipped"]] == ["no token was sampled"]
