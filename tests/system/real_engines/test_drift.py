"""Drift with a real engine: its kind, and the engine's own texts."""

import pytest

from .calls import CALL, QUESTION, TOOL, forced
from .through import through_proxy

BODY = {"model": "tiny", "seed": 11, "max_tokens": 60, "logit_bias": {"4087": -100}}
MORE = {"role": "user", "content": "And then?"}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
KEPT = {"chat_template_kwargs": {"enable_thinking": False, "preserve_thinking": True}}


async def two_turns(proxy, *, first: dict, then: dict, changed=None) -> list[dict]:
    """Run a turn and a second one after `changed` edits the reply; return the drift between them."""
    async with proxy.agent("r1") as agent:
        first_reply = await agent.chat.completions.create(messages=QUESTION, **BODY, **first)
        reply = first_reply.choices[0].message.model_dump(exclude_none=True)
        reply = {key: value for key, value in reply.items() if key in ("role", "content", "tool_calls", "reasoning")}
        reply = changed(reply) if changed else reply
        calls = reply.get("tool_calls") or []
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "4"} for call in calls]
        await agent.chat.completions.create(messages=[*QUESTION, reply, *(results or [MORE])], **BODY, **then)
    return (await proxy.get("/rollouts/r1/tree"))["drift"]


def edited(reply: dict) -> dict:
    return {**reply, "content": "I never said that."}


def spaced(reply: dict) -> dict:
    return {**reply, "content": f"{reply['content']}  "}


def without_reasoning(reply: dict) -> dict:
    return {key: value for key, value in reply.items() if key != "reasoning"}


def with_other_whitespace(reply: dict) -> dict:
    (call,) = reply["tool_calls"]
    function = {**call["function"], "arguments": call["function"]["arguments"].replace(": ", ":   ")}
    return {**reply, "tool_calls": [{**call, "function": function}]}


OFF_MODE = {"mode": "off"}  # the engine renders each call
DIGITS = forced("[0-9]{4}")
THINKING = {"extra_body": {"logit_bias": {"4095": 6.5, "4087": -100}}}


@pytest.mark.parametrize(
    ("kind", "first", "then", "changed"),
    [
        ("template", {"extra_body": OFF | DIGITS}, {"extra_body": OFF | DIGITS}, None),
        ("edited", {"extra_body": KEPT | DIGITS}, {"extra_body": KEPT | DIGITS}, edited),
        ("whitespace", {"extra_body": KEPT | DIGITS}, {"extra_body": KEPT | DIGITS}, spaced),
        (
            "tool_call_rewritten",
            {"extra_body": KEPT | forced(CALL), "tools": [TOOL]},
            {"extra_body": KEPT | DIGITS, "tools": [TOOL]},
            with_other_whitespace,
        ),
        ("reasoning_stripped", THINKING, {"extra_body": DIGITS | OFF}, without_reasoning),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_the_kind_of_drift_is_classified(engine, tmp_path, kind, first, then, changed):
    """With the engine's own texts beside the ids."""
    async with through_proxy(engine.url, tmp_path, continuation=OFF_MODE) as proxy:
        (drift,) = await two_turns(proxy, first=first, then=then, changed=changed)

    assert kind == drift["kind"], repr(drift)
    assert drift["expected_text"] != drift["found_text"]
    assert drift["expected_ids"] != drift["found_ids"]


async def test_text_that_is_tokenized_differently_is_drift(engine, tmp_path):
    """A forced word was sampled as several tokens, and comes back as one, as the tokenizer writes it."""
    words = {"extra_body": KEPT | forced("import self import self import self")}
    async with through_proxy(engine.url, tmp_path, continuation=OFF_MODE) as proxy:
        drift = await two_turns(proxy, first=words, then={"extra_body": KEPT | DIGITS})

    assert {"retokenized"} >= {boundary["kind"] for boundary in drift}


async def test_a_template_that_keeps_turns_has_no_drift(engine, tmp_path):
    """Digits come back as they were sampled."""
    async with through_proxy(engine.url, tmp_path, continuation=OFF_MODE) as proxy:
        assert await two_turns(proxy, first={"extra_body": KEPT | DIGITS}, then={"extra_body": KEPT | DIGITS}) == []
