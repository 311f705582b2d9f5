"""Content-addressed blocks: prompts and messages that repeat between the steps of a rollout, stored once.

A chain is a list of pieces. The name of a piece is a hash of its kind, of the name of the piece before it, and of its
bytes. The name of the last piece therefore identifies the whole chain, chains with a common beginning share its blocks,
and a rollout takes space for its unique content only. A block is the name of the block before it (zeros for the first),
a flag, and the piece, compressed if that saves space.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

import orjson
import zstandard

from proxy.trajectory.image_texts import MARK, message_of
from proxy.trajectory.shared_ids import Link

T = TypeVar("T")

ROOT: Final = bytes(16)
IDS: Final = b"ids"
MESSAGES: Final = b"messages"
JSON: Final = b"json"
IMAGE: Final = b"image"  # the data of one image: a chain of one piece

PIECE_BYTES: Final = 1024  # 256 ids
_SHORT_PIECE: Final = 20  # bytes: no zstd frame saves space
_LONG_CHAIN_BYTES: Final = 2**16
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


class BrokenChain(ValueError):
    """A block of a chain is missing or damaged."""


def cut(raw: bytes) -> tuple[list[bytes], bytes]:
    """Return the full pieces of `PIECE_BYTES` each, and the rest."""
    full = len(raw) - len(raw) % PIECE_BYTES
    return [raw[start : start + PIECE_BYTES] for start in range(0, full, PIECE_BYTES)], raw[full:]


def _name(kind: bytes, parent: bytes, piece: bytes) -> bytes:
    return blake2b(piece, digest_size=16, person=kind, salt=parent).digest()


class _Chain(NamedTuple):
    """A chain: its pieces, its approximate memory in bytes, and the name of each block."""

    pieces: list[bytes]
    size: int
    names: list[bytes]


class KnownBlocks(set[bytes]):
    """The names of the blocks of a rollout that are stored, and its newest long chain of each kind.

    A chain that begins as the one before has the same names until then: comparing pieces takes a twentieth of the time of
    hashing them. `chain_bytes` is the approximate memory of these chains. Threads may use this at the same time.
    """

    chain_bytes = 0
    _chains: Mapping[bytes, _Chain] = MappingProxyType(
        {}
    )  # replaced, so that a rollout of short chains has none of its own

    def forget_chains(self) -> None:
        """Drop the chains, and keep the names."""
        self._chains, self.chain_bytes = {}, 0

    def names_of(self, kind: bytes, pieces: list[bytes]) -> list[bytes]:
        """Return the name of each block of a chain."""
        size = sum(map(len, pieces))
        if size < _LONG_CHAIN_BYTES:
            return names_of(kind, pieces)
        before = self._chains.get(kind)
        names = [] if before is None else before.names[: count_equal(before.pieces, pieces)]
        names += names_of(kind, pieces[len(names) :], names[-1] if names else ROOT)
        self._chains = {**self._chains, kind: _Chain(pieces, size + _BYTES_PER_PIECE * len(pieces), names)}
        self.chain_bytes = sum(chain.size for chain in self._chains.values())
        return names


def names_of(kind: bytes, pieces: list[bytes], name: bytes = ROOT) -> list[bytes]:
    """Return the names of the blocks of these pieces, which follow the block with this name."""
    names = []
    for piece in pieces:
        name = _name(kind, name, piece)
        names.append(name)
    return names


def count_equal(before: list[T], pieces: list[T]) -> int:
    """Return how many pieces at the beginning are equal."""
    length = min(len(before), len(pieces))
    if before[:length] == pieces[:length]:
        return length
    return next(at for at in range(length) if before[at] != pieces[at])


class BlockWriter:
    """Cuts chains into blocks, except for those that are known to be stored.

    `blocks` are the new blocks by name, `leans_on` the known blocks that the chains continue, `ends` the names of all
    chains. A known block implies all before it: no block is stored without those.
    """

    __slots__ = ("_known", "blocks", "ends", "leans_on")

    def __init__(self, known: Container[bytes]) -> None:
        self._known = known
        self.blocks: dict[bytes, bytes] = {}
        self.leans_on: list[bytes] = []
        self.ends: list[bytes] = []

    def write(self, kind: bytes, pieces: Iterable[bytes]) -> bytes:
        """Write the pieces as a chain and return its name, which is `ROOT` if there are none."""
        pieces, known = list(pieces), self._known
        if not pieces:
            return ROOT
        names = known.names_of(kind, pieces) if isinstance(known, KnownBlocks) else names_of(kind, pieces)
        self.ends.append(names[-1])
        for at in range(len(names) - 1, -1, -1):
            name = names[at]
            if name in self.blocks:
                break
            if name in known:
                self.leans_on.append(name)
                break
            self.blocks[name] = b"".join((names[at - 1] if at else ROOT, *self._flagged(pieces[at])))
        return names[-1]

    def write_images(self, images: Mapping[str, bytes]) -> None:
        """Write the data of images, whose names are the values: chains of one piece, which are not hashed again."""
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
        """The number of bytes of all blocks."""
        return sum(map(len, self._blocks.values()))

    def read(self, kind: bytes, end: bytes) -> tuple[Any, ...]:
        """Return the pieces of the chain with this name: bytes, or parsed messages.

        Raises:
            BrokenChain: A block is missing or damaged.
        """
        fresh = []
        name = end
        while name != ROOT and name not in self._recent:
            name, piece = self._opened.get(name) or self._open(kind, name)
            fresh.append(piece)
        pieces = (*self._recent.get(name, ()), *reversed(fresh))
        self._recent[end] = pieces
        if len(self._recent) > RECENT_CHAINS:
            del self._recent[next(iter(self._recent))]
        return pieces

    def link(self, end: bytes) -> Link | None:
        """Return the last link of the chain of ids with this name. Chains with a common beginning share their links.

        Raises:
            BrokenChain: A block is missing or damaged.
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
        """Return the data of an image, as it is in messages.

        Raises:
            BrokenChain: It is missing or damaged.
        """
        _, data = self._opened.get(name) or self._open(IMAGE, name)
        return str(data)

    def expand(self, packed: bytes) -> bytes:
        """Return the bytes that `BlockWriter.compress` compressed.

        Raises:
            ValueError: The bytes are damaged.
        """
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
            sound = _name(kind, parent, piece) == name
        except ValueError:
            sound = False
        if not sound:
            raise BrokenChain(f"block {name.hex()} is damaged")
        has_images = kind == MESSAGES and piece.startswith(MARK)
        opened = (parent, message_of(piece, self.image) if has_images else _VALUES[kind](piece))
        if keep:
            self._opened[name] = opened
        return opened
