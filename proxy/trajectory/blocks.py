"""Content-addressed blocks: prompts and messages that repeat between the steps of a rollout, stored once.

A chain is a list of pieces: messages, or units of `UNIT_BYTES`. The name of a piece is a hash of its kind, of the name of the
piece before it, and of its bytes. The name of the last piece therefore identifies the whole chain, chains with a common
beginning share its blocks, and a rollout takes space for its unique content only.

A block is the name of the piece before it (zeros for the first), a flag, and a piece or a run of units, compressed if that
saves space; its name is the name of its last piece. New units are stored in aligned runs of up to `RUN_UNITS`: a long prompt
takes few blocks, which are compressed in a quarter of the time, and one that grows shares all blocks of the prompt before it.
Names do not depend on the runs, so processes that cut the same ids differently still name, and share, the same chain.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

import orjson
import zstandard

from proxy.trajectory.arrays import Link
from proxy.trajectory.images import MARK, message_of

Content: TypeAlias = "bytes | list[bytes]"  # whole units, or pieces

ROOT: Final = bytes(16)
IDS: Final = b"ids"
MESSAGES: Final = b"messages"
JSON: Final = b"json"
IMAGE: Final = b"image"  # the data of one image: a chain of one piece

UNIT_BYTES: Final = 1024  # 256 ids
RUN_UNITS: Final = 16
_SHORT_PIECE: Final = 20  # bytes: no zstd frame saves space
_FRAME_HEADER: Final = 18  # bytes of a zstd frame at most
_LONG_CHAIN_BYTES: Final = 2**13  # from here on, comparing is faster than hashing
_BYTES_PER_PIECE: Final = 100  # an estimate: the objects of a piece and of its name
RECENT_CHAINS: Final = 64  # cached chains: this many branches can alternate without reading their blocks again

# Idle ones: creating one takes longer than compressing or decompressing a piece, and one is not thread-safe.
_IDLE: Final[list[zstandard.ZstdCompressor]] = []
_IDLE_DECOMPRESSORS: Final[list[zstandard.ZstdDecompressor]] = []

_PLAIN, _ZSTD = b"\x00", b"\x01"
_VALUES: Final[dict[bytes, Callable[[bytes], Any]]] = {
    IDS: bytes,
    JSON: bytes,
    MESSAGES: orjson.loads,
    IMAGE: lambda piece: piece.decode("ascii"),
}


_IN_UNITS: Final = (IDS, JSON)


class BrokenChain(ValueError):
    """A block of a chain is missing or damaged."""


class _Chain(NamedTuple):
    """A chain, its approximate memory in bytes, and the name of each piece."""

    content: Content
    size: int
    names: list[bytes]


class KnownBlocks(set[bytes]):
    """The names of the blocks of a rollout that are stored, and its newest long chain of each kind.

    Equal beginnings of two chains have the same names: comparing with the last chain takes a twentieth of the time of hashing.
    Threads may use this at the same time.
    """

    chain_bytes = 0  # the approximate memory of all these
    made: Mapping[bytes, bytes] = MappingProxyType({})  # the newest blocks, so that calls compress a common prompt once
    _chains: Mapping[bytes, _Chain] = made  # type: ignore[assignment] # replaced, so that a rollout of short chains has none

    def names_of(self, kind: bytes, content: Content, size: int) -> tuple[list[bytes], int]:
        """Return the name of each piece of a chain of this size, and how many pieces begin the newest chain as well."""
        before = self._chains.get(kind)
        equal = 0 if before is None else count_equal(before.content, content)
        names = [] if before is None else before.names[:equal]
        names += names_of(kind, content, equal, names[-1] if names else ROOT)
        self._chains = {**self._chains, kind: _Chain(content, size + _BYTES_PER_PIECE * len(names), names)}
        return names, equal

    def keep(self, made: Mapping[bytes, bytes]) -> None:
        """Keep the blocks that were made for the newest chains."""
        self.made = made
        self.chain_bytes = sum(chain.size for chain in self._chains.values()) + sum(map(len, made.values()))


def names_of(kind: bytes, content: Content, start: int = 0, name: bytes = ROOT) -> list[bytes]:
    """Return the names of the pieces from position `start` on, which follow the piece with this name."""
    names = []
    for piece in units_of(content, start) if isinstance(content, bytes) else content[start:]:
        name = blake2b(piece, digest_size=16, person=kind, salt=name).digest()
        names.append(name)
    return names


def cut(raw: bytes) -> tuple[bytes, bytes]:
    """Return the whole units of these bytes, and the rest."""
    whole = len(raw) - len(raw) % UNIT_BYTES
    return raw[:whole], raw[whole:]


def units_of(raw: bytes, start: int = 0) -> list[bytes]:
    """Return the units of these bytes from position `start` on; the last one may be shorter, or empty if it is the only one."""
    return [raw[at : at + UNIT_BYTES] for at in range(start * UNIT_BYTES, max(1, len(raw)), UNIT_BYTES)]


def count_equal(before: Sequence[Any], content: Sequence[Any]) -> int:
    """Return how many pieces, or values, at the beginning are equal. Bisects, since slices compare fast."""
    unit = UNIT_BYTES if isinstance(content, bytes) else 1
    equal, end = 0, min(len(before), len(content)) // unit
    middle = end  # the usual case: one is the beginning of the other
    while equal < end:
        if before[equal * unit : middle * unit] == content[equal * unit : middle * unit]:
            equal = middle
        else:
            end = middle - 1
        middle = (equal + end + 1) // 2
    return equal


class BlockWriter:
    """Cuts chains into blocks, and omits the blocks that are known to be stored.

    `blocks` are the new blocks by name, `leans_on` the known blocks that the chains continue, `ends` the names of all
    chains. A known block implies all before it: no block is stored without them.
    """

    __slots__ = ("_known", "blocks", "ends", "leans_on")

    def __init__(self, known: Container[bytes]) -> None:
        self._known = known
        self.blocks: dict[bytes, bytes] = {}
        self.leans_on: list[bytes] = []
        self.ends: list[bytes] = []

    def write(self, kind: bytes, content: Content) -> bytes:
        """Write pieces, or whole units, as a chain and return its name, which is `ROOT` if there are none."""
        if not content:
            return ROOT
        known = self._known
        size = len(content) if isinstance(content, bytes) else sum(map(len, content))
        if size < _LONG_CHAIN_BYTES or not isinstance(known, KnownBlocks):
            return self._add(content, names_of(kind, content), 0, {})
        end = self._add(content, *known.names_of(kind, content, size), known.made)
        known.keep(self.blocks)
        return end

    def _add(self, content: Content, names: list[bytes], fork: int, made: Mapping[bytes, bytes]) -> bytes:
        """Add the new blocks of a chain, with the names of its pieces; return the last name.

        No run crosses the `fork`, where other chains may leave this one.
        """
        self.ends.append(names[-1])
        at = len(names)
        while at and (name := names[at - 1]) not in self.blocks:  # back to what is stored, or added already
            if name in self._known:
                self.leans_on.append(name)
                break
            at -= 1
        while at < len(names):
            if isinstance(content, bytes):
                run = min(at & -at or RUN_UNITS, RUN_UNITS)
                while run > len(names) - at or at < fork < at + run:
                    run //= 2
                piece = content[at * UNIT_BYTES : (at + run) * UNIT_BYTES]
            else:
                run, piece = 1, content[at]
            before, name = names[at - 1] if at else ROOT, names[at + run - 1]
            block = made.get(name, b"")  # of another run, its beginning may not be stored
            self.blocks[name] = block if block.startswith(before) else b"".join((before, *self._flagged(piece)))
            at += run
        return names[-1]

    def write_images(self, images: Mapping[str, bytes]) -> None:
        """Write each image as a chain of one piece. `images` are names by data, so that nothing is hashed again."""
        for data, name in images.items():
            self.ends.append(name)
            if name in self._known:
                self.leans_on.append(name)
            else:
                self.blocks[name] = b"".join((ROOT, *self._flagged(data.encode())))

    def compress(self, raw: bytes) -> bytes:
        """Return the bytes compressed, for `BlockReader.expand`."""
        try:
            compressor = _IDLE.pop()
        except IndexError:
            compressor = zstandard.ZstdCompressor(level=1)
        packed = compressor.compress(raw)
        _IDLE.append(compressor)
        return packed

    def _flagged(self, piece: bytes) -> tuple[bytes, bytes]:
        if len(piece) < _SHORT_PIECE:
            return _PLAIN, piece
        packed = self.compress(piece)
        return (_ZSTD, packed) if len(packed) < len(piece) * 7 // 8 else (_PLAIN, piece)


def expanded_size(packed: bytes, start: int) -> int:
    """Return the number of bytes to which the zstd frame from `start` on expands, as its header says; 0 for a damaged one."""
    try:
        return max(zstandard.frame_content_size(packed[start : start + _FRAME_HEADER]), 0)
    except zstandard.ZstdError:
        return 0


class BlockReader:
    """Reads chains from the blocks of one rollout, and opens each block once.

    Pieces are shared between readers: parsed messages must not be changed. A reader is not thread-safe.
    """

    __slots__ = ("_blocks", "_links", "_opened", "_recent")

    def __init__(self, blocks: Mapping[bytes, bytes]) -> None:
        self._blocks = blocks
        self._opened: dict[bytes, tuple[bytes, Any]] = {}
        self._recent: dict[bytes, tuple[Any, ...]] = {}
        self._links: dict[bytes, Link | None] = {ROOT: None}

    @property
    def count(self) -> int:
        """The number of blocks."""
        return len(self._blocks)

    @property
    def size(self) -> int:
        """The number of bytes of all blocks when they are expanded."""
        return sum(
            [expanded_size(block, 17) if block[16:17] == _ZSTD else len(block) for block in self._blocks.values()]
        )

    def read(self, kind: bytes, end: bytes) -> tuple[Any, ...]:
        """Return the pieces of the chain with this name: bytes, or parsed messages.

        Raises BrokenChain if a block is missing or damaged.
        """
        name, fresh = self.since(kind, end, self._recent)
        pieces = (*self._recent.get(name, ()), *(piece for _, piece in fresh))
        self._recent[end] = pieces
        if len(self._recent) > RECENT_CHAINS:
            del self._recent[next(iter(self._recent))]
        return pieces

    def since(self, kind: bytes, end: bytes, known: Container[bytes]) -> tuple[bytes, list[tuple[bytes, Any]]]:
        """Return the last name of a chain that is known, or `ROOT`, and the names and pieces after it.

        Raises BrokenChain if a block is missing or damaged.
        """
        fresh = []
        name = end
        while name != ROOT and name not in known:
            before, piece = self._opened.get(name) or self._open(kind, name)
            fresh.append((name, piece))
            name = before
        return name, fresh[::-1]

    def link(self, end: bytes) -> Link | None:
        """Return the last link of the chain of ids with this name. Chains with a common beginning share their links.

        Raises BrokenChain if a block is missing or damaged.
        """
        fresh = []
        name = end
        while name not in self._links:
            parent, piece = self._open(IDS, name, keep=False)
            fresh.append((name, piece))
            name = parent
        link = self._links[name]
        for fresh_name, piece in reversed(fresh):
            link = self._links[fresh_name] = Link(link, piece)
        return link

    def image(self, name: bytes) -> str:
        """Return the data of an image, as it is in messages. Raises BrokenChain if it is missing or damaged."""
        _, data = self._opened.get(name) or self._open(IMAGE, name)
        return str(data)

    def expand(self, packed: bytes) -> bytes:
        """Return the bytes that `BlockWriter.compress` compressed. Raises ValueError if the bytes are damaged."""
        try:
            decompressor = _IDLE_DECOMPRESSORS.pop()
        except IndexError:
            decompressor = zstandard.ZstdDecompressor()
        try:
            return decompressor.decompress(packed)
        except (zstandard.ZstdError, MemoryError) as error:  # a damaged header may claim any size
            raise ValueError("corrupt compressed data") from error
        finally:
            _IDLE_DECOMPRESSORS.append(decompressor)

    def _open(self, kind: bytes, name: bytes, *, keep: bool = True) -> tuple[bytes, Any]:
        block = self._blocks.get(name)
        if block is None:
            raise BrokenChain(f"block {name.hex()} is missing")
        parent, flag, piece = block[:16], block[16:17], block[17:]
        try:
            if flag == _ZSTD:
                piece = self.expand(piece)
            units = units_of(piece) if kind in _IN_UNITS else [piece]
            sound = names_of(kind, units, 0, parent)[-1] == name
        except ValueError:
            sound = False
        if not sound:
            raise BrokenChain(f"block {name.hex()} is damaged")
        has_images = kind == MESSAGES and piece.startswith(MARK)
        opened = (parent, message_of(piece, self.image) if has_images else _VALUES[kind](piece))
        if keep:
            self._opened[name] = opened
        return opened
