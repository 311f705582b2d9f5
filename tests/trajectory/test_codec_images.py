"""Records of calls with images: the data of each is a block of its own."""

import random
from base64 import b64encode
from hashlib import blake2b

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.forests import make_step

from proxy.rollouts.archive.rows import chains_of, put_together, take_apart
from proxy.trajectory.blocks import BlockReader
from proxy.trajectory.codec import UnreadableRecord, decode, encode
from proxy.trajectory.images import data_in, names_in

TEXT = st.text(max_size=12)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.dictionaries(TEXT, VALUE, max_size=3)
DATA = ["A" * 3000, "A" * 2999 + "B", "BBBB"]
PARTS = st.lists(
    st.sampled_from([{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}} for data in DATA])
    | st.just({"type": "text", "text": "What is this?"})
    | VALUE,
    max_size=4,
)
WITH_IMAGES = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": PARTS}), max_size=4)


def with_images(messages, **facts):
    """Return a step of these messages, as the proxy records it."""
    extra = {"images": {"ids": names_in(messages), "token": None}}
    return make_step("a", [1, 2], [3], **{"request": {"messages": messages}, "extra": extra, **facts})


@given(WITH_IMAGES, FIELDS, st.booleans())
def test_a_call_with_images_is_read_as_it_was(messages, fields, is_translated):
    """Also with images in a client's fields of another dialect, which are sent as messages; known blocks are not written."""
    facts = {"request": fields | {"input": messages}, "sent": {"set": {"messages": messages}}} if is_translated else {}
    step = with_images(messages, **facts)
    written = encode(step)
    again = encode(step, {*written.blocks, *written.names})

    assert step == decode(written.record, BlockReader(written.blocks))
    assert ({}, written.record) == (again.blocks, again.record)


@given(WITH_IMAGES)
def test_the_parts_of_a_record_with_images_make_an_equal_one(messages):
    written = encode(with_images(messages))
    parts, is_equal = take_apart(written.record, BlockReader(written.blocks), written.blocks)
    made = put_together(parts, set())

    assert is_equal
    assert (written.record, written.blocks) == (made.record, made.blocks)
    assert set(data_in(messages).values()) <= chains_of(orjson.loads(parts.head))


def test_the_data_of_an_image_is_stored_once():
    """In any message, at any position, with any type, and in any field of the request."""
    data = b64encode(random.Random(7).randbytes(10_000)).decode()
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}"}} for kind in ("png", "x")]
    messages = [{"role": role, "content": [*parts, {"type": "text", "text": role}]} for role in ("user", "tool")]
    request = {"input": [{"source": {"type": "base64", "data": data}}] * 9, "system": [data]}
    written = encode(with_images(messages, request=request, sent={"set": {"messages": messages[::-1]}}))
    sizes = sorted(map(len, [*written.blocks.values(), written.record]))

    assert 10_000 < sizes[-1] < len(data)
    assert sizes[-2] < 1_000


def test_damaged_images_raise_unreadable_record():
    messages = [{"role": "user", "content": [{"image_url": {"url": f"data:,{DATA[0]}"}}]}]
    written = encode(with_images(messages))
    (name,) = data_in(messages).values()
    others = {other: block for other, block in written.blocks.items() if other != name}
    piece = b"\x01[[3]]\n{}"
    odd = {blake2b(piece, digest_size=16, person=b"messages", salt=bytes(16)).digest(): bytes(17) + piece}

    with pytest.raises(UnreadableRecord, match=f"block {name.hex()} is missing"):
        decode(written.record, BlockReader(others))
    with pytest.raises(UnreadableRecord, match=f"block {name.hex()} is damaged"):
        decode(written.record, BlockReader({**others, name: bytes(17) + b"C"}))
    with pytest.raises(ValueError, match="not enough values"):
        BlockReader(odd).read(b"messages", next(iter(odd)))
