"""Unmodified Messages and Responses clients with a real engine: exact steps, and one sequence."""

import anthropic
import openai
import pytest

from .calls import CALL, TOOL, forced
from .test_conversation import DIGITS, NO_SECOND_END, check_rows, kwargs
from .through import through_proxy

FUNCTION = TOOL["function"]
QUESTION = "What is 57 and 67?"
FIRM = {"seed": 11, "logit_bias": NO_SECOND_END, **kwargs(preserve=True)}
ALIASES = {"claude-*": "tiny", "gpt-*": "tiny", "m": "tiny"}


async def messages_turns(proxy, rollout, *, stream):
    """Run three turns of Anthropic's client: a tool call, an answer to its result, and one to a further question."""
    tools = [{"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}]
    messages = [{"role": "user", "content": QUESTION}]
    async with anthropic.AsyncAnthropic(base_url=f"{proxy.url}/rollouts/{rollout}", api_key="none") as client:
        for constrained in (forced(CALL), DIGITS, DIGITS):
            request = {
                "model": "claude-x",
                "max_tokens": 60,
                "messages": messages,
                "tools": tools,
                "extra_body": FIRM | constrained,
            }
            counted = await client.messages.count_tokens(
                model="claude-x", messages=messages, tools=tools, extra_body=kwargs(preserve=True)
            )
            if stream:
                async with client.messages.stream(**request) as events:
                    response = await events.get_final_message()
            else:
                response = await client.messages.create(**request)
            assert counted.input_tokens == response.usage.input_tokens
            calls = [block for block in response.content if block.type == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "124"} for call in calls]
            messages = [
                *messages,
                {"role": "assistant", "content": response.content},
                {"role": "user", "content": results or "And?"},
            ]


async def responses_turns(proxy, rollout, *, stream):
    """Run the same with OpenAI's client, which references the previous response."""
    tools = [{"type": "function", "name": FUNCTION["name"], "parameters": FUNCTION["parameters"]}]
    next_input, before = QUESTION, None
    async with openai.AsyncOpenAI(base_url=f"{proxy.url}/rollouts/{rollout}/v1", api_key="none") as client:
        for constrained in (forced(CALL), DIGITS, DIGITS):
            request = {
                "model": "gpt-5",
                "input": next_input,
                "tools": tools,
                "max_output_tokens": 60,
                "extra_body": FIRM | constrained,
            }
            named = {} if before is None else {"previous_response_id": before}
            if stream:
                async with client.responses.stream(**request, **named) as events:
                    response = await events.get_final_response()
            else:
                response = await client.responses.create(**request, **named)
            calls = [item for item in response.output if item.type == "function_call"]
            results = [{"type": "function_call_output", "call_id": call.call_id, "output": "124"} for call in calls]
            next_input, before = results or "And?", response.id


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("converse", [messages_turns, responses_turns])
async def test_three_turns_are_exact_and_extend_each_other_as_in_chat(engine, tmp_path, converse, stream):
    """Every step is exact; ids that do not extend each other are reported as drift, as for the chat dialect.

    The engine renders each call: `count_tokens` returns the number of tokens of its rendering.
    """
    async with through_proxy(engine.url, tmp_path, models=ALIASES, continuation={"mode": "off"}) as proxy:
        await converse(proxy, "r1", stream=stream)
        steps, rows, tree = await proxy.steps("r1"), await proxy.rows("r1"), await proxy.get("/rollouts/r1/tree")

    assert len(steps) == 3
    assert all(step["fidelity"]["exact"] for step in steps), [step["fidelity"] for step in steps]
    check_rows(steps, rows)
    assert len(rows) == 1 or tree["drift"], tree
    assert [step["choices"][0]["finish_reason"] for step in steps] == ["tool_calls", "stop", "stop"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_max_tokens_beyond_the_context_window_is_capped(engine, tmp_path, stream):
    """`cap: {max_tokens: auto}`, in either dialect: 32,000 tokens of a window of 2,048."""
    rules = {"cap": {"max_tokens": "auto"}, "override": {"stop_token_ids": list(range(4089))}}
    async with through_proxy(engine.url, tmp_path, models=ALIASES, sampling=rules) as proxy:
        async with anthropic.AsyncAnthropic(base_url=f"{proxy.url}/rollouts/r1", api_key="none") as client:
            messages = [{"role": "user", "content": "hi"}]
            request = {"model": "claude-x", "max_tokens": 32_000, "messages": messages}
            if stream:
                async with client.messages.stream(**request) as events:
                    await events.get_final_message()
            else:
                await client.messages.create(**request, timeout=60)
        async with openai.AsyncOpenAI(base_url=f"{proxy.url}/rollouts/r1/v1", api_key="none") as client:
            await client.responses.create(model="gpt-5", input="hi", max_output_tokens=32_000)
        steps = await proxy.steps("r1")

    assert all(step["fidelity"]["exact"] for step in steps)
    assert [2048 - len(step["prompt_ids"]) for step in steps] == [step["sent"]["set"]["max_tokens"] for step in steps]


@pytest.mark.parametrize("kind", ["messages", "responses"])
async def test_errors_of_the_engine_keep_their_message(engine, tmp_path, kind):
    """In the dialect's shape, with the engine's status; the step has it, too."""
    async with through_proxy(engine.url, tmp_path, models=ALIASES) as proxy:
        if kind == "messages":
            async with anthropic.AsyncAnthropic(base_url=f"{proxy.url}/rollouts/r1", api_key="none") as client:
                with pytest.raises(anthropic.BadRequestError, match="2048"):
                    await client.messages.create(
                        model="m", max_tokens=9, messages=[{"role": "user", "content": "a b " * 3000}]
                    )
        else:
            async with openai.AsyncOpenAI(base_url=f"{proxy.url}/rollouts/r1/v1", api_key="none") as client:
                with pytest.raises(openai.BadRequestError, match="2048"):
                    await client.responses.create(model="m", input="a b " * 3000)
        (step,) = await proxy.steps("r1")

    assert (step["status"], step["dialect"]) == ("error", kind)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_three_turns_of_responses_are_one_sequence_in_append(engine, tmp_path, stream):
    """A translated dialect is continued like chat."""
    async with through_proxy(engine.url, tmp_path, models=ALIASES, continuation={"mode": "append"}) as proxy:
        async with proxy.agent("first") as agent:  # shows the stop token
            await agent.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "Hi"}], extra_body=FIRM | DIGITS
            )
        await responses_turns(proxy, "r1", stream=stream)
        steps, rows = await proxy.steps("r1"), await proxy.rows("r1")

    check_rows(steps, rows)
    assert [step["extra"]["continuation"].get("reason") for step in steps[1:]] == [None, None]
    assert len(rows) == 1
