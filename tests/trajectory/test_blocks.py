"""Chains of blocks: common prefixes are stored once, and a damaged chain is never read as another one."""

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from unittest.mock import patch

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.trajectory.blocks import (
    IDS,
    JSON,
    MESSAGES,
    PIECE_BYTES,
    RECENT_CHAINS,
    ROOT,
    BlockReader,
    BlockWriter,
    BrokenChain,
    KnownBlocks,
    cut,
)

PIECES = st.lists(st.binary(max_size=80), max_size=12)


def written(kind, pieces, known=frozenset()):
    writer = BlockWriter(known)
    return writer.write(kind, pieces), writer


class CountedBlocks(dict):
    """Blocks that record each lookup."""

    def __init__(self, blocks):
        super().__init__(blocks)
        self.fetched = []

    def get(self, name):
        self.fetched.append(name)
        return super().get(name)


@given(st.binary(max_size=5 * PIECE_BYTES))
def test_bytes_are_cut_into_full_pieces_and_a_tail(raw):
    pieces, tail = cut(raw)

    assert raw == b"".join((*pieces, tail))
    assert len(pieces) == len(raw) // PIECE_BYTES
    assert all(len(piece) == PIECE_BYTES for piece in pieces)


@given(PIECES)
def test_chains_round_trip(pieces):
    end, writer = written(IDS, pieces)

    assert tuple(pieces) == BlockReader(writer.blocks).read(IDS, end)
    assert len(pieces) == len(writer.blocks)
    assert [end] * bool(pieces) == writer.ends


def test_an_empty_chain_is_the_root_and_has_no_block():
    end, writer = written(IDS, [])

    assert (ROOT, {}) == (end, writer.blocks)
    assert () == BlockReader({}).read(IDS, ROOT)


def test_messages_are_read_as_json_and_equal_prefixes_share_the_object():
    first, second = {"role": "user", "content": "grüß dich"}, {"role": "assistant", "content": None}
    writer = BlockWriter(frozenset())
    short = writer.write(MESSAGES, [orjson.dumps(first)])
    long = writer.write(MESSAGES, [orjson.dumps(first), orjson.dumps(second)])
    reader = BlockReader(writer.blocks)

    assert (first, second) == reader.read(MESSAGES, long)
    assert reader.read(MESSAGES, short)[0] is reader.read(MESSAGES, long)[0]
    assert len(writer.blocks) == 2


def test_a_blocks_name_depends_on_kind_content_and_predecessors():
    names = {
        *written(IDS, [b"1"])[1].blocks,
        *written(JSON, [b"1"])[1].blocks,
        *written(IDS, [b"1", b"1"])[1].blocks,
        *written(IDS, [b"2", b"1"])[1].blocks,
    }

    assert 5 == len(names)


@given(PIECES, PIECES, PIECES)
def test_only_blocks_after_the_stored_prefix_are_new(shared, left, right):
    """The chain depends on the last stored block."""
    _, first = written(IDS, shared + left)
    end, second = written(IDS, shared + right, known=first.blocks)
    together = first.blocks | second.blocks

    assert not first.blocks.keys() & second.blocks.keys()
    assert set(second.leans_on) <= first.blocks.keys()
    assert bool(second.leans_on) == (len(second.blocks) < len(shared + right))
    assert tuple(shared + right) == BlockReader(together).read(IDS, end)


def test_a_known_last_block_implies_the_whole_chain():
    end, first = written(IDS, [b"a", b"b", b"c"])
    _, again = written(IDS, [b"a", b"b", b"c"], known={end})
    _, longer = written(IDS, [b"a", b"b", b"c", b"d"], known={end})

    assert ({}, [end]) == (again.blocks, again.leans_on)
    assert (1, [end]) == (len(longer.blocks), longer.leans_on)
    assert len(first.blocks) == 3


def test_pieces_are_compressed_only_if_it_makes_them_smaller():
    """An incompressible piece takes its own length and 17 bytes."""
    plain, dense = bytes(PIECE_BYTES), os.urandom(PIECE_BYTES)
    (small,) = written(IDS, [plain])[1].blocks.values()
    (large,) = written(IDS, [dense])[1].blocks.values()

    assert len(small) < 60
    assert 17 + PIECE_BYTES == len(large)


@given(st.lists(st.binary(min_size=1, max_size=80), min_size=1, max_size=4), st.data())
def test_a_damaged_block_raises_or_reads_as_the_same_pieces(pieces, draw):
    end, writer = written(JSON, pieces)
    name = draw.draw(st.sampled_from(sorted(writer.blocks)))
    block = bytearray(writer.blocks[name])
    block[draw.draw(st.integers(0, len(block) - 1))] ^= draw.draw(st.integers(1, 255))
    cut_short = draw.draw(st.integers(0, len(block)))
    for damaged in (bytes(block), bytes(writer.blocks[name][:cut_short])):
        try:
            read = BlockReader(writer.blocks | {name: damaged}).read(JSON, end)
        except BrokenChain:
            continue

        assert tuple(pieces) == read


def test_a_missing_block_is_named_in_the_error():
    end, writer = written(IDS, [b"a", b"b"])
    first, *_ = (name for name in writer.blocks if name != end)
    del writer.blocks[first]

    with pytest.raises(BrokenChain, match=f"block {first.hex()} is missing"):
        BlockReader(writer.blocks).read(IDS, end)


def test_reading_a_growing_chain_decodes_each_block_once():
    """4,000 messages, without recursion."""
    messages = [orjson.dumps({"role": "user", "content": str(turn)}) for turn in range(4_000)]
    blocks, ends, known = {}, [], set()
    for turns in range(100, 4_001, 100):
        end, writer = written(MESSAGES, messages[:turns], known)
        blocks |= writer.blocks
        known = {end}
        ends.append(end)
    counted = CountedBlocks(blocks)
    reader = BlockReader(counted)
    lengths = [len(reader.read(MESSAGES, end)) for end in ends]

    assert list(range(100, 4_001, 100)) == lengths
    assert len(counted.fetched) == len(blocks) == 4_000


def test_alternating_between_many_branches_decodes_each_block_once():
    stem, blocks, chains = [b"stem"] * 3, {}, []
    for branch in range(3 * RECENT_CHAINS):
        pieces = (*stem, b"%d" % branch, b"leaf")
        end, writer = written(IDS, pieces, blocks)
        blocks |= writer.blocks
        chains.append((end, pieces))
    counted = CountedBlocks(blocks)
    reader = BlockReader(counted)
    read = [reader.read(IDS, end) for end, _ in chains * 2]

    assert [pieces for _, pieces in chains * 2] == read
    assert len(counted.fetched) == len(blocks)
    assert all(first != second for first, second in pairwise(read))


@given(
    st.lists(
        st.tuples(st.sampled_from([IDS, JSON]), st.lists(st.sampled_from([b"a", b"b", b""]), max_size=6)), max_size=6
    )
)
def test_a_long_chain_has_the_same_blocks_after_any_other(chains):
    """The names of a common beginning are kept, and only these."""
    known = KnownBlocks()
    with patch("proxy.trajectory.blocks._LONG_CHAIN_BYTES", 2):
        for kind, pieces in chains:
            expected = written(kind, pieces, set(known))
            found = written(kind, pieces, known)

            assert expected[0] == found[0]
            for name in ("blocks", "leans_on", "ends"):
                assert getattr(expected[1], name) == getattr(found[1], name)
            known.update(found[1].blocks)


def test_the_common_beginning_of_long_chains_is_hashed_once():
    pieces = [os.urandom(PIECE_BYTES) for _ in range(100)]
    known = KnownBlocks()
    written(IDS, pieces, known)
    with patch("proxy.trajectory.blocks._name", side_effect=[b"name"] * 3) as hashed:
        written(IDS, [*pieces, b"1", b"2"], known)
        written(IDS, pieces[:90], known)
        written(IDS, [*pieces[:89], b"3"], known)

    assert [b"1", b"2", b"3"] == [call.args[2] for call in hashed.call_args_list]
    assert known.chain_bytes == 89 * PIECE_BYTES + 1 + 90 * 100
    known.forget_chains()
    assert 0 == known.chain_bytes


def test_short_chains_are_not_kept():
    known = KnownBlocks()
    written(IDS, [b"a" * PIECE_BYTES] * 60, known)

    assert 0 == known.chain_bytes


def test_readers_of_several_threads_decompress_at_once():
    """No two threads use the same decompressor."""
    pieces = [bytes([number]) * PIECE_BYTES for number in range(200)]
    name, writer = written(IDS, pieces)
    with ThreadPoolExecutor(4) as pool:
        read = list(pool.map(lambda _: BlockReader(writer.blocks).read(IDS, name), range(16)))

    assert [tuple(pieces)] * 16 == read
