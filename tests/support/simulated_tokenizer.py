"""The simulator's vocabulary as a tokenizer of transformers: byte-level pieces ("Ġhello"), as Llama's and Qwen's are."""

from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from proxy.simulator.tokenizer import ADDED, NAMED, SPECIAL, load_tokenizer, load_vocabulary


@cache
def spelling() -> dict[int, str]:
    """The character that byte-level vocabularies write for each byte: itself if it can be seen, else one from 256 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + at) for at, byte in enumerate(hidden)}


def piece(token: bytes) -> str:
    """A token's string in the vocabulary."""
    return "".join(spelling()[byte] for byte in token)


def make_simulated_tokenizer(folder: Path) -> Path:
    """Write the tokenizer's files; the folder."""
    pieces = [piece(token) for token in load_tokenizer().pieces[: -len(NAMED)]]
    merges = [(pieces[left], pieces[right]) for left, right in load_vocabulary()["merges"]]
    core = Tokenizer(models.BPE({name: at for at, name in enumerate(pieces)}, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_tokens([AddedToken(name, special=name in SPECIAL) for name in SPECIAL + ADDED])
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>").save_pretrained(folder)
    return folder
