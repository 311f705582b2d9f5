"""Stored records with changed bytes and valid checksums: decoded to a step, or rejected."""

from array import array
from contextlib import suppress
from hashlib import blake2b

import orjson
import pytest
import zstandard
from hypothesis import strategies as st

from proxy.trajectory.blocks import BlockReader
from proxy.trajectory.codec import SCHEMA, UnreadableRecord, decode, encode
from proxy.trajectory.step import Choice, EngineFacts, Step, Timing

pytestmark = [pytest.mark.timeout(3600), pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")]
ENGINE = EngineFacts("local", "vllm", "0.32.0", "http://engine:8000")
WRITTEN = [
    encode(
        Step(
            step_id="01J",
            rollout_id="r",
            dialect="chat",
            endpoint="/v1/chat/completions",
            engine=ENGINE,
            model_asked="m",
            model_served="m",
            request={"messages": [{"role": "user", "content": "hi " * times}], "tools": ["t" * times]},
            sent={"set": {"logprobs": True}, "unset": []},
            response={"choices": []},
            prompts=(array("i", [5] * times),) if times else (),
            choices=tuple(Choice(index, array("i", [7, 8]), array("f", [-0.5, -1.0]), "stop") for index in range(2)),
            usage={"prompt_tokens": times},
            sampling={"temperature": 1.0},
            timing=Timing(1.0),
            status="complete",
        )
    )
    for times in (0, 3, 900)
]
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 2**40) | st.text(max_size=4) | st.floats(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def sealed(payload):
    """Return a record with a valid checksum of any payload."""
    packed = zstandard.compress(payload)
    return (
        b"TT"
        + bytes([SCHEMA])
        + blake2b(packed, digest_size=8, person=b"record", salt=bytes([SCHEMA])).digest()
        + packed
    )


def with_head(payload, change):
    """Return the payload with a changed head and the correct length."""
    size = int.from_bytes(payload[:4], "little")
    head = orjson.loads(payload[16 : 16 + size])
    change(head)
    text = orjson.dumps(head, option=orjson.OPT_NON_STR_KEYS)
    return len(text).to_bytes(4, "little") + payload[4:16] + text + payload[16 + size :]


@st.composite
def records(draw):
    """Draw a record and its blocks with changed bytes, changed values of the head, damaged blocks, or none of these."""
    written = draw(st.sampled_from(WRITTEN))
    payload, blocks = zstandard.decompress(written.record[11:]), dict(written.blocks)
    for _ in range(draw(st.integers(1, 2))):
        match draw(st.sampled_from(["bytes", "head", "inner", "block", "lost", "garbage"])):
            case "bytes":
                offset = draw(st.integers(0, len(payload)))
                payload = payload[:offset] + draw(st.binary(max_size=4)) + payload[offset + draw(st.integers(0, 4)) :]
            case "block" if blocks:
                name = draw(st.sampled_from(sorted(blocks)))
                offset = draw(st.integers(0, len(blocks[name]) - 1))
                blocks[name] = blocks[name][:offset] + draw(st.binary(max_size=3)) + blocks[name][offset + 1 :]
            case "lost" if blocks:
                del blocks[draw(st.sampled_from(sorted(blocks)))]
            case "garbage":
                payload = draw(st.binary(max_size=60))
            case how:
                value, inner = draw(VALUE), draw(st.integers(0, 99))

                def change(head, how=how, value=value, inner=inner):
                    names = sorted(head)
                    target = head if how == "head" else head[names[inner % len(names)]]
                    if isinstance(target, list) and target:
                        target = target[0]
                    if isinstance(target, dict) and target:
                        target[sorted(target)[inner % len(target)]] = value

                with suppress(orjson.JSONDecodeError, AttributeError, TypeError):  # the head may be damaged already
                    payload = with_head(payload, change)
    return sealed(payload), blocks


async def test_a_damaged_record_is_a_step_or_an_error(fuzz):
    """The only exception is `UnreadableRecord`; a decoded step has ids and logprobs as arrays."""

    def check(drawn):
        record, blocks = drawn
        for whole in (True, False):
            try:
                step = decode(record, BlockReader(blocks), whole=whole)
            except UnreadableRecord:
                continue
            assert isinstance(step, Step)
            assert all(isinstance(ids[:], array) for ids in step.prompts)
            assert all(isinstance(choice.ids, array) and isinstance(choice.logprobs, array) for choice in step.choices)

    await fuzz(0.35, records(), check)
