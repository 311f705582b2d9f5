"""ManagedServer: the acceptance checks AT of the systems that TokenTape serves, over a real proxy."""

import asyncio

import openai
import pytest
from tests.support.fakes import nothing, proxying
from tests.support.scripted import BOS, EOS, ScriptedEngine

from proxy.simulator.tokenizer import load_tokenizer
from tokentape import AsyncClient, ClientError, ManagedServer, ManagedServerAdapter
from tokentape.managed_server import InexactStep, _most_likely

USER = {"role": "user", "content": "hi there"}
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}


class Simulated:
    """The simulator's tokenizer with the interface of transformers."""

    def encode(self, text, add_special_tokens=True):
        return load_tokenizer().encode(text)

    def decode(self, ids, skip_special_tokens=False):
        return load_tokenizer().decode(ids, skip_special=skip_special_tokens)


@pytest.fixture
async def client(url):
    """A client of a proxy before the simulator."""
    async with AsyncClient(url) as client:
        yield client


@pytest.fixture
def script(engine):
    return ScriptedEngine(engine)


@pytest.fixture
async def scripted(script, engine, store):
    """A client of a proxy before an engine; a test sets the engine's completions."""
    async with proxying(engine.url, store) as served, AsyncClient(served.url) as client:
        yield client


def keeps_the_invariants(node) -> bool:
    lists = (node.tokens, node.masked_tokens, node.logprobs)
    return len({len(values) for values in lists}) == 1 and all(
        (masked, logprob) == (-100, 1.0) or (masked == token and logprob <= 0)
        for token, masked, logprob in zip(*lists, strict=True)
    )


def trained(node) -> list[int]:
    return [token for token in node.masked_tokens if token != -100]


async def recorded(managed) -> list[tuple[list[int], list[int]]]:
    """The prompt ids and completion ids of each recorded choice, in order."""
    steps = [step async for step in managed.server.steps(managed.opened["rollout_id"])]
    return [(step["prompt_ids"], choice["ids"]) for step in steps for choice in step["choices"]]


@pytest.mark.parametrize("shape", ["vllm", "sglang"])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize("track_tree", [False, True])
async def test_at_1_nodes_of_a_chat_keep_the_invariants(client, turns, n, track_tree):
    """Equal lengths, exact tokens, masks where the logprob is 1.0, every turn trained, each end of sequence once."""
    messages = [USER]
    async with client.managed_server(Simulated(), track_tree=track_tree) as managed:
        for turn in range(turns):
            reply = await managed.chat_completion(messages=messages, n=n, seed=turn, max_tokens=64)
            messages += [{"role": "assistant", "content": reply.choices[0].message.content}, USER]
        steps = await recorded(managed)
        state = managed.get_state()

    nodes = list(state["sequences"].values()) if track_tree else state["nodes"]
    assert all(map(keeps_the_invariants, nodes))
    # In the default mode a turn replaces the first choice it continues; the tree keeps all choices of all turns.
    kept = [pair for index, pair in enumerate(steps) if track_tree or index % n or index == (turns - 1) * n]
    assert sorted([*prompt, *ids] for prompt, ids in kept) == sorted(node.tokens for node in nodes)
    last = next(node for node in nodes if node.tokens == [*steps[-n][0], *steps[-n][1]])
    assert [token for _, ids in steps[::n] for token in ids] == trained(last)
    assert load_tokenizer().decode(last.tokens) == last.full_text


@pytest.mark.parametrize("shape", ["vllm", "sglang"])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("turns", [1, 2, 3])
async def test_at_1_nodes_of_completions_keep_the_invariants(client, turns, n):
    """A prompt that starts with the text of a node continues its ids, although the text alone may encode to other ids."""
    prompt = "Once upon a time"
    async with client.managed_server(Simulated()) as managed:
        for turn in range(turns):
            await managed.completion(prompt=prompt, n=n, seed=turn, max_tokens=32)
            prompt = managed.current_nodes[0].full_text + " And then"
        steps = await recorded(managed)

    nodes = managed.get_state()["nodes"]
    assert len(nodes) == n + (n - 1) * (turns - 1)
    assert all(map(keeps_the_invariants, nodes))
    assert [token for _, ids in steps[::n] for token in ids] == trained(nodes[0])
    assert [*steps[-n][0], *steps[-n][1]] == nodes[0].tokens
    assert nodes[0].full_text == load_tokenizer().decode(nodes[0].tokens)


async def test_at_2_each_turn_replaces_the_node_it_continues(scripted, script):
    """8 samples, each continued, then 8 under another system prompt: 8, 8, 16 nodes."""
    first = [f"sample {number}" for number in range(8)]
    async with scripted.managed_server(script.words) as managed:
        script.replies(*first)
        await managed.chat_completion(messages=[USER], n=8)
        assert len(managed.current_nodes) == 8
        for text in reversed(first):
            script.replies(f"after {text}")
            await managed.chat_completion(messages=[USER, {"role": "assistant", "content": text}, USER])
        assert len(managed.current_nodes) == 8
        texts = [node.full_text for node in managed.current_nodes]
        script.replies(*first)
        await managed.chat_completion(messages=[{"role": "system", "content": "be brief"}, USER], n=8)

    assert len(managed.current_nodes) == 16
    assert all(f"after sample {number}" in text for number, text in enumerate(texts))


@pytest.mark.parametrize("track_tree", [False, True])
async def test_at_3_equal_samples_are_separate_nodes(scripted, script, track_tree):
    """In both modes, and each can be continued."""
    script.replies(*["the same"] * 4)
    async with scripted.managed_server(script.words, track_tree=track_tree) as managed:
        await managed.chat_completion(messages=[USER], n=4)
        state = managed.get_state()
        nodes = list(state["sequences"].values()) if track_tree else state["nodes"]
        assert [nodes[0]] * 4 == nodes
        for _ in range(4):
            script.replies("more")
            await managed.chat_completion(messages=[USER, {"role": "assistant", "content": "the same"}, USER])

    assert (8 if track_tree else 4) == len(managed.sequences if track_tree else managed.current_nodes)


async def test_at_4_an_empty_completion_is_not_continued_by_another_prompt(scripted, script):
    """An end of sequence alone makes a completion longer than its prompt."""
    script.replies("", "B")
    async with scripted.managed_server(script.words) as managed:
        await managed.completion(prompt="A")
        await managed.completion(prompt="Another")

    nodes = managed.get_state()["nodes"]
    assert [node.full_text for node in nodes] == [f"A{EOS}", f"AnotherB{EOS}"]
    assert [nodes[0].masked_tokens] == [[-100, -100, 2]]


async def test_at_5_a_conversation_with_tools_is_one_node(client):
    """6 completions and at least 12 messages, with each call and each result."""
    messages = [USER]
    async with client.managed_server(Simulated(), tool_parser="hermes") as managed:
        for turn in range(6):
            choice = "required" if turn < 5 else "none"
            reply = await managed.chat_completion(
                messages=messages, tools=[TOOL], tool_choice=choice, seed=turn, max_tokens=200
            )
            message = reply.choices[0].message
            messages.append({"role": "assistant", "content": message.content, "tool_calls": message.tool_calls or []})
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": "nothing"} for call in message.tool_calls or ()
            ]
        steps = await recorded(managed)

    (node,) = managed.get_state()["nodes"]
    assert len(messages) >= 12
    assert [token for _, ids in steps for token in ids] == trained(node)
    assert node.full_text.count("nothing") == 5


async def test_a_response_without_tool_calls_has_none_as_in_atropos(script, scripted):
    """Also if the engine returns an empty list."""
    script.message = {"tool_calls": []}
    script.replies("Hello")
    async with ManagedServer(scripted, script.words, tool_parser="hermes") as managed:
        reply = await managed.chat_completion(messages=[USER], tools=[TOOL], max_tokens=8)

    assert reply.choices[0].message.tool_calls is None


@pytest.mark.parametrize("prompt", ["Say it", f"{BOS}Say it"])
async def test_at_6_a_completion_has_one_bos(scripted, script, prompt):
    """Whether the prompt contains it or the engine adds it, and after a second turn."""
    script.replies(" yes", " no")
    async with scripted.managed_server(script.words) as managed:
        await managed.completion(prompt=prompt)
        await managed.completion(prompt=managed.current_nodes[0].full_text + " really")

    (node,) = managed.get_state()["nodes"]
    assert (node.tokens[0], node.tokens.count(1)) == (1, 1)
    assert node.tokens.count(2) == 2


async def test_at_6_a_chat_has_one_bos(scripted, script):
    """The chat template adds it."""
    script.replies("yes")
    async with scripted.managed_server(script.words) as managed:
        await managed.chat_completion(messages=[USER])

    (node,) = managed.get_state()["nodes"]
    assert (node.tokens[0], node.tokens.count(1)) == (1, 1)


async def test_at_10_two_concurrent_calls_make_two_correct_nodes(client):
    """Of two conversations, and of two turns that continue one node."""
    async with client.managed_server(Simulated()) as managed:

        async def send(text, *earlier):
            messages = [*earlier, {"role": "user", "content": text}]
            return await managed.chat_completion(messages=messages, seed=1, max_tokens=16)

        reply, _ = await asyncio.gather(send("one"), send("two"))
        assert len(managed.current_nodes) == 2
        turn = [{"role": "user", "content": "one"}, {"role": "assistant", "content": reply.choices[0].message.content}]
        await asyncio.gather(send("more", *turn), send("less", *turn))
        steps = await recorded(managed)

    nodes = managed.get_state()["nodes"]
    assert len(nodes) == 3
    assert all(map(keeps_the_invariants, nodes))
    assert all([*prompt, *ids] in [node.tokens for node in nodes] for prompt, ids in steps[2:])
    # Both continue the first turn of one conversation; which conversation is recorded first is not defined.
    continued = [sum(trained(node)[: len(ids)] == list(ids) for node in nodes) for _, ids in steps[:2]]
    assert sorted(continued) == [1, 2]


async def test_at_11_a_step_that_is_not_exact_makes_no_node(scripted, script):
    """With one logprob too few the error has the response, the step is flagged, and nothing is exported or padded."""
    script.replies("one two three")
    script.logprobs_short_by = 1
    async with scripted.managed_server(script.words, allow_dummy_tokens=True) as managed:
        with pytest.raises(InexactStep, match="is not exact") as caught:
            await managed.chat_completion(messages=[USER])
    rollout_id = managed.opened["rollout_id"]

    assert managed.get_state() == {"nodes": []}
    assert caught.value.response.choices[0].message.content == "one two three"
    assert caught.value.step["fidelity"]["problems"] == ["logprob_count"]
    assert [row async for row in scripted.export_rollout(rollout_id, "nodes")] == []


async def test_a_proxy_that_requests_no_logprobs_makes_no_node(script, engine, store):
    """The step is exact; a node would not be."""
    script.replies("one two")
    script.logprobs_short_by = 3
    async with (
        proxying(engine.url, store, record={"logprobs": "off"}) as served,
        AsyncClient(served.url) as client,
        client.managed_server(script.words) as managed,
    ):
        with pytest.raises(NotImplementedError, match="record.logprobs: off"):
            await managed.chat_completion(messages=[USER])

    assert managed.get_state() == {"nodes": []}


async def test_at_12_a_truncated_completion_has_finish_reason_length_with_tools(client):
    """In the response and in the node."""
    async with client.managed_server(Simulated(), tool_parser="hermes") as managed:
        reply = await managed.chat_completion(messages=[USER], tools=[TOOL], seed=1, max_tokens=3)

    assert reply.choices[0].finish_reason == "length"
    assert [node.metadata for node in managed.get_state()["nodes"]] == [{"finish_reason": "length"}]


@pytest.mark.parametrize("kind", ["chat", "text"])
async def test_an_engine_that_returns_text_only_raises(scripted, script, kind):
    """The error names the argument that makes placeholders."""
    script.returns_ids = False
    script.replies("yes")
    async with scripted.managed_server() as managed:
        with pytest.raises(NotImplementedError, match="allow_dummy_tokens"):
            await sample(managed, kind)

    assert managed.get_state() == {"nodes": []}


@pytest.mark.parametrize("kind", ["chat", "text"])
async def test_placeholders_are_marked_in_their_metadata(scripted, script, kind):
    """A node per choice with 128 tokens, as in Atropos; a placeholder continues no node."""
    script.returns_ids = False
    script.replies("yes", "no", "more")
    async with scripted.managed_server(allow_dummy_tokens=True) as managed:
        await sample(managed, kind, n=2)
        await sample(managed, kind)

    nodes = managed.get_state()["nodes"]
    assert [node.metadata for node in nodes] == [{"finish_reason": "stop", "dummy_tokens": True}] * 3
    assert (list(range(128)), [-100, *range(1, 128)], [-0.5] * 128) == (
        nodes[0].tokens, nodes[0].masked_tokens, nodes[0].logprobs,
    )  # fmt: skip
    assert nodes[0].full_text.endswith("yes")


async def sample(managed, kind, **options):
    if kind == "chat":
        return await managed.chat_completion(messages=[USER], **options)
    return await managed.completion(prompt="Say", **options)


async def test_the_state_is_a_copy(scripted, script):
    """It does not change with reset or the end of the block, and changing it does not change the nodes."""
    script.replies("yes")
    async with scripted.managed_server(script.words) as managed:
        await managed.chat_completion(messages=[USER])
        state = managed.get_state()
        state["nodes"][0].tokens.clear()
        assert managed.current_nodes[0].tokens
        state = managed.get_state()
        managed.reset()

    assert (len(state["nodes"]), managed.current_nodes) == (1, [])


async def test_the_first_call_opens_the_rollout_and_the_end_of_the_block_finishes_it(scripted, script):
    """With the options of `rollout`; as failed if the block raises."""
    script.replies("yes")
    async with scripted.managed_server(rollout={"group_id": "g1"}) as managed:
        assert managed.opened is None
        await managed.chat_completion(messages=[USER])
    with pytest.raises(ZeroDivisionError):
        async with scripted.managed_server() as failing:
            script.replies("yes")
            await failing.chat_completion(messages=[USER])
            1 / 0  # noqa: B018
    rollouts = [await scripted.rollout(server.opened["rollout_id"]) for server in (managed, failing)]

    assert [(rollout["status"], rollout["group_id"]) for rollout in rollouts] == [("completed", "g1"), ("failed", None)]


async def test_close_leaves_the_rollout_open(scripted, script):
    """Without `async with` its status is unknown. Closing twice is no error."""
    script.replies("yes")
    managed = ManagedServer(scripted)
    await managed.chat_completion(messages=[USER])
    await managed.close()
    await managed.close()

    assert (await scripted.rollout(managed.opened["rollout_id"]))["status"] == "open"
    assert len(managed.current_nodes) == 1


async def test_a_rollout_passed_as_opened_is_not_finished(scripted, script):
    """The code that opened it finishes it."""
    script.replies("yes")
    opened = await scripted.open_rollout("r1")
    async with ManagedServer(scripted, opened=opened) as managed:
        await managed.chat_completion(messages=[USER])
    rollout = await scripted.rollout("r1")

    assert (rollout["status"], rollout["counts"]["exact"]) == ("open", 1)


async def test_a_rollout_that_the_block_finishes_keeps_its_status(scripted, script):
    """The 409 of the second finish is ignored."""
    script.replies("yes")
    async with scripted.managed_server() as managed:
        await managed.chat_completion(messages=[USER])
        await scripted.finish_rollout(managed.opened["rollout_id"], "truncated", reward=0.0)

    assert (await scripted.rollout(managed.opened["rollout_id"]))["status"] == "truncated"


async def test_without_a_tokenizer_a_node_has_only_texts_that_were_sent_or_returned(scripted, script):
    """A chat node has an empty text; a completion's node has its prompt and the engine's text."""
    script.replies("yes", " no")
    async with scripted.managed_server() as managed:
        await managed.chat_completion(messages=[USER])
        await managed.completion(prompt="Say")

    assert [node.full_text for node in managed.current_nodes] == ["", "Say no"]


async def test_a_prompt_can_be_token_ids(scripted, script):
    """The call continues the node with the ids at its start."""
    script.replies("yes", "no", finish_reason="length")
    async with scripted.managed_server(script.words) as managed:
        await managed.completion(prompt=script.words.encode("Say"))
        await managed.completion(prompt=[*managed.current_nodes[0].tokens, *script.words.encode(" or", False)])

    assert [node.full_text for node in managed.current_nodes] == [f"{BOS}Sayyes orno"]


async def test_tools_are_sent_only_with_a_tool_parser(scripted, script, engine):
    """As in Atropos, with a warning; tool_choice too."""
    script.replies("yes", "yes")
    async with scripted.managed_server() as without, scripted.managed_server(tool_parser="hermes") as with_one:
        with pytest.warns(UserWarning, match="tool_parser"):
            await without.chat_completion(messages=[USER], tools=[TOOL], tool_choice="auto")
        await with_one.chat_completion(messages=[USER], tools=[TOOL], tool_choice="auto")

    assert [("tools" in body, "tool_choice" in body) for body in engine.requests] == [(False, False), (True, True)]


async def test_other_arguments_are_sent_to_the_engine(scripted, script, engine):
    """Arguments of Atropos' own servers are renamed or removed."""
    script.replies("yes", "yes")
    async with scripted.managed_server() as managed:
        await managed.chat_completion(messages=[USER], top_k=5, split="eval", max_new_tokens=7, model="policy")
        await managed.completion(prompt="Say", top_k=5, split="eval", max_new_tokens=7, model="policy")

    sent = [(body["top_k"], body["max_tokens"], body["model"], "split" in body) for body in engine.requests]
    assert sent == [(5, 7, "policy", False)] * 2


async def test_streaming_raises(scripted):
    """The error names the alternative."""
    async with scripted.managed_server() as managed:
        with pytest.raises(ValueError, match="remove stream"):
            await managed.chat_completion(messages=[USER], stream=True)


async def test_an_error_of_the_engine_is_an_openai_error(scripted, engine):
    """It makes no node."""
    engine.respond = nothing
    async with scripted.managed_server() as managed:
        with pytest.raises(openai.InternalServerError):
            await managed.chat_completion(messages=[USER])

    assert managed.current_nodes == []


async def test_a_retried_call_keeps_its_idempotency_key(engine):
    """The proxy replays the recorded response and samples once; another call has another key."""
    engine.respond = nothing
    opened = {"base_url": f"{engine.url}/v1", "api_key": "k", "rollout_id": "r1"}
    async with AsyncClient(engine.url) as client, ManagedServer(client, opened=opened) as managed:
        for kind in ("chat", "text"):
            with pytest.raises(openai.InternalServerError):
                await sample(managed, kind)
    keys = [headers["idempotency-key"] for headers in engine.headers]

    assert [keys.count(key) for key in dict.fromkeys(keys)] == [3, 3]


async def test_other_errors_of_finishing_are_raised(scripted, script):
    """For example, 404 if the block deleted the rollout."""
    script.replies("yes")
    with pytest.raises(ClientError, match="404"):
        async with scripted.managed_server() as managed:
            await managed.chat_completion(messages=[USER])
            await scripted.delete_rollout(managed.opened["rollout_id"])


def test_preserve_think_blocks_raises():
    """The chat template of the engine decides which reasoning stays."""
    with pytest.raises(NotImplementedError, match="append"):
        AsyncClient("http://127.0.0.1:1").managed_server(preserve_think_blocks=True)


def test_another_base_url_raises():
    """The only server is the proxy; its own URL is accepted."""
    client = AsyncClient("http://127.0.0.1:1")

    assert client is client.managed_server(base_url="http://127.0.0.1:1/v1").server
    with pytest.raises(ValueError, match="http://127.0.0.1:1"):
        client.managed_server(base_url="http://elsewhere")


@pytest.fixture
async def managed(url):
    """A ManagedServer of a proxy before the simulator."""
    async with AsyncClient(url) as client, client.managed_server() as managed:
        yield managed


@pytest.mark.parametrize(
    "prompt", [{"prompt": "Once upon"}, {"input_ids": [79, 110, 99]}, {"messages": [{"role": "user", "content": "hi"}]}]
)
@pytest.mark.parametrize("count", [{}, {"top_k": 3}, {"top_logprobs": 2}])
async def test_each_position_has_the_k_most_likely_ids(managed, prompt, count):
    """In descending order; the first position has none."""
    scores = await managed.get_logprobs(**prompt, **count)
    k = next(iter(count.values()), 1)

    assert scores.keys() == {"prompt_tokens", "prompt_topk_token_ids", "prompt_topk_logprobs"}
    assert prompt.get("input_ids", scores["prompt_tokens"]) == scores["prompt_tokens"]
    assert [0, *[k] * (len(scores["prompt_tokens"]) - 1)] == [len(ids) for ids in scores["prompt_topk_token_ids"]]
    assert all(logprobs == sorted(logprobs, reverse=True) for logprobs in scores["prompt_topk_logprobs"])


async def test_no_node_and_no_rollout_remains(managed):
    """The rollout of the call is deleted: nothing must train on its completion token."""
    await managed.get_logprobs(prompt="Once")

    assert managed.current_nodes == []
    assert [rollout async for rollout in managed.server.rollouts()] == []


@pytest.mark.parametrize("prompts", [{}, {"prompt": "a", "input_ids": [1]}])
async def test_exactly_one_prompt_is_required(managed, prompts):
    """The error lists the arguments to choose from."""
    with pytest.raises(ValueError, match="one of prompt, messages, input_ids"):
        await managed.get_logprobs(**prompts)


async def test_an_engine_without_prompt_logprobs_raises(engine, store):
    """NotImplementedError; the rollout is deleted too."""
    script = ScriptedEngine(engine)
    script.replies("yes")
    async with proxying(engine.url, store) as served, AsyncClient(served.url) as client:
        async with client.managed_server() as managed:
            with pytest.raises(NotImplementedError, match="no prompt logprobs"):
                await managed.get_logprobs(prompt="Once")
        assert [rollout async for rollout in client.rollouts()] == []


def test_the_prompts_own_id_is_returned_only_if_it_is_among_the_most_likely():
    """vLLM adds it to each position."""
    positions = [None, {"7": {"logprob": -9.0}, "8": {"logprob": -0.5}, "9": {"logprob": -1.5}}]

    assert (_most_likely(positions, 2)) == {
        "prompt_topk_token_ids": [[], [8, 9]],
        "prompt_topk_logprobs": [[], [-0.5, -1.5]],
    }


async def test_both_create_methods_of_the_adapter_sample_through_the_managed_server(url):
    """They return the responses of OpenAI's client, and make nodes."""
    async with AsyncClient(url) as client, client.managed_server() as managed:
        adapter = ManagedServerAdapter(managed, "http://base/v1")
        messages = [{"role": "user", "content": "hi"}]
        chat = await adapter.chat.completions.create(model="policy", messages=messages, n=2, max_tokens=4, seed=1)
        text = await adapter.completions.create(model="policy", prompt="Once", max_tokens=4, seed=1)

    assert (adapter.base_url, chat.object, text.object) == ("http://base/v1", "chat.completion", "text_completion")
    assert (len(chat.choices), len(managed.current_nodes)) == (2, 3)


async def test_methods_of_the_adapter_that_would_bypass_the_nodes_raise():
    """`post` and `copy` of an OpenAI client."""
    adapter = ManagedServerAdapter(ManagedServer(None), "http://base/v1")

    with pytest.raises(NotImplementedError, match="copy"):
        adapter.copy()
    with pytest.raises(NotImplementedError, match="post"):
        await adapter.post("/x")
