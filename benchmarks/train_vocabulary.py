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

from proxy.simulator.tokenizer import NAMED, Tokenizer, Vocabulary, split_words

_OUTPUT: Final = Path(__file__).parent.parent / "proxy" / "simulator" / "vocabulary.json"
_VOCABULARY_SIZE: Final = 2_048
_FOLLOWERS: Final = 8
_STARTERS: Final = 24
_PROSE: Final = re.compile(r"[A-Z][A-Za-z0-9 ,;:()'/-]{30,}\.")
_TEMPLATE_WORDS: Final = 'system\nuser\nassistant\n# Tools\n{"name": "", "arguments": {"type": "string"}}\n\n'


def docstrings() -> Iterator[str]:
    """Every documentation string of the standard library, in the order of file names."""
    yield from pydoc_data.topics.topics.values()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield ast.get_docstring(node) or ""


def sentences() -> list[str]:
    """What of it reads as sentences, each once."""
    found: dict[str, None] = {}
    for text in docstrings():
        for paragraph in text.split("\n\n"):
            for sentence in _PROSE.findall(" ".join(paragraph.split())):
                found[sentence] = None
    return list(found)


def learn_merges(texts: Sequence[str], count: int) -> list[tuple[int, int]]:
    """The byte pairs to merge, most frequent first; ties go to the smaller ids, so that runs agree."""
    words = Counter(word for text in texts for word in split_words(text))
    spelled = {word: list(word.encode()) for word in words}
    pairs: Counter[tuple[int, int]] = Counter()
    places: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
    for word, ids in spelled.items():
        for pair in pairwise(ids):
            pairs[pair] += words[word]
            places[pair].add(word)
    merges: list[tuple[int, int]] = []
    while len(merges) < count:
        best = max(pairs, key=lambda pair: (pairs[pair], -pair[0], -pair[1]))
        merged = 256 + len(merges)
        merges.append(best)
        for word in sorted(places.pop(best)):
            ids = spelled[word]
            for pair in pairwise(ids):
                pairs[pair] -= words[word]
            spelled[word] = ids = merge(ids, best, merged)
            for pair in pairwise(ids):
                pairs[pair] += words[word]
                places[pair].add(word)
        del pairs[best]
    return merges


def merge(ids: Sequence[int], pair: tuple[int, int], merged: int) -> list[int]:
    """The ids with each occurrence of the pair replaced."""
    out: list[int] = []
    for token in ids:
        if out and (out[-1], token) == pair:
            out[-1] = merged
        else:
            out.append(token)
    return out


def learn_followers(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[list[list[int]], list[int]]:
    """For each token those that often follow it, and the tokens that often begin a sentence.

    Of what follows a token only whole words, their endings and plain signs are kept, so that a walk along it
    reads like words, and its ids are the ones that its text would be encoded to.
    """
    follows: defaultdict[int, Counter[int]] = defaultdict(Counter)
    begins = Counter[int]()
    for text in texts:
        ids = tokenizer.encode(text)
        begins[ids[0]] += 1
        # The first word without its space occurs only here, with it only after another sentence.
        for token, following in [*pairwise(ids), *pairwise(tokenizer.encode(". " + text)[:2])]:
            follows[token][following] += 1

    def letter(token: int) -> bool:
        return tokenizer.pieces[token][:1].isalpha()

    def ends_word(token: int) -> bool:
        seen = follows[token]
        return sum(seen[each] for each in seen if letter(each)) * 5 < seen.total()

    def fits(token: int, following: int) -> bool:
        piece = tokenizer.pieces[following]
        if letter(following):
            return not ends_word(token)
        return piece in {b".", b",", b";", b":"} or (piece[1:].isalpha() and ends_word(following))

    followers = [
        [each for each, seen in follows[token].most_common() if seen > 1 and fits(token, each)][:_FOLLOWERS]
        for token in range(len(tokenizer))
    ]
    whole = [token for token, _ in begins.most_common() if ends_word(token) and followers[token]]
    return followers, whole[:_STARTERS]


def learn() -> Vocabulary:
    """The whole vocabulary."""
    texts = sentences()
    merges = learn_merges([*texts, *[_TEMPLATE_WORDS] * 50], _VOCABULARY_SIZE - 256 - len(NAMED))
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
