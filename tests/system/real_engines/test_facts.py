"""Facts about the engine on which the other tests depend, verified without a proxy."""

import orjson
import pytest

from .calls import CALL, QUESTION, TOOL, forced

SEED = 7
ASK = {"return_token_ids": True}
END_OF_TEXT, END_OF_THINKING = "4087", "4095"


@pytest.mark.parametrize("n", [1, 3])
async def test_streamed_and_unstreamed_calls_sample_the_same(direct, n):
    """The same seed gives the same ids and logprobs."""
    body = {"model": "tiny", "messages": QUESTION, "seed": SEED, "n": n, "max_tokens": 40, "logprobs": True}
    whole = await direct.chat.completions.create(**body, extra_body=ASK)
    expected = {
        choice.index: (choice.token_ids, [entry.logprob for entry in choice.logprobs.content])
        for choice in whole.choices
    }
    actual = {index: ([], []) for index in range(n)}

    async for chunk in await direct.chat.completions.create(**body, extra_body=ASK, stream=True):
        (choice,) = chunk.choices
        ids, logprobs = actual[choice.index]
        ids += getattr(choice, "token_ids", None) or []
        logprobs += [entry.logprob for entry in choice.logprobs.content] if choice.logprobs else []

    assert actual == expected
    assert all(len(ids) == len(logprobs) > 0 for ids, logprobs in actual.values())


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
async def test_sampled_ids_score_the_same_as_a_prompt(direct, temperature):
    """The engine gives them the logprobs with which it sampled them."""
    reply = await direct.chat.completions.create(
        model="tiny",
        messages=QUESTION,
        seed=SEED,
        temperature=temperature,
        max_tokens=200,
        logprobs=True,
        extra_body=ASK | {"ignore_eos": True},
    )
    choice = reply.choices[0]
    ids = reply.prompt_token_ids + choice.token_ids
    expected = [entry.logprob for entry in choice.logprobs.content]

    scored = await direct.completions.create(model="tiny", prompt=ids, max_tokens=1, extra_body={"prompt_logprobs": 0})
    entries = scored.choices[0].prompt_logprobs
    actual = [entry[str(token)]["logprob"] for token, entry in zip(ids[1:], entries[1:], strict=True)]

    assert len(expected) == 200
    assert pytest.approx(expected, abs=1e-4) == actual[-200:]


@pytest.mark.parametrize(
    "steered",
    [{"chat_template_kwargs": {"enable_thinking": False}}, {"logit_bias": {END_OF_THINKING: 100}}],
    ids=["thinking switched off", "thinking ended at once"],
)
async def test_a_forced_tool_call_is_parsed(direct, steered):
    """A tool call forced by a regex is in the response's tool calls."""
    reply = await direct.chat.completions.create(
        model="tiny",
        messages=QUESTION,
        tools=[TOOL],
        seed=SEED,
        max_tokens=100,
        extra_body=ASK | forced(CALL) | steered,
    )
    choice = reply.choices[0]
    (call,) = choice.message.tool_calls

    assert (choice.finish_reason, call.function.name) == ("tool_calls", "add")
    assert orjson.loads(call.function.arguments)["x"] in range(100, 1000)


@pytest.mark.parametrize("preserve", [True, False])
async def test_the_second_turn_extends_the_first_if_reasoning_is_kept(direct, preserve):
    """And only if the template keeps its think block."""
    body = {
        "model": "tiny",
        "seed": SEED,
        "max_tokens": 20,
        # Each digit is a token, so text preserves them. The template ends every message with the same EOS, so a reply
        # that ended with the other one would not come back as it was.
        "logit_bias": {END_OF_TEXT: -100},
        "extra_body": ASK
        | forced("[0-9]{4}")
        | {"chat_template_kwargs": {"enable_thinking": False, "preserve_thinking": preserve}},
    }
    first = await direct.chat.completions.create(messages=QUESTION, **body)
    message = first.choices[0].message
    turns = [*QUESTION, {"role": "assistant", "content": message.content}, *QUESTION]

    second = await direct.chat.completions.create(messages=turns, **body)
    ids = first.prompt_token_ids + first.choices[0].token_ids

    assert preserve == (second.prompt_token_ids[: len(ids)] == ids)
