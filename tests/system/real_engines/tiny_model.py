"""The tiny model of the engine's tests: random weights in Qwen3's shape, a tokenizer, a chat template.

Run by the python that has vLLM (environment.py does), with the folder to write into:
`python tiny_model.py FOLDER`. Holds the making of the model and nothing that uses it. Its text is noise; ids,
shapes and lengths are what counts.
"""

import sys
import sysconfig
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 4096
CONTEXT = 2048
TRAINING_CHARACTERS = 4_000_000
SEED = 20261121

END_OF_TEXT, MESSAGE_START, MESSAGE_END = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Plain added tokens: one id each, but text like any other, as vLLM's hermes and qwen3 parsers expect them.
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
# Words with the space before them, digits one by one, punctuation, line ends, other space.
PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the standard library's sources, read in the order of their names."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(source.read_text(encoding="utf-8", errors="replace") for source in sources)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(MARKERS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text[:TRAINING_CHARACTERS].splitlines(keepends=True), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in MARKERS])
    if tokenizer.get_vocab_size() != VOCABULARY:
        found = tokenizer.get_vocab_size()
        sys.exit(f"The tokenizer has {found} ids, not {VOCABULARY}: there is too little text to train it on.")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=MESSAGE_END,
        pad_token=END_OF_TEXT,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8"),
    )


def make_model(end_ids: list[int]) -> Qwen3ForCausalLM:
    """Draw the weights. `end_ids` are the ids that end a reply; there are two, as real models have."""
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        # Ten times the usual: with less, any next token is as likely as any other.
        initializer_range=0.2,
        eos_token_id=end_ids[0],
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=end_ids)
    return model


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    made = make_tokenizer()
    made.save_pretrained(folder)
    make_model(made.convert_tokens_to_ids([MESSAGE_END, END_OF_TEXT])).save_pretrained(folder)
