"""Trains the simulator's vocabulary on the docstrings of Python's standard library: `python -m benchmarks.train_vocabulary`.

Writes `proxy/simulator/vocabulary.json`. Another Python version has other docstrings, so the vocabulary and all token ids
change; that is why the file is committed.
"""

import ast
import pydoc_data.topics
import re
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import orjson

from proxy.simulator.tokenizer import NAMED_TOKENS, Tokenizer, Vocabulary, split_words

_OUTPUT: Final = Path(__file__).parent.parent / "proxy" / "simulator" / "vocabulary.json"
_VOCABULARY_SIZE: Final = 2_048
_MAX_FOLLOWERS: Final = 8
_MAX_STARTERS: Final = 24
_SENTENCE: Final = re.compile(r"[A-Z][A-Za-z0-9 ,;:()'/-]{30,}\.")
_TEMPLATE_WORDS: Final = 'system\nuser\nassistant\n# Tools\n{"name": "", "arguments": {"type": "string"}}\n\n'


def docstrings() -> Iterator[str]:
    """Yield the docstrings of the standard library, ordered by file name."""
    yield from pydoc_data.topics.topics.values()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield ast.get_docstring(node) or ""


def sentences() -> list[str]:
    """Return the sentences of the docstrings, without duplicates."""
    found: dict[str, None] = {}
    for text in docstrings():
        for paragraph in text.split("\n\n"):
            for sentence in _SENTENCE.findall(" ".join(paragraph.split())):
                found[sentence] = None
    return list(found)


def learn_merges(texts: Sequence[str], count: int) -> list[tuple[int, int]]:
    """Return the pairs of ids to merge, most frequent first; of equally frequent pairs, the one with the smaller ids."""
    words = Counter(word for text in texts for word in split_words(text))
    ids_by_word = {word: list(word.encode()) for word in words}
    pairs: Counter[tuple[int, int]] = Counter()
    words_by_pair: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
    for word, ids in ids_by_word.items():
        for pair in pairwise(ids):
            pairs[pair] += words[word]
            words_by_pair[pair].add(word)
    merges: list[tuple[int, int]] = []
    while len(merges) < count:
        best = max(pairs, key=lambda pair: (pairs[pair], -pair[0], -pair[1]))
        merged = 256 + len(merges)
        merges.append(best)
        for word in sorted(words_by_pair.pop(best)):
            ids = ids_by_word[word]
            for pair in pairwise(ids):
                pairs[pair] -= words[word]
            ids_by_word[word] = ids = merge(ids, best, merged)
            for pair in pairwise(ids):
                pairs[pair] += words[word]
                words_by_pair[pair].add(word)
        del pairs[best]
    return merges


def merge(ids: Sequence[int], pair: tuple[int, int], merged: int) -> list[int]:
    """Return the ids with each occurrence of the pair replaced."""
    out: list[int] = []
    for token in ids:
        if out and (out[-1], token) == pair:
            out[-1] = merged
        else:
            out.append(token)
    return out


def learn_followers(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[list[list[int]], list[int]]:
    """Return for each token the tokens that often follow it, and the tokens that often begin a sentence.

    Followers are limited to whole words, their endings and simple punctuation, so that a walk along them reads like
    words, and its text is encoded to the same ids.
    """
    follows: defaultdict[int, Counter[int]] = defaultdict(Counter)
    begins = Counter[int]()
    for text in texts:
        ids = tokenizer.encode(text)
        begins[ids[0]] += 1
        # Sentences are separate texts, so a word with a space after a period occurs only in the second pair.
        for token, follower in [*pairwise(ids), *pairwise(tokenizer.encode(". " + text)[:2])]:
            follows[token][follower] += 1

    def is_letter(token: int) -> bool:
        return tokenizer.pieces[token][:1].isalpha()

    def ends_word(token: int) -> bool:
        counts = follows[token]
        return sum(counts[follower] for follower in counts if is_letter(follower)) * 5 < counts.total()

    def fits(token: int, follower: int) -> bool:
        piece = tokenizer.pieces[follower]
        if is_letter(follower):
            return not ends_word(token)
        return piece in {b".", b",", b";", b":"} or (piece[1:].isalpha() and ends_word(follower))

    followers = [
        [follower for follower, count in follows[token].most_common() if count > 1 and fits(token, follower)]
        for token in range(len(tokenizer))
    ]
    followers = [tokens[:_MAX_FOLLOWERS] for tokens in followers]
    starters = [token for token, _ in begins.most_common() if ends_word(token) and followers[token]]
    return followers, starters[:_MAX_STARTERS]


def learn() -> Vocabulary:
    """Return the vocabulary."""
    texts = sentences()
    merges = learn_merges([*texts, *[_TEMPLATE_WORDS] * 50], _VOCABULARY_SIZE - 256 - len(NAMED_TOKENS))
    tokenizer = Tokenizer(merges)
    counts = Counter(token for text in texts for token in tokenizer.encode(text))
    followers, starters = learn_followers(texts, tokenizer)
    return {
        "merges": merges,
        "counts": [counts[token] for token in range(len(tokenizer))],
        "followers": followers,
        "starters": starters,
    }


if __name__ == "__main__":
    _OUTPUT.write_bytes(orjson.dumps(learn()) + b"\n")
