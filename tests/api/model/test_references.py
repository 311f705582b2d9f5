"""What calls lean on by name: the answer before, its items, and the text of calls that no client can bring back."""

import asyncio

import anthropic
import openai
import pytest
from fakes import proxying
from stored import stored_steps

from proxy.server.listener import simulating
from proxy.simulator.options import Options
from proxy.simulator.script import Conversation, Script, ScriptedCall, Turn

SPACED = '{"city":  "Oslo",\n "days": 1.0}'
PATCH = '*** Begin Patch\n+ a "quoted" line\n*** End Patch'
TURNS = [Turn(say="I look.", call=[ScriptedCall("weather", {"city": "Oslo"})]), Turn(say="It rains."), Turn(say="Bye.")]
# vLLM's parser spells arguments anew in whole answers (hermes, 0.32.0), and tells them as sampled in streams. Its template
# is given the object, and not the text that comes back.
UNUSUAL = [Turn(say="I look.", call=[ScriptedCall("weather", SPACED)]), *TURNS[1:]]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "number"}}}


@pytest.fixture
def turns():
    """What the model says, turn by turn; a test may parametrize it."""
    return TURNS


@pytest.fixture
async def urls(store, turns):
    """Two proxies that share a store, before one engine."""
    script = Script([Conversation(turns)])
    async with (
        simulating("127.0.0.1:0", Options(script=script)) as engine,
        proxying(engine, store) as one,
        proxying(engine, store) as other,
    ):
        yield one.url, other.url


async def outline(http, url, rollout):
    async with http.get(f"{url}/rollouts/{rollout}/tree") as response:
        return await response.json()


def is_linear(tree):
    """Whether each step goes on from the one before it, exactly."""
    parents = [node["parent"] for node in tree["nodes"]]
    return (
        parents == [None, *range(len(parents) - 1)]
        and not tree["drift"]
        and all(node["exact"] for node in tree["nodes"])
    )


@pytest.mark.parametrize(
    ("stream", "turns", "spelt"),
    [(True, UNUSUAL, SPACED), (True, TURNS, '{"city": "Oslo"}'), (False, TURNS, '{"city": "Oslo"}')],
    ids=["streamed, unusual", "streamed", "whole"],
)
async def test_a_call_of_a_tool_comes_back_as_it_was_sampled(http, store, urls, stream, turns, spelt, sdk):
    """Messages carries an object: its text is kept, for whichever process the next call comes to."""
    client = [sdk(anthropic.AsyncAnthropic, f"{url}/rollouts/r1") for url in urls]
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    said = [{"role": "user", "content": "Oslo?"}]
    for number in range(3):
        ask = {"model": "m", "max_tokens": 99, "messages": said, "tools": tools}
        if stream:
            async with client[number % 2].messages.stream(**ask) as events:
                response = await events.get_final_message()
        else:
            response = await client[number % 2].messages.create(**ask)
        calls = [block for block in response.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"} for call in calls]
        said += [{"role": "assistant", "content": response.content}, {"role": "user", "content": results or "And?"}]
    tree = await outline(http, urls[0], "r1")
    later = [step.body["messages"] for step in (await stored_steps(store, "r1"))[1:]]
    sent = [message["tool_calls"] for messages in later for message in messages if message.get("tool_calls")]

    assert [[spelt], [spelt]] == [[call["function"]["arguments"] for call in calls] for calls in sent]
    assert 3 == len(tree["nodes"])
    assert turns is UNUSUAL or is_linear(tree), tree


async def test_a_call_may_name_the_answer_before_it_and_no_rollout(http, urls, sdk):
    """It goes on in that answer's rollout, from what was sent and sampled, at any process."""
    first, second = (sdk(openai.AsyncOpenAI, f"{url}/v1") for url in urls)
    tools = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
    one = await first.responses.create(model="m", input="Oslo?", tools=tools)
    (call,) = [item for item in one.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    two = await second.responses.create(model="m", input=[result], previous_response_id=one.id, tools=tools)
    three = await first.responses.create(model="m", input="And?", previous_response_id=two.id, tools=tools)
    async with http.get(f"{urls[0]}/rollouts") as response:
        (rollout,) = (await response.json())["rollouts"]
    tree = await outline(http, urls[0], rollout["rollout_id"])

    assert ["It rains.", "Bye."] == [two.output_text, three.output_text]
    assert 3 == len(tree["nodes"])
    assert is_linear(tree), tree


@pytest.mark.parametrize("turns", [[Turn(call=[ScriptedCall("apply_patch", {"input": PATCH})]), Turn(say="Done.")]])
async def test_the_input_of_a_custom_tool_comes_back_in_what_it_was_sampled_in(http, urls, sdk):
    """A freeform tool is a function of one string to the engine; the agent knows the string only."""
    client = sdk(openai.AsyncOpenAI, f"{urls[0]}/rollouts/r1/v1")
    tools = [{"type": "custom", "name": "apply_patch"}]
    said = [{"role": "user", "content": "Mend it."}]
    one = await client.responses.create(model="m", input=said, tools=tools, store=False)
    (call,) = one.output
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"}
    two = await client.responses.create(
        model="m", input=[*said, call.model_dump(exclude_none=True), output], tools=tools
    )

    assert PATCH == call.input
    assert "Done." == two.output_text
    assert is_linear(await outline(http, urls[0], "r1"))


async def test_items_may_be_named_by_their_ids(http, urls, sdk):
    """Those of an answer, within its rollout."""
    client = sdk(openai.AsyncOpenAI, f"{urls[0]}/rollouts/r1/v1")
    tools = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
    one = await client.responses.create(model="m", input="Oslo?", tools=tools)
    call = next(item for item in one.output if item.type == "function_call")
    named = [{"type": "item_reference", "id": item.id} for item in one.output]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    asked = [{"role": "user", "content": "Oslo?"}, *named, result]
    two = await client.responses.create(model="m", input=asked, tools=tools)

    assert "It rains." == two.output_text
    assert is_linear(await outline(http, urls[0], "r1"))


@pytest.mark.parametrize(
    "name", ["resp_68f0", "resp_01ARZ3NDEKTSV4RRFFQ69G5FAV", "resp_01ARZ3NDEKTSV4RRFFQ69G5FAV.cjE", "x" * 999]
)
async def test_an_answer_that_is_not_there_is_404(urls, name, sdk):
    """Naming the field, before anything is sent."""
    client = sdk(openai.AsyncOpenAI, f"{urls[0]}/rollouts/r1/v1")
    with pytest.raises(openai.NotFoundError) as caught:
        await client.responses.create(model="m", input="hi", previous_response_id=name)

    assert "previous_response_id" == caught.value.param


async def test_a_rollouts_own_key_follows_no_answer_of_another(http, urls, sdk):
    """403, whatever id it names."""
    client = sdk(openai.AsyncOpenAI, f"{urls[0]}/rollouts/other/v1")
    foreign = await client.responses.create(model="m", input="secret")
    async with http.post(f"{urls[0]}/rollouts", json={"rollout_id": "own"}) as response:
        opened = await response.json()
    own = sdk(openai.AsyncOpenAI, opened["base_url"], opened["api_key"])
    with pytest.raises(openai.PermissionDeniedError):
        await own.responses.create(model="m", input="and?", previous_response_id=foreign.id)
    with pytest.raises(openai.PermissionDeniedError):
        await own.responses.retrieve(foreign.id)


async def test_a_client_that_leaves_while_calls_are_kept_loses_no_step(http, store):
    """The step is stored before; that its client did not get it is marked when the store takes marks again."""
    script = Script([Conversation(TURNS)])
    tools = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
    body = {"model": "m", "input": "Oslo?", "tools": tools}
    store.waiting["mark"] = asyncio.Event()
    async with simulating("127.0.0.1:0", Options(script=script)) as engine, proxying(engine, store) as served:
        asking = asyncio.create_task(http.post(f"{served.url}/rollouts/r1/v1/responses", json=body))
        async with asyncio.timeout(50):
            while "mark" not in store.reached:
                await asyncio.sleep(0.01)
        asking.cancel()
        store.waiting.pop("mark").set()
        async with http.get(f"{served.url}/rollouts/r1") as response:
            counts = (await response.json())["counts"]

    assert (1, 1) == (counts["steps"], counts["exact"])
