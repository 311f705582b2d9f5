"""Linear rollouts on real engines with the chat templates of TRL, in mode `append`.

`make continuation-table` runs this file; `make test-engine` does not. The templates are adapted to the tiny model: it has one
stop token for all of them.
"""

import asyncio
import sys
from collections import Counter

import orjson
import pytest
from tests.support.chat_templates import ChatTemplate, template
from tests.support.continuation_table import Combination, combinations
from tests.support.continued_calls import assembled

from .calls import CALL, CHAT, TOOL, forced
from .test_conversation import check_rows
from .through import through_proxy

TURNS = 5
AT_ONCE = 8
STOP, OTHER_STOP, CLOSE_THOUGHT = ("<|im_end|>", 4089), ("<|endoftext|>", 4087), 4095  # of tiny_model.py
BIAS = {str(STOP[1]): 8.0, str(OTHER_STOP[1]): -100.0}
BESIDE = "[A-Z][a-z]{2,5} [a-z]{2,5}[.]\n"
WORDS = "[A-Z][a-z]{1,8}( [a-z]{1,8}){1,4}[.]"
ENDS = {"gptoss": "<|end|>", "cohere2": "<|END_RESPONSE|>"}
CUTS = ("cut in a thought", "cut in a call", "cut in a streamed call")
# deepseekv3 adds the arguments of earlier calls, which engines pass as objects, to a text.
CANNOT = ("deepseekv3",)


def source(used: ChatTemplate) -> str:
    """Return a template with the model's two special tokens in place of its own ends of turns, and of texts."""
    text = used.source
    for stop in used.stops:
        text = text.replace(stop, STOP[0])
    if used.name in ENDS:
        text = text.replace(ENDS[used.name], OTHER_STOP[0])
    return '{%- set bos_token = bos_token | default("") -%}' + text


def chosen(kind: str) -> list[Combination]:
    """Return the combinations that a random model can sample on an engine, CUTS in the second turn included."""
    return [one for one in combinations() if one.incident in {"", *CUTS} and can_serve(kind, one)]


def can_serve(kind: str, one: Combination) -> bool:
    """Return whether an engine renders the messages of a combination."""
    if kind == "sglang" and (one.incident == CUTS[-1] or template(one.template).takes_parts):
        # SGLang (0.5.23) rejects later turns with arguments that are no JSON object, as in a call that was cut in its
        # stream, and passes messages as its own template takes them, also to another one.
        return False
    return not (one.tools and one.template in CANNOT)


def body_of(engine, one, messages, turn: int, seed: int) -> dict:
    """Return the body of a call: two turns of three call a tool, if the combination has tools."""
    calls, is_cut = one.tools and turn % 3 != 2, bool(one.incident) and turn == 1
    thinks = one.reasoning or one.incident == CUTS[0]
    beside = BESIDE if one.content and turn % 3 == 0 else ""
    options = {"enable_thinking": thinks}
    text = source(template(one.template))
    # A grammar applies after the thought, and vLLM (0.32) fails if that has more than its end.
    bias = BIAS | ({str(CLOSE_THOUGHT): 100.0 if calls else 6.5} if thinks and not is_cut else {})
    body = {
        "model": "tiny",
        "messages": messages,
        "seed": seed,
        "max_tokens": 14 if is_cut else 60,  # within the thought, or the call
        "temperature": 1.5,
        "logit_bias": bias,
    }
    if engine.kind == "sglang":
        body["chat_template_kwargs"] = options | {"chat_template": text}
    else:
        body |= {"chat_template": text, "chat_template_kwargs": options}
    shape = beside + CALL if calls else "" if thinks else WORDS
    return body | ({"tools": [TOOL]} if one.tools else {}) | (forced(shape) if shape else {})


def is_streamed(one: Combination, turn: int) -> bool:
    """Return whether a call is streamed: each second one, or else the one with a cut reply."""
    return turn % 2 == 1 if one.incident in {"", CUTS[-1]} else turn % 2 == 0


async def converse(engine, proxy, one, number: int) -> str:
    """Run a rollout. The agent drops reasoning and writes arguments in its own way."""
    rollout = f"r{number}"
    await proxy.http.post(f"{proxy.url}/rollouts", json={"rollout_id": rollout, "continuation": "append"})
    messages: list[dict] = [{"role": "user", "content": f"Question {number}."}]
    for turn in range(TURNS):
        body = body_of(engine, one, messages, turn, 100 * number + turn) | {"stream": is_streamed(one, turn)}
        async with proxy.http.post(f"{proxy.url}/rollouts/{rollout}{CHAT}", json=body) as response:
            text = await response.text()
            assert response.status == 200, (str(one), one.template, text)
        message = (assembled(text) if body["stream"] else orjson.loads(text))["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        for call in calls:
            call["function"]["arguments"] = call["function"]["arguments"].replace(" ", "")
        back = {"role": "assistant", "content": message.get("content") or ""}
        messages = [*messages, back | ({"tool_calls": calls} if calls else {})]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": str(turn)} for call in calls]
        messages += results or [{"role": "user", "content": f"Turn {turn}."}]
    return rollout


async def check_bridges(engine, proxy, steps) -> None:
    """Assert that each prompt that was sent as ids ends as the engine renders its messages.

    Or its messages with the calls of the last reply alone: some templates write content after the results of calls.
    """
    path = "/v1/tokenize" if engine.kind == "sglang" else "/tokenize"
    for step in steps[1:]:
        bridge = step["extra"]["continuation"].get("bridge")
        if bridge is None:
            continue
        sent = step["request"]
        last = max(index for index, message in enumerate(sent["messages"]) if message["role"] == "assistant")
        alone = [message | ({"content": ""} if index == last else {}) for index, message in enumerate(sent["messages"])]
        fields = {name: sent[name] for name in ("tools", "chat_template", "chat_template_kwargs") if name in sent}
        ends = []
        for messages in (sent["messages"], alone):
            body = {"model": "tiny", "messages": messages, **fields}
            async with proxy.http.post(f"{engine.url}{path}", json=body) as response:
                ends.append((await response.json())["tokens"][-bridge:])
        assert step["prompt_ids"][-bridge:] in ends, step["extra"]["continuation"]


async def measured(engine, tmp_path, rollouts, capsys) -> list[str]:
    """Return the combinations that are several sequences, with the reasons; print them and the totals."""
    limit, several, reasons = asyncio.Semaphore(AT_ONCE), [], Counter()
    async with through_proxy(engine.url, tmp_path) as proxy:

        async def run(number, one):
            async with limit:
                rollout = await converse(engine, proxy, one, number)
                steps, rows = await proxy.steps(rollout), await proxy.rows(rollout)
                check_rows(steps, rows)
                await check_bridges(engine, proxy, steps)
            assert all(step["fidelity"]["exact"] for step in steps)
            why = [step["extra"]["continuation"] for step in steps[1:]]
            reasons.update(
                facts.get("reason", "continued") if "kept" in facts else f"refused: {facts['reason']}" for facts in why
            )
            if len(rows) > 1:
                several.append(
                    f"{one.template:24} {one!s:40} {[facts.get('reason') for facts in why if 'kept' not in facts]}"
                )

        await asyncio.gather(*(run(number, one) for number, one in enumerate(rollouts)))
    total = f"{engine.kind}: {len(rollouts) - len(several)} of {len(rollouts)} are one sequence; {dict(reasons)}"
    with capsys.disabled():
        sys.stdout.write("\n".join(["", total, *sorted(several), ""]))
    return several


@pytest.mark.timeout(1500, func_only=True)
async def test_linear_rollouts_are_one_sequence_on_vllm(vllm, tmp_path, capsys):
    """With each template, in the request's `chat_template`."""
    assert await measured(vllm, tmp_path, chosen("vllm"), capsys) == []


@pytest.mark.timeout(1500, func_only=True)
async def test_linear_rollouts_are_one_sequence_on_sglang(sglang, tmp_path, capsys):
    """With each template that takes content as text, in the request's arguments of the template."""
    assert await measured(sglang, tmp_path, chosen("sglang"), capsys) == []
