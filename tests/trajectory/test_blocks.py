"""Chains in blocks: shared where they begin alike, and never read back as something else."""

import os
from itertools import pairwise

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
    cut,
)

PIECES = st.lists(st.binary(max_size=80), max_size=12)


def written(kind, pieces, known=frozenset()):
    writer = BlockWriter(known)
    return writer.write(kind, pieces), writer


class CountedBlocks(dict):
    """Blocks that count how often each is fetched."""

    def __init__(self, blocks):
        super().__init__(blocks)
        self.fetched = []

    def get(self, name):
        self.fetched.append(name)
        return super().get(name)


@given(st.binary(max_size=5 * PIECE_BYTES))
def test_cut(raw):
    """Pieces are full and the tail is not, and together they are the bytes."""
    pieces, tail = cut(raw)

    assert raw == b"".join((*pieces, tail))
    assert len(pieces) == len(raw) // PIECE_BYTES
    assert all(len(piece) == PIECE_BYTES for piece in pieces)


@given(PIECES)
def test_chain(pieces):
    """A chain comes back from its blocks, piece by piece."""
    end, writer = written(IDS, pieces)

    assert tuple(pieces) == BlockReader(writer.blocks).read(IDS, end)
    assert len(pieces) == len(writer.blocks)
    assert [end] * bool(pieces) == writer.ends


def test_empty_chain():
    """A chain without pieces is the root, and takes no block."""
    end, writer = written(IDS, [])

    assert (ROOT, {}) == (end, writer.blocks)
    assert () == BlockReader({}).read(IDS, ROOT)


def test_messages_come_back_parsed():
    """Messages are read as JSON, and the same message is one object for all who read it."""
    first, second = {"role": "user", "content": "grüß dich"}, {"role": "assistant", "content": None}
    writer = BlockWriter(frozenset())
    short = writer.write(MESSAGES, [orjson.dumps(first)])
    long = writer.write(MESSAGES, [orjson.dumps(first), orjson.dumps(second)])
    reader = BlockReader(writer.blocks)

    assert (first, second) == reader.read(MESSAGES, long)
    assert reader.read(MESSAGES, short)[0] is reader.read(MESSAGES, long)[0]
    assert len(writer.blocks) == 2


def test_kinds_are_apart():
    """The same bytes as another kind, after another piece, or in another order have other names."""
    names = {
        *written(IDS, [b"1"])[1].blocks,
        *written(JSON, [b"1"])[1].blocks,
        *written(IDS, [b"1", b"1"])[1].blocks,
        *written(IDS, [b"2", b"1"])[1].blocks,
    }

    assert 5 == len(names)


@given(PIECES, PIECES, PIECES)
def test_known_beginning(shared, left, right):
    """Of a chain whose beginning is stored only the rest is new, and it leans on the last stored block."""
    _, first = written(IDS, shared + left)
    end, second = written(IDS, shared + right, known=first.blocks)
    together = first.blocks | second.blocks

    assert not first.blocks.keys() & second.blocks.keys()
    assert set(second.leans_on) <= first.blocks.keys()
    assert bool(second.leans_on) == (len(second.blocks) < len(shared + right))
    assert tuple(shared + right) == BlockReader(together).read(IDS, end)


def test_known_end_vouches_for_all_before_it():
    """To know the name of the last block is to know the chain."""
    end, first = written(IDS, [b"a", b"b", b"c"])
    _, again = written(IDS, [b"a", b"b", b"c"], known={end})
    _, longer = written(IDS, [b"a", b"b", b"c", b"d"], known={end})

    assert ({}, [end]) == (again.blocks, again.leans_on)
    assert (1, [end]) == (len(longer.blocks), longer.leans_on)
    assert len(first.blocks) == 3


def test_compressed_where_it_pays():
    """A piece that compresses takes less, and one that does not takes its own length and 17 bytes."""
    plain, dense = bytes(PIECE_BYTES), os.urandom(PIECE_BYTES)
    (small,) = written(IDS, [plain])[1].blocks.values()
    (large,) = written(IDS, [dense])[1].blocks.values()

    assert len(small) < 60
    assert 17 + PIECE_BYTES == len(large)


@given(st.lists(st.binary(min_size=1, max_size=80), min_size=1, max_size=4), st.data())
def test_damage(pieces, draw):
    """A damaged block is refused or still says the same: it is never read as something else."""
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


def test_missing_block():
    """A missing block is named."""
    end, writer = written(IDS, [b"a", b"b"])
    first, *_ = (name for name in writer.blocks if name != end)
    del writer.blocks[first]

    with pytest.raises(BrokenChain, match=f"block {first.hex()} is missing"):
        BlockReader(writer.blocks).read(IDS, end)


def test_a_growing_chain_opens_each_block_once():
    """Reading a chain after each of 4,000 messages opens each block once and needs no recursion."""
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


def test_many_branches():
    """However many branches take turns, each comes back whole."""
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
    assert all(one != other for one, other in pairwise(read))
