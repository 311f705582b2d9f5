"""Rules for the kinds of threads."""

import json
import re
import time
from pathlib import Path
from typing import get_args

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.threaded import call, conversation, recorded_calls, said, user

from proxy.config.sections import Kind, Preset
from proxy.trajectory.openings import Openings
from proxy.trajectory.thread_rules import (
    AGENT_NAME,
    KINDS_OF,
    PRESETS,
    SUB_AGENT,
    RuleSearch,
    ThreadKind,
    ThreadRule,
    agent_of,
    matches,
    rules_of,
)
from proxy.trajectory.threads import find_threads

TEXTS = st.text("ab*\n", max_size=8)


@given(pattern=st.text("ab*", max_size=6), text=st.text("ab\n", max_size=10))
def test_a_pattern_matches_as_the_regular_expression_that_has_any_characters_for_each_star(pattern, text):
    expression = ".*".join(map(re.escape, pattern.split("*")))

    assert matches(pattern, text) == bool(re.fullmatch(expression, text, re.DOTALL))


def test_the_time_of_a_match_does_not_depend_on_backtracking():
    """A regular expression with as many repetitions would not end."""
    started = time.process_time()

    assert not matches("*a" * 400 + "*b", "a" * 200_000)
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    ("rule", "is_matched"),
    [
        (ThreadRule("auxiliary", model="haiku*"), True),
        (ThreadRule("auxiliary", model="opus*"), False),
        (ThreadRule("auxiliary", model="haiku*", system="You*titles."), True),
        (ThreadRule("auxiliary", model="haiku*", system="You*code."), False),
        (ThreadRule("auxiliary", user="Summarize*"), True),
        (ThreadRule("auxiliary", tools="bash*"), True),
        (ThreadRule("auxiliary", tools="bash"), False),
        (ThreadRule("auxiliary", tools=""), False),
        (ThreadRule("auxiliary", agent="*"), True),
        (ThreadRule("auxiliary", agent="judge"), False),
    ],
)
def test_a_rule_matches_calls_that_match_all_its_patterns(rule, is_matched):
    facts = {
        "model": "haiku-4",
        "system": "You write titles.",
        "user": "Summarize this.",
        "tools": "bash read",
        "agent": None,
    }

    assert is_matched == rule.has(**facts)


def test_the_first_rule_that_matches_applies():
    """The user message is read only if a rule has a pattern of it and may match, and once for each call."""
    rules = [
        ThreadRule("main", system="S", user="a*"),
        ThreadRule("auxiliary", system="S", user="b*"),
        ThreadRule("sub-agent", tools="read write"),
    ]
    search, read = RuleSearch(rules), []

    def first(system, user, tools=()):
        return search.first("m", system, frozenset(tools), None, lambda: read.append(user) or user)

    assert [first("S", user) for user in ("aa", "bb", "cc")] == [0, 1, None]
    assert [first("T", "x"), first("T", "x", ("write", "read"))] == [None, 2]
    assert read == ["aa", "bb", "cc"]
    assert RuleSearch(()).first(None, "", frozenset(), None, str) is None


def test_the_settings_have_the_same_kinds():
    assert get_args(ThreadKind) == get_args(Kind)
    assert KINDS_OF["main"] < KINDS_OF["agents"] < KINDS_OF["all"] == set(get_args(ThreadKind))


def metadata(**fields):
    """Return Codex's metadata of a turn of a sub-agent, as a field of the request."""
    turn = {"subagent_kind": "thread_spawn", "agent_name": "/root/count", **fields}
    return {"client_metadata": {"x-codex-turn-metadata": orjson.dumps(turn).decode()}}


def codex(number, *messages, turn, **facts):
    step = call(number, *messages, tools=("spawn_agent",), **facts)
    step.request.update(turn)
    return step


def agent_named(step):
    return agent_of(step.extra, step.request)


@pytest.mark.parametrize(
    ("turn", "agent"),
    [
        (metadata(), "sub-agent:root.count"),
        (metadata(agent_name="/root/plan/count"), "sub-agent:root.plan.count"),
        (metadata(agent_name="/"), None),
        (metadata(agent_name="/root/" + "a" * 64), None),
        (metadata(agent_name="/root/a b"), None),
        (metadata(agent_name=7), None),
        (metadata(subagent_kind="compact"), None),
        (metadata(subagent_kind=None), None),
        ({"client_metadata": {"x-codex-turn-metadata": "{"}}, None),
        ({"client_metadata": {"x-codex-turn-metadata": "[]"}}, None),
        ({"client_metadata": {"x-codex-turn-metadata": {}}}, None),
        ({"client_metadata": "a"}, None),
        ({}, None),
    ],
)
def test_the_agent_of_codexs_metadata_is_the_path_of_its_task(turn, agent):
    """Of sub-agents only, and only if it is a valid name."""
    assert agent == agent_named(codex(1, user("Task"), turn=turn))


def test_the_header_has_precedence():
    assert agent_named(codex(1, user("Task"), turn=metadata(), agent="critic")) == "critic"


@given(st.text() | st.from_regex(r"/?root/[a-z_/]{1,70}", fullmatch=True))
def test_each_task_has_a_name_as_the_header_may_have(path):
    name = agent_named(codex(1, user("Task"), turn=metadata(agent_name=path)))

    assert name is None or AGENT_NAME.fullmatch(name.removeprefix(SUB_AGENT))


def test_a_sub_agent_that_begins_with_the_history_of_its_caller_has_its_own_thread():
    """Codex's default model has such sub-agents: prompt, tools and first messages are the caller's."""
    task, delegates, begun = user("Task"), said("I delegate.", ("spawn_agent", {"message": "Count."})), user("Count.")
    result = {"role": "tool", "content": "/root/count"}
    steps = [
        codex(1, task, turn=metadata(subagent_kind=None), reply=delegates),
        codex(2, task, delegates, result, turn=metadata(subagent_kind=None)),
        codex(3, task, delegates, result, begun, turn=metadata()),
        codex(4, task, delegates, result, begun, said("ok"), result, turn=metadata()),
    ]

    found = find_threads(steps)

    assert [found.of[step.step_id].name for step in steps] == [
        "main",
        "main",
        "sub-agent:root.count",
        "sub-agent:root.count",
    ]
    assert [(thread.kind, thread.agent) for thread in found.all] == [("main", None), ("sub-agent", None)]


def test_a_task_of_one_call_without_tools_is_a_sub_agent():
    """The metadata of its caller is certain."""
    main = [codex(n, user("Task"), turn=metadata(subagent_kind=None)) for n in (1, 2)]
    task = call(3, user("Count."))
    task.request.update(metadata())

    assert find_threads([*main, task]).of[task.step_id].kind == "sub-agent"


ROOT = Path(__file__).parents[2]
CLAUDE = "You are a Claude agent, built on Anthropic's Claude Agent SDK."
GEMINI = "You are Gemini CLI, an interactive CLI agent specializing in software engineering tasks. Your primary goal is to help"

# The beginnings of system prompts and of last user messages, and names of tools, as the versions of the presets send them.
PROMPTS = json.loads(Path(__file__).with_name("agent_texts.json").read_text())
EXAMPLES = [
    pytest.param(preset, kind, field, text, id=f"{preset}, {text[:40].strip()}")
    for preset, kinds in PROMPTS.items()
    for kind, fields in kinds.items()
    for field, texts in fields.items()
    for text in texts
]


def facts(preset, field, text):
    """Return what the rules see of a call with this text; those without tools have the main system prompt."""
    system = GEMINI if field == "tools" and preset == "gemini-cli" else ""
    return {"model": "m", "agent": None, "system": system, "user": "", "tools": "", field: text}


@pytest.mark.parametrize(("preset", "kind", "field", "text"), EXAMPLES)
def test_a_call_beside_the_main_conversation_has_the_kind_of_its_preset(preset, kind, field, text):
    seen = facts(preset, field, text)

    assert kind == next(rule.kind for rule in PRESETS[preset].rules if rule.has(**seen))


@pytest.mark.parametrize("preset", PRESETS)
def test_each_rule_of_a_preset_is_for_a_text_of_the_agent(preset):
    """A rule that no text needs is removed."""
    seen = [facts(*example.values[:1], *example.values[2:]) for example in EXAMPLES if example.values[0] == preset]
    first = {next(rule for rule in PRESETS[preset].rules if rule.has(**each)) for each in seen}

    assert set(PRESETS[preset].rules) == first


RANDOM = [  # lines of two runs, in another month
    ("aider", "- Current date: 2026-11-27", "- Current date: 2026-12-01"),
    ("claude-code", "Today's date is 2026-11-27.", "Today's date is 2026-12-01."),
    ("claude-code", "- The current month is November 2026 — use this", "- The current month is December 2026 — use this"),
    ("claude-code", " - OS Version: Linux 6.18.44-fc-v657", " - OS Version: Linux 6.12.1"),
    ("claude-code", "agentId: a8d7599edf (use SendMessage)", "agentId: a9dde4f566 (use SendMessage)"),
    ("claude-code", "duration_ms: 1721</usage>", "duration_ms: 804</usage>"),
    ("claude-code", "<duration_ms>1157</duration_ms></usage>", "<duration_ms>99</duration_ms></usage>"),
    ("claude-code", "output_file: /tmp/c7f842/abfbd3.output", "output_file: /tmp/a2a633/a0081b.output"),
    ("claude-code", "Command running in background with ID: b4x. Output", "Command running in background with ID: btv. Output"),
    ("claude-code", "Full output saved to: /w/c7f8/b4ea16esd.txt", "Full output saved to: /w/a2a6/bo3kxlcan.txt"),
    ("claude-code", "<task-id>b4xilom19</task-id>", "<task-id>btvl920kg</task-id>"),
    ("claude-code", "<tool-use-id>chatcmpl-tool-8265</tool-use-id>", "<tool-use-id>chatcmpl-tool-e583</tool-use-id>"),
    ("claude-code", "<output-file>/tmp/c7f842/b4x.output</output-file>", "<output-file>/tmp/a2a633/btv.output</output-file>"),
    ("cline", "2. Date: 11/27/2026", "2. Date: 12/1/2026"),
    ("codex", "  <current_date>2026-11-27</current_date>", "  <current_date>2026-12-01</current_date>"),
    ("codex", "Chunk ID: 367a57", "Chunk ID: 70eb26"),
    ("codex", "Wall time: 0.1782 seconds", "Wall time: 2.0 seconds"),
    ("codex", "Wall time 1.0 seconds", "Wall time 0.5 seconds"),
    ("codex", "Process running with session ID 9131", "Process running with session ID 36102"),
    ("codex", '{"chunk_id":"4ff141","wall_time_seconds":2.0005,"session_id":16556,"output":"begun\\n"}',
     '{"chunk_id":"568415","wall_time_seconds":0.0000057,"session_id":98389,"output":"begun\\n"}'),
    ("gemini-cli", "Today's date is Friday, November 27, 2026 (", "Today's date is Tuesday, December 1, 2026 ("),
    ("gemini-cli", "Process Group PGID: 6150", "Process Group PGID: 6291"),
    ("mini-swe-agent", "Linux 6.18.44-fc-v657 #1 SMP PREEMPT_DYNAMIC @0 x86_64", "Linux 6.1.0 #1 SMP Debian 6.1.27 aarch64"),
    ("openclaw", "Current date: 2026-11-27", "Current date: 2026-12-01"),
    ("openclaw", "Runtime: agent=main | session=agent:main:explicit:71baf046 | host=vm", "Runtime: agent=main | host=vm"),
    ("openclaw", "[Fri 2026-11-27 23:22 UTC] Continue.", "[Tue 2026-12-01 13:24 GMT+14] Continue."),
    ("opencode", "  Today's date: Fri Nov 27 2026", "  Today's date: Tue Dec 1 2026"),
    ("opencode", "Full output saved to: /h/tool-output/tool_21f4461750", "Full output saved to: /h/tool-output/tool_21f448c"),
    ("opencode", '<task id="ses_de0bb405bffe" state="completed">', '<task id="ses_de0bb05d9ffep" state="completed">'),
    ("pi", "Current date: 2026-11-27", "Current date: 2026-12-01"),
    ("qwen-code", "Today's date is Friday, November 27, 2026.", "Today's date is Tuesday, December 1, 2026."),
    ("qwen-code", "The current date is: Friday, November 27, 2026.", "The current date is: Tuesday, December 1, 2026."),
]  # fmt: skip


@pytest.mark.parametrize(("preset", "first", "second"), RANDOM)
def test_a_text_that_is_random_in_each_run_is_ignored(preset, first, second):
    assert first != without_ignored(preset, first) == without_ignored(preset, second)


def without_ignored(preset: str, line: str) -> str:
    for pattern in PRESETS[preset].ignore:
        line = re.sub(".*?".join(map(re.escape, pattern.split("*"))) + "$" * pattern.endswith("*"), "", line)
    return line


@pytest.mark.parametrize("preset", PRESETS)
def test_each_ignored_pattern_is_for_a_text_of_the_agent(preset):
    """A pattern that no text needs is removed."""
    lines = [first for name, first, _ in RANDOM if name == preset]

    assert [each for each in PRESETS[preset].ignore if not any(matches(f"*{each}*", line) for line in lines)] == []


def test_the_settings_have_the_same_presets():
    assert set(get_args(Preset)) == set(PRESETS)


def test_configured_rules_precede_presets():
    own = ThreadRule("main", model="m")

    assert (own, *PRESETS["codex"].rules, *PRESETS["pi"].rules) == rules_of(["codex", "pi"], [own])


def test_presets_are_of_the_versions_that_are_tested():
    """Their texts are read again when `make test-agents` gets a newer version."""
    folder = ROOT / "tests" / "system" / "agents"
    pinned = dict(json.loads((folder / "package-cli.json").read_text())["dependencies"])
    for file in folder.glob("requirements*.txt"):
        pinned |= dict(re.findall(r"^([\w.-]+)==([\w.]+)", file.read_text(), re.MULTILINE))

    assert {preset.package: preset.version for preset in PRESETS.values()}.items() <= pinned.items()


def test_the_page_has_the_version_of_each_preset():
    page = (ROOT / "docs" / "threads.md").read_text()

    assert all(
        re.search(rf"^\| `{name}` \|.* {re.escape(of.version)} \|", page, re.MULTILINE) for name, of in PRESETS.items()
    )


@pytest.mark.parametrize("agent", recorded_calls())
def test_no_rule_of_any_preset_has_a_call_of_a_main_thread_or_a_sub_agent(agent):
    """Also of the agents of other presets."""
    reader, rules = Openings(), rules_of(PRESETS, ())
    calls = [reader.read(step) for step, thread in recorded_calls()[agent] if thread.startswith(("main", "sub-agent"))]
    seen = [
        {
            "model": opening.model,
            "agent": opening.agent,
            "system": opening.system.text,
            "user": reader.user(opening),
            "tools": " ".join(sorted(opening.tools)),
        }
        for opening in calls
    ]

    assert not [rule for rule in rules for each in seen if rule.has(**each)]


def kinds(preset, *steps):
    """Return the kind of each step's thread, without rules and with a preset's rules."""
    return [
        [find_threads(steps, rules).of[step.step_id].kind for step in steps] for rules in ((), PRESETS[preset].rules)
    ]


def test_questions_about_the_main_conversation_are_no_turns_of_it():
    """Claude Code's suggestions have its prompt, its tools and its history."""
    first, second = said("I repaired it."), said("I tested it.")
    work = {"system": CLAUDE, "tools": ("Bash",)}
    suggest = user("[SUGGESTION MODE: Suggest what the user might naturally type next into Claude Code.]")
    steps = [
        call(1, user("Repair it."), reply=first, **work),
        call(2, user("Repair it."), first, suggest, **work),
        call(3, user("Repair it."), first, user("Test it."), reply=second, **work),
        call(4, user("Repair it."), first, user("Test it."), second, suggest, **work),
    ]

    assert kinds("claude-code", *steps) == [["main"] * 4, ["main", "auxiliary", "main", "auxiliary"]]


def test_a_page_or_a_search_that_a_tool_reads_is_no_sub_agent():
    """Gemini CLI's searches have the text of the tool's argument and the main system prompt, and no tools."""
    reply = said("I search.", ("google_web_search", {"query": "the newest version of it"}))
    steps = [
        call(1, user("Which version is it?"), system=GEMINI, tools=("google_web_search",), reply=reply),
        call(2, user("the newest version of it"), system=GEMINI, model="flash"),
    ]

    assert kinds("gemini-cli", *steps) == [["main", "sub-agent"], ["main", "auxiliary"]]


def test_a_question_with_a_schema_as_its_only_tool_is_auxiliary():
    """As Qwen Code's titles and classifiers."""
    steps = [
        call(1, user("Repair it."), system="You are Qwen Code.", tools=("agent", "read_file")),
        call(2, user("Conversation so far:\nRepair it."), system="Generate a title.", tools=("respond_in_schema",)),
    ]

    assert kinds("qwen-code", *steps) == [["main", "sub-agent"], ["main", "auxiliary"]]


def test_a_commit_message_of_an_agent_without_tools_is_auxiliary():
    """aider's main conversation may be as short as that."""
    commit = PROMPTS["aider"]["auxiliary"]["system"][0]
    steps = [
        call(1, user("Repair it."), system="Act as an expert software developer."),
        call(2, user("Diffs:"), system=commit),
    ]

    assert kinds("aider", *steps) == [["main", "sub-agent"], ["main", "auxiliary"]]


def test_a_memory_that_is_written_before_the_first_call_is_not_the_main_thread():
    """Agno's runs at the same time, with tools and with the message of the user."""
    memory = PROMPTS["agno"]["auxiliary"]["system"][1]
    steps = [
        call(1, user("Repair it."), system=memory, tools=("add_memory",)),
        call(2, user("Repair it."), system="You work.", tools=("bash",)),
    ]

    assert kinds("agno", *steps) == [["main", "sub-agent"], ["auxiliary", "main"]]


def test_a_plan_is_trained():
    """As smolagents writes one before a conversation with tools."""
    plan = PROMPTS["smolagents"]["sub-agent"]["user"][0]
    work = conversation(2, "New task:\nRepair it.", system="You are an expert assistant.", tools=("run",))
    steps = [call(0, user(plan)), *(call(n, *each.pop("messages"), **each) for n, each in enumerate(work, 1))]

    assert kinds("smolagents", *steps) == [["auxiliary", "main", "main"], ["sub-agent", "main", "main"]]
