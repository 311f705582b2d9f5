"""Chains of blocks: common prefixes are stored once, and a damaged chain is never read as another one."""

import os
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from itertools import pairwise
from random import Random
from unittest.mock import patch

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.trajectory.blocks import (
    IDS,
    JSON,
    MESSAGES,
    RECENT_CHAINS,
    ROOT,
    RUN_UNITS,
    UNIT_BYTES,
    BlockReader,
    BlockWriter,
    BrokenChain,
    KnownBlocks,
    cut,
    names_of,
)

PIECES = st.lists(st.binary(max_size=80), max_size=12)


def written(kind, pieces, known=frozenset()):
    writer = BlockWriter(known)
    return writer.write(kind, list(pieces)), writer


def written_units(raw, known=frozenset()):
    """The name of the chain of these bytes, and its writer; the blocks are then known."""
    writer = BlockWriter(known)
    end = writer.write(IDS, raw)
    if isinstance(known, KnownBlocks):
        known.update(writer.blocks)
    return end, writer


def runs_of(writer):
    """The numbers of units of the new blocks, in the order of the chain."""
    return [sum(len(piece) for piece in pieces_of(block)) // UNIT_BYTES for block in writer.blocks.values()]


def pieces_of(block):
    return (BlockReader({}).expand(block[17:]) if block[16] else block[17:],)


class CountedBlocks(dict):
    """Blocks that record each lookup."""

    def __init__(self, blocks):
        super().__init__(blocks)
        self.fetched = []

    def get(self, name):
        self.fetched.append(name)
        return super().get(name)


@given(st.integers(0, 40 * UNIT_BYTES), st.randoms(use_true_random=False))
def test_bytes_are_written_as_whole_units_and_a_tail(length, random):
    raw = random.randbytes(length)
    writer = BlockWriter(frozenset())
    units, tail = cut(raw)
    end = writer.write(IDS, units)

    assert len(tail) == length % UNIT_BYTES
    assert raw == b"".join((*BlockReader(writer.blocks).read(IDS, end), tail))
    assert ([end] if length >= UNIT_BYTES else []) == writer.ends


@pytest.mark.parametrize(
    ("known", "units", "runs"),
    [(0, 1, [1]), (0, 3, [2, 1]), (0, 31, [16, 8, 4, 2, 1]), (0, 40, [16, 16, 8]), (3, 8, [1, 4]), (5, 7, [1, 1])],
)
def test_new_units_are_stored_in_aligned_runs(known, units, runs):
    """Up to 16 units, of 256 ids each, are one block; units that are stored already are not stored again."""
    raw, names = os.urandom(40 * UNIT_BYTES), KnownBlocks()
    written_units(raw[: known * UNIT_BYTES], names)
    _, writer = written_units(raw[: units * UNIT_BYTES], names)

    assert runs == runs_of(writer)
    assert RUN_UNITS == 16


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 40), st.integers(0, 20), st.booleans()), min_size=1, max_size=8
    ),
    st.integers(0, 99),
)
def test_processes_that_know_other_blocks_name_and_read_the_same_chains(prompts, seed):
    """Two processes write prompts that share a beginning to one store, where the first block of a name remains.

    Some writes do not reach the store.
    """
    processes, stored, written, random = (KnownBlocks(), KnownBlocks()), {}, [], Random(seed)
    raw = random.randbytes(40 * UNIT_BYTES)
    for process, shared, own, is_stored in prompts:
        prompt = raw[: shared * UNIT_BYTES] + random.randbytes(max(own, shared == 0) * UNIT_BYTES)
        writer = BlockWriter(processes[process])
        end = writer.write(IDS, prompt)
        assert stored.keys() >= set(writer.leans_on)
        if is_stored:
            processes[process].update(writer.blocks)
            stored = writer.blocks | stored
            written.append((end, prompt))

    for end, prompt in written:
        assert names_of(IDS, prompt)[-1] == end
        assert prompt == b"".join(BlockReader(stored).read(IDS, end))


def test_branches_of_a_stored_run_store_their_common_beginning_once():
    """The second branch cuts its run where it leaves the first one."""
    raw, known = os.urandom(16 * UNIT_BYTES), KnownBlocks()
    new = []
    for _ in range(4):
        _, writer = written_units(raw[: 11 * UNIT_BYTES] + os.urandom(5 * UNIT_BYTES), known)
        new.append(runs_of(writer))

    assert new == [[16], [8, 2, 1, 1, 4], [1, 4], [1, 4]]


def test_a_common_prompt_is_compressed_once_before_it_is_stored():
    """Each writer has all blocks."""
    raw, known, compressed = os.urandom(500 * UNIT_BYTES), KnownBlocks(), []
    writers = [BlockWriter(known) for _ in range(10)]
    with patch.object(BlockWriter, "compress", lambda _, piece: compressed.append(piece) or piece):
        ends = {writer.write(IDS, raw) for writer in writers}

    assert len(ends) == 1
    assert len(compressed) == 32
    assert all(writers[0].blocks == writer.blocks for writer in writers)


@given(PIECES)
def test_chains_round_trip(pieces):
    end, writer = written(IDS, pieces)

    assert BlockReader(writer.blocks).read(IDS, end) == tuple(pieces)
    assert len(pieces) == len(writer.blocks)
    assert [end] * bool(pieces) == writer.ends


def test_an_empty_chain_is_the_root_and_has_no_block():
    end, writer = written(IDS, [])

    assert (end, writer.blocks) == (ROOT, {})
    assert BlockReader({}).read(IDS, ROOT) == ()


def test_messages_are_read_as_json_and_equal_prefixes_share_the_object():
    first, second = {"role": "user", "content": "grüß dich"}, {"role": "assistant", "content": None}
    writer = BlockWriter(frozenset())
    short = writer.write(MESSAGES, [orjson.dumps(first)])
    long = writer.write(MESSAGES, [orjson.dumps(first), orjson.dumps(second)])
    reader = BlockReader(writer.blocks)

    assert reader.read(MESSAGES, long) == (first, second)
    assert reader.read(MESSAGES, short)[0] is reader.read(MESSAGES, long)[0]
    assert len(writer.blocks) == 2


def test_a_blocks_name_depends_on_kind_content_and_predecessors():
    names = {
        *written(IDS, [b"1"])[1].blocks,
        *written(JSON, [b"1"])[1].blocks,
        *written(IDS, [b"1", b"1"])[1].blocks,
        *written(IDS, [b"2", b"1"])[1].blocks,
    }

    assert len(names) == 5


@given(PIECES, PIECES, PIECES)
def test_only_blocks_after_the_stored_prefix_are_new(shared, left, right):
    """The chain depends on the last stored block."""
    _, first = written(IDS, shared + left)
    end, second = written(IDS, shared + right, known=first.blocks)
    together = first.blocks | second.blocks

    assert not first.blocks.keys() & second.blocks.keys()
    assert set(second.leans_on) <= first.blocks.keys()
    assert bool(second.leans_on) == (len(second.blocks) < len(shared + right))
    assert BlockReader(together).read(IDS, end) == tuple(shared + right)


def test_a_known_last_block_implies_the_whole_chain():
    end, first = written(IDS, [b"a", b"b", b"c"])
    _, again = written(IDS, [b"a", b"b", b"c"], known={end})
    _, longer = written(IDS, [b"a", b"b", b"c", b"d"], known={end})

    assert (again.blocks, again.leans_on) == ({}, [end])
    assert (len(longer.blocks), longer.leans_on) == (1, [end])
    assert len(first.blocks) == 3


def test_pieces_are_compressed_only_if_it_makes_them_smaller():
    """An incompressible piece takes its own length and 17 bytes."""
    plain, dense = bytes(UNIT_BYTES), os.urandom(UNIT_BYTES)
    (small,) = written(IDS, [plain])[1].blocks.values()
    (large,) = written(IDS, [dense])[1].blocks.values()

    assert len(small) < 60
    assert len(large) == 17 + UNIT_BYTES


@given(st.lists(st.binary(min_size=1, max_size=80), min_size=1, max_size=4), st.data())
def test_a_damaged_block_raises_or_reads_as_the_same_pieces(pieces, draw):
    """A block of a piece, or of a run of units."""
    end, writer = written(JSON, pieces)
    if draw.draw(st.booleans()):
        pieces = [b"".join(pieces) * 2 * UNIT_BYTES]
        pieces = [pieces[0][: 2 * UNIT_BYTES]]
        writer = BlockWriter(frozenset())
        end = writer.write(JSON, *pieces)
    name = draw.draw(st.sampled_from(sorted(writer.blocks)))
    block = bytearray(writer.blocks[name])
    block[draw.draw(st.integers(0, len(block) - 1))] ^= draw.draw(st.integers(1, 255))
    cut_short = draw.draw(st.integers(0, len(block)))
    for damaged in (bytes(block), bytes(writer.blocks[name][:cut_short])):
        try:
            read = BlockReader(writer.blocks | {name: damaged}).read(JSON, end)
        except BrokenChain:
            continue

        assert read == tuple(pieces)


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

    assert lengths == list(range(100, 4_001, 100))
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
    pieces = [os.urandom(UNIT_BYTES) for _ in range(100)]
    known = KnownBlocks()
    written(IDS, pieces, known)
    with patch("proxy.trajectory.blocks.blake2b", wraps=blake2b) as hashed:
        written(IDS, [*pieces, b"1", b"2"], known)
        written(IDS, pieces[:90], known)
        _, last = written(IDS, [*pieces[:89], b"3"], known)

    assert [call.args[0] for call in hashed.call_args_list] == [b"1", b"2", b"3"]
    assert known.chain_bytes == 89 * UNIT_BYTES + 1 + 90 * 100 + sum(map(len, last.blocks.values()))


def test_short_chains_are_not_kept():
    known = KnownBlocks()
    written(IDS, [b"a" * UNIT_BYTES] * 7, known)

    assert known.chain_bytes == 0


def test_readers_of_several_threads_decompress_at_once():
    """No two threads use the same decompressor."""
    pieces = [bytes([number]) * UNIT_BYTES for number in range(200)]
    name, writer = written(IDS, pieces)
    with ThreadPoolExecutor(4) as pool:
        read = list(pool.map(lambda _: BlockReader(writer.blocks).read(IDS, name), range(16)))

    assert [tuple(pieces)] * 16 == read
