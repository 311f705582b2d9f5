"""The format `prime_rl`: the position is the name."""

from dataclasses import replace

import pytest
import worked
from forests import make_step

from proxy.export import FORMATS, Inexpressible
from proxy.export.containers import CONTAINERS


def test_worked_example():
    """All 13 positions are there, in order, and no logprob is null."""
    assert [
        [
            [101, 102, 103, 201, 202, 9, 301, 302, 303, 304, 203, 9],
            [False, False, False, True, True, True, False, False, False, False, True, True],
            [0.0, 0.0, 0.0, -0.5, -0.25, -0.125, 0.0, 0.0, 0.0, 0.0, -1.0, -0.0625],
            [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
            "demo",
            *[None, None, None, None, None, None, None],
            [0.0, 0.0, 0.0, 0.5, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.5, 0.5],
        ]
    ] == worked.rows("prime_rl")
    assert 13 == len(FORMATS["prime_rl"].columns)


def test_temperatures():
    """What was not sampled has the temperature of the turn that it leads up to."""
    steps = [worked.first(), worked.second(sampling={"temperature": 0.5})]

    assert [1.0] * 6 + [0.5] * 6 == worked.rows("prime_rl", steps)[0][3]


def test_once():
    """A turn that two sequences share is trained in the first; in the other it has no advantage."""
    steps = [make_step("a", [1], [10]), make_step("b", [1, 10, 2], [20]), make_step("c", [1, 10, 3], [30])]
    one, other = worked.rows("prime_rl", steps)

    assert ([False, True, False, True], [0.0, 0.5, 0.0, 0.5]) == (one[1], one[12])
    assert ([False, False, False, True], [0.0, 0.0, 0.0, 0.5]) == (other[1], other[12])


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"advantages": None}, "requires an advantage"),
        ({"metadata": {}}, "requires `env_name` in the metadata"),
        ({"metadata": {"env_name": "all"}}, "other than 'all'"),
    ],
)
def test_refused(facts, why):
    """What the trainer must have is not made up."""
    with pytest.raises(Inexpressible, match=why):
        worked.rows("prime_rl", facts=replace(worked.FACTS, **facts))


def test_no_temperature():
    """A temperature that nobody knows is not taken to be 1; the refusal names the setting that states it."""
    with pytest.raises(
        Inexpressible, match=r"requires the temperature of each step.* has none at step 'b'.*sampling_defaults"
    ):
        worked.rows("prime_rl", [worked.first(), worked.second(sampling={})])


def test_wire():
    """A struct as the trainer's, an array in msgpack, reads the container's bytes, every position by its name."""
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
    }
    required = ("token_ids", "mask", "logprobs", "temperatures", "env_name")
    fields = [
        (name, kinds[name]) if name in required else (name, kinds[name] | None, None)
        for name in FORMATS["prime_rl"].columns
    ]
    sample = msgspec.defstruct("TrainingSample", fields, array_like=True)
    (row,) = worked.rows("prime_rl")
    raw = CONTAINERS["msgpack"].writer(FORMATS["prime_rl"]).row(row)
    read = msgspec.msgpack.decode(raw, type=sample)

    assert row == [getattr(read, name) for name in FORMATS["prime_rl"].columns]
    assert raw == msgspec.msgpack.encode(read)
