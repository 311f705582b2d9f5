"""A small byte-level BPE tokenizer, and the decoder that turns ids into text one by one.

Holds the cutting of text into words, the merges, the special and added tokens, and the decoding back; it must
not hold anything of chat, sampling or HTTP. The merges are read from `vocabulary.json`, which
`benchmarks/train_vocabulary.py` makes.

Ids: the 256 bytes, then one id for each merge in the order learnt, then the tokens of `NAMED`.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Final, TypedDict

import orjson

SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Tokens that never show in generated text (`skip_special_tokens`)."""

ADDED: Final = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Tokens of their own that do show: parsers look for them."""

NAMED: Final = SPECIAL + ADDED

# Qwen's cutting in the standard library's terms: a contraction; letters with one leading sign or space; one
# digit; other signs with their newlines; newlines; spaces. Runs are bounded so that encoding is linear in the
# text.
_WORDS: Final = re.compile(
    r"'(?:[sdmtSDMT]|ll|ve|re|LL|VE|RE)"
    r"|(?:[^\r\n\w]|_)?[^\W\d_]{1,24}"
    r"|\d"
    r"| ?(?:[^\s\w]|_){1,24}[\r\n]{0,8}"
    r"|\s{0,24}[\r\n]{1,8}"
    r"|\s{1,24}(?!\S)"
    r"|\s{1,24}"
)
_NAMED: Final = re.compile("(" + "|".join(re.escape(name) for name in NAMED) + ")")
_CACHED_WORDS: Final = 50_000  # about 10 MB of them; real prompts repeat far fewer


class Vocabulary(TypedDict):
    """What `vocabulary.json` holds.

    Pairs of ids to merge; for each id how often it occurred and which ids often follow it; ids that often
    begin a sentence.
    """

    merges: list[tuple[int, int]]
    counts: list[int]
    followers: list[list[int]]
    starters: list[int]


@cache
def load_vocabulary() -> Vocabulary:
    """Read the vocabulary that is installed beside this file."""
    raw = files("proxy.simulator").joinpath("vocabulary.json").read_bytes()
    vocabulary: Vocabulary = orjson.loads(raw)
    return vocabulary


def split_words(text: str) -> list[str]:
    """Cut text into the words that merges never cross; joined, they are the text."""
    return _WORDS.findall(text)


class Tokenizer:
    """Text to ids and back. `decode(encode(text)) == text` for any text that UTF-8 can carry."""

    __slots__ = ("_cached", "_named", "_ranks", "pieces", "special")

    def __init__(self, merges: Iterable[tuple[int, int]]) -> None:
        pieces = [bytes([byte]) for byte in range(256)]
        self._ranks: dict[tuple[int, int], int] = {}
        for left, right in merges:
            self._ranks[left, right] = len(pieces)
            pieces.append(pieces[left] + pieces[right])
        self._named = {name: len(pieces) + place for place, name in enumerate(NAMED)}
        self.pieces: Sequence[bytes] = (*pieces, *(name.encode() for name in NAMED))
        self.special = frozenset(self._named[name] for name in SPECIAL)
        self._cached: dict[str, tuple[int, ...]] = {}

    def __len__(self) -> int:
        """How many ids there are."""
        return len(self.pieces)

    def id(self, name: str) -> int:
        """The id of a special or added token."""
        return self._named[name]

    def encode(self, text: str) -> list[int]:
        """The ids of a text; the spelling of a special or added token becomes that token, as in vLLM."""
        ids: list[int] = []
        for place, part in enumerate(_NAMED.split(text)):
            if place % 2:
                ids.append(self._named[part])
                continue
            for word in split_words(part):
                ids.extend(self._cached.get(word) or self._encode_word(word))
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of these ids; bytes that are no character become U+FFFD."""
        hidden = self.special if skip_special else frozenset[int]()
        return b"".join([self.pieces[i] for i in ids if i not in hidden]).decode("utf-8", "replace")

    def _encode_word(self, word: str) -> tuple[int, ...]:
        """Merge the bytes of one word, always the pair learnt first; words are short enough for that."""
        ids = list(word.encode())
        unknown = len(self.pieces)
        while len(ids) > 1:
            ranks = [self._ranks.get(pair, unknown) for pair in pairwise(ids)]
            best = min(ranks)
            if best == unknown:
                break
            at = ranks.index(best)
            ids[at : at + 2] = [best]
        if len(self._cached) < _CACHED_WORDS:
            self._cached[word] = tuple(ids)
        return tuple(ids)


class Decoder:
    """Turns sampled ids into text as they come, holding back what is not yet a whole character.

    As vLLM 0.32 does (cassette `utf8_emoji_stream`): the ids that begin a character have the string "", the
    one that completes it has the whole character; a character that is never completed is missing from the
    text.
    """

    __slots__ = ("_held", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._held = b""

    def string(self, token: int) -> str:
        """The token's own string, as it stands beside its logprob; does not move the decoder."""
        piece = self._tokenizer.pieces[token]
        try:
            return piece.decode()
        except UnicodeDecodeError:
            text = (self._held + piece).decode("utf-8", "replace")
            return "" if text.endswith("\ufffd") else text.lstrip("\ufffd")

    def feed(self, token: int) -> str:
        """The text that this token completes; special tokens have none."""
        if token in self._tokenizer.special:
            return ""
        spelled = self._held + self._tokenizer.pieces[token]
        text = spelled.decode("utf-8", "replace")
        if text.endswith("\ufffd"):
            self._held = spelled
            return ""
        self._held = b""
        return text


@cache
def load_tokenizer() -> Tokenizer:
    """The tokenizer of the installed vocabulary; there is one, shared, for it only ever caches."""
    return Tokenizer(load_vocabulary()["merges"])
