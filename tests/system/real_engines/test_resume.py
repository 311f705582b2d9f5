"""Updates of the weights while three official clients wait for replies, which are those of an engine without updates.

`TOKENTAPE_UPDATES` is the number of updates in each test. The replies are greedy. The weights stay the same, and only their
version changes, so that what a reply would be without updates is known.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import aiohttp
import anthropic
import httpx2
import openai
import orjson
import pytest
from google import genai
from google.genai import types
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from tokentape import AsyncClient

from . import environment
from .calls import CALL, TOOL, forced
from .test_exactness import TOLERANCE, differences
from .test_leaving import until
from .through import through_proxy

UPDATES = int(os.environ.get("TOKENTAPE_UPDATES", "4"))
BETWEEN = 60  # tokens that the engine samples from one update to the next, at least
MOST_TOKENS = 250
TIMEOUT_S = 120 + 20 * UPDATES
PROMPTS = {"chat": "Tell a story.", "messages": "List the planets.", "gemini": "What is a proxy?"}
NAMES = {"claude-*": "tiny", "gemini-*": "tiny"}
THINKING_OFF = {"chat_template_kwargs": {"enable_thinking": False}}
FUNCTION = TOOL["function"]
# What the trainer does at the engine, before and after the new version.
PAUSES = {"vllm": ("/pause?mode=abort", "/resume"), "sglang": ("/pause_generation", "/continue_generation")}


@dataclass(slots=True)
class Reply:
    """What a client received."""

    text: str = ""
    thought: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    ended: Any = None
    tokens: int | None = None


def no_broken_text() -> dict[str, int]:
    """Return a `logit_bias` against ids that are no text by themselves: parts of a character, and special tokens."""
    tokenizer = Tokenizer.from_file(str(environment.ensure().model / "tokenizer.json"))
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in range(tokenizer.get_vocab_size())]
    return {str(token): -100 for token, text in enumerate(texts) if "\ufffd" in text or text.startswith("<")}


KINDS = {
    "plain": lambda _bias: THINKING_OFF,  # it may be cut inside a character
    "thinking": lambda bias: {
        "logit_bias": bias
    },  # a thought without an end: that of random weights is not the only one
    "tool": lambda _bias: {**forced(CALL), **THINKING_OFF, "ignore_eos": False},
}


async def by_openai(proxy, rollout, extra, *, stream):
    tools = {"tools": [TOOL]} if "regex" in extra else {}
    messages = [{"role": "user", "content": PROMPTS["chat"]}]
    request = {"model": "tiny", "messages": messages, "max_tokens": MOST_TOKENS, **tools}
    got, calls = Reply(), {}
    async with proxy.agent(rollout) as client:
        if stream:
            usage = {"stream_options": {"include_usage": True}}
            async for chunk in await client.chat.completions.create(**request, **usage, extra_body=extra, stream=True):
                got.tokens = got.tokens if chunk.usage is None else chunk.usage.completion_tokens
                for choice in chunk.choices:
                    got.ended = choice.finish_reason or got.ended
                    _add(got, choice.delta)
                    for call in choice.delta.tool_calls or []:
                        kept = calls.setdefault(call.index, ["", ""])
                        kept[0] += call.function.name or ""
                        kept[1] += call.function.arguments or ""
            got.calls = [(name, read(arguments)) for name, arguments in calls.values()]
            return got
        response = await client.chat.completions.create(**request, extra_body=extra)
    (choice,) = response.choices
    _add(got, choice.message)
    functions = [call.function for call in choice.message.tool_calls or []]
    got.calls = [(function.name, read(function.arguments)) for function in functions]
    got.ended, got.tokens = choice.finish_reason, response.usage.completion_tokens
    return got


def read(arguments: str) -> Any:
    """Return the arguments of a call; text if it is cut off."""
    with suppress(orjson.JSONDecodeError):
        return orjson.loads(arguments)
    return arguments


def _add(got, message):
    named = message.model_extra or {}
    got.text += message.content or ""
    got.thought += named.get("reasoning") or named.get("reasoning_content") or ""


async def by_anthropic(proxy, rollout, extra, *, stream):
    declared = [{"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}]
    tools = {"tools": declared} if "regex" in extra else {}
    messages = [{"role": "user", "content": PROMPTS["messages"]}]
    request = {"model": "claude-x", "messages": messages, "max_tokens": MOST_TOKENS, **tools}
    async with anthropic.AsyncAnthropic(
        base_url=f"{proxy.url}/rollouts/{rollout}", api_key="none", max_retries=0
    ) as client:
        if stream:
            async with client.messages.stream(**request, extra_body=extra) as events:
                response = await events.get_final_message()
        else:
            response = await client.messages.create(**request, extra_body=extra)
    return Reply(
        "".join(block.text for block in response.content if block.type == "text"),
        "".join(block.thinking for block in response.content if block.type == "thinking"),
        [(block.name, block.input) for block in response.content if block.type == "tool_use"],
        response.stop_reason,
        response.usage.output_tokens,
    )


async def by_google(proxy, rollout, extra, *, stream):
    declaration = types.FunctionDeclaration(name=FUNCTION["name"], parameters_json_schema=FUNCTION["parameters"])
    tools = {"tools": [types.Tool(function_declarations=[declaration])]} if "regex" in extra else {}
    async with httpx2.AsyncClient(timeout=300) as http:
        options = types.HttpOptions(base_url=f"{proxy.url}/rollouts/{rollout}", httpx_async_client=http)
        client = genai.Client(api_key="none", http_options=options)
        settings = types.GenerateContentConfig(
            max_output_tokens=MOST_TOKENS, temperature=0, thinking_config=types.ThinkingConfig(include_thoughts=True),
            http_options=types.HttpOptions(extra_body=dict(extra)), **tools,
        )  # fmt: skip
        request = {"model": "gemini-x", "contents": PROMPTS["gemini"], "config": settings}
        if stream:
            responses = [chunk async for chunk in await client.aio.models.generate_content_stream(**request)]
        else:
            responses = [await client.aio.models.generate_content(**request)]
        client.close()
    got = Reply()
    for response in responses:
        for candidate in response.candidates or []:
            got.ended = candidate.finish_reason or got.ended
            for part in (candidate.content and candidate.content.parts) or []:
                if part.function_call is not None:
                    got.calls.append((part.function_call.name, dict(part.function_call.args)))
                elif part.thought:
                    got.thought += part.text or ""
                else:
                    got.text += part.text or ""
        usage = response.usage_metadata
        counts = () if usage is None else (usage.candidates_token_count, usage.thoughts_token_count)
        got.tokens = (
            sum(count or 0 for count in counts) or got.tokens
        )  # a cut stream does not say which are of a thought
    return got


CLIENTS = {"openai": by_openai, "anthropic": by_anthropic, "google": by_google}


ORDER = [None, "default", *map(str, range(UPDATES))]  # of the versions
CUT_OFF = (openai.APIError, anthropic.APIError, httpx2.TransportError)  # an incomplete response


async def trained(http, engine, version):
    """Update the engine as trainers do: abort what it samples, change the weights, and let it go on."""
    pause, resume = PAUSES[engine.kind]
    body = {"new_version": str(version), "abort_all_requests": False}
    for path, sent in ((pause, {"mode": "abort"}), ("/update_weight_version", body), (resume, {})):
        async with http.post(engine.url + path, json=sent) as response:
            assert response.status == 200, await response.text()


async def at_the_engine(http, client, engine, version):
    """The trainer pauses the engine only, and announces the version."""
    await trained(http, engine, version)
    await client.put_policy(version)


async def by_tokentape(http, client, engine, version):
    """The trainer has TokenTape interrupt the calls."""
    await client.update_policy(version, partial(trained, http, engine, version), in_flight="resume", drain_s=20)


async def counted(http, proxy, name):
    """Return a metric of TokenTape by its labels without the engine's: (reason, result), or (result,)."""
    async with http.get(f"{proxy.url}/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return {
        tuple(value for label, value in sorted(sample.labels.items()) if label != "engine"): sample.value
        for sample in samples
        if sample.value
    }


@dataclass(slots=True)
class Seen:
    """The replies during updates, with what each is without; their steps and rows; and what TokenTape counted."""

    replies: list[tuple[str, Reply, Reply]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    calls: dict[tuple[str, ...], float] = field(default_factory=dict)
    tokens: dict[tuple[str, ...], float] = field(default_factory=dict)

    @property
    def others(self) -> list[tuple[str, Reply, Reply]]:
        """The replies that are not what they are without updates.

        Around a forced call the engines repeat neither the space (in streams, it depends on how the tokens fall into events)
        nor the number of tokens.
        """
        return [one for one in self.replies if _spaceless(one[1]) != _spaceless(one[2])]


def _spaceless(reply):
    return replace(reply, text=reply.text.strip(), tokens=None) if reply.calls else reply


async def answered(made, rollout):
    """Return the reply to a call; an incomplete response is one that ended as `cut`."""
    try:
        return await made(rollout=rollout)
    except CUT_OFF:
        return Reply(ended="cut")


@asynccontextmanager
async def updated(engine, folder, update, kinds) -> AsyncIterator[Seen]:
    """Update the engine while each client makes calls of these kinds, streamed and not; return what was seen."""
    bias, seen, is_over, made = no_broken_text(), Seen(), asyncio.Event(), {}
    async with (
        # A short call that starts again at each update is ended by none.
        through_proxy(engine.url, folder, models=NAMES, agents={"max_resumes": max(100, 2 * UPDATES)}) as proxy,
        # SGLang closes idle connections after five seconds.
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http,
        AsyncClient(proxy.url) as client,
    ):
        for kind, stream in ((kind, stream) for kind in kinds for stream in (False, True)):
            extra = {"temperature": 0, "ignore_eos": True, **KINDS[kind](bias)}
            for name, make in CLIENTS.items():
                made[f"{name}-{kind}-{stream}"] = partial(make, proxy, extra=extra, stream=stream)
        await until(lambda kind: kind == engine.kind, proxy.kind)
        expected = {name: await made[name](rollout=f"before-{name}") for name in made}

        async def agent(name):
            while not is_over.is_set():
                seen.replies.append((name, expected[name], await answered(made[name], name)))

        async with asyncio.TaskGroup() as agents:
            for name in made:
                agents.create_task(agent(name))
            try:
                for version in range(UPDATES):
                    least = await engine.metric("sampled") + BETWEEN
                    await until(lambda count, least=least: count >= least, lambda: engine.metric("sampled"))
                    await until(lambda running: running >= 3, engine.running)
                    await update(http, client, engine, version)
            finally:
                is_over.set()
        for name in made:
            seen.steps += await proxy.steps(name)
            seen.rows += await proxy.rows(name)
        seen.calls = await counted(http, proxy, "tokentape_resumed_calls_total")
        seen.tokens = await counted(http, proxy, "tokentape_cut_tokens_total")
        yield seen
        await trained(http, engine, "default")


UPDATED = pytest.mark.parametrize("update", [at_the_engine, by_tokentape])


@UPDATED
@pytest.mark.timeout(TIMEOUT_S, func_only=True)
async def test_plain_replies_are_those_without_updates(engine, tmp_path, update):
    """None is cut, no sampled token is lost, and all tokens score as recorded, those of each version."""
    async with updated(engine, tmp_path, update, ("plain",)) as seen:
        assert (seen.others, {reason for reason, _ in seen.calls}, seen.tokens.keys()) == ([], {"none"}, {("kept",)})
        assert {step["status"] for step in seen.steps} == {"complete"}
        assert [MOST_TOKENS] * len(seen.replies) == [len(step["choices"][0]["ids"]) for step in seen.steps]
        # A call that starts again before its first token, and is not resumed later, has no `resumed`.
        resumed, times = seen.calls["none", "resumed"], sum(step["extra"].get("resumed", 0) for step in seen.steps)
        assert 0 < resumed <= times <= resumed + seen.calls.get(("none", "restarted"), 0)
        versions = [[span["policy_version"] for span in step["choices"][0]["spans"]] for step in seen.steps]
        assert versions == [sorted(set(found), key=ORDER.index) for found in versions]
        # vLLM does not report versions: at the engine, the rest may be sent before the next one is announced.
        assert any(len(found) > 1 for found in versions) or (engine.kind, update) == ("vllm", at_the_engine)
        compared = await compared_with(engine, seen.rows)
        assert len(compared) == sum(sum(row["mask"]) for row in seen.rows) > 0
        assert max(compared) < TOLERANCE


async def compared_with(engine, rows):
    """Return how far each recorded logprob that can be compared is from the engine's own."""
    return [difference for row in rows for difference in await differences(engine, row)]


@UPDATED
@pytest.mark.timeout(TIMEOUT_S, func_only=True)
async def test_tool_calls_and_thoughts_are_those_without_updates_or_counted(engine, tmp_path, update):
    """Only a stream whose client has received a part is not what it would be, and ends as aborted; it is counted."""
    async with updated(engine, tmp_path, update, ("thinking", "tool", "plain")) as seen:
        resumed = {step["step_id"] for step in seen.steps if step["extra"].get("resumed")}
        rows = [row for row in seen.rows if any(span["step_id"] in resumed for span in row["spans"])]
        assert max(await compared_with(engine, rows), default=0) < TOLERANCE
        ended = [
            step for step in seen.steps if "aborted" in step["fidelity"]["problems"] or step["status"] == "partial"
        ]

    assert len(seen.replies) == len(seen.steps)
    assert len(seen.others) == len(ended) == sum(n for (_, result), n in seen.calls.items() if result == "ended")
    assert all(name.endswith("True") for name, _, _ in seen.others), seen.others
    reasons = {"none", "grammar", "field", "parser", "character", "length", "finished"}
    assert {reason for reason, _ in seen.calls} <= reasons
