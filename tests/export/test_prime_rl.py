"""The format `prime_rl`: arrays with 14 positional fields."""

from array import array
from dataclasses import replace

import pytest
from tests.support import worked
from tests.support.forests import make_choice, make_step

from proxy.export import FORMATS, Inexpressible
from proxy.export.containers import CONTAINERS
from proxy.trajectory.arrays import pack_mask

PROCESSED = {"temperature": 1.0, "logprobs_mode": "processed_logprobs", "top_k": 2}


def test_a_row_has_14_fields_in_order_and_no_null_logprobs():
    assert worked.rows("prime_rl") == [
        [
            [101, 102, 103, 201, 202, 9, 301, 302, 303, 304, 203, 9],
            [False, False, False, True, True, True, False, False, False, False, True, True],
            [0.0, 0.0, 0.0, -0.5, -0.25, -0.125, 0.0, 0.0, 0.0, 0.0, -1.0, -0.0625],
            [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
            "demo",
            *[None, None, None, None, None, None, None],
            [0.0, 0.0, 0.0, 0.5, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.5, 0.5],
            None,
        ]
    ]
    assert len(FORMATS["prime_rl"].columns) == 14


def test_tokens_that_were_not_sampled_have_the_temperature_of_the_next_turn():
    steps = [worked.first(), worked.second(sampling={"temperature": 0.5})]

    assert worked.rows("prime_rl", steps)[0][3] == [1.0] * 6 + [0.5] * 6


def test_a_turn_shared_by_two_sequences_is_trained_in_the_first():
    """In the other its advantage is 0."""
    steps = [make_step("a", [1], [10]), make_step("b", [1, 10, 2], [20]), make_step("c", [1, 10, 3], [30])]
    first, second = worked.rows("prime_rl", steps)

    assert (first[1], first[12]) == ([False, True, False, True], [0.0, 0.5, 0.0, 0.5])
    assert (second[1], second[12]) == ([False, False, False, True], [0.0, 0.0, 0.0, 0.5])


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"advantages": None}, "requires an advantage"),
        ({"metadata": {}}, "requires `env_name` in the metadata"),
        ({"metadata": {"env_name": "all"}}, "other than 'all'"),
    ],
)
def test_a_missing_required_field_is_rejected(facts, why):
    with pytest.raises(Inexpressible, match=why):
        worked.rows("prime_rl", facts=replace(worked.FACTS, **facts))


def test_an_unknown_temperature_is_rejected_with_the_name_of_the_setting():
    with pytest.raises(
        Inexpressible, match=r"requires the temperature of each step.* has none at step 'b'.*sampling_defaults"
    ):
        worked.rows("prime_rl", [worked.first(), worked.second(sampling={})])


def test_msgspec_reads_a_row_as_the_trainers_struct():
    """The trainer's struct is array-like: fields are read by position."""
    msgspec = pytest.importorskip("msgspec")
    kinds = {
        **dict.fromkeys(("ref_logprobs", "rl_weights", "ce_weights", "ref_kl_weights", "advantages"), list[float]),
        "token_ids": list[int],
        "mask": list[bool],
        "logprobs": list[float],
        "temperatures": list[float],
        "env_name": str,
        "mm_kwargs": dict,
        "routed_experts": dict,
        "mm_token_type_ids": list[int],
        "sampling_mask": list[bytes],
    }
    required = ("token_ids", "mask", "logprobs", "temperatures", "env_name")
    fields = [
        (name, kinds[name]) if name in required else (name, kinds[name] | None, None)
        for name in FORMATS["prime_rl"].columns
    ]
    sample = msgspec.defstruct("TrainingSample", fields, array_like=True)
    (row,) = worked.rows("prime_rl")
    raw = CONTAINERS["msgpack"](FORMATS["prime_rl"]).row(row)
    read = msgspec.msgpack.decode(raw, type=sample)

    assert row == [getattr(read, name) for name in FORMATS["prime_rl"].columns]
    assert raw == msgspec.msgpack.encode(read)


@pytest.mark.parametrize("container", ["json", "msgpack", "arrow", "parquet"])
def test_sampling_masks_are_flat_bytes_with_a_count_for_each_position(container):
    """Positions that are not trained have none."""
    masks = pack_mask([[10, 11], [12]])
    steps = [worked.first(), make_step("z", [1], make_choice(0, [10, 12], sampling_mask=masks), sampling=PROCESSED)]
    plain, masked = sorted(worked.rows("prime_rl", steps), key=lambda row: row[13] is not None)
    ids, counts = masked[13]

    assert (plain[13], array("i", ids).tolist(), array("i", counts).tolist()) == (None, [10, 11, 12], [0, 2, 1])
    writer = CONTAINERS[container](FORMATS["prime_rl"])
    assert writer.opening() + writer.row(plain) + writer.row(masked) + writer.closing(None)
