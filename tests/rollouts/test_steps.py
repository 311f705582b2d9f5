"""The cost of reading large rollouts: time grows with the number of steps."""

from threading import current_thread, main_thread
from time import process_time

import pytest
from tests.support.forests import make_choice, make_step

from proxy.rollouts import steps as reading
from proxy.rollouts.rollout import read_rollout
from proxy.rollouts.steps import read_steps, weights_of
from proxy.trajectory import codec
from proxy.trajectory.drift import explain, find_boundaries
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.json_bytes import to_json_bytes
from proxy.trajectory.outline import outline
from proxy.trajectory.tree import grow
from storage.types import StepWrite

ASK = {"role": "user", "content": "go"}


def response(text, index=0):
    return {"index": index, "message": {"role": "assistant", "content": text}}


def side_by_side(count):
    """Return calls with one prompt."""
    return [
        make_step(f"{n:06}", [1, 2], [n + 9], request={"messages": [ASK]}, response={"choices": [response(f"t{n}")]})
        for n in range(count)
    ]


def below_the_first(count):
    """Return calls that all continue the first."""
    first = make_step("0", [1], [5], request={"messages": [ASK]}, response={"choices": [response("a")]})
    messages = [ASK, response("a")["message"], ASK]
    return [first, *(
        make_step(f"{n:06}", [1, 5, 2], [n + 9], request={"messages": messages}, response={"choices": [response(f"t{n}")]})
        for n in range(1, count)
    )]  # fmt: skip


def of_one_call(count):
    """Return the choices of one call."""
    choices = [response(f"t{n}", n) for n in range(count)]
    return [
        make_step("a", [1, 2], *(make_choice(n, [n + 9]) for n in range(count)), request={"messages": [ASK]},
                  response={"choices": choices})
    ]  # fmt: skip


def drifted(count, reply):
    """Return calls with one prompt, and for each another call that continues a reply with other ids."""
    early = side_by_side(count // 2)
    if reply == "same":
        early = [make_step(step.step_id, [1, 2], step.choices[0].ids, request=step.request,
                           response={"choices": [response("same")]}) for step in early]  # fmt: skip
    content = {"same": "same", "edited": "something else"}[reply]
    messages = [ASK, {"role": "assistant", "content": content}, ASK]
    return early + [
        make_step(f"x{n:06}", [1, 2, 3, n], [n + 9], request={"messages": messages}, response={"choices": []})
        for n in range(count // 2)
    ]


@pytest.mark.parametrize(
    "rollout",
    [
        side_by_side,
        below_the_first,
        of_one_call,
        lambda count: drifted(count, "same"),
        lambda count: drifted(count, "edited"),
    ],
    ids=["siblings", "below the first", "one call", "drifted", "edited"],
)
def test_a_tree_of_ten_thousand_nodes_takes_at_most_4_s_of_cpu_time(rollout):
    """This includes its drift and the JSON."""
    steps = rollout(10_000)
    start = process_time()
    drift = [explain(boundary) for boundary in find_boundaries(grow(steps))]
    text = to_json_bytes(outline(steps, RolloutFacts("r1"), drift))

    assert text.count(b'"node":') == 10_000
    assert process_time() - start < 4


def test_tokens_weigh_less_in_packed_rows():
    """Lists of numbers take longer to make than copies of arrays. Choices and messages weigh the same, translated ones too."""
    short, long = make_step("a", [1], [2]), make_step("b", range(80_000), make_choice(0, range(1_920)))
    asked = make_step("c", [1], [2], request={"messages": [ASK] * 640})
    translated = make_step("d", [1], [2], request={"contents": []}, sent={"set": {"messages": [ASK] * 640}})

    assert [weights_of([step]) for step in (short, asked, translated)] == [(1, 1), (11, 11), (11, 11)]
    assert weights_of([short, long]) == (82, 12)


@pytest.mark.parametrize(
    ("texts", "is_on_the_loop"), [(("a", "b"), True), (("a" * 1_000_000, "b"), False), (("a", "b" * 1_000_000), False)]
)
async def test_steps_that_expand_to_long_ones_are_decoded_in_a_thread(store, monkeypatch, texts, is_on_the_loop):
    """A message, or a reply, that repeats itself is compressed to a thousandth of its length."""
    asked, replied = texts
    messages = [{"role": "user", "content": asked}]
    step = make_step("s1", [1], [2], request={"messages": messages}, response={"choices": [response(replied)]})
    record = codec.encode(step)
    stored = await store.open("r1", {}, now_ms=1)
    await store.append(StepWrite("r1", stored.incarnation, "s1", record.record, record.blocks), now_ms=2)
    threads = []

    def decode(*args, **named):
        threads.append(current_thread())
        return codec.decode(*args, **named)

    monkeypatch.setattr(reading, "decode", decode)
    (read,) = await read_steps(store, read_rollout(stored), whole=True)

    assert read.response == step.response
    assert [thread is main_thread() for thread in threads] == [is_on_the_loop]
