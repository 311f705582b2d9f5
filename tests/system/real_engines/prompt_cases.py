"""Requests for which our prompts must equal the prompts of vLLM's own Messages and Responses endpoints.

The bodies, by name: each kind of content, alone and as Claude Code and Codex send it.
"""

from typing import Any

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
NUMBER = [{"name": "add", "description": "Add one.", "input_schema": SCHEMA}]
SECOND = {"name": "look", "description": "Look it up.", "input_schema": {"properties": {}}, "strict": True}
BILLING = "x-anthropic-billing-header: cc_version=2.1.1; cch=0a1b2;"

Body = dict[str, Any]


def text(content: str, **extra: Any) -> Body:
    """Return a text block."""
    return {"type": "text", "text": content, **extra}


def uses(number: int, **arguments: Any) -> Body:
    """Return a tool_use block."""
    return {"type": "tool_use", "id": f"toolu_{number}", "name": "add", "input": arguments}


def result(number: int, content: Any = "124", **extra: Any) -> Body:
    """Return its tool_result block."""
    return {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": content, **extra}


def thinks(thought: str) -> Body:
    """Return a thinking block."""
    return {"type": "thinking", "thinking": thought, "signature": "sig"}


def talk(*turns: tuple[str, Any], **fields: Any) -> Body:
    """Return a Messages body with these turns."""
    return {"messages": [{"role": role, "content": content} for role, content in turns], **fields}


HI = ("user", "hi")
LOOP = (
    HI,
    ("assistant", [thinks("Let me see."), text("I add."), uses(1, x=1), uses(2, x=2, y="é\n<b>")]),
    ("user", [result(1), result(2, [text("a"), text("b")])]),
)

MESSAGES: dict[str, Body] = {
    "one question": talk(HI),
    "a system": talk(HI, system="Be brief.\n"),
    "an empty system": talk(HI, system=""),
    "a system of blocks": talk(HI, system=[text("Be brief.", **EPHEMERAL), text(" Be kind."), text("")]),
    "a system of a billing header and blocks": talk(HI, system=[text(BILLING), text("You are Claude."), text("Go.")]),
    "a system of a billing header alone": talk(HI, system=[text(BILLING)]),
    "a system that is a billing header": talk(HI, system=f"{BILLING}\nBe brief."),
    "a question in blocks": talk(("user", [text("a", **EPHEMERAL), text("b\n"), text("c")])),
    "a question in one block": talk(("user", [text("a")])),
    "empty blocks": talk(("user", [text(""), text("a"), text("")])),
    "an empty question": talk(("user", ""), ("assistant", "What?"), HI),
    "a question of nothing": talk(("user", []), HI),
    "two questions": talk(HI, ("user", [text("there")])),
    "two replies": talk(HI, ("assistant", "a"), ("assistant", [text("b")]), HI),
    "a reply in blocks": talk(HI, ("assistant", [text("a"), text("b")]), HI),
    "an empty reply": talk(HI, ("assistant", ""), HI),
    "a reply of nothing": talk(HI, ("assistant", []), HI),
    "thoughts before the question": talk(HI, ("assistant", [thinks("hm"), text("a")]), HI),
    "hidden thoughts": talk(HI, ("assistant", [{"type": "redacted_thinking", "data": "x"}, text("a")]), HI),
    "thoughts alone": talk(HI, ("assistant", [thinks("hm"), thinks("so")]), HI),
    "a tool loop": talk(*LOOP, tools=NUMBER),
    "a continued tool loop": talk(
        *LOOP,
        ("assistant", [text("And."), uses(3, x=3)]),
        ("user", [result(3)]),
        ("assistant", "Done."),
        HI,
        tools=NUMBER,
    ),
    "texts before and after results": talk(
        *LOOP[:2], ("user", [text("so"), result(1), text("then"), result(2), text("go on")]), tools=NUMBER
    ),
    "results of nothing": talk(*LOOP[:2], ("user", [result(1, ""), result(2, [])]), tools=NUMBER),
    "a result without content": talk(*LOOP[:2], ("user", [result(1, None), result(2, [text(""), text("b")])])),
    "a result that failed": talk(*LOOP[:2], ("user", [result(1, "no", is_error=True), result(2, "", is_error=True)])),
    "results and reminders": talk(
        *LOOP[:2],
        ("user", [result(1, **EPHEMERAL), result(2), text("<system-reminder>\nBe quick.\n</system-reminder>")]),
    ),
    "calls without arguments": talk(HI, ("assistant", [uses(1)]), ("user", [result(1)]), tools=[SECOND]),
    "tools": talk(HI, tools=[*NUMBER, SECOND], system="S"),
    "tools without a system": talk(HI, tools=[NUMBER[0] | EPHEMERAL | {"type": "custom"}]),
    "deferred tools": talk(HI, tools=[*NUMBER, SECOND | {"defer_loading": True}]),
    "a reference to a tool": talk(
        *LOOP[:2],
        ("user", [result(1, [text("found"), {"type": "tool_reference", "tool_name": "look"}]), result(2)]),
        tools=[*NUMBER, SECOND | {"defer_loading": True}],
    ),
    "no tools chosen": talk(HI, tools=NUMBER, tool_choice={"type": "none"}),
    "any tool": talk(HI, tools=NUMBER, tool_choice={"type": "any", "disable_parallel_tool_use": True}),
    "one tool": talk(HI, tools=NUMBER, tool_choice={"type": "tool", "name": "add"}),
    "thinking": talk(HI, max_tokens=1100, thinking={"type": "adaptive"}),
    "no thinking": talk(HI, thinking={"type": "disabled"}),
    "an effort": talk(HI, output_config={"effort": "high"}),
    "an effort without thinking": talk(HI, output_config={"effort": "high"}, thinking={"type": "disabled"}),
    "arguments of the template": talk(
        *LOOP, chat_template_kwargs={"enable_thinking": False, "preserve_thinking": True}
    ),
    "a system between turns": talk(HI, ("assistant", "a"), ("system", "Now."), HI, system="S"),
    "systems between turns": talk(
        *LOOP,
        ("system", [text("Now"), text(BILLING), text(" then.")]),
        ("system", BILLING),
        HI,
        system=[text("S"), text("T")],
    ),
    "a system first among turns": talk(("system", "S"), HI),
    "systems at the beginning": talk(("system", "S"), HI, system="T"),
    "tools that were changed": talk(
        HI,
        ("assistant", "a"),
        (
            "system",
            [
                {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "look"}},
                {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "add"}},
                {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": SECOND | {"name": "new"}}},
            ],
        ),
        HI,
        tools=[*NUMBER, SECOND | {"defer_loading": True}],
    ),
    "Claude Code's": talk(
        ("user", [text("<system-reminder>\nToday is Monday.\n</system-reminder>\n"), text("Fix it.", **EPHEMERAL)]),
        ("assistant", [thinks("First look."), text("I look."), uses(1, x=1)]),
        ("user", [result(1, "1\tdef f():\n2\t    pass\n")]),
        ("assistant", [uses(2, x=2), uses(3, x=3)]),
        (
            "user",
            [
                result(2, [text("ok")]),
                result(3, "Error: exit 1", is_error=True),
                text("<system-reminder>\nGo.\n</system-reminder>", **EPHEMERAL),
            ],
        ),
        system=[
            text(BILLING),
            text("You are Claude Code.", **EPHEMERAL),
            text("\nYou are an agent.\n\n# Tone\n", **EPHEMERAL),
        ],
        tools=[*NUMBER, SECOND],
        thinking={"type": "adaptive"},
        metadata={"user_id": "u"},
    ),
}

FUNCTION = {"type": "function", "name": "add", "description": "Add one.", "parameters": SCHEMA, "strict": False}
CUSTOM = {"type": "custom", "name": "patch", "description": "Patch it.", "format": {"type": "text"}}


def message(role: str, *parts: str, **extra: Any) -> Body:
    """Return a message with these parts."""
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": part} for part in parts], **extra}


def thought(content: str) -> Body:
    """Return a reasoning item."""
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": content}]}


def call(number: int, arguments: str = '{"x":1}') -> Body:
    """Return a function_call item."""
    return {"type": "function_call", "call_id": f"c{number}", "name": "add", "arguments": arguments}


def output(number: int, content: Any = "124") -> Body:
    """Return its function_call_output item."""
    return {"type": "function_call_output", "call_id": f"c{number}", "output": content}


TURN = (
    message("user", "hi"),
    thought("Let me see."),
    message("assistant", "I add."),
    call(1),
    call(2),
    output(1),
    output(2),
)
PARTS = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]


def responses_body(*items: Body, **fields: Any) -> Body:
    """Return a Responses body with these items."""
    return {"input": list(items), **fields}


USER = {"role": "user", "content": "hi"}
RESPONSES: dict[str, Body] = {
    "one question": {"input": "hi"},
    "instructions": {"input": "hi", "instructions": "Be brief.\n"},
    "empty instructions": {"input": "hi", "instructions": ""},
    "a question of parts": responses_body(message("user", "a", "b", "")),
    "questions": responses_body(
        USER, message("user", "a"), message("assistant", "b", status="completed", id="msg_9"), USER
    ),
    "a developer": responses_body({"role": "developer", "content": "Be brief."}, USER),
    "instructions and a developer": responses_body(message("developer", "a", "b"), USER, instructions="I"),
    "developers": responses_body(message("developer", "a", "b"), message("developer", "c"), USER, instructions="I"),
    "a developer between turns": responses_body(
        USER, message("assistant", "a"), message("developer", "Now."), USER, instructions="I"
    ),
    "a system": responses_body({"role": "system", "content": "Be brief."}, USER),
    "a system of parts": responses_body(message("system", "a", "b"), USER),
    "instructions and a system": responses_body({"role": "system", "content": "S"}, USER, instructions="I"),
    "a system between turns": responses_body(USER, message("assistant", "a"), {"role": "system", "content": "S"}, USER),
    "a system and a developer": responses_body({"role": "system", "content": "S"}, message("developer", "D"), USER),
    "a tool loop": responses_body(*TURN, tools=[FUNCTION]),
    "a continued tool loop": responses_body(
        *TURN,
        thought("Now."),
        call(3),
        output(3),
        message("assistant", "Done."),
        USER,
        tools=[FUNCTION],
        instructions="I",
    ),
    "calls without a text": responses_body(
        USER, call(1, ""), call(2, '{"x": 2, "y": "é"}'), output(1), output(2, PARTS), tools=[FUNCTION]
    ),
    "an empty output": responses_body(USER, call(1), output(1, ""), tools=[FUNCTION]),
    "a reply that is a string": responses_body(USER, {"role": "assistant", "content": "a"}, USER),
    "two replies": responses_body(USER, message("assistant", "a"), message("assistant", "b"), USER),
    "thoughts and replies": responses_body(
        USER, thought("t"), message("assistant", "a"), thought("u"), message("assistant", "b"), USER
    ),
    "tools": responses_body(
        USER, tools=[FUNCTION, {"type": "function", "name": "look", "parameters": None, "strict": True}]
    ),
    "deferred tools": responses_body(USER, tools=[FUNCTION | {"defer_loading": True}]),
    "a custom tool": responses_body(USER, tools=[CUSTOM]),
    "a call of a custom tool": responses_body(
        USER,
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'a "b"\n'},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"},
        tools=[CUSTOM],
    ),
    "a namespace": responses_body(
        USER,
        call(1) | {"namespace": "n"},
        output(1),
        tools=[{"type": "namespace", "name": "n", "description": "N.", "tools": [FUNCTION]}],
    ),
    "no tools chosen": responses_body(USER, tools=[FUNCTION], tool_choice="none"),
    "a tool required": responses_body(USER, tools=[FUNCTION], tool_choice="required", parallel_tool_calls=False),
    "one tool": responses_body(USER, tools=[FUNCTION], tool_choice={"type": "function", "name": "add"}),
    "an effort": responses_body(USER, reasoning={"effort": "low", "summary": "auto"}),
    "no effort": responses_body(USER, reasoning={"effort": "none"}),
    "arguments of the template": responses_body(
        *TURN, chat_template_kwargs={"preserve_thinking": True}, reasoning={"effort": "none"}
    ),
    "an incomplete reply at the end": responses_body(USER, message("assistant", "Once upon", status="incomplete")),
    "incomplete reasoning at the end": responses_body(USER, thought("Once upon") | {"status": "incomplete"}),
    "an incomplete reply before": responses_body(USER, message("assistant", "Once upon", status="incomplete"), USER),
    "Codex'": responses_body(
        message("developer", "<permissions>\nread-only\n</permissions>", "<apps>\nnone\n</apps>"),
        message("user", "# AGENTS.md\nBe good.", "<environment_context>\n/tmp\n</environment_context>"),
        message("developer", "<collaboration_mode>\nDefault\n</collaboration_mode>"),
        message("user", "Fix it."),
        thought("First look."),
        message("assistant", "I look.", phase="commentary"),
        call(1),
        output(1, "Exit code: 0\nOutput:\nok\n"),
        {
            "type": "custom_tool_call",
            "call_id": "c2",
            "name": "patch",
            "input": "*** Begin Patch\n",
            "status": "completed",
        },
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "Done"},
        instructions="You are Codex.\n",
        tools=[FUNCTION, CUSTOM],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"effort": "medium"},
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
    ),
}
