"""Routed experts and sampling masks are stored once per record and restored in the response."""

from base64 import b64encode
from dataclasses import replace
from math import prod

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.forests import make_choice, make_step

from proxy.trajectory.arrays import Experts, pack_experts, pack_mask
from proxy.trajectory.blocks import BlockReader
from proxy.trajectory.codec import decode, encode
from proxy.trajectory.experts_and_masks import ExpertRows, expert_rows, join_experts, left_out, put_back

TEXT = b64encode(b"\x93NUMPY" + bytes(range(50))).decode()
MASK = [[5, 6], [], [7]]

# Values of an engine's fields for routed experts and masks: valid ones, and some that only look valid.
EXPERT_VALUES = st.sampled_from([TEXT, "", "AAB=", "not base64", None, 1, 1.0, True, [1], {"a": [1.0]}])
MASK_VALUES = st.sampled_from([MASK, [], "", {}, None, [[]], [{}], [[5, 6], [], [7.0]], [[True]], [[1]], 7])
CHOICE_FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "routed_experts": EXPERT_VALUES,
        "sampling_mask": MASK_VALUES,
        "meta_info": st.none()
        | st.fixed_dictionaries({"routed_experts": EXPERT_VALUES, "output_token_sampling_mask": MASK_VALUES}),
    },
)
EXPERTS = st.none() | EXPERT_VALUES.map(pack_experts)
MASKS = st.sampled_from([None, pack_mask(MASK), pack_mask([]), pack_mask([[]]), pack_mask([[1]])])
CHOICES = st.lists(
    st.tuples(EXPERTS, MASKS).map(
        lambda kept: replace(make_choice(0, [1, 2, 3]), routed_experts=kept[0], sampling_mask=kept[1])
    ),
    max_size=3,
).map(tuple)


@given(
    st.none() | st.fixed_dictionaries({"id": st.just(1), "choices": st.lists(CHOICE_FIELDS | st.none(), max_size=3)}),
    CHOICES,
)
def test_a_response_is_restored_byte_for_byte(response, choices):
    """The argument is not changed."""
    before = orjson.dumps(response)
    left, again = left_out(response, choices)
    read = orjson.loads(orjson.dumps(left))
    put_back(read, orjson.loads(orjson.dumps(again)), choices)

    assert before == orjson.dumps(response)
    assert before == orjson.dumps(read)


@pytest.mark.parametrize(
    "fields",
    [
        {"routed_experts": TEXT, "sampling_mask": MASK},
        {"meta_info": {"routed_experts": TEXT, "output_token_sampling_mask": MASK}},
    ],
    ids=["vLLM", "SGLang"],
)
def test_values_of_a_choice_are_not_stored_again_in_the_response(fields):
    choice = replace(make_choice(0, [1, 2, 3]), routed_experts=pack_experts(TEXT), sampling_mask=pack_mask(MASK))
    left, again = left_out({"choices": [{"index": 0, **fields}]}, (choice,))

    assert len(again) == 2
    assert TEXT.encode() not in orjson.dumps(left)
    assert b"[5,6]" not in orjson.dumps(left)


def test_a_mask_takes_at_most_4_bytes_per_number():
    """200 000 positions with a few ids each."""
    mask = [[position % 50_000, position % 49_999 + 1] for position in range(200_000)]
    step = make_step("a", [1], replace(make_choice(0, [1]), sampling_mask=pack_mask(mask)))
    step = replace(step, response={"choices": [{"index": 0, "sampling_mask": mask}]})
    written = encode(step)
    read = decode(written.record, BlockReader(written.blocks))

    assert len(written.record) < 4 * 3 * 200_000
    assert mask == read.response["choices"][0]["sampling_mask"]
    assert step.choices[0].sampling_mask == read.choices[0].sampling_mask


def npy(shape, descr="|u1", *, size=1, order="False"):
    """Return a .npy file of zeros."""
    header = f"{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}".ljust(117) + "\n"
    data = bytes(size * prod(shape))
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + data


@pytest.mark.parametrize(
    ("experts", "count", "found"),
    [
        (Experts("npy", npy((5, 2, 3))), 5, ((2, 3), "uint8")),
        (Experts("npy", npy((5, 2, 3), "<i2", size=2)), 5, ((2, 3), "int16")),
        (Experts("npy", npy((5, 2, 3))), 4, None),
        (Experts("npy", npy((5, 2, 3), order="True")), 5, None),
        (Experts("npy", npy((5, 2, 3), ">i2", size=2)), 5, None),
        (Experts("npy", npy((5, 2, 3), "<f4", size=4)), 5, None),
        (Experts("npy", npy((5, 6))), 5, None),
        (Experts("npy", npy((5, 2, 3))[:-1]), 5, None),
        (Experts("npy", b"\x93NUMPY"), 5, None),
        (Experts("int32", bytes(4 * 5 * 6)), 5, ((6,), "int32")),
        (Experts("int32", bytes(4 * 5 * 6 - 4)), 5, None),
        (Experts("int32", b""), 5, None),
        (Experts("int32", bytes(24)), 0, None),
        (Experts("json", b"[1]"), 1, None),
        (None, 5, None),
    ],
)
def test_experts_are_read_if_each_token_has_its_own(experts, count, found):
    rows = expert_rows(experts, count)

    assert found == (None if rows is None else (rows.shape, rows.dtype))


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 6))
def test_experts_of_two_steps_join_without_a_gap_or_not_at_all(first, second, start):
    """Each token has the experts of the first step that has the token."""
    before = ExpertRows(bytes(range(first)), first, (1,), "uint8")
    after = ExpertRows(bytes(range(100, 100 + second)), second, (1,), "uint8")
    joined = join_experts([(0, before), (start, after)])

    if start > first or start + second < first:
        assert joined is None
    else:
        assert (start + second, before.raw) == (joined.count, joined.raw[:first])
        assert joined.raw[first:] == bytes(range(100 + first - start, 100 + second))
    assert join_experts([(0, after)]) == after
    assert join_experts([]) is join_experts([(1, after)]) is join_experts([(0, before), (first, None)]) is None
    assert join_experts([(0, before), (first, ExpertRows(after.raw, second, (1, 1), "uint8"))]) is None
