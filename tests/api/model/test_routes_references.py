"""References of calls to earlier responses and items, and the sampled text of tool calls."""

import anthropic
import openai
import pytest
from tests.support.fakes import proxying
from tests.support.stored import stored_steps

from proxy.server.listener import simulating
from proxy.simulator.options import Options
from proxy.simulator.script import Conversation, Script, ScriptedCall, Turn

SPACED = '{"city":  "Oslo",\n "days": 1.0}'
PATCH = '*** Begin Patch\n+ a "quoted" line\n*** End Patch'
TURNS = [Turn(say="I look.", call=[ScriptedCall("weather", {"city": "Oslo"})]), Turn(say="It rains."), Turn(say="Bye.")]
# vLLM's parser (hermes, 0.32.0) reformats arguments in unstreamed responses, and streams them as sampled. Its template
# gets the object, not the text that the client returns.
UNUSUAL = [Turn(say="I look.", call=[ScriptedCall("weather", SPACED)]), *TURNS[1:]]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "number"}}}


@pytest.fixture
def turns():
    """The model's turns; a test may parametrize them."""
    return TURNS


@pytest.fixture
async def urls(store, turns):
    """The URLs of two proxies that share a store and an engine."""
    script = Script([Conversation(turns)])
    async with (
        simulating("127.0.0.1:0", Options(script=script)) as engine,
        proxying(engine, store) as first,
        proxying(engine, store) as second,
    ):
        yield first.url, second.url


async def outline(http, url, rollout):
    async with http.get(f"{url}/rollouts/{rollout}/tree") as response:
        return await response.json()


def is_linear(tree):
    """Return whether each step continues the previous one exactly."""
    parents = [node["parent"] for node in tree["nodes"]]
    return (
        parents == [None, *range(len(parents) - 1)]
        and not tree["drift"]
        and all(node["exact"] for node in tree["nodes"])
    )


@pytest.mark.parametrize(
    ("stream", "turns", "sampled"),
    [(True, UNUSUAL, SPACED), (True, TURNS, '{"city": "Oslo"}'), (False, TURNS, '{"city": "Oslo"}')],
    ids=["streamed, unusual", "streamed", "whole"],
)
async def test_a_tool_call_of_messages_is_sent_to_the_engine_as_it_was_sampled(
    http, store, urls, stream, turns, sampled, sdk
):
    """Messages has the arguments as an object; any process reads their text from the recorded step."""
    client = [sdk(anthropic.AsyncAnthropic, f"{url}/rollouts/r1") for url in urls]
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    history = [{"role": "user", "content": "Oslo?"}]
    for number in range(3):
        options = {"model": "m", "max_tokens": 99, "messages": history, "tools": tools}
        if stream:
            async with client[number % 2].messages.stream(**options) as events:
                response = await events.get_final_message()
        else:
            response = await client[number % 2].messages.create(**options)
        calls = [block for block in response.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"} for call in calls]
        history += [{"role": "assistant", "content": response.content}, {"role": "user", "content": results or "And?"}]
    tree = await outline(http, urls[0], "r1")
    later = [step.body["messages"] for step in (await stored_steps(store, "r1"))[1:]]
    sent = [message["tool_calls"] for messages in later for message in messages if message.get("tool_calls")]

    assert [[call["function"]["arguments"] for call in calls] for calls in sent] == [[sampled], [sampled]]
    assert len(tree["nodes"]) == 3
    assert turns is UNUSUAL or is_linear(tree), tree


async def test_previous_response_id_continues_the_rollout_of_that_response(http, urls, sdk):
    """No rollout is named, and any process can serve the call."""
    first, second = (sdk(openai.AsyncOpenAI, f"{url}/v1") for url in urls)
    tools = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
    opening = await first.responses.create(model="m", input="Oslo?", tools=tools)
    (call,) = [item for item in opening.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    middle = await second.responses.create(model="m", input=[result], previous_response_id=opening.id, tools=tools)
    last = await first.responses.create(model="m", input="And?", previous_response_id=middle.id, tools=tools)
    async with http.get(f"{urls[0]}/rollouts") as response:
        (rollout,) = (await response.json())["rollouts"]
    tree = await outline(http, urls[0], rollout["rollout_id"])

    assert [middle.output_text, last.output_text] == ["It rains.", "Bye."]
    assert len(tree["nodes"]) == 3
    assert is_linear(tree), tree


@pytest.mark.parametrize("turns", [[Turn(call=[ScriptedCall("apply_patch", {"input": PATCH})]), Turn(say="Done.")]])
async def test_the_input_of_a_custom_tool_is_sent_to_the_engine_as_it_was_sampled(http, urls, sdk):
    """To the engine a freeform tool is a function with one string; the agent knows the string only."""
    client = sdk(openai.AsyncOpenAI, f"{urls[0]}/rollouts/r1/v1")
    tools = [{"type": "custom", "name": "apply_patch"}]
    history = [{"role": "user", "content": "Fix it."}]
    first = await client.responses.create(model="m", input=history, tools=tools, store=False)
    (call,) = first.output
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"}
    second = await client.responses.create(
        model="m", input=[*history, call.model_dump(exclude_none=True), output], tools=tools
    )

    assert call.input == PATCH
    assert second.output_text == "Done."
    assert is_linear(await outline(http, urls[0], "r1"))


async def test_items_of_a_response_can_be_referenced_by_id(http, urls, sdk):
    client = sdk(openai.AsyncOpenAI, f"{urls[0]}/rollouts/r1/v1")
    tools = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
    first = await client.responses.create(model="m", input="Oslo?", tools=tools)
    call = next(item for item in first.output if item.type == "function_call")
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    history = [{"role": "user", "content": "Oslo?"}, *references, result]
    second = await client.responses.create(model="m", input=history, tools=tools)

    assert second.output_text == "It rains."
    assert is_linear(await outline(http, urls[0], "r1"))


@pytest.mark.parametrize(
    "name", ["resp_68f0", "resp_01ARZ3NDEKTSV4RRFFQ69G5FAV", "resp_01ARZ3NDEKTSV4RRFFQ69G5FAV.cjE", "x" * 999]
)
async def test_an_unknown_previous_response_id_is_404(urls, name, sdk):
    """The error names the field."""
    client = sdk(openai.AsyncOpenAI, f"{urls[0]}/rollouts/r1/v1")
    with pytest.raises(openai.NotFoundError) as caught:
        await client.responses.create(model="m", input="hi", previous_response_id=name)

    assert caught.value.param == "previous_response_id"


async def test_a_minted_key_is_403_for_responses_of_another_rollout(http, urls, sdk):
    client = sdk(openai.AsyncOpenAI, f"{urls[0]}/rollouts/other/v1")
    foreign = await client.responses.create(model="m", input="secret")
    async with http.post(f"{urls[0]}/rollouts", json={"rollout_id": "own"}) as response:
        opened = await response.json()
    own = sdk(openai.AsyncOpenAI, opened["base_url"], opened["api_key"])
    with pytest.raises(openai.PermissionDeniedError):
        await own.responses.create(model="m", input="and?", previous_response_id=foreign.id)
    with pytest.raises(openai.PermissionDeniedError):
        await own.responses.retrieve(foreign.id)


@pytest.mark.parametrize("turns", [UNUSUAL])
async def test_steps_that_cannot_be_read_leave_the_arguments_as_the_client_sends_them(http, store, urls, sdk):
    """The call is sent, and the store's error is not shown to the agent."""
    first, second = (sdk(anthropic.AsyncAnthropic, f"{url}/rollouts/r1") for url in urls)
    options = {"model": "m", "max_tokens": 99, "tools": [{"name": "weather", "input_schema": SCHEMA}]}
    history = [{"role": "user", "content": "Oslo?"}]
    async with first.messages.stream(messages=history, **options) as events:
        response = await events.get_final_message()
    (call,) = (block for block in response.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    history += [{"role": "assistant", "content": response.content}, {"role": "user", "content": [result]}]
    store.failing.add("read")
    await second.messages.create(messages=history, **options)
    store.failing.clear()
    sent = (await stored_steps(store, "r1"))[1].body["messages"][1]["tool_calls"]

    assert [call["function"]["arguments"] for call in sent] == ['{"city": "Oslo", "days": 1.0}']
