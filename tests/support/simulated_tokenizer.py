"""The simulator's vocabulary as a transformers tokenizer with byte-level pieces ("Ġhello"), like Llama's and Qwen's."""

from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from proxy.simulator.tokenizer import ADDED_TOKENS, NAMED_TOKENS, SPECIAL_TOKENS, load_tokenizer, load_vocabulary


@cache
def byte_characters() -> dict[int, str]:
    """The character of each byte in byte-level vocabularies: itself if it is printable, else one from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}


def piece(token: bytes) -> str:
    """A token's string in the vocabulary."""
    return "".join(byte_characters()[byte] for byte in token)


def make_simulated_tokenizer(folder: Path) -> Path:
    """Write the tokenizer's files to the folder; return the folder."""
    pieces = [piece(token) for token in load_tokenizer().pieces[: -len(NAMED_TOKENS)]]
    merges = [(pieces[left], pieces[right]) for left, right in load_vocabulary()["merges"]]
    core = Tokenizer(models.BPE({name: index for index, name in enumerate(pieces)}, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_tokens([AddedToken(name, special=name in SPECIAL_TOKENS) for name in SPECIAL_TOKENS + ADDED_TOKENS])
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>").save_pretrained(folder)
    return folder
