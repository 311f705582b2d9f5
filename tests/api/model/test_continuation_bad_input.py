"""Calls that cannot be continued: the call goes out as it came, the reason is counted, and no step is lost."""

import orjson
import pytest
from tests.support.continued_calls import CHAT, TOOL, continuations, served

KV = "kv_transfer_params"
MORE = {"role": "user", "content": "More?"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


async def compared(proxy, body: bytes, rollout: str = "r1") -> tuple[int, bool]:
    """Send a body with continuation and without; return the status, which must be the same, and whether it was refused.

    Unless it was sent by ids, the engine received the same bytes.
    """
    before = len(proxy.engine.raw())
    status, _ = await proxy.send(f"/rollouts/{rollout}{CHAT}", body)
    sent = proxy.engine.raw()[before:]
    before = len(proxy.engine.raw())
    status_off, _ = await proxy.send(f"/rollouts/off{CHAT}", body, X_Rollout_Continuation="off")
    sent_off = proxy.engine.raw()[before:]
    assert status == status_off
    assert status < 500
    by_ids = [KV in orjson.loads(text) and KV not in orjson.loads(body) for text in sent]
    if not any(by_ids):
        assert sent == sent_off
    return status, not any(by_ids)


@pytest.mark.parametrize(
    "fields",
    [
        {KV: {"prompt_token_ids": [1, 2, 3]}},
        {KV: {"do_remote_prefill": True}},
        {KV: {"prompt_token_ids": "x"}},
        {KV: {"prompt_token_ids": [10**9]}},
        {"prompt_token_ids": [1, 2]},
        {"prompt_token_ids": "x"},
        {"input_ids": [1, 2]},
        {"input_ids": [[1]]},
        {"input_ids": 7},
    ],
    ids=str,
)
async def test_ids_of_the_client_win(store, fields):
    """The engine gets them and nothing else; its error, if it has one, is the client's."""
    async with served(store) as proxy:
        agent = proxy.agent("r1")
        await agent.turn()
        agent.fields = fields
        agent.messages.append(MORE)
        status, refused = await compared(proxy, orjson.dumps(agent.body()))
        steps, counts = await proxy.steps("r1"), await proxy.counts()

    assert refused
    assert continuations(steps) == [None, "own_ids"]
    assert counts == {"refused:own_ids": 1}
    assert status in {200, 400}


@pytest.mark.parametrize("fields", [{KV: None}, {KV: {}}, {"prompt_token_ids": None}, {"input_ids": None}], ids=str)
async def test_empty_fields_of_ids_are_no_ids_of_the_client(store, fields):
    """The call is continued."""
    async with served(store) as proxy:
        agent = proxy.agent("r1")
        await agent.turn()
        agent.fields = fields
        await agent.turn()
        found = continuations(await proxy.steps("r1"))

    assert found == [None, "sent"]


async def test_a_conversation_that_was_edited_by_one_character_is_sent_as_it_came(store):
    """In any message, its text, a tool's name or arguments; later calls continue the edited conversation."""
    async with served(store, template="qwen3") as proxy:
        agent = proxy.agent("r1", tools=True)
        agent.messages = [{"role": "system", "content": "Be brief."}]
        await agent.turn("Which words?")
        await agent.turn("one")
        assert [message["role"] for message in agent.messages] == ["system", "user", "assistant", "tool", "assistant"]

        def edited(index, change):
            branch = agent.branch()
            change(branch.messages[index])
            return branch

        def text(message):
            message["content"] = message["content"][:-1] + "#"

        def name(message):
            message["tool_calls"][0]["function"]["name"] += "2"

        def arguments(message):
            call = message["tool_calls"][0]["function"]
            call["arguments"] = orjson.dumps(orjson.loads(call["arguments"]) | {"limit": -1}).decode()

        branches = [edited(0, text), edited(1, text), edited(2, name), edited(2, arguments), edited(4, text)]
        branches.append(edited(3, text))
        for branch in branches:
            branch.rollout = "r1"
            branch.messages.append(MORE)
            status, refused = await compared(proxy, orjson.dumps(branch.body()))
            assert status == 200
            assert refused == (branch is not branches[-1] and branch is not branches[-2])
        steps, counts = await proxy.steps("r1"), await proxy.counts()
        await proxy.check_bridges("r1")

    assert continuations(steps)[2:6] == ["edited"] * 4
    assert counts["refused:edited"] == 4
    assert {steps[0].step_id} == {step.extra["continuation"]["step_id"] for step in steps[6:]}


@pytest.mark.parametrize("left", [0, 10])
async def test_a_continued_prompt_that_does_not_fit_into_the_window_is_not_sent(store, left):
    """Alone, or with max_tokens where the rendering fits with them: the rendering is shorter, as it has no reasoning."""
    fields = {"chat_template_kwargs": {"enable_thinking": True}, "max_tokens": 45}
    sections = {"continuation": {"mode": "append"}}

    async def run(window):
        async with served(store, template="qwen3", sections=sections, max_model_len=window) as proxy:
            agent = proxy.agent(f"r{left}-{window}", fields=fields)
            await agent.turn()
            agent.fields = {**fields, "max_tokens": 20}
            await agent.turn()
            if window < 30_000:
                await proxy.check_unchanged(agent)
                assert await proxy.counts() == {"refused:window": 1}
            return await proxy.steps(agent.rollout)

    steps = await run(32_768)
    facts = steps[1].extra["continuation"]
    assert facts["rendered"] + 20 < len(steps[1].prompts[0]) + left
    narrow = await run(len(steps[1].prompts[0]) + left)

    assert continuations(narrow) == [None, "window"]
    assert list(steps[0].choices[0].ids) == list(narrow[0].choices[0].ids)
    assert all(step.exact for step in narrow)


async def test_an_image_in_the_last_message_only_is_sent_as_it_came(store):
    """The engine expands it in the prompt; the text before it is not continued either."""
    async with served(store) as proxy:
        agent = proxy.agent("r1")
        await agent.turn()
        agent.messages.append({"role": "user", "content": [{"type": "text", "text": "What is this?"}, IMAGE]})
        _, refused = await compared(proxy, orjson.dumps(agent.body()))
        counts = await proxy.counts()

    assert refused
    assert counts == {"refused:content": 1}


async def test_content_of_text_parts_is_continued(store):
    """As a list of parts in the last message."""
    async with served(store) as proxy:
        agent = proxy.agent("r1")
        await agent.turn()
        agent.messages.append(
            {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "text", "text": "so"}]}
        )
        await agent.call()
        found = continuations(await proxy.steps("r1"))

    assert found == [None, "sent"]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": [TOOL, {**TOOL, "function": {**TOOL["function"], "name": "other"}}]},
        {"tools": [{**TOOL, "function": {**TOOL["function"], "description": "Looks a word up!"}}]},
        {"tool_choice": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"documents": [{"text": "a"}]},
        {"reasoning_effort": "low"},
        {"add_special_tokens": True},
        {"unknown_field_of_a_later_engine": 1},
    ],
    ids=str,
)
async def test_other_tools_and_template_options_than_before_are_sent_as_they_came(store, fields):
    """They may change the prompt from its beginning on; the calls after them are continued again."""
    async with served(store, template="qwen3") as proxy:
        agent = proxy.agent("r1", tools=True)
        await agent.turn("Which words?")
        agent.tools, agent.fields = False, {"tools": [TOOL], **fields}
        agent.messages.append(
            {"role": "tool", "tool_call_id": agent.messages[-1]["tool_calls"][0]["id"], "content": "one"}
        )
        status, refused = await compared(proxy, orjson.dumps(agent.body()))
        counts = await proxy.counts()

    assert status in {200, 400}
    assert refused
    assert counts == {"refused:options": 1}


def nested(depth):
    """JSON of this depth."""
    return b"[" * depth + b"]" * depth


ODD_MESSAGES = [
    b'{"role": "user", "content": 5}',
    b'{"role": "user", "content": {"a": 1}}',
    b'{"role": "user", "content": null}',
    b'{"role": "user", "content": [null, 5, "x"]}',
    b'{"role": "user", "content": [{"type": "text"}]}',
    b'{"role": "user", "content": [{"type": "text", "text": 5}]}',
    b'{"role": "user", "content": "a", "name": null}',
    b'{"role": "user", "content": "a", "name": 7}',
    b'{"role": "assistant", "content": "a", "tool_calls": "x"}, {"role": "user", "content": "b"}',
    b'{"role": "assistant", "content": "a", "tool_calls": [1, null]}, {"role": "user", "content": "b"}',
    b'{"role": "assistant", "tool_calls": [{"function": 5}]}, {"role": "user", "content": "b"}',
    b'{"role": "assistant", "tool_calls": [{"id": 5, "function": {"name": 1, "arguments": {"a": 1}}}]}, {"role": "user"}',
    b'{"role": "assistant", "content": "a", "reasoning": 5, "reasoning_content": []}, {"role": "user", "content": "b"}',
    b'{"role": "tool", "content": 5, "tool_call_id": {}}',
    b'{"role": 5, "content": "a"}',
    b'{"content": "a"}',
    b"{}",
    b"null",
    b"7",
    b'"a"',
    b"[]",
    b'{"role": "user", "content": "\\ud800"}',
    b'{"role": "user", "content": "\xff"}',
    b'{"role": "user", "content": "\\u0000"}',
    b'{"role": "user", "content": "a", "x": ' + nested(200) + b"}",
    b'{"role": "user", "content": ' + nested(200) + b"}",
    b'{"role": "user", "content": "a", "x": ' + nested(2000) + b"}",
    b'{"role": "user", "content": "a", "x": 123456789012345678901234567890}',
    b'{"role": "user", "content": "a", "x": 1e400}',
]


@pytest.mark.parametrize("place", ["last", "first", "reply"])
async def test_messages_of_odd_types_are_handled_as_without_continuation(store, place):
    """Numbers as content, strings as calls, lone surrogates, deep nesting: the same status, and the same bytes sent."""
    async with served(store) as proxy:
        agent = proxy.agent("r1")
        await agent.turn()
        first, reply = (orjson.dumps(message) for message in agent.messages)
        for odd in ODD_MESSAGES:
            messages = {"last": [first, reply, odd], "first": [odd, first, reply], "reply": [first, odd]}[place]
            text = b", ".join([*messages, orjson.dumps(MORE)])
            await compared(proxy, b'{"model": "simulated", "max_tokens": 3, "messages": [' + text + b"]}")
        stored, counts = await proxy.steps("r1"), await proxy.counts()
        off = await proxy.steps("off")

    assert len(stored) == 1 + len(off)
    assert counts["refused:internal"] == 0


ODD_FIELDS = [
    b'"tools": 5', b'"tools": "x"', b'"tools": [null]', b'"tool_choice": 5', b'"stop_token_ids": "x"',
    b'"stop_token_ids": [null, "a"]', b'"parallel_tool_calls": "no"', b'"chat_template": 5', b'"chat_template_kwargs": 5',
    b'"max_tokens": "x"', b'"max_tokens": -1', b'"max_tokens": 1e9', b'"max_tokens": true', b'"n": 0', b'"echo": "yes"',
    b'"continue_final_message": 5', b'"add_generation_prompt": false', b'"reasoning_effort": {}', b'"model": 5',
    b'"x": ' + nested(200), b'"x": 123456789012345678901234567890', b'"stream": 5', b'"include_reasoning": 5',
]  # fmt: skip


async def test_fields_of_odd_types_are_handled_as_without_continuation(store):
    """The same status, and the same bytes sent."""
    async with served(store) as proxy:
        agent = proxy.agent("r1")
        await agent.turn()
        messages = orjson.dumps([*agent.messages, MORE])
        for field in ODD_FIELDS:
            await compared(
                proxy, b'{"model": "simulated", "max_tokens": 3, "messages": ' + messages + b", " + field + b"}"
            )
        stored, off, counts = await proxy.steps("r1"), await proxy.steps("off"), await proxy.counts()

    assert len(stored) == 1 + len(off)
    assert counts["refused:internal"] == 0


@pytest.mark.parametrize("messages", [b"[]", b"null", b"5", b'"x"', b'{"role": "user"}', b"[null]"])
async def test_messages_that_are_no_list_are_handled_as_without_continuation(store, messages):
    """The engine's error is the client's."""
    async with served(store) as proxy:
        await proxy.agent("r1").turn()
        status, refused = await compared(proxy, b'{"model": "simulated", "messages": ' + messages + b"}")

    assert (status, refused) == (400, True)


async def test_a_prefill_and_a_conversation_without_user_are_sent_as_they_came(store):
    """Each has its reason."""
    async with served(store) as proxy:
        agent = proxy.agent("r1")
        await agent.turn()
        prefill = {**agent.body(), "messages": [*agent.messages, MORE, {"role": "assistant", "content": "I"}]}
        prefill |= {"continue_final_message": True, "add_generation_prompt": False}
        assert await compared(proxy, orjson.dumps(prefill)) == (200, True)
        without = [{"role": "system", "content": "Go."}, agent.messages[1], {"role": "system", "content": "More."}]
        _, refused = await compared(proxy, orjson.dumps({**agent.body(), "messages": without}))
        counts = await proxy.counts()

    assert refused
    assert counts == {"refused:prefill": 1, "refused:no_user": 1}
