"""Samples in token splits that the tokenizer would not choose."""

import orjson
import pytest

from proxy.simulator.model import load_model
from proxy.simulator.options import Options
from proxy.simulator.script import Conversation, Script, ScriptedCall, Turn

TEXT = "The objects of the world are what they are, one after another: naïve words, 🙂 and numbers 12345."
TOKENIZER = load_model().tokenizer
SCRIPT = Script(
    [Conversation([Turn(TEXT, think="Where is it?", call=[ScriptedCall("get_weather", {"city": "Oslo"})] * 8)])]
)
SHAPES = pytest.mark.parametrize("shape", ["vllm", "sglang"])


def sampled_ids(choice):
    """The sampled ids of a choice of either shape."""
    return choice["token_ids"] if "token_ids" in choice else choice["response_token_ids"]


@SHAPES
async def test_ids_are_split_and_the_text_is_the_same(shape, start, tools):
    """At rate 0.3 many tokens are split; ids, logprobs and usage agree, and the message is the same as at rate 0."""
    replies = []
    for rate in (0.0, 0.3):
        client = await start(Options(shape=shape, script=SCRIPT, noncanonical_rate=rate))
        replies.append(await client.chat(seed=1, tools=tools, return_token_ids=True, logprobs=True))
    canonical, split = [sampled_ids(reply["choices"][0]) for reply in replies]
    choice = replies[1]["choices"][0]
    plain = replies[0]["choices"][0]["message"]
    message = choice["message"]
    for calls in (plain["tool_calls"], message["tool_calls"]):
        for call in calls:
            del call["id"]

    assert canonical == TOKENIZER.encode(TOKENIZER.decode(canonical))
    assert split != TOKENIZER.encode(TOKENIZER.decode(split))
    assert 1.2 * len(canonical) < len(split)
    assert len(split) == len(choice["logprobs"]["content"]) == replies[1]["usage"]["completion_tokens"]
    assert plain == message


async def test_the_logprobs_equal_the_scores(start):
    """Scoring the prompt and the split ids again gives the logprobs of the sampling."""
    client = await start(Options(noncanonical_rate=0.5))
    chat = await client.chat(seed=3, return_token_ids=True, logprobs=True)
    choice, prompt = chat["choices"][0], chat["prompt_token_ids"]
    ids = prompt + choice["token_ids"]
    scored = await client.completion(ids, prompt_logprobs=0, max_tokens=1)
    logprobs = [
        scored["choices"][0]["prompt_logprobs"][at][str(ids[at])]["logprob"] for at in range(len(prompt), len(ids))
    ]

    assert logprobs == [entry["logprob"] for entry in choice["logprobs"]["content"]]


async def test_the_seed_determines_the_split(start):
    """The same seed gives the same ids, another seed other ones; a stream has them, too."""
    client = await start(Options(script=SCRIPT, noncanonical_rate=0.3))

    async def ids(seed):
        return sampled_ids((await client.chat(seed=seed, return_token_ids=True))["choices"][0])

    streamed = await client.chat_stream(seed=1, return_token_ids=True)
    in_stream = [token for chunk in streamed for token in chunk["choices"][0].get("token_ids") or ()]

    assert await ids(1) == await ids(1) == in_stream
    assert await ids(1) != await ids(2)


async def test_named_tokens_are_never_split():
    """Bytes, special tokens and markers have no parts, and the parts of a token have its text."""
    merged = [token for token in range(len(TOKENIZER)) if TOKENIZER.parts(token)]
    named = [TOKENIZER.id(name) for name in TOKENIZER.names]

    assert not {*range(256), *named} & {*merged}
    assert len(TOKENIZER) == 256 + len(merged) + len(named)
    for token in merged:
        left, right = TOKENIZER.parts(token)
        assert TOKENIZER.pieces[token] == TOKENIZER.pieces[left] + TOKENIZER.pieces[right]


@pytest.mark.parametrize("scripted", [SCRIPT, None])
async def test_calls_are_written_in_other_white_space(scripted, start, tools):
    """At rate 1 each call is compact or spaced, scripted or not, and is parsed streamed and not."""
    client = await start(Options(script=scripted, noncanonical_rate=1.0))
    texts = set()
    for seed in range(6):
        choice = (await client.chat(seed=seed, tools=tools, return_token_ids=True))["choices"][0]
        calls = [call["function"] for call in choice["message"]["tool_calls"]]
        text = TOKENIZER.decode(choice["token_ids"])
        texts |= {
            written for written in ('"name":"get_weather","arg', '"name":  "get_weather",  "arg') if written in text
        }
        chunks = await client.chat_stream(seed=seed, tools=tools)
        deltas = [d["function"] for c in chunks for d in c["choices"][0]["delta"].get("tool_calls", ())]
        assert '"name": "' not in text
        assert {call["name"] for call in calls} == {d["name"] for d in deltas if "name" in d} == {"get_weather"}
        assert [orjson.loads(call["arguments"]) for call in calls] == objects([d.get("arguments", "") for d in deltas])

    assert len(texts) == 2


def objects(pieces):
    """The objects in the concatenated arguments of streamed calls."""
    return orjson.loads("[" + "".join(pieces).replace("}{", "},{") + "]")
