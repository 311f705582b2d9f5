"""ManagedServer: the acceptance checks AT of the systems that the proxy serves, over a real proxy."""

import asyncio

import openai
import pytest
from fakes import nothing, proxying
from scripted import BOS, EOS, ScriptedEngine

from proxy.simulator.tokenizer import load_tokenizer
from tokentape import AsyncClient, ClientError, ManagedServer
from tokentape.managed_server import InexactStep

USER = {"role": "user", "content": "hi there"}
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}


class Simulated:
    """The simulator's own tokenizer, as transformers would have it."""

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
    """A client of a proxy before an engine that says what the test says."""
    async with proxying(engine.url, store) as served, AsyncClient(served.url) as client:
        yield client


def keeps_the_invariants(node) -> bool:
    lists = (node.tokens, node.masked_tokens, node.logprobs)
    return len({len(each) for each in lists}) == 1 and all(
        (masked, logprob) == (-100, 1.0) or (masked == token and logprob <= 0)
        for token, masked, logprob in zip(*lists, strict=True)
    )


def trained(node) -> list[int]:
    return [token for token in node.masked_tokens if token != -100]


async def recorded(managed) -> list[tuple[list[int], list[int]]]:
    """Prompt and sampled ids of each choice that the proxy recorded, in order."""
    steps = [step async for step in managed.server.steps(managed.opened["rollout_id"])]
    return [(step["prompt_ids"], choice["ids"]) for step in steps for choice in step["choices"]]


@pytest.mark.parametrize("shape", ["vllm", "sglang"])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize("track_tree", [False, True])
async def test_at_1_a_chat_of_some_turns_keeps_the_invariants(client, turns, n, track_tree):
    """Lengths equal, tokens exact, masked where 1.0, every turn trained, no end of sequence doubled or lost."""
    messages = [USER]
    async with client.managed_server(Simulated(), track_tree=track_tree) as managed:
        for turn in range(turns):
            reply = await managed.chat_completion(messages=messages, n=n, seed=turn, max_tokens=64)
            messages += [{"role": "assistant", "content": reply.choices[0].message.content}, USER]
        told = await recorded(managed)
        state = managed.get_state()

    nodes = list(state["sequences"].values()) if track_tree else state["nodes"]
    assert all(map(keeps_the_invariants, nodes))
    # In the default mode a first choice goes on in its place; the tree keeps every one of every turn.
    kept = [pair for place, pair in enumerate(told) if track_tree or place % n or place == (turns - 1) * n]
    assert sorted([*prompt, *ids] for prompt, ids in kept) == sorted(node.tokens for node in nodes)
    last = next(node for node in nodes if node.tokens == [*told[-n][0], *told[-n][1]])
    assert [token for _, ids in told[::n] for token in ids] == trained(last)
    assert load_tokenizer().decode(last.tokens) == last.full_text


@pytest.mark.parametrize("shape", ["vllm", "sglang"])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("turns", [1, 2, 3])
async def test_at_1_a_completion_of_some_turns_keeps_the_invariants(client, turns, n):
    """A prompt that begins with a node's text goes on from that node's ids, whatever ids its text would have."""
    prompt = "Once upon a time"
    async with client.managed_server(Simulated()) as managed:
        for turn in range(turns):
            await managed.completion(prompt=prompt, n=n, seed=turn, max_tokens=32)
            prompt = managed.current_nodes[0].full_text + " And then"
        told = await recorded(managed)

    nodes = managed.get_state()["nodes"]
    assert n + (n - 1) * (turns - 1) == len(nodes)
    assert all(map(keeps_the_invariants, nodes))
    assert [token for _, ids in told[::n] for token in ids] == trained(nodes[0])
    assert [*told[-n][0], *told[-n][1]] == nodes[0].tokens
    assert nodes[0].full_text == load_tokenizer().decode(nodes[0].tokens)


async def test_at_2_nodes_are_extended_each_in_its_place(scripted, script):
    """8 samples; each gone on from; then 8 under another system prompt: 8, 8, 16 nodes."""
    first = [f"sample {number}" for number in range(8)]
    async with scripted.managed_server(script.words) as managed:
        script.says(*first)
        await managed.chat_completion(messages=[USER], n=8)
        assert 8 == len(managed.current_nodes)
        for text in reversed(first):
            script.says(f"after {text}")
            await managed.chat_completion(messages=[USER, {"role": "assistant", "content": text}, USER])
        assert 8 == len(managed.current_nodes)
        texts = [node.full_text for node in managed.current_nodes]
        script.says(*first)
        await managed.chat_completion(messages=[{"role": "system", "content": "be brief"}, USER], n=8)

    assert 16 == len(managed.current_nodes)
    assert all(f"after sample {number}" in text for number, text in enumerate(texts))


@pytest.mark.parametrize("track_tree", [False, True])
async def test_at_3_identical_samples_stay_as_many_nodes(scripted, script, track_tree):
    """In both modes; and each can be gone on from."""
    script.says(*["the same"] * 4)
    async with scripted.managed_server(script.words, track_tree=track_tree) as managed:
        await managed.chat_completion(messages=[USER], n=4)
        state = managed.get_state()
        nodes = list(state["sequences"].values()) if track_tree else state["nodes"]
        assert [nodes[0]] * 4 == nodes
        for _ in range(4):
            script.says("more")
            await managed.chat_completion(messages=[USER, {"role": "assistant", "content": "the same"}, USER])

    assert (8 if track_tree else 4) == len(managed.sequences if track_tree else managed.current_nodes)


async def test_at_4_an_empty_sample_captures_no_other_prompt(scripted, script):
    """A completion that is an end of sequence alone has the text of its prompt, and is no beginning of another's."""
    script.says("", "B")
    async with scripted.managed_server(script.words) as managed:
        await managed.completion(prompt="A")
        await managed.completion(prompt="Another")

    nodes = managed.get_state()["nodes"]
    assert [f"A{EOS}", f"AnotherB{EOS}"] == [node.full_text for node in nodes]
    assert [[-100, -100, 2]] == [nodes[0].masked_tokens]


async def test_at_5_a_conversation_with_tools_is_one_node(client):
    """6 completions, 12 messages and more, each call and each result in its place."""
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
        told = await recorded(managed)

    (node,) = managed.get_state()["nodes"]
    assert 12 <= len(messages)
    assert [token for _, ids in told for token in ids] == trained(node)
    assert 5 == node.full_text.count("nothing")


async def test_a_reply_without_calls_has_none_as_in_atropos(script, scripted):
    """Also where the engine says an empty list."""
    script.message = {"tool_calls": []}
    script.says("Hello")
    async with ManagedServer(scripted, script.words, tool_parser="hermes") as managed:
        reply = await managed.chat_completion(messages=[USER], tools=[TOOL], max_tokens=8)

    assert reply.choices[0].message.tool_calls is None


@pytest.mark.parametrize("prompt", ["Say it", f"{BOS}Say it"])
async def test_at_6_the_beginning_of_sequence_is_there_once_in_a_completion(scripted, script, prompt):
    """Whether the text spells it or the engine adds it; and when the node goes on."""
    script.says(" yes", " no")
    async with scripted.managed_server(script.words) as managed:
        await managed.completion(prompt=prompt)
        await managed.completion(prompt=managed.current_nodes[0].full_text + " really")

    (node,) = managed.get_state()["nodes"]
    assert (1, 1) == (node.tokens[0], node.tokens.count(1))
    assert 2 == node.tokens.count(2)


async def test_at_6_the_beginning_of_sequence_is_there_once_in_a_chat(scripted, script):
    """The template writes it."""
    script.says("yes")
    async with scripted.managed_server(script.words) as managed:
        await managed.chat_completion(messages=[USER])

    (node,) = managed.get_state()["nodes"]
    assert (1, 1) == (node.tokens[0], node.tokens.count(1))


async def test_at_10_two_calls_at_once_give_two_correct_nodes(client):
    """Of two conversations, and of one that both go on from."""
    async with client.managed_server(Simulated()) as managed:

        async def ask(text, *before):
            messages = [*before, {"role": "user", "content": text}]
            return await managed.chat_completion(messages=messages, seed=1, max_tokens=16)

        one, _ = await asyncio.gather(ask("one"), ask("two"))
        assert 2 == len(managed.current_nodes)
        said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": one.choices[0].message.content}]
        await asyncio.gather(ask("more", *said), ask("less", *said))
        told = await recorded(managed)

    nodes = managed.get_state()["nodes"]
    assert 3 == len(nodes)
    assert all(map(keeps_the_invariants, nodes))
    assert all([*prompt, *ids] in [node.tokens for node in nodes] for prompt, ids in told[2:])
    # Both go on from what the first turn of one sampled; which of the first two was recorded first is open.
    going_on = [sum(trained(node)[: len(ids)] == list(ids) for node in nodes) for _, ids in told[:2]]
    assert [1, 2] == sorted(going_on)


async def test_at_11_a_step_that_is_not_exact_gives_no_node(scripted, script):
    """One logprob too few: an error with the reply, the step flagged, nothing exported and nothing padded."""
    script.says("one two three")
    script.logprobs_short_by = 1
    async with scripted.managed_server(script.words, allow_dummy_tokens=True) as managed:
        with pytest.raises(InexactStep, match="is not exact") as caught:
            await managed.chat_completion(messages=[USER])
    rollout_id = managed.opened["rollout_id"]

    assert {"nodes": []} == managed.get_state()
    assert "one two three" == caught.value.reply.choices[0].message.content
    assert ["logprob_count"] == caught.value.step["fidelity"]["problems"]
    assert [] == [row async for row in scripted.export_rollout(rollout_id, "nodes")]


async def test_a_proxy_that_asks_for_no_logprobs_gives_no_node(script, engine, store):
    """The step is exact all the same; a node would not be."""
    script.says("one two")
    script.logprobs_short_by = 3
    async with (
        proxying(engine.url, store, record={"logprobs": "off"}) as served,
        AsyncClient(served.url) as client,
        client.managed_server(script.words) as managed,
    ):
        with pytest.raises(NotImplementedError, match="record.logprobs: off"):
            await managed.chat_completion(messages=[USER])

    assert {"nodes": []} == managed.get_state()


async def test_at_12_a_reply_that_was_cut_says_so_with_tools_active(client):
    """`length` in the reply and in the node."""
    async with client.managed_server(Simulated(), tool_parser="hermes") as managed:
        reply = await managed.chat_completion(messages=[USER], tools=[TOOL], seed=1, max_tokens=3)

    assert "length" == reply.choices[0].finish_reason
    assert [{"finish_reason": "length"}] == [node.metadata for node in managed.get_state()["nodes"]]


@pytest.mark.parametrize("kind", ["chat", "text"])
async def test_an_engine_that_tells_text_only_is_refused(scripted, script, kind):
    """Unless placeholders are asked for."""
    script.tells_ids = False
    script.says("yes")
    async with scripted.managed_server() as managed:
        with pytest.raises(NotImplementedError, match="allow_dummy_tokens"):
            await ask(managed, kind)

    assert {"nodes": []} == managed.get_state()


@pytest.mark.parametrize("kind", ["chat", "text"])
async def test_placeholders_say_that_they_are(scripted, script, kind):
    """Each node of each choice: 128 of them, as Atropos makes them, joined to nothing."""
    script.tells_ids = False
    script.says("yes", "no", "more")
    async with scripted.managed_server(allow_dummy_tokens=True) as managed:
        await ask(managed, kind, n=2)
        await ask(managed, kind)

    nodes = managed.get_state()["nodes"]
    assert [{"finish_reason": "stop", "dummy_tokens": True}] * 3 == [node.metadata for node in nodes]
    assert (list(range(128)), [-100, *range(1, 128)], [-0.5] * 128) == (
        nodes[0].tokens, nodes[0].masked_tokens, nodes[0].logprobs,
    )  # fmt: skip
    assert nodes[0].full_text.endswith("yes")


async def ask(managed, kind, **said):
    if kind == "chat":
        return await managed.chat_completion(messages=[USER], **said)
    return await managed.completion(prompt="Say", **said)


async def test_the_state_is_a_copy(scripted, script):
    """It survives reset and the end of the context, and what is done to it changes nothing here."""
    script.says("yes")
    async with scripted.managed_server(script.words) as managed:
        await managed.chat_completion(messages=[USER])
        state = managed.get_state()
        state["nodes"][0].tokens.clear()
        assert managed.current_nodes[0].tokens
        state = managed.get_state()
        managed.reset()

    assert (1, []) == (len(state["nodes"]), managed.current_nodes)


async def test_the_rollout_is_opened_at_the_first_call_and_finished_at_the_end(scripted, script):
    """On the terms given; failed where the block raised."""
    script.says("yes")
    async with scripted.managed_server(rollout={"group_id": "g1"}) as managed:
        assert managed.opened is None
        await managed.chat_completion(messages=[USER])
    with pytest.raises(ZeroDivisionError):
        async with scripted.managed_server() as failing:
            script.says("yes")
            await failing.chat_completion(messages=[USER])
            1 / 0  # noqa: B018
    rollouts = [await scripted.rollout(each.opened["rollout_id"]) for each in (managed, failing)]

    assert [("completed", "g1"), ("failed", None)] == [(each["status"], each["group_id"]) for each in rollouts]


async def test_without_a_context_it_is_closed_by_hand(scripted, script):
    """The rollout stays open, for nobody said how it ended; and closing twice is fine."""
    script.says("yes")
    managed = ManagedServer(scripted)
    await managed.chat_completion(messages=[USER])
    await managed.close()
    await managed.close()

    assert "open" == (await scripted.rollout(managed.opened["rollout_id"]))["status"]
    assert 1 == len(managed.current_nodes)


async def test_a_rollout_that_was_opened_before_is_left_open(scripted, script):
    """Whoever opened it finishes it."""
    script.says("yes")
    opened = await scripted.open_rollout("r1")
    async with ManagedServer(scripted, opened=opened) as managed:
        await managed.chat_completion(messages=[USER])
    rollout = await scripted.rollout("r1")

    assert ("open", 1) == (rollout["status"], rollout["counts"]["exact"])


async def test_a_rollout_that_was_finished_in_the_block_stays_as_it_is(scripted, script):
    """The block knew better how."""
    script.says("yes")
    async with scripted.managed_server() as managed:
        await managed.chat_completion(messages=[USER])
        await scripted.finish_rollout(managed.opened["rollout_id"], "truncated", reward=0.0)

    assert "truncated" == (await scripted.rollout(managed.opened["rollout_id"]))["status"]


async def test_without_a_tokenizer_no_text_is_made_up(scripted, script):
    """A chat's node has none; a completion's is what was sent and what was told."""
    script.says("yes", " no")
    async with scripted.managed_server() as managed:
        await managed.chat_completion(messages=[USER])
        await managed.completion(prompt="Say")

    assert ["", "Say no"] == [node.full_text for node in managed.current_nodes]


async def test_a_prompt_of_ids_goes_on_from_them(scripted, script):
    """As exact as a text is not."""
    script.says("yes", "no", finish_reason="length")
    async with scripted.managed_server(script.words) as managed:
        await managed.completion(prompt=script.words.encode("Say"))
        await managed.completion(prompt=[*managed.current_nodes[0].tokens, *script.words.encode(" or", False)])

    assert [f"{BOS}Sayyes orno"] == [node.full_text for node in managed.current_nodes]


async def test_tools_are_sent_only_with_a_tool_parser(scripted, script, engine):
    """As in Atropos, and tool_choice with them; but not without a word."""
    script.says("yes", "yes")
    async with scripted.managed_server() as without, scripted.managed_server(tool_parser="hermes") as with_one:
        with pytest.warns(UserWarning, match="tool_parser"):
            await without.chat_completion(messages=[USER], tools=[TOOL], tool_choice="auto")
        await with_one.chat_completion(messages=[USER], tools=[TOOL], tool_choice="auto")

    assert [("tools" in body, "tool_choice" in body) for body in engine.asked] == [(False, False), (True, True)]


async def test_sampling_keys_are_the_engines(scripted, script, engine):
    """Any; but those of Atropos' own servers are said in the engine's words, or not at all."""
    script.says("yes", "yes")
    async with scripted.managed_server() as managed:
        await managed.chat_completion(messages=[USER], top_k=5, split="eval", max_new_tokens=7, model="policy")
        await managed.completion(prompt="Say", top_k=5, split="eval", max_new_tokens=7, model="policy")

    told = [(body["top_k"], body["max_tokens"], body["model"], "split" in body) for body in engine.asked]
    assert [(5, 7, "policy", False)] * 2 == told


async def test_a_stream_is_refused(scripted):
    """With what to do instead."""
    async with scripted.managed_server() as managed:
        with pytest.raises(ValueError, match="remove stream"):
            await managed.chat_completion(messages=[USER], stream=True)


async def test_what_the_engine_refuses_is_an_openai_error(scripted, engine):
    """And makes no node."""
    engine.answering = nothing
    async with scripted.managed_server() as managed:
        with pytest.raises(openai.InternalServerError):
            await managed.chat_completion(messages=[USER])

    assert [] == managed.current_nodes


async def test_a_call_that_is_sent_again_has_one_key(engine):
    """So that the proxy answers a repeat with what it recorded, and does not sample twice; another call has another key."""
    engine.answering = nothing
    opened = {"base_url": f"{engine.url}/v1", "api_key": "k", "rollout_id": "r1"}
    async with AsyncClient(engine.url) as client, ManagedServer(client, opened=opened) as managed:
        for kind in ("chat", "text"):
            with pytest.raises(openai.InternalServerError):
                await ask(managed, kind)
    keys = [headers["idempotency-key"] for headers in engine.headers]

    assert [3, 3] == [keys.count(key) for key in dict.fromkeys(keys)]


async def test_what_else_is_wrong_with_finishing_is_raised(scripted, script):
    """The rollout was deleted in the block, say."""
    script.says("yes")
    with pytest.raises(ClientError, match="404"):
        async with scripted.managed_server() as managed:
            await managed.chat_completion(messages=[USER])
            await scripted.delete_rollout(managed.opened["rollout_id"])


def test_thoughts_are_kept_by_the_engines_template_alone():
    """preserve_think_blocks cannot be kept as a promise here, and says so."""
    with pytest.raises(NotImplementedError, match="chat_template_kwargs"):
        AsyncClient("http://127.0.0.1:1").managed_server(preserve_think_blocks=True)


def test_another_base_url_is_not_known():
    """There is one server, and its own address is no other."""
    client = AsyncClient("http://127.0.0.1:1")

    assert client is client.managed_server(base_url="http://127.0.0.1:1/v1").server
    with pytest.raises(ValueError, match="http://127.0.0.1:1"):
        client.managed_server(base_url="http://elsewhere")
