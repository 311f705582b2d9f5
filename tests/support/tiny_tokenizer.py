"""A small real tokenizer of a few words, with a chat template."""

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'nobody' %}{{ raise_exception('no such role') }}{% endif %}"
    "<s>{{ message.role }} {{ message.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant{% endif %}"
)
WORDS = ("<unk>", "<s>", "</s>", "user", "assistant", "tools", "Say", "hi", "hello", "there")


def make_tokenizer(folder: Path) -> Path:
    """Write the tokenizer's files; return the folder."""
    core = Tokenizer(models.WordLevel({word: position for position, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    made.save_pretrained(folder)
    return folder
