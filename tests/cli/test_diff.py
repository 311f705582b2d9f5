"""`tokentape diff`: what two rollouts differ in, from their first different step on."""

from contextlib import nullcontext
from copy import deepcopy
from types import SimpleNamespace

import orjson
import pytest
from tests.support.taped import record, recorder

from proxy.cli.control import ControlAddress
from proxy.cli.diff import compare, diff, first_difference
from proxy.cli.runner import Exit


def message(role: str, content: str, **more) -> dict:
    return {"role": role, "content": content, **more}


def step(index: int, *messages: dict, reply: str = "yes", ids=(7, 8), **changes) -> dict:
    """A step as the control API returns it."""
    made = {
        "step_id": f"s{index}",
        "rollout_id": "r",
        "index": index,
        "request": {"messages": list(messages), "stream": True},
        "sent": {"set": {"return_token_ids": True}, "unset": []},
        "response": {"id": f"chatcmpl-{index}", "choices": [{"index": 0, "message": message("assistant", reply)}]},
        "prompt_ids": [1, 2, 3],
        "choices": [
            {
                "index": 0,
                "prompt": 0,
                "ids": list(ids),
                "logprobs": [-0.5] * len(ids),
                "finish_reason": "stop",
                "stop_reason": None,
                "spans": [],
            }
        ],
        "sampling": {"temperature": 1.0},
        "status": "complete",
        "reason": None,
        "policy_version": "v1",
        "policy_version_end": None,
        "fidelity": {"exact": True, "problems": [], "why": []},
    }
    return {**made, **changes}


async def given(steps):
    """The steps of a rollout."""
    for each in steps:
        yield deepcopy(each)


async def differences(a: dict, b: dict, tolerance: float = 0.01) -> list[tuple]:
    """The differences of two rollouts of one step."""
    compared = await compare(given([a]), given([b]), tolerance)
    return [tuple(found) for pair in compared.pairs for found in pair.differences]


HELLO = message("user", "Hello")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (step(0, message("user", "Hallo")), [("messages", "[0].content", "Hello", "Hallo")]),
        (step(0, HELLO, message("user", "!")), [("messages", "[1]", None, message("user", "!"))]),
        (step(0, HELLO, reply="no"), [("reply", "[0].content", "yes", "no")]),
        (step(0, HELLO, sampling={"temperature": 0.5}), [("sampling", ".temperature", 1.0, 0.5)]),
        (step(0, HELLO, prompt_ids=[1, 5, 3]), [("prompt ids", "position 1 of 3 and 3", 2, 5)]),
        (step(0, HELLO, prompt_ids=[1, 2]), [("prompt ids", "position 2 of 3 and 2", 3, None)]),
        (step(0, HELLO, prompt_ids=None), [("prompt ids", "position 0 of 3 and 0", 1, None)]),
        (step(0, HELLO, ids=(7, 9)), [("ids", "position 1 of 2 and 2", 8, 9)]),
        (step(0, HELLO, choices=[]), [("choices", "", 0, None)]),
        (step(0, HELLO, policy_version="v2"), [("version", "policy_version", "v1", "v2")]),
        (step(0, HELLO, policy="critic"), [("version", "policy", None, "critic")]),
        (step(0, HELLO, status="partial", reason="cut"), [("status", "status", "complete", "partial")]),
        (
            step(0, HELLO, fidelity={"problems": ["no_ids"]}),
            [("fidelity", "problems", [], ["no_ids"])],
        ),
        (
            step(0, HELLO, request={"messages": [HELLO], "tools": [{"type": "function"}]}),
            [("tools", ".tools", None, [{"type": "function"}])],
        ),
        (
            step(0, HELLO, status="error", response={"status": 500, "body": "x"}),
            [
                ("reply", "", [message("assistant", "yes")], {"status": 500, "body": "x"}),
                ("status", "status", "complete", "error"),
            ],
        ),
    ],
)  # fmt: skip
async def test_each_respect_in_which_steps_differ_is_named_with_its_first_difference(changed, expected):
    assert await differences(step(0, HELLO), step(0, HELLO, step_id="other", timing={"received": 9})) == []
    assert await differences(step(0, HELLO), changed) == expected


async def test_logprobs_are_compared_up_to_a_tolerance_and_the_first_other_token():
    def with_logprobs(*logprobs, ids=(7, 8), **fields):
        made = step(0, HELLO, ids=ids)
        return {**made, "choices": [{**made["choices"][0], "logprobs": list(logprobs), **fields}]}

    first = with_logprobs(-0.5, -1.0)

    assert await differences(first, with_logprobs(-0.5, -1.009)) == []
    assert await differences(first, with_logprobs(-0.5, -1.02)) == [("logprobs", "position 1", -1.0, -1.02)]
    assert await differences(first, with_logprobs(-0.5, -1.02), tolerance=0.1) == []
    assert await differences(first, with_logprobs(None, -1.0)) == [("logprobs", "position 0", -0.5, None)]
    assert [found[0] for found in await differences(first, with_logprobs(-0.5, -9.0, ids=(7, 9)))] == ["ids"]
    assert await differences(first, with_logprobs(-0.5, -1.0, finish_reason="length")) == [
        ("finish reason", "", "stop", "length")
    ]


async def test_completions_are_compared_by_their_prompts():
    first = step(0, request={"prompt": "once"}, response={"choices": [{"index": 0, "text": "upon"}]})

    assert await differences(first, deepcopy(first)) == []
    assert await differences(first, {**first, "request": {"prompt": "twice"}}) == [("messages", "", "once", "twice")]
    assert await differences(first, {**first, "response": {"choices": [{"index": 0, "text": "a"}]}}) == [
        ("reply", "[0]", "upon", "a")
    ]


async def test_ids_of_tool_calls_are_compared_by_their_order():
    def conversation(first: str, second: str, results: tuple[str, str]) -> dict:
        calls = [{"id": each, "type": "function", "function": {"name": "f"}} for each in (first, second)]
        reply = message("assistant", "", tool_calls=calls)
        return step(0, HELLO, reply, *(message("tool", "ok", tool_call_id=each) for each in results))

    assert await differences(conversation("x", "y", ("x", "y")), conversation("1", "2", ("1", "2"))) == []
    assert await differences(conversation("x", "y", ("x", "y")), conversation("1", "2", ("2", "1"))) == [
        ("messages", "[2].tool_call_id", "call 0", "call 1")
    ]


async def test_after_the_first_difference_steps_are_paired_by_their_messages():
    """Parallel calls may end in another order; the remaining steps are compared in their order, or are in one rollout only."""
    first, second, third = (step(index, message("user", text)) for index, text in enumerate("abc"))
    swapped = [{**third, "index": 0}, {**first, "index": 1}, {**second, "index": 2}]
    other = [first, {**second, "index": 1, "request": {"messages": [message("user", "x")]}}]
    steps = [first, second, third]

    assert (await compare(given(steps), given(swapped), 0)).pairs == []
    compared = await compare(given(steps), given(other), 0)
    assert (compared.equal, compared.steps) == (1, [3, 2])
    assert [(pair.a and pair.a["step_id"], pair.b and pair.b["step_id"]) for pair in compared.pairs] == [
        ("s1", "s1"),
        ("s2", None),
    ]
    assert [pair.a for pair in (await compare(given([]), given(steps), 0)).pairs] == [None] * 3


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ({"x": [1, {"y": "a"}]}, {"x": [1, {"y": "b"}]}, (".x[1].y", "a", "b")),
        ({"x": None}, {}, None),
        (1, True, ("", 1, True)),
        (1, 1.0, None),
        ([], [None], None),
        ([1], {"0": 1}, ("", [1], {"0": 1})),
    ],
)
def test_the_first_difference_of_json_is_a_path(a, b, expected):
    assert first_difference(a, b) == expected


async def test_two_recorded_rollouts_are_compared(address, call_proxy, recorded, make_console, capsys):
    """A rollout equals itself; the JSON names the steps, and shortens texts around their first difference."""
    out = make_console()
    assert await diff(address, out, "demo", "demo", 0, as_json=False)
    assert out.file.getvalue() == "demo and demo are equal: 3 steps\n"
    for name, text in (("x", f"{'-' * 900}1{'-' * 900}"), ("y", f"{'-' * 900}2{'-' * 900}")):
        body = {"model": "policy", "messages": [message("user", text)], "max_tokens": 4, "seed": 1}
        await call_proxy("POST", f"/rollouts/{name}/v1/chat/completions", body)
    assert not await diff(address, make_console(), "x", "y", 0, as_json=True)
    found = orjson.loads(capsys.readouterr().out)

    assert (found["a"], found["b"], found["steps"], found["equal"]) == ("x", "y", [1, 1], 0)
    (pair,) = found["different"]
    assert (pair["a"]["index"], pair["b"]["index"]) == (0, 0)
    messages = pair["differences"][0]
    assert (messages["what"], messages["where"]) == ("messages", "[0].content")
    assert messages["a"] == f"{'-' * 100}1{'-' * 399}"
    assert {"prompt ids", "messages"} <= {each["what"] for each in pair["differences"]}


async def test_the_first_different_step_is_shown_in_detail_and_the_others_by_name(monkeypatch, make_console):
    first = step(0, HELLO)
    rollouts = {
        "a": [first, step(1, message("user", "a\x1b")), step(2, HELLO), step(3, HELLO)],
        "b": [first, step(1, message("user", "b")), step(2, HELLO, ids=(1, 2), reply="no")],
    }
    control = SimpleNamespace(steps=lambda name: given(rollouts[name]))
    monkeypatch.setattr("proxy.cli.diff.connected", lambda _: nullcontext(control))
    out = make_console()
    assert not await diff(ControlAddress(None, None, None), out, "a", "b", 0, as_json=False)

    assert out.file.getvalue().splitlines() == [
        "a and b: 1 step equal, 3 different",
        "step 1",
        "  messages  [0].content",
        "    - a\\x1b",
        "    + b",
        "step 2  reply, ids",
        "step 3  only in a",
    ]


async def test_files_of_rollouts_are_compared_without_a_proxy(store, tmp_path, make_console, invoke):
    """A tape equals its rollout."""
    path = await record(store, tmp_path, "r1")
    again = tmp_path / "again.jsonl"
    again.write_text(path.read_text().replace("It rains.", "It snows."))
    nowhere = ControlAddress("http://127.0.0.1:9", None, None)
    assert await diff(nowhere, make_console(), str(path), str(path), 0, as_json=False)
    out = make_console()
    assert not await diff(nowhere, out, str(path), str(again), 0, as_json=False)
    assert out.file.getvalue().splitlines()[1:3] == ["step 1", "  reply  [0].content"]
    async with recorder(store, tmp_path) as url:
        assert await diff(ControlAddress(url, None, None), make_console(), str(path), "r1", 0, as_json=False)

    assert (await invoke("diff", str(tmp_path / "none.jsonl"), "r1"))[0] == 2


async def test_the_exit_status_is_that_of_diff(recorded, invoke):
    """0 for equal rollouts, 1 for different ones, 2 for trouble."""
    assert (await invoke("diff", "demo", "demo"))[0] == Exit.DONE
    assert (await invoke("diff", "demo", "bad"))[0] == 1
    status, printed, errors = await invoke("diff", "demo", "none")
    assert (status, printed, "Rollout 'none' not found." in errors) == (2, "", True)
    assert (await invoke("diff", "demo", "bad", url="http://127.0.0.1:9"))[0] == 2
