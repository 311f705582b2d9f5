"""Records as earlier versions may have stored them: fields of any type, bodies of any JSON, up to the maximum depth."""

from contextlib import suppress

from hypothesis import strategies as st
from tests.support.forests import make_choice, make_step

from proxy.trajectory.blocks import BlockReader
from proxy.trajectory.codec import UnreadableRecord, decode, encode
from proxy.trajectory.step import Span

DEEPEST = 248


def deep(inner):
    """Nest the value in as many lists and objects as a record can contain."""
    for level in range(DEEPEST):
        inner = [inner] if level % 2 else {"content": inner}
    return inner


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "assistant", "stop", "1.0", "9" * 5000, "<think>x</think>y", "\x00"])
)
NAMES = st.sampled_from(
    ["role", "content", "tool_calls", "function", "name", "arguments", "index", "message", "text", "choices", "a"]
)
JSON = st.recursive(
    SCALARS | SCALARS.map(deep),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)
PLAIN_MESSAGE = st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "assistant"]),
                          st.sampled_from(["a", "b"]))  # fmt: skip
MESSAGE = PLAIN_MESSAGE | JSON | st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "tool"]) | JSON,
        "content": st.sampled_from(["hi", "<think>x</think>y"]) | JSON,
        "tool_calls": JSON | st.lists(st.fixed_dictionaries({"function": JSON}), max_size=2),
        "reasoning": JSON,
    },
)  # fmt: skip
CHOICE = JSON | st.fixed_dictionaries(
    {"index": st.integers(-1, 2) | JSON}, optional={"message": MESSAGE, "text": JSON, "logprobs": JSON}
)
RESPONSE = JSON | st.fixed_dictionaries(
    {"choices": JSON | st.lists(CHOICE, max_size=3)},
    optional={"id": JSON, "model": JSON, "usage": JSON, "created": JSON},
)
REQUEST = st.dictionaries(NAMES, JSON, max_size=3) | st.fixed_dictionaries(
    {},
    optional={
        "messages": st.lists(MESSAGE, max_size=4) | JSON,
        "prompt": JSON,
        "input": JSON,
        "tools": JSON,
        "stream": JSON,
        "stream_options": JSON,
        "max_tokens": JSON,
    },
)
SAMPLING = JSON | st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("temperature", "max_tokens", "top_k", "stop", "ignore_eos"), JSON)
)
VERSION = st.sampled_from(["1", "2", None, 3, "v", "9" * 5000]) | JSON

BOUND = st.integers(-1, 4) | JSON
SPANS = st.lists(st.builds(Span, BOUND, BOUND, VERSION, st.integers(-1, 2) | JSON), max_size=2).map(tuple)


@st.composite
def odd_steps(draw):
    """Draw steps with valid ids and logprobs, everything else of any type."""

    def any_of(usual, odd):
        return draw(st.sampled_from(usual)) if draw(st.integers(0, 3)) else draw(odd)

    steps, fulls = [], [[]]
    for number in range(draw(st.integers(1, 4))):
        prompt = [*draw(st.sampled_from(fulls)), *([number + 1] if draw(st.booleans()) else [])]
        choices = []
        for index in range(draw(st.integers(0, 2))):
            ids = draw(st.lists(st.integers(10, 20), max_size=3))
            choices.append(
                make_choice(
                    any_of([index], st.integers(-1, 2) | JSON),
                    ids,
                    finish_reason=any_of(["stop", "length", None], JSON),
                    stop_reason=any_of([None, 9, "END"], JSON),
                    prompt=any_of([0], st.integers(-2, 2) | JSON),
                    spans=any_of([(Span(0, len(ids), "1"),), ()], SPANS),
                )
            )
            fulls.append([*prompt, *ids])
        steps.append(
            make_step(
                f"{number:02}",
                prompt,
                *choices,
                dialect=draw(
                    st.sampled_from(["chat", "chat", "completions", "generate", "messages", "responses", "gemini"])
                ),
                request=draw(REQUEST),
                sent=draw(st.just({}) | st.builds(lambda body: {"set": body, "unset": ["a"]}, REQUEST)),
                response=draw(RESPONSE),
                usage=any_of([None, {}], JSON),
                sampling=any_of([{"temperature": 1.0}], SAMPLING),
                model_served=any_of(["policy"], JSON),
                policy_version=draw(st.just("1") | VERSION),
                reason=any_of([None], JSON),
                extra=any_of(
                    [{"request_key": str(number)}],
                    st.fixed_dictionaries(
                        {}, optional={"request_key": JSON, "retry_of": JSON, "attempt": JSON, "mask_claim": JSON}
                    ),
                ),
            )
        )
    return steps


def read_back(steps):
    """Return the steps as a reader gets them; a step with a rejected record is omitted."""
    read = []
    for position, step in enumerate(steps):
        with suppress(TypeError, ValueError, AttributeError):  # a failed write stores nothing
            record = encode(step)
            with suppress(UnreadableRecord):
                read.append(decode(record.record, BlockReader(record.blocks), position))
    return read
