"""Experts and masks in a record: kept once, and given back wherever they stood."""

from base64 import b64encode
from dataclasses import replace

import orjson
import pytest
from forests import make_choice, make_step
from hypothesis import given
from hypothesis import strategies as st

from proxy.trajectory.arrays import pack_experts, pack_mask
from proxy.trajectory.blocks import BlockReader
from proxy.trajectory.codec import decode, encode
from proxy.trajectory.experts_and_masks import left_out, put_back

TEXT = b64encode(b"\x93NUMPY" + bytes(range(50))).decode()
MASK = [[5, 6], [], [7]]

# What an engine may say where experts are told, and where masks are: what we know, and what only looks like it.
SAID_EXPERTS = st.sampled_from([TEXT, "", "AAB=", "not base64", None, 1, 1.0, True, [1], {"a": [1.0]}])
SAID_MASKS = st.sampled_from([MASK, [], "", {}, None, [[]], [{}], [[5, 6], [], [7.0]], [[True]], [[1]], 7])
SAID = st.fixed_dictionaries(
    {},
    optional={
        "routed_experts": SAID_EXPERTS,
        "sampling_mask": SAID_MASKS,
        "meta_info": st.none()
        | st.fixed_dictionaries({"routed_experts": SAID_EXPERTS, "output_token_sampling_mask": SAID_MASKS}),
    },
)
EXPERTS = st.none() | SAID_EXPERTS.map(pack_experts)
MASKS = st.sampled_from([None, pack_mask(MASK), pack_mask([]), pack_mask([[]]), pack_mask([[1]])])
CHOICES = st.lists(
    st.tuples(EXPERTS, MASKS).map(
        lambda kept: replace(make_choice(0, [1, 2, 3]), routed_experts=kept[0], sampling_mask=kept[1])
    ),
    max_size=3,
).map(tuple)


@given(
    st.none() | st.fixed_dictionaries({"id": st.just(1), "choices": st.lists(SAID | st.none(), max_size=3)}), CHOICES
)
def test_a_response_comes_back_as_it_was(response, choices):
    """To the last byte, and the one that was given is not changed."""
    before = orjson.dumps(response)
    left, again = left_out(response, choices)
    read = orjson.loads(orjson.dumps(left))
    put_back(read, orjson.loads(orjson.dumps(again)), choices)

    assert before == orjson.dumps(response)
    assert before == orjson.dumps(read)


@pytest.mark.parametrize(
    "said",
    [
        {"routed_experts": TEXT, "sampling_mask": MASK},
        {"meta_info": {"routed_experts": TEXT, "output_token_sampling_mask": MASK}},
    ],
    ids=["vLLM", "SGLang"],
)
def test_what_a_choice_holds_is_not_held_again(said):
    """The response is kept without it, wherever the engine said it."""
    choice = replace(make_choice(0, [1, 2, 3]), routed_experts=pack_experts(TEXT), sampling_mask=pack_mask(MASK))
    left, again = left_out({"choices": [{"index": 0, **said}]}, (choice,))

    assert 2 == len(again)
    assert TEXT.encode() not in orjson.dumps(left)
    assert b"[5,6]" not in orjson.dumps(left)


def test_a_long_mask_costs_little():
    """200 000 positions with a few ids each take a record of at most 4 bytes per number."""
    mask = [[place % 50_000, place % 49_999 + 1] for place in range(200_000)]
    step = make_step("a", [1], replace(make_choice(0, [1]), sampling_mask=pack_mask(mask)))
    step = replace(step, response={"choices": [{"index": 0, "sampling_mask": mask}]})
    written = encode(step)
    read = decode(written.record, BlockReader(written.blocks))

    assert len(written.record) < 4 * 3 * 200_000
    assert mask == read.response["choices"][0]["sampling_mask"]
    assert step.choices[0].sampling_mask == read.choices[0].sampling_mask
