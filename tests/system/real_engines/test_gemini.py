"""Unmodified Gemini clients with a real engine: exact steps, one sequence, and functions that the client forces."""

import httpx2
import orjson
import pytest
from google import genai
from google.genai import types
from google.genai.errors import ClientError

from .calls import CALL, TOOL, forced
from .test_by_chat import ALIASES, FIRM, QUESTION
from .test_conversation import DIGITS, check_rows, kwargs
from .through import through_proxy

FUNCTION = TOOL["function"]
DECLARED = types.Tool(
    function_declarations=[
        types.FunctionDeclaration(name=FUNCTION["name"], parameters_json_schema=FUNCTION["parameters"])
    ]
)
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
GEMINI = {**ALIASES, "gemini-*": "tiny"}


@pytest.fixture
async def connected():
    """A factory of the SDK's clients of a rollout, which are closed after the test."""
    async with httpx2.AsyncClient(timeout=300) as http:
        opened = []

        def connect(proxy, rollout="r1"):
            options = types.HttpOptions(base_url=f"{proxy.url}/rollouts/{rollout}", httpx_async_client=http)
            opened.append(genai.Client(api_key="none", http_options=options))
            return opened[-1].aio

        yield connect
        for client in opened:
            client.close()


def config(extra, **fields):
    """Return a config with fields of the engine."""
    body = types.HttpOptions(extra_body=dict(extra))
    return types.GenerateContentConfig(max_output_tokens=60, tools=[DECLARED], http_options=body, **fields)


async def said(chat, message, settings, *, stream):
    """Send a message in a chat; return its function calls and the prompt's token count."""
    if stream:
        responses = [chunk async for chunk in await chat.send_message_stream(message, config=settings)]
    else:
        responses = [await chat.send_message(message, config=settings)]
    calls = [call for response in responses for call in response.function_calls or ()]
    return calls, responses[-1].usage_metadata.prompt_token_count


async def converse(client, *, stream):
    """Run three turns of a chat: a function call, an answer to its result, and one to a further question."""
    chat, message = client.chats.create(model="gemini-x"), QUESTION
    for constrained in (forced(CALL), DIGITS, DIGITS):
        extra = FIRM | constrained
        calls, tokens = await said(chat, message, config(extra), stream=stream)
        assert tokens > 0
        results = [types.Part.from_function_response(name=call.name, response={"output": "124"}) for call in calls]
        message = results or "And?"


@STREAMS
async def test_three_turns_are_exact_and_extend_each_other_as_in_chat(engine, tmp_path, connected, stream):
    """Every step is exact; ids that do not extend each other are reported as drift, as for the chat dialect."""
    async with through_proxy(engine.url, tmp_path, models=GEMINI, continuation={"mode": "off"}) as proxy:
        await converse(connected(proxy), stream=stream)
        steps, rows, tree = await proxy.steps("r1"), await proxy.rows("r1"), await proxy.get("/rollouts/r1/tree")

    assert [step["dialect"] for step in steps] == ["gemini"] * 3
    assert all(step["fidelity"]["exact"] for step in steps), [step["fidelity"] for step in steps]
    check_rows(steps, rows)
    assert len(rows) == 1 or tree["drift"], tree
    assert [step["choices"][0]["finish_reason"] for step in steps] == ["tool_calls", "stop", "stop"]


@STREAMS
async def test_three_turns_are_one_sequence_in_append(engine, tmp_path, connected, stream):
    """A translated dialect is continued like chat."""
    async with through_proxy(engine.url, tmp_path, models=GEMINI, continuation={"mode": "append"}) as proxy:
        async with proxy.agent("first") as agent:  # shows the stop token
            await agent.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "Hi"}], extra_body=FIRM | DIGITS
            )
        await converse(connected(proxy), stream=stream)
        steps, rows = await proxy.steps("r1"), await proxy.rows("r1")

    check_rows(steps, rows)
    assert [step["extra"]["continuation"].get("reason") for step in steps[1:]] == [None, None]
    assert len(rows) == 1


async def test_the_count_of_tokens_equals_the_engines_rendering(engine, tmp_path, connected):
    async with through_proxy(engine.url, tmp_path, models=GEMINI) as proxy:
        client = connected(proxy)
        counted = await client.models.count_tokens(model="gemini-x", contents=QUESTION)
        response = await client.models.generate_content(
            model="gemini-x", contents=QUESTION, config=types.GenerateContentConfig(max_output_tokens=2)
        )

    assert counted.total_tokens == response.usage_metadata.prompt_token_count


@STREAMS
async def test_a_forced_function_and_a_schema_are_enforced_by_the_engine(vllm, tmp_path, connected, stream):
    """The engine constrains its sampling; the arguments and the text conform."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    calling = types.ToolConfig(
        function_calling_config=types.FunctionCallingConfig(mode="ANY", allowed_function_names=[FUNCTION["name"]])
    )
    async with through_proxy(vllm.url, tmp_path, models=GEMINI) as proxy:
        chat = connected(proxy).chats.create(model="gemini-x")
        calls, _ = await said(chat, QUESTION, config(kwargs(preserve=True), seed=1, tool_config=calling), stream=stream)
        text = await connected(proxy).models.generate_content(
            model="gemini-x", contents="Is it?",
            config=types.GenerateContentConfig(
                max_output_tokens=60, response_mime_type="application/json", response_json_schema=schema, candidate_count=2,
                http_options=types.HttpOptions(extra_body=kwargs(preserve=True)),
            ),
        )  # fmt: skip
        steps = await proxy.steps("r1")

    assert [FUNCTION["name"]] == [call.name for call in calls]
    parsed = ["".join(part.text or "" for part in one.content.parts if not part.thought) for one in text.candidates]
    assert len(parsed) == 2
    assert all(isinstance(orjson.loads(one)["a"], bool) for one in parsed if one.endswith("}"))
    assert [len(step["choices"]) for step in steps] == [1, 2]
    assert all(not step["fidelity"]["problems"] for step in steps), [step["fidelity"] for step in steps]


async def test_errors_of_the_engine_keep_their_message(engine, tmp_path, connected):
    """In Google's format, with the engine's status; the step has it, too."""
    async with through_proxy(engine.url, tmp_path, models=GEMINI) as proxy:
        with pytest.raises(ClientError, match="2048") as raised:
            await connected(proxy).models.generate_content(model="gemini-x", contents="a b " * 3000)
        (step,) = await proxy.steps("r1")

    assert (raised.value.code, raised.value.status) == (400, "INVALID_ARGUMENT")
    assert (step["status"], step["dialect"]) == ("error", "gemini")
