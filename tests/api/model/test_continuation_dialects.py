"""Continuation of conversations in each dialect, by official clients, streamed and not."""

import anthropic
import httpx2
import openai
import pytest
from google import genai
from google.genai import types
from tests.support.continued_calls import COMPLETIONS, TOOL, continuations, served

FUNCTION = TOOL["function"]
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


async def one_sequence(proxy, turns) -> None:
    """Assert that the steps of rollout r1 are one sequence, with prompts that were sent as ids."""
    steps = await proxy.steps("r1")
    assert continuations(steps) == [None, *["sent"] * (turns - 1)]
    assert all(step.exact for step in steps)
    assert len(await proxy.rows("r1")) == 1


@STREAMS
async def test_a_tool_loop_of_openais_client_is_one_sequence(store, sdk, stream):
    """Chat completions, with a tool call and its result in each second turn."""
    async with served(store, template="qwen3") as proxy:
        client = sdk(openai.AsyncOpenAI, f"{proxy.url}/rollouts/r1/v1")
        messages = [{"role": "user", "content": "Which words?"}]
        for _ in range(4):
            body = {"model": "simulated", "messages": messages, "tools": [TOOL]}
            if stream:
                async with client.chat.completions.stream(**body) as events:
                    async for _event in events:
                        pass
                    message = (await events.get_final_completion()).choices[0].message
            else:
                message = (await client.chat.completions.create(**body)).choices[0].message
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            results = [{"role": "tool", "tool_call_id": call.id, "content": "one"} for call in message.tool_calls or []]
            messages += results or [{"role": "user", "content": "And then?"}]
        await one_sequence(proxy, 4)


@STREAMS
async def test_a_tool_loop_of_anthropics_client_is_one_sequence(store, sdk, stream):
    """Anthropic's client sends the arguments of a call back as an object."""
    tool = {"name": "look_up", "description": "Looks a word up.", "input_schema": FUNCTION["parameters"]}
    async with served(store, template="qwen3") as proxy:
        client = sdk(anthropic.AsyncAnthropic, f"{proxy.url}/rollouts/r1")
        messages = [{"role": "user", "content": "Which words?"}]
        for _ in range(4):
            body = {
                "model": "simulated",
                "max_tokens": 300,
                "system": "Be brief.",
                "messages": messages,
                "tools": [tool],
            }
            if stream:
                async with client.messages.stream(**body) as events:
                    reply = await events.get_final_message()
            else:
                reply = await client.messages.create(**body)
            messages.append(
                {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in reply.content]}
            )
            calls = [block for block in reply.content if block.type == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "one"} for call in calls]
            messages.append({"role": "user", "content": results or "And then?"})
        await one_sequence(proxy, 4)


@STREAMS
@pytest.mark.parametrize("by_id", [False, True], ids=["items", "previous_response_id"])
async def test_a_tool_loop_of_responses_is_one_sequence(store, sdk, stream, by_id):
    """The agent sends its items back, or names the previous response."""
    tool = {"type": "function", "strict": False, **FUNCTION}
    async with served(store, template="qwen3") as proxy:
        client = sdk(openai.AsyncOpenAI, f"{proxy.url}/rollouts/r1/v1")
        items, more = [{"role": "user", "content": "Which words?"}], {}
        for _ in range(4):
            body = {"model": "simulated", "instructions": "Be brief.", "input": items, "tools": [tool], **more}
            if stream:
                events = await client.responses.create(**body, stream=True)
                response = [event async for event in events][-1].response
            else:
                response = await client.responses.create(**body)
            calls = [item for item in response.output if item.type == "function_call"]
            results = [{"type": "function_call_output", "call_id": call.call_id, "output": "one"} for call in calls]
            new = results or [{"role": "user", "content": "And then?"}]
            if by_id:
                items, more = new, {"previous_response_id": response.id}
            else:
                items = [*items, *(item.model_dump(exclude_none=True) for item in response.output), *new]
        await one_sequence(proxy, 4)


@STREAMS
async def test_a_tool_loop_of_googles_client_is_one_sequence(store, stream):
    """Automatic function calling in a chat: results without ids, and a content for each chunk of a stream."""

    def look_up(word: str, limit: int) -> str:
        """Looks a word up."""
        return "one"

    async with httpx2.AsyncClient() as http, served(store, template="qwen3") as proxy:
        options = types.HttpOptions(base_url=f"{proxy.url}/rollouts/r1", httpx_async_client=http)
        client = genai.Client(api_key="none", http_options=options)
        config = types.GenerateContentConfig(
            tools=[look_up], system_instruction="Be brief.", max_output_tokens=300,
            automatic_function_calling=types.AutomaticFunctionCallingConfig(maximum_remote_calls=2),
        )  # fmt: skip
        chat = client.aio.chats.create(model="simulated", config=config)
        for text in ("Which words?", "And then?"):
            if stream:
                async for _ in await chat.send_message_stream(text):
                    pass
            else:
                await chat.send_message(text)
        client.close()
        await one_sequence(proxy, 4)


@pytest.mark.parametrize(("kept", "stream"), [("ids", True), ("signatures", True), ("nothing", False)])
async def test_a_tool_loop_of_a_client_that_drops_fields_is_one_sequence(store, stream, kept):
    """Calls without ids, without signatures, without both, and without thoughts: results have their places."""
    tool = {"functionDeclarations": [TOOL["function"]]}
    async with served(store, template="qwen3") as proxy:
        contents = [{"role": "user", "parts": [{"text": "Which words?"}]}]
        for _ in range(4):
            body = {"contents": contents, "tools": [tool], "generationConfig": {"maxOutputTokens": 300}}
            path = f"/rollouts/r1/v1beta/models/simulated:{'streamGenerateContent' if stream else 'generateContent'}"
            _, response = await proxy.send(path, body)
            parts = [
                part
                for chunk in (response if stream else [response])
                for part in chunk["candidates"][0]["content"]["parts"]
            ]
            for part in parts:
                if kept != "signatures":
                    part.pop("thoughtSignature", None)
                if kept != "ids":
                    part.get("functionCall", {}).pop("id", None)
            names = [part["functionCall"]["name"] for part in parts if "functionCall" in part]
            results = [{"functionResponse": {"name": name, "response": {"output": "one"}}} for name in names]
            contents += [
                {"role": "model", "parts": parts},
                {"role": "user", "parts": results or [{"text": "And then?"}]},
            ]
        await one_sequence(proxy, 4)


@STREAMS
async def test_text_prompts_that_continue_each_other_are_one_sequence(store, sdk, stream):
    """Completions: each prompt is the one before, its text, and more text."""
    async with served(store) as proxy:
        client = sdk(openai.AsyncOpenAI, f"{proxy.url}/rollouts/r1/v1")
        prompt = "The lake is"
        for number in range(4):
            body = {
                "model": "simulated",
                "prompt": prompt,
                "max_tokens": 20,
                "extra_body": {"skip_special_tokens": False},
            }
            if stream:
                events = await client.completions.create(**body, stream=True)
                text = "".join([event.choices[0].text async for event in events if event.choices])
            else:
                text = (await client.completions.create(**body)).choices[0].text
            prompt += f"{text} And {number}:"
        sent = [body["prompt"] for body in proxy.engine.bodies(COMPLETIONS)]
        await one_sequence(proxy, 4)

    assert [type(prompt) for prompt in sent] == [str, list, list, list]


async def test_the_text_of_a_completion_that_was_edited_is_not_continued(store):
    """One other character, and the prompt is sent as it came."""
    async with served(store) as proxy:
        path = f"/rollouts/r1{COMPLETIONS}"
        body = {"model": "simulated", "prompt": "The lake is", "max_tokens": 20, "skip_special_tokens": False}
        _, response = await proxy.send(path, body)
        text = response["choices"][0]["text"]
        for edited in (text[:-1] + "#", "#" + text[1:], text.upper(), text[:-1]):
            prompt = f"The lake is{edited} and"
            assert (await proxy.send(path, {**body, "prompt": prompt}))[0] == 200
            assert prompt == proxy.engine.bodies(COMPLETIONS)[-1]["prompt"]
        counts = await proxy.counts()

    assert counts["continued"] == 0


@pytest.mark.parametrize(
    "fields",
    [{"prompt": [5, 6, 7]}, {"prompt": ["a", "b"]}, {"prompt": [[5], [6]]}, {"echo": True}, {"suffix": "x"}, {"n": 2}],
    ids=str,
)
async def test_other_completions_are_sent_as_they_came(store, fields):
    """Ids, lists of prompts, echo: nothing fails, and only a text prompt with its usual options is continued."""
    async with served(store) as proxy:
        path = f"/rollouts/r1{COMPLETIONS}"
        body = {"model": "simulated", "prompt": "The lake is", "max_tokens": 20, "skip_special_tokens": False}
        _, response = await proxy.send(path, body)
        prompt = f"The lake is{response['choices'][0]['text']} and"
        status, _ = await proxy.send(path, {**body, "prompt": prompt, **fields})
        sent = proxy.engine.bodies(COMPLETIONS)[-1]["prompt"]
        statuses = {status, (await proxy.send(path, {**body, **fields}))[0]}
        await proxy.steps("r1")

    assert statuses <= {200, 400}
    assert sent == fields.get("prompt", prompt) or "n" in fields
    assert isinstance(sent, list) or "n" not in fields
