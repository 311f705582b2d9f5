"""A small byte-level BPE tokenizer, and a decoder that turns ids into text one id at a time.

Ids: the 256 bytes, then one id for each merge in the order learned, then `NAMED_TOKENS`, then the markers of the engine's
chat template. The merges are in `vocabulary.json`, which `benchmarks/train_vocabulary.py` writes.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Final, TypedDict

import orjson

SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Tokens that are removed from generated text (`skip_special_tokens`)."""

ADDED_TOKENS: Final = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Single tokens that stay in generated text, because parsers need them."""

NAMED_TOKENS: Final = SPECIAL_TOKENS + ADDED_TOKENS

# Qwen's pre-tokenizer, written for the standard library: a contraction; letters with one leading sign or space; one
# digit; other signs with the newlines after them; newlines; spaces. Runs are bounded so that the time to encode is
# linear in the length of the text.
_WORDS: Final = re.compile(
    r"'(?:[sdmtSDMT]|ll|ve|re|LL|VE|RE)"
    r"|(?:[^\r\n\w]|_)?[^\W\d_]{1,24}"
    r"|\d"
    r"| ?(?:[^\s\w]|_){1,24}[\r\n]{0,8}"
    r"|\s{0,24}[\r\n]{1,8}"
    r"|\s{1,24}(?!\S)"
    r"|\s{1,24}"
)
_MAX_CACHED_WORDS: Final = 50_000  # about 10 MB; real prompts have far fewer different words


class Vocabulary(TypedDict):
    """The contents of `vocabulary.json`."""

    merges: list[tuple[int, int]]  # of ids
    counts: list[int]  # by id: how often a token occurs in the training text
    followers: list[list[int]]  # by id: which tokens often follow it
    starters: list[int]  # ids that often begin a sentence


@cache
def load_vocabulary() -> Vocabulary:
    """Return the installed vocabulary."""
    raw = Path(__file__).with_name("vocabulary.json").read_bytes()
    vocabulary: Vocabulary = orjson.loads(raw)
    return vocabulary


def split_words(text: str) -> list[str]:
    """Split a text into words, which merges do not cross; joined, they are the text again."""
    return _WORDS.findall(text)


class Tokenizer:
    """Text to ids and back: `decode(encode(text)) == text` for every text that UTF-8 can encode."""

    __slots__ = ("_cache", "_merges", "_named_ids", "_named_token", "_ranks", "pieces", "special_ids")

    def __init__(
        self, merges: Iterable[tuple[int, int]], markers: Sequence[str] = (), special: Collection[str] = ()
    ) -> None:
        """Add the `markers` to the named tokens; the tokens named in `special` are removed from generated text, too."""
        pieces = [bytes([byte]) for byte in range(256)]
        self._ranks: dict[tuple[int, int], int] = {}
        for left, right in merges:
            self._ranks[left, right] = len(pieces)
            pieces.append(pieces[left] + pieces[right])
        names = (*NAMED_TOKENS, *markers)
        self._merges = {token: pair for pair, token in self._ranks.items()}
        self._named_ids = {name: len(pieces) + index for index, name in enumerate(names)}
        # Longest first, so that a name that begins with another one is found.
        self._named_token = re.compile("(" + "|".join(map(re.escape, sorted(names, key=len, reverse=True))) + ")")
        self.pieces: Sequence[bytes] = (*pieces, *(name.encode() for name in names))
        self.special_ids = frozenset(self._named_ids[name] for name in {*SPECIAL_TOKENS, *special})
        self._cache: dict[str, tuple[int, ...]] = {}

    def __len__(self) -> int:
        """Return the number of ids."""
        return len(self.pieces)

    def id(self, name: str) -> int:
        """Return the id of a special or added token."""
        return self._named_ids[name]

    @property
    def names(self) -> Sequence[str]:
        """The special and added tokens, in the order of their ids."""
        return tuple(self._named_ids)

    def parts(self, token: int) -> tuple[int, int] | None:
        """Return the two tokens that were merged into this token; None for a byte, and for a special or added token."""
        return self._merges.get(token)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; the name of a special or added token becomes one token, as in vLLM."""
        ids: list[int] = []
        for index, part in enumerate(self._named_token.split(text)):
            if index % 2:  # `split` alternates text and what the pattern matched
                ids.append(self._named_ids[part])
                continue
            for word in split_words(part):
                ids.extend(self._cache.get(word) or self._encode_word(word))
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Return the text of ids; bytes that are not valid UTF-8 become U+FFFD."""
        skipped = self.special_ids if skip_special else frozenset[int]()
        return b"".join([self.pieces[i] for i in ids if i not in skipped]).decode("utf-8", "replace")

    def _encode_word(self, word: str) -> tuple[int, ...]:
        """Merge the bytes of one word, always the pair that was learned first; words are short."""
        ids = list(word.encode())
        unknown = len(self.pieces)
        while len(ids) > 1:
            ranks = [self._ranks.get(pair, unknown) for pair in pairwise(ids)]
            best = min(ranks)
            if best == unknown:
                break
            index = ranks.index(best)
            ids[index : index + 2] = [best]
        if len(self._cache) < _MAX_CACHED_WORDS:
            self._cache[word] = tuple(ids)
        return tuple(ids)


class Decoder:
    """Turns sampled ids into text one id at a time, and keeps incomplete characters back.

    As vLLM 0.32 does (cassette `utf8_emoji_stream`): the ids that begin a character have the string "", the id that
    completes it has the whole character, and a character that is never completed is missing from the text.
    """

    __slots__ = ("_pending", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pending = b""

    def string(self, token: int) -> str:
        """Return the token's string as logprobs show it; the decoder does not advance."""
        piece = self._tokenizer.pieces[token]
        try:
            return piece.decode()
        except UnicodeDecodeError:
            text = (self._pending + piece).decode("utf-8", "replace")
            return "" if text.endswith("\ufffd") else text.lstrip("\ufffd")

    def feed(self, token: int) -> str:
        """Return the text that this token completes; special tokens have none."""
        if token in self._tokenizer.special_ids:
            return ""
        raw = self._pending + self._tokenizer.pieces[token]
        text = raw.decode("utf-8", "replace")
        if text.endswith("\ufffd"):
            self._pending = raw
            return ""
        self._pending = b""
        return text


@cache
def load_tokenizer() -> Tokenizer:
    """Return the tokenizer of the installed vocabulary; all engines share it, its only state is a cache."""
    return Tokenizer(load_vocabulary()["merges"])
