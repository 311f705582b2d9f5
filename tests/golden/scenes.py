"""The scenes of the golden session: what agents and trainers request of a proxy."""

from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from tests.golden.session import Stage, SteppedClock, staging
from tests.support.pictures import BLUE, RED, data_of, image, png, text, url_of

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}
LIMITED = {"rollout_id": "limited", "limits": {"max_steps": 1, "max_tokens": 500}}
ENVIRONMENT = {"env_name": "math", "env_example_id": "e7"}
SYSTEM = {"role": "system", "content": "You are a helpful assistant. " * 40}  # long enough for blocks of its own


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def reply(text: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": list(messages), "seed": 1, "max_tokens": 24, **fields}


async def turns(stage: Stage, rollout: str, first: list, count: int, **fields: Any) -> list[dict[str, Any]]:
    """Hold a conversation of `count` turns, and repeat each turn streamed in another rollout; return the messages."""
    messages = list(first)
    for turn in range(count):
        messages.append(user(f"This is turn {turn}."))
        found = await stage.post(f"/rollouts/{rollout}{CHAT}", chat(*messages, **{"seed": turn, **fields}))
        messages.append(reply(found["choices"][0]["message"]["content"]))
        await stage.post(f"/rollouts/{rollout}-streamed{CHAT}", chat(*messages[:-1], stream=True, **fields))
    return messages


async def chats(stage: Stage) -> None:
    """Send chats: whole and streamed, with and without token options, several choices, branches, retries."""
    terms = {
        "metadata": {"task": 7, "split": "train"},
        "sampling": {"default": {"temperature": 0.7}, "cap": {"top_p": 0.9}},
    }
    await stage.call("PUT", "/policy", {"version": 3})
    await stage.post("/rollouts", {"rollout_id": "chat", **terms})
    messages = await turns(stage, "chat", [SYSTEM], 3)
    await stage.call("PUT", "/policy", {"version": 4})
    await stage.post(f"/rollouts/chat{CHAT}", chat(*messages[:3], user("Another way.")))
    await stage.post(f"/rollouts/chat{CHAT}", chat(*messages[:3], user("A third."), stream=True, temperature=1.1))
    await turns(stage, "chat%2Fother%20system", [{"role": "system", "content": "Be brief."}], 2, top_p=0.8, top_k=20)
    options = (
        {}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 2}, {"return_token_ids": True},
        {"logprobs": True, "return_token_ids": True, "n": 2}, {"n": 3, "temperature": 1.3}, {"stop": ["e"]},
        {"max_tokens": 1}, {"response_format": {"type": "json_object"}}, {"logit_bias": {"40": 2}}, {"min_tokens": 4},
        {"stream_options": {"include_usage": True}}, {"max_completion_tokens": 5, "user": "someone", "store": True},
    )  # fmt: skip
    for number, fields in enumerate(options):
        body = chat(user(f"Options {number}."), **fields)
        if "stream_options" not in fields:
            await stage.post(f"/rollouts/options{CHAT}", body)
        await stage.post(f"/rollouts/options-streamed{CHAT}", body | {"stream": True})
    await stage.post(CHAT, chat(user("By a header.")), X_Rollout_Id="by-header", X_Rollout_Group="by-header-group")
    await stage.post(CHAT, chat(user("By a key.")), Authorization="Bearer rollout:by-key")
    await stage.post(f"/sessions/by-session{CHAT}", chat(user("By a session.")))
    await stage.post(f"/rollouts/ids{CHAT}", chat(user("Ids."), n=2), X_Reply_Ids="choices")
    await stage.call("PATCH", "/rollouts/chat", {"reward": 0.75, "advantages": -0.5, "metadata": ENVIRONMENT})
    for stream in (False, True):
        key = {"Idempotency_Key": f"turn-{stream}"}
        for _ in range(2):
            await stage.post(f"/rollouts/keyed{CHAT}", chat(user("Once."), stream=stream), **key)
    await stage.post(f"/rollouts/keyed{CHAT}", chat(user("Twice.")), Idempotency_Key="turn-False")
    for count in ("0", "1"):
        await stage.post(f"/rollouts/retried{CHAT}", chat(user("Again.")), X_Stainless_Retry_Count=count)


async def drift(stage: Stage) -> None:
    """Send a history that differs from what was sampled: whitespace, another text, a truncated reply."""
    first = [user("Tell me a story of the sea.")]
    changes = (str.strip, str.upper, lambda text: text[: len(text) // 2], lambda text: f" {text} ")
    for number, change in enumerate(changes):
        rollout = f"drift-{number}"
        found = await stage.post(f"/rollouts/{rollout}{CHAT}", chat(*first, seed=number + 3))
        text = change(found["choices"][0]["message"]["content"] or "")
        messages = [*first, reply(text), user("Go on.")]
        await stage.post(f"/rollouts/{rollout}{CHAT}", chat(*messages))
        await stage.finish(rollout, status="completed", reward=0.5)
        await stage.get(f"/rollouts/{rollout}/tree")


async def tools(stage: Stage) -> None:
    """Tool calls: forced, streamed and whole, and their results in the next turn."""
    for stream in (False, True):
        rollout = f"tools-{stream}"
        messages = [SYSTEM, user("What is the weather in Oslo?")]
        fields = {"tools": [WEATHER], "max_tokens": 200}
        for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}, "auto", "none"):
            await stage.post(f"/rollouts/{rollout}{CHAT}", chat(*messages, tool_choice=choice, stream=stream, **fields))
        found = await stage.post(
            f"/rollouts/{rollout}{CHAT}", chat(*messages, tool_choice="required", seed=5, **fields)
        )
        called = found["choices"][0]["message"]
        ids = [call["id"] for call in called.get("tool_calls") or []]
        results = [{"role": "tool", "tool_call_id": call_id, "content": "4"} for call_id in ids]
        messages += [{name: value for name, value in called.items() if value is not None}, *results]
        await stage.post(f"/rollouts/{rollout}{CHAT}", chat(*messages, stream=stream, **fields))


async def completions(stage: Stage) -> None:
    """Completions of texts and of ids, echoed, several, streamed; Atropos' two shapes of /generate."""
    options = (
        {}, {"logprobs": 1}, {"n": 2}, {"echo": True}, {"prompt": [40, 41, 42]}, {"prompt": ["One", "Two"]},
        {"prompt": [[40, 41], [42]], "return_token_ids": True}, {"stop": ["a"], "logprobs": 0}, {"suffix": "end"},
    )  # fmt: skip
    for number, fields in enumerate(options):
        body = {"model": "policy", "prompt": f"Once {number}", "max_tokens": 12, "seed": number, **fields}
        for stream in (False, True):
            await stage.post(f"/rollouts/completions{COMPLETIONS}", {**body, "stream": stream})
    text = "The sea is wide and the ship is small."
    for _ in range(3):  # each prompt continues the previous one
        found = await stage.post(f"/rollouts/growing{COMPLETIONS}", {"prompt": text, "max_tokens": 9, "seed": 2})
        text += found["choices"][0]["text"] + " And then"
    vllm = {"prompt": {"prompt_token_ids": [40, 41, 42]}, "logprobs": 0, "max_tokens": 8, "n": 2, "seed": 1}
    sampling = {"max_new_tokens": 8, "sampling_seed": 1}
    sglang = {"input_ids": [40, 41, 42], "sampling_params": sampling, "return_logprob": True}
    await stage.post("/rollouts/atropos/generate", vllm)
    await stage.post("/rollouts/atropos/generate", sglang)
    flat = {"rollout_id": "osmosis", "model": "default", "messages": [user("Hello!")], "max_tokens": 16, "seed": 1}
    await stage.post(COMPLETIONS, {**flat, "response_mask": None})
    result = {"rollout_id": "osmosis", "status": "COMPLETED", "finish_reason": "stop", "reward": 1.0}
    await stage.post("/v1/rollout/completed", result)
    await stage.settle("osmosis")


async def generated(stage: Stage) -> None:
    """Tokens in, tokens out."""
    for number, fields in enumerate(({}, {"logprobs": 1}, {"n": 2}, {"stop_token_ids": [7]})):
        params = {"max_tokens": 10, "seed": number, **fields}
        for stream in (False, True):
            body = {"token_ids": [40, 41, 42, 43], "sampling_params": params, "stream": stream}
            await stage.post(f"/rollouts/generated{GENERATE}", body)
    ids = [40 + number % 50 for number in range(300)]  # longer than one block of ids
    for _ in range(2):
        body = {"token_ids": ids, "sampling_params": {"max_tokens": 8, "seed": 1}}
        found = await stage.post(f"/rollouts/generated{GENERATE}", body)
        ids = [*ids, *found["choices"][0]["token_ids"], 44]


async def messages(stage: Stage) -> None:
    """Anthropic's Messages: whole, streamed, with tools and their results, with system prompts; token counts."""
    tool = {"name": "get_weather", "description": "Weather.", "input_schema": WEATHER["function"]["parameters"]}
    for stream in (False, True):
        rollout = f"messages-{stream}"
        body = {"model": "claude-x", "max_tokens": 30, "messages": [user("Hello!")], "stream": stream}
        await stage.post(f"/rollouts/{rollout}{MESSAGES}", body)
        more = {"system": "Be kind.", "stop_sequences": ["e"], "temperature": 0.5}
        await stage.post(f"/rollouts/{rollout}{MESSAGES}", body | more)
        forced = {"tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 200}
        found = await stage.call("POST", f"/rollouts/{rollout}{MESSAGES}", body | forced)
        if not stream:
            content = orjson.loads(found["body"])["content"]
            used = [part["id"] for part in content if part["type"] == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": name, "content": "4"} for name in used]
            history = [user("Hello!"), reply(content), {"role": "user", "content": results}]
            await stage.post(f"/rollouts/{rollout}{MESSAGES}", body | forced | {"messages": history})
    counted = {"model": "claude-x", "messages": [user("Hello!")]}
    await stage.post("/v1/messages/count_tokens", counted)


async def responses(stage: Stage) -> None:
    """OpenAI's Responses: whole, streamed, with tools, going on from an earlier one; read and hidden."""
    tool = {"type": "function", **WEATHER["function"], "strict": False}
    for stream in (False, True):
        rollout = f"responses-{stream}"
        body = {"model": "gpt-x", "input": "Hello!", "max_output_tokens": 30, "stream": stream}
        found = await stage.call("POST", f"/rollouts/{rollout}{RESPONSES}", body)
        forced = {"tools": [tool], "tool_choice": "required", "max_output_tokens": 200}
        called = await stage.call("POST", f"/rollouts/{rollout}{RESPONSES}", body | forced)
        if not stream:
            first, second = (orjson.loads(response["body"]) for response in (found, called))
            more = {"input": "Go on.", "previous_response_id": first["id"], "instructions": "Be brief."}
            await stage.post(RESPONSES, body | more)
            outputs = [
                {"type": "function_call_output", "call_id": item["call_id"], "output": "4"}
                for item in second["output"]
                if item["type"] == "function_call"
            ]
            await stage.post(RESPONSES, body | forced | {"previous_response_id": second["id"], "input": outputs})
            await stage.get(f"{RESPONSES}/{first['id']}")
            await stage.get(f"{RESPONSES}/{first['id']}/input_items")
            await stage.call("DELETE", f"{RESPONSES}/{first['id']}")
            await stage.get(f"{RESPONSES}/{first['id']}")


async def failures(stage: Stage) -> None:
    """Errors of the engine and ours, a stream that breaks off, a client that leaves, a late step, limits."""
    await stage.post(f"/rollouts/failed{CHAT}", chat(user("Hot."), temperature=-1))
    await stage.post(f"/rollouts/failed{CHAT}", chat(user("Hot."), temperature=-1, stream=True))
    await stage.post(f"/rollouts/failed{CHAT}", {"model": "policy"})
    await stage.post(f"/rollouts/failed{MESSAGES}", {"model": "x", "max_tokens": 5, "messages": [], "temperature": -1})
    await stage.post(f"/rollouts/failed{COMPLETIONS}", {"prompt": "x", "max_tokens": 10**6})
    await stage.post("/v1/nothing", {})
    await stage.get("/rollouts/nobody")
    await stage.post("/rollouts", {"rollout_id": "chat", "metadata": {"other": 1}})
    stage.engine.cut_after = 5
    await stage.post(f"/rollouts/broken{CHAT}", chat(user("A long story."), stream=True))
    await stage.leave(f"/rollouts/left{CHAT}", chat(user("A long story."), stream=True, seed=9), events=6)
    await stage.until("/rollouts/left", lambda rollout: rollout["counts"].get("steps") == 1)
    await stage.post(f"/rollouts/late{CHAT}", chat(user("In time.")))
    finishing = stage.finish("late", status="truncated", reward=0.25, metadata={"cause": "time"})
    await stage.late(f"/rollouts/late{CHAT}", chat(user("Too late.")), finishing)
    await stage.post(f"/rollouts/late{CHAT}", chat(user("Much too late.")))
    await stage.post("/rollouts", LIMITED)
    for _ in range(2):
        await stage.post(f"/rollouts/limited{CHAT}", chat(user("Once.")))


async def groups(stage: Stage) -> None:
    """Groups with rewards, rewards of steps and of tokens, advantages; batches that are claimed, acknowledged, released."""
    for group in ("g0", "g1", "g2", "g3"):
        terms = {"metadata": {"task": group, **ENVIRONMENT}, "sampling": {"default": {"temperature": 1.0}}}
        opened = await stage.post(
            "/groups", {"group_id": group, "size": 3, "rollout": terms, "metadata": {"kind": "test"}}
        )
        members = [rollout["rollout_id"] for rollout in opened["rollouts"]]
        for number, member in enumerate(members):
            first = user(f"A question of {group}.")
            found = await stage.call("POST", f"/rollouts/{member}{CHAT}", chat(first, seed=number))
            text = orjson.loads(found["body"])["choices"][0]["message"]["content"]
            step = dict(found["headers"])["x-step-id"]
            if number:
                history = [first, reply(text), user("Go on.")]
                await stage.post(f"/rollouts/{member}{CHAT}", chat(*history, stream=number == 2))
            metadata = {"n": number, **ENVIRONMENT}
            await stage.call("PATCH", f"/rollouts/{member}", {"step_rewards": {step: number / 2}, "metadata": metadata})
            advantage = {"advantages": number - 1.0} if group != "g1" else {}
            await stage.call("PATCH", f"/rollouts/{member}", {"reward": number / 4, **advantage})
            if group != "g3" or number:
                await stage.finish(member, status=("completed", "failed", "truncated")[number])
            await stage.get(f"/rollouts/{member}")
        await stage.get(f"/groups/{group}")
    await stage.get("/groups")
    claim = {"consumer": "trainer", "lease_s": 3600}
    claimed = await stage.post("/batches/claim", {**claim, "format": "trl", "advantage": "grpo"})
    await stage.post(f"/batches/{claimed['batch_id']}/ack", {})
    claimed = await stage.post("/batches/claim", {**claim, "format": "sequences", "members": "rewarded"})
    await stage.post(f"/batches/{claimed['batch_id']}/release", {})
    found = await stage.call(
        "POST", f"/rollouts/per-token{CHAT}", chat(user("Per token."), return_token_ids=True, temperature=1.0)
    )
    step = dict(found["headers"])["x-step-id"]
    count = len(orjson.loads(found["body"])["choices"][0]["token_ids"])
    numbers = [number / 8 for number in range(count)]
    await stage.call("PATCH", "/rollouts/per-token", {"step_rewards": {step: numbers}, "metadata": ENVIRONMENT})
    await stage.finish("per-token", status="completed", reward=-1.5)


async def sessions(stage: Stage) -> None:
    """Sessions, as Atropos' proxy has them."""
    for tree in (False, True):
        opened = await stage.post("/sessions/create", {"track_tree": tree})
        base = f"/{opened['uuid']}"
        first = [user("Hello!")]
        found = await stage.post(f"{base}{CHAT}", {"messages": first, "max_tokens": 12, "temperature": 1.0, "n": 2})
        text = found["choices"][0]["message"]["content"]
        await stage.post(f"{base}{CHAT}", {"messages": [*first, reply(text), user("More.")], "max_tokens": 12})
        await stage.get(f"{base}/nodes")
    await stage.get("/sessions")


async def extras(stage: Stage) -> None:
    """Routed experts and sampling masks, and the labels of weights that change."""
    for number in range(2):
        for stream in (False, True):
            body = {"token_ids": [40, 41, 42], "sampling_params": {"max_tokens": 6, "seed": number}, "stream": stream}
            await stage.post(f"/rollouts/extras{GENERATE}", body)
    ids = [40, 41, 42]
    for _ in range(3):
        params = {"max_tokens": 6, "seed": 1, "temperature": 0.9}
        found = await stage.post(f"/rollouts/extra-turns{GENERATE}", {"token_ids": ids, "sampling_params": params})
        ids = [*ids, *found["choices"][0]["token_ids"], 44]
    await stage.call("PATCH", "/rollouts/extra-turns", {"advantages": 0.5, "metadata": ENVIRONMENT})
    for rollout in ("extras", "extra-turns"):
        await stage.finish(rollout, status="completed", reward=1)


async def sglang(stage: Stage) -> None:
    """The same of an engine of SGLang's shapes."""
    await turns(stage, stage.name, [SYSTEM], 2)
    await tools_of_sglang(stage)
    options = ({"logprobs": True}, {"n": 2}, {"return_meta_info": True}, {"return_routed_experts": True})
    for number, fields in enumerate(options):
        body = chat(user(f"Options {number}."), **fields)
        for stream in (False, True):
            await stage.post(f"/rollouts/{stage.name}-options{CHAT}", body | {"stream": stream})
    for prompt in ("Once", [40, 41, 42]):
        for stream in (False, True):
            body = {"prompt": prompt, "max_tokens": 8, "seed": 1, "stream": stream, "logprobs": 1}
            await stage.post(f"/rollouts/{stage.name}-completions{COMPLETIONS}", body)
    for stream in (False, True):
        body = {"model": "x", "max_tokens": 12, "messages": [user("Hi")], "stream": stream}
        await stage.post(f"/rollouts/{stage.name}-messages{MESSAGES}", body)
        body = {"model": "x", "max_output_tokens": 12, "input": "Hi", "stream": stream}
        await stage.post(f"/rollouts/{stage.name}-responses{RESPONSES}", body)
    signals = {"reward": 0.75, "advantages": -0.5, "metadata": ENVIRONMENT}
    await stage.call("PATCH", f"/rollouts/{stage.name}", signals)
    vllm = {"prompt": {"prompt_token_ids": [40, 41, 42]}, "logprobs": 0, "max_tokens": 8, "seed": 1}
    await stage.post(f"/rollouts/{stage.name}-atropos/generate", vllm)
    await stage.post(f"/rollouts/{stage.name}-options{CHAT}", chat(user("Hot."), temperature=-1))


async def tools_of_sglang(stage: Stage) -> None:
    """A forced call of a tool, whole and streamed."""
    for stream in (False, True):
        fields = {"tools": [WEATHER], "max_tokens": 200, "tool_choice": "required", "stream": stream}
        await stage.post(f"/rollouts/{stage.name}-tools{CHAT}", chat(user("The weather?"), **fields))


async def continued(stage: Stage) -> None:
    """Conversations that continue recorded steps, with calls of tools and a reply that was cut off."""
    await turns(stage, f"continued-{stage.name}", [SYSTEM], 3, max_tokens=200)
    await turns(stage, f"continued-{stage.name}-cut", [], 2)
    messages: list[Any] = [user("What is the weather in Oslo?")]
    for turn in range(3):
        fields = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 200, "seed": turn}
        found = await stage.post(f"/rollouts/continued-{stage.name}-tools{CHAT}", chat(*messages, **fields))
        called = {name: value for name, value in found["choices"][0]["message"].items() if value is not None}
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "4"} for call in called["tool_calls"]]
        messages += [called, *results]
    for rollout in (f"continued-{stage.name}", f"continued-{stage.name}-tools"):
        await stage.finish(rollout, status="completed", reward=1)


async def gemini(stage: Stage) -> None:
    """The Gemini API: whole, in both forms of streams, with tools and their results; token counts."""
    model, base = "/v1beta/models/simulated", "/rollouts/gemini/v1beta/models/simulated"
    asked = {"role": "user", "parts": [{"text": "Hello!"}]}
    body = {"contents": [asked], "generationConfig": {"maxOutputTokens": 12, "seed": 1}}
    for method in ("generateContent", "streamGenerateContent?alt=sse", "streamGenerateContent"):
        found = await stage.call(
            "POST", f"{base}:{method}", {**body, "systemInstruction": {"parts": [{"text": "Be brief."}]}}
        )
    declared = {"functionDeclarations": [{**WEATHER["function"], "name": "weather"}]}
    forced = {"tools": [declared], "toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}
    long = {"generationConfig": {"maxOutputTokens": 200, "seed": 1}}
    found = await stage.post(f"{base}:generateContent", body | forced | long)
    content = found["candidates"][0]["content"]
    results = [
        {"functionResponse": {"name": part["functionCall"]["name"], "response": {"result": "4"}}}
        for part in content["parts"]
        if "functionCall" in part
    ]
    history = [asked, content, {"role": "user", "parts": results}]
    await stage.post(f"{base}:generateContent", body | forced | long | {"contents": history})
    await stage.post(f"{model}:countTokens", {"contents": [asked]})
    await stage.finish("gemini", status="completed", reward=0.5)


async def threads(stage: Stage) -> None:
    """A main conversation, a sub-agent that a tool starts, a title beside it, and rewards of threads."""
    path = f"/rollouts/threads{CHAT}"
    task = [{"role": "system", "content": "You work on tasks."}, user("Build a house.")]
    fields = {"tools": [WEATHER], "max_tokens": 200, "seed": 1}
    found = await stage.post(path, chat(*task, tool_choice="required", **fields))
    called = {name: value for name, value in found["choices"][0]["message"].items() if value is not None}
    city = orjson.loads(called["tool_calls"][0]["function"]["arguments"])["city"]
    helper = [{"role": "system", "content": "You help others."}, user(city)]
    await turns(stage, "threads", helper, 2, tools=[WEATHER], tool_choice="none")
    title = [{"role": "system", "content": "You write titles."}, user("Build a house.")]
    await stage.post(path, chat(*title), X_Agent_Name="titles")
    result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "done"}
    await stage.post(path, chat(*task, called, result, tool_choice="none", **fields))
    found = await stage.get("/rollouts/threads/tree")
    names = [thread["name"] for thread in orjson.loads(found["body"])["threads"]]
    rewards = {name: number / 4 for number, name in enumerate(names)}
    await stage.call("PATCH", "/rollouts/threads", {"reward": 1.0, "thread_rewards": rewards})
    await stage.finish("threads", status="completed")
    await stage.get("/rollouts/threads/tree")


async def members(stage: Stage) -> None:
    """Groups that over-sample, replace failed members, end by a deadline, are dropped, requeued and redelivered."""
    claim = {"consumer": "trainer", "lease_s": 60, "format": "trl", "advantage": "grpo"}
    over = await stage.post("/groups", {"group_id": "over", "size": 2, "over_sample": 1})
    for number, member in enumerate(over["rollouts"][:2]):
        await stage.post(f"/rollouts/{member['rollout_id']}{CHAT}", chat(user("Over."), seed=number))
        await stage.finish(member["rollout_id"], status="completed", reward=number)
    await stage.settle(over["rollouts"][2]["rollout_id"])  # ended with its group
    await stage.get("/groups/over")
    replaced = await stage.post("/groups", {"group_id": "replaced", "size": 1, "replace": 2})
    first = replaced["rollouts"][0]["rollout_id"]
    await stage.post(f"/rollouts/{first}{CHAT}", chat(user("Fails.")))
    failed = await stage.post(f"/rollouts/{first}/finish", {"status": "failed"})
    await stage.settle(first)
    await stage.post(f"/rollouts/{failed['replaced_by']['rollout_id']}{CHAT}", chat(user("Works.")))
    await stage.finish(failed["replaced_by"]["rollout_id"], status="completed", reward=1)
    late = await stage.post("/groups", {"group_id": "expired", "size": 1, "deadline_s": 5})
    (member,) = (rollout["rollout_id"] for rollout in late["rollouts"])
    await stage.post(f"/rollouts/{member}{CHAT}", chat(user("Never ends.")))
    stage.clock.tick(10)
    await stage.until("/groups/expired", lambda group: group["status"] == "complete")
    await stage.settle(member)
    await stage.get(f"/rollouts/{member}")
    unrewarded = await stage.post("/groups", {"group_id": "unrewarded", "size": 1})
    (member,) = (rollout["rollout_id"] for rollout in unrewarded["rollouts"])
    await stage.post(f"/rollouts/{member}{CHAT}", chat(user("Without a reward.")))
    await stage.finish(member, status="completed")
    claimed = await stage.post("/batches/claim", {**claim, "groups": 9, "reward_s": 0, "min_group": 1})
    await stage.post(f"/batches/{claimed['batch_id']}/extend", {"lease_s": 600})
    await stage.post("/groups/unrewarded/requeue", {"max_staleness": 5})
    await stage.post("/batches/claim", {**claim, "groups": 9})
    await stage.post(f"/batches/{claimed['batch_id']}/release", {})
    another = {"consumer": "another", "instance": "i1", "format": "sequences", "advantage": "step", "discount": 0.9}
    await stage.post("/batches/claim", {**claim, **another, "groups": 2, "lease_s": 3600})
    for group in ("over", "replaced", "expired", "unrewarded"):
        await stage.get(f"/groups/{group}")


async def epochs(stage: Stage) -> None:
    """Versions of the policy: a run that goes back, pauses, staleness."""
    await stage.call("PUT", "/policy", {"version": 10, "run": "run-1"})
    opened = await stage.post("/groups", {"group_id": "epoch-1", "size": 1})
    (member,) = (rollout["rollout_id"] for rollout in opened["rollouts"])
    await stage.post(f"/rollouts/{member}{CHAT}", chat(user("In the first epoch.")))
    await stage.finish(member, status="completed", reward=1)
    await stage.post("/policy/pause", {"mode": "wait"})
    await stage.call("PUT", "/policy", {"version": 9})
    await stage.call("PUT", "/policy", {"version": 4, "run": "run-2"})
    await stage.post("/policy/resume")
    opened = await stage.post("/groups", {"group_id": "epoch-2", "size": 1})
    (member,) = (rollout["rollout_id"] for rollout in opened["rollouts"])
    await stage.post(f"/rollouts/{member}{CHAT}", chat(user("In the second epoch.")))
    await stage.finish(member, status="completed", reward=1)
    await stage.call("PUT", "/policy", {"version": 6})
    await stage.get("/policy")
    claim = {"consumer": "trainer", "groups": 5, "lease_s": 3600, "max_staleness": 3}
    await stage.post("/batches/claim", claim)
    await stage.get("/training")


async def images(stage: Stage) -> None:
    """Images in chat, Messages, Responses and Gemini: repeated in the next turn, and a second one."""
    red, blue = url_of(png(RED)), url_of(png(BLUE))
    messages: list[Any] = [{"role": "user", "content": [text("What is this?"), image(red)]}]
    found = await stage.post(f"/rollouts/images{CHAT}", chat(*messages))
    messages += [
        reply(found["choices"][0]["message"]["content"]),
        {"role": "user", "content": [image(blue), text("And?")]},
    ]
    await stage.post(f"/rollouts/images{CHAT}", chat(*messages, stream=True))
    source = {"type": "base64", "media_type": "image/png", "data": data_of(png(RED))}
    content = [{"type": "image", "source": source}, text("What is this?")]
    shown = {"model": "x", "max_tokens": 12, "messages": [{"role": "user", "content": content}]}
    await stage.post(f"/rollouts/images-messages{MESSAGES}", shown)
    parts = [{"type": "input_text", "text": "What is this?"}, {"type": "input_image", "image_url": red}]
    body = {"model": "x", "max_output_tokens": 12, "input": [{"role": "user", "content": parts}]}
    await stage.post(f"/rollouts/images-responses{RESPONSES}", body)
    inline = {"inlineData": {"mimeType": "image/png", "data": data_of(png(RED))}}
    asked = {"contents": [{"role": "user", "parts": [inline, {"text": "What is this?"}]}]}
    limited = {"generationConfig": {"maxOutputTokens": 12, "seed": 1}}
    await stage.post("/rollouts/images-gemini/v1beta/models/simulated:generateContent", asked | limited)
    rewarded = {"reward": 1.0, "advantages": 0.5, "metadata": ENVIRONMENT}
    await stage.call("PATCH", "/rollouts/images", rewarded)
    await stage.finish("images", status="completed")


async def native(stage: Stage) -> None:
    """SGLang's own `/generate`: text and ids, several prompts and samples, whole and streamed."""
    ids = [40, 41, 42]
    calls: tuple[dict[str, Any], ...] = (
        {"text": "Once"}, {"input_ids": ids}, {"text": ["One", "Two"]}, {"input_ids": ids, "return_logprob": True},
        {"text": "Two samples", "sampling_params": {"n": 2}}, {"text": 5},
    )  # fmt: skip
    for number, fields in enumerate(calls):
        for stream in (False, True):
            params = {"max_new_tokens": 6, "sampling_seed": number, **fields.get("sampling_params", {})}
            await stage.post("/rollouts/native/generate", {**fields, "sampling_params": params, "stream": stream})


async def routed(stage: Stage) -> None:
    """Experts, masks of truncated sampling, and turns that continue each other."""
    messages = await turns(stage, stage.name, [SYSTEM], 3, top_k=20, top_p=0.9)
    await stage.post(f"/rollouts/{stage.name}{CHAT}", chat(*messages[:2], user("Two."), n=2, top_k=5))
    await stage.call("PATCH", f"/rollouts/{stage.name}", {"advantages": 0.5, "metadata": ENVIRONMENT})
    await stage.finish(stage.name, status="completed", reward=1)


async def policies(stage: Stage) -> None:
    """Two trained policies and a judge in one rollout: versions of each, groups, claims of each."""
    await stage.call("PUT", "/policies/planner", {"version": 3})
    await stage.call("PUT", "/policies/coder", {"version": 8})
    opened = await stage.post("/groups", {"group_id": "policies", "size": 2})
    members = [rollout["rollout_id"] for rollout in opened["rollouts"]]
    for number, member in enumerate(members):
        for model in ("planner", "coder", "judge", "other"):
            body = chat(user(f"A task for the {model}."), model=model, seed=number)
            await stage.post(f"/rollouts/{member}{CHAT}", body)
        await stage.call("PATCH", f"/rollouts/{member}", {"metadata": ENVIRONMENT, "reward": number})
        await stage.finish(member, status="completed")
    await stage.call("PUT", "/policies/planner", {"version": 4})
    await stage.get("/policies")
    claim = {"consumer": "trainer", "lease_s": 3600}
    await stage.post("/batches/claim", claim)
    claimed = await stage.post("/batches/claim", {**claim, "policy": "planner", "advantage": "grpo"})
    await stage.get("/groups/policies")
    await stage.post(f"/batches/{claimed['batch_id']}/ack", {"delete": True})
    await stage.get("/groups/policies")
    for policy in ("planner", "coder", "judge"):
        await stage.get(f"/groups/policies/export?format=sequences&policy={policy}&report=true")


async def plain(stage: Stage) -> None:
    """An engine that returns no token ids."""
    await turns(stage, "plain", [SYSTEM], 2, logprobs=True)
    body = {"model": "x", "max_tokens": 12, "messages": [user("Hi")], "stream": True}
    await stage.post(f"/rollouts/plain{MESSAGES}", body)
    await stage.post(f"/rollouts/plain{COMPLETIONS}", {"prompt": "Once", "max_tokens": 8, "seed": 1})
    await stage.finish("plain", status="completed", reward=1)


_AT_VLLM = (
    chats, drift, tools, completions, generated, messages, responses, gemini, failures, threads, groups, members, epochs,
)  # fmt: skip
_LIVE = {"record": {"streaming": "live"}}
_EXPERTS = {"record": {"sampling_masks": True, "routed_experts": True}}
_POLICIES = {name: {"models": [name], "train": name != "judge"} for name in ("planner", "coder", "judge")}

# name -> scenes and settings of the proxy; the stages without scenes play cases recorded from real engines.
STAGES: dict[str, tuple[tuple[Callable[[Stage], Awaitable[None]], ...], dict[str, Any]]] = {
    "vllm": (_AT_VLLM, {}),
    "off": ((continued,), {"continuation": {"mode": "off"}}),
    "append": ((continued,), {"continuation": {"mode": "append"}}),
    "extras": ((extras,), {"record": {"logprobs": "sampled"}}),
    "sessions": ((sessions,), {"atropos": {"enabled": True}}),
    "images": ((images,), {}),
    "policies": ((policies,), {"policies": _POLICIES}),
    "plain": ((plain,), {"endpoint": {"kind": "plain"}}),
    "sglang": ((sglang, native, continued), {}),
    "sglang-no-parser": ((sglang,), {}),
    "sglang-experts": ((routed,), _EXPERTS),
    "real-vllm": ((), _LIVE),
    "real-sglang": ((), _LIVE),
    "real-llamacpp": ((), _LIVE),
}


async def play(store: Any, tapes: dict[str, Any], sources: dict[str, Any] | None = None) -> dict[str, Any]:
    """Play all stages over one store; return for each its calls, and what its engine received."""
    clock, played = SteppedClock(), {}
    for name, (scenes, settings) in STAGES.items():
        tape = tapes[name]
        source = sources[name] if sources else None
        async with staging(store, clock, tape["exchanges"], source, name=name, **settings) as stage:
            for scene in scenes:
                await scene(stage)
            for case in tape.get("cases", []):
                await stage.call("POST", f"/rollouts/{case['rollout']}{case['path']}", case["body"])
        received, lookups = stage.engine.received, sorted(stage.engine.lookups)
        played[name] = {"calls": stage.calls, "received": received, "lookups": lookups}
    return played
