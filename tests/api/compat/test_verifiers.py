"""verifiers (fa7f5fa) through the proxy: its clients' flags, and its parser on the responses."""

from types import SimpleNamespace

import orjson
import pytest
from openai import AsyncOpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion
from tests.support.fakes import proxying, settings_for
from tests.support.recorded import load
from tests.support.trainers import load_published

from proxy.server.listener import running, simulating
from proxy.simulator.options import Options

MESSAGES = [{"role": "user", "content": "What is 2 + 2?"}]
FLAGS = {"return_tokens_as_token_ids": True, "return_token_ids": True, "prompt_logprobs": 1}
DEFAULTS = {"model": "policy", "max_tokens": 12, "seed": 3}


@pytest.fixture(scope="module")
def parse():
    """`parse_response_tokens` of verifiers: release 0.1.9 has the version of that commit."""
    types = {"ChatCompletion": ChatCompletion, "Completion": Completion, "TrajectoryStepTokens": dict}
    return load_published("verifiers/utils/response_utils.py", "parse_response_tokens", **types).parse_response_tokens


@pytest.fixture(params=["vllm", "sglang"])
def shape(request):
    return request.param


@pytest.fixture
async def proxy(store, http, shape):
    """A proxy in front of a simulated engine, which can also be called directly."""
    async with (
        simulating("127.0.0.1:0", Options(shape=shape)) as engine,
        running(settings_for(engine), store) as served,
    ):
        yield _Proxy(http, served.url, engine)


class _Proxy:
    def __init__(self, http, url, engine=None):
        self.http, self.url, self.engine = http, url, engine

    async def chat(self, **options):
        return await self._call(f"{self.url}/rollouts/r1/v1", "chat", messages=MESSAGES, **options)

    async def directly(self, **options):
        return await self._call(f"{self.engine}/v1", "chat", messages=MESSAGES, **options)

    async def complete(self, **options):
        return await self._call(f"{self.url}/rollouts/r1/v1", "completions", prompt="2 + 2 =", **options)

    async def _call(self, base_url, dialect, **options):
        async with AsyncOpenAI(base_url=base_url, api_key="x", max_retries=0) as client:
            calls = client.chat.completions if dialect == "chat" else client.completions
            return await calls.create(**DEFAULTS | options)

    async def export(self, name="verifiers", *, reward=1.0, **options):
        query = "".join(f"&{option}={value}" for option, value in options.items())
        async with self.http.patch(f"{self.url}/rollouts/r1", json={"reward": reward}) as patched:
            assert patched.status == 200
        async with self.http.get(f"{self.url}/rollouts/r1/export?format={name}&report=true{query}") as response:
            return SimpleNamespace(**orjson.loads(await response.read()))


def approximately(tokens):
    """Return the tokens with logprobs compared as 32-bit floats."""
    return tokens | {"completion_logprobs": pytest.approx(tokens["completion_logprobs"])}


async def test_vf_1_a_client_that_sets_the_flags_gets_ids_logprobs_and_named_tokens(store, engine, http):
    """vLLM returns the same response to the same flags."""
    recorded = load("chat_ids_lp_asids")
    engine.plays(recorded)
    async with proxying(engine.url, store) as served:
        response = await _Proxy(http, served.url).chat(logprobs=1, top_logprobs=1, extra_body=FLAGS)
    direct = ChatCompletion.model_validate_json(recorded.response)

    assert direct.model_copy(update={"model": response.model}) == response
    assert {key: engine.requests[0][key] for key in FLAGS} == FLAGS
    assert f"token_id:{response.choices[0].token_ids[0]}" == response.choices[0].logprobs.content[0].token


@pytest.mark.parametrize("shape", ["vllm"], indirect=True)
async def test_vf_1_the_parser_of_verifiers_finds_the_tokens_of_the_export(proxy, parse):
    responses = [await proxy.chat(logprobs=1, extra_body=FLAGS), await proxy.complete(logprobs=1, extra_body=FLAGS)]
    parsed = [await parse(response, kind) for response, kind in zip(responses, ("chat", "completion"), strict=True)]

    assert [approximately(tokens) for tokens in parsed] == [row["tokens"] for row in (await proxy.export()).rows]
    assert all(tokens["completion_ids"] for tokens in parsed)


async def test_vf_2_a_client_without_the_flags_gets_the_engines_plain_response(proxy, parse):
    """The parser finds no tokens there; the export has them."""
    response, direct = await proxy.chat(), await proxy.directly()
    (row,) = (await proxy.export()).rows

    shown, alone = (
        completion.model_dump(exclude={"id", "created"}, warnings=False) for completion in (response, direct)
    )
    assert alone == shown
    assert await parse(response, "chat") is None
    assert response.usage.prompt_tokens == len(row["tokens"]["prompt_ids"])
    assert response.usage.completion_tokens == len(row["tokens"]["completion_ids"])
    assert len(row["tokens"]["completion_ids"]) == len(row["tokens"]["completion_logprobs"])


async def test_vf_3_training_examples_have_one_example_per_step(proxy):
    """Its reward is the step's, or else the rollout's."""
    for _ in range(2):
        await proxy.chat()
    async with proxy.http.get(f"{proxy.url}/rollouts/r1/steps") as response:
        first, _ = (await response.json())["steps"]
    async with proxy.http.patch(f"{proxy.url}/rollouts/r1", json={"step_rewards": {first["step_id"]: 0.0}}) as patched:
        assert patched.status == 200
    steps, examples = (await proxy.export()).rows, (await proxy.export("training_examples")).rows

    assert [step["reward"] for step in steps] == [example["reward"] for example in examples] == [0.0, 1.0]
    for step, example in zip(steps, examples, strict=True):
        tokens = step["tokens"]
        assert {
            "token_ids": tokens["prompt_ids"] + tokens["completion_ids"],
            "logprobs": [0.0] * len(tokens["prompt_ids"]) + tokens["completion_logprobs"],
            "mask": tokens["prompt_mask"] + tokens["completion_mask"],
            "reward": step["reward"],
        } == example


@pytest.mark.parametrize("shape", ["vllm"], indirect=True)
async def test_vf_4_max_len_truncates_like_max_seq_len_of_verifiers(proxy, parse):
    response = await proxy.chat(logprobs=1, extra_body=FLAGS)
    length = response.usage.total_tokens

    for room in (1, response.usage.prompt_tokens - 1, *range(response.usage.prompt_tokens, length + 2)):
        parsed = await parse(response, "chat", room)
        (row,) = (await proxy.export(max_len=room)).rows
        assert approximately(parsed) == row["tokens"], room


async def test_vf_5_a_step_without_ids_has_no_tokens_and_is_no_training_example(store, engine, http):
    """The report lists it."""
    engine.plays(load("chat_plain"))
    async with proxying(None, store, engines={"endpoints": [{"url": engine.url, "kind": "plain"}]}) as served:
        proxy = _Proxy(http, served.url)
        response = await proxy.chat()
        steps, examples = await proxy.export(), await proxy.export("training_examples")

    assert [row["tokens"] for row in steps.rows] == [None]
    assert [[{"role": "assistant", "content": response.choices[0].message.content}]] == [
        [{key: message[key] for key in ("role", "content")} for message in row["completion"]] for row in steps.rows
    ]
    assert examples.rows == []
    assert len(steps.report["skipped"]) == len(examples.report["skipped"]) == 1
    assert "no_token_ids" in examples.report["skipped"][0]["why"]


@pytest.mark.parametrize(("logprobs", "sent"), [(1, "true"), (True, "true"), (2, "2")])
async def test_vf_6_logprobs_1_of_a_chat_call_is_sent_as_true(store, engine, http, logprobs, sent):
    """All engines accept true; other values are sent unchanged."""
    engine.plays(load("chat_ids_lp"))
    async with proxying(engine.url, store) as served:
        await _Proxy(http, served.url).chat(logprobs=logprobs)

    assert sent == orjson.dumps(engine.requests[0]["logprobs"]).decode()


async def test_vf_6_logprobs_1_returns_a_logprob_per_token(proxy):
    response = await proxy.chat(logprobs=1)

    assert response.usage.completion_tokens == len(response.choices[0].logprobs.content)
    assert {entry.logprob for entry in response.choices[0].logprobs.content} != {0.0}
