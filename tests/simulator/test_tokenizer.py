"""Text to ids and back."""

from importlib.resources import files

from hypothesis import example, given
from hypothesis import strategies as st

from proxy.simulator.tokenizer import (
    ADDED_TOKENS,
    NAMED_TOKENS,
    SPECIAL_TOKENS,
    Decoder,
    Tokenizer,
    load_tokenizer,
    load_vocabulary,
    split_words,
)

TOKENIZER = load_tokenizer()
TEXTS = st.lists(
    st.one_of(st.text(), st.sampled_from([*NAMED_TOKENS, "the object", " \n\n\t ", "don't", "x" * 60]))
).map("".join)


@given(TEXTS)
@example("¼² ٣ é\u0301 \u00a0\u2028\ufffd 🦊 漢字")
def test_decoding_undoes_encoding(text):
    """Every text that UTF-8 can encode survives encoding and decoding."""
    assert text == TOKENIZER.decode(TOKENIZER.encode(text))


@given(TEXTS)
def test_words_joined_are_the_text(text):
    """The words of a text, joined, are the text."""
    assert text == "".join(split_words(text))


def test_a_full_cache_changes_nothing(monkeypatch):
    """Words that do not fit into the cache are encoded as before."""
    monkeypatch.setattr("proxy.simulator.tokenizer._MAX_CACHED_WORDS", 0)

    assert TOKENIZER.encode(" object") == Tokenizer(load_vocabulary()["merges"]).encode(" object")


def test_named_tokens_are_one_id():
    """Special and added tokens are one id each, anywhere in a text."""
    ids = TOKENIZER.encode("a<|im_start|>b<tool_call>")

    assert [TOKENIZER.id("<|im_start|>"), TOKENIZER.id("<tool_call>")] == [ids[1], ids[3]]


def test_common_words_are_one_id():
    """A frequent word of the training text is one token with its leading space."""
    assert [TOKENIZER.decode([i]) for i in TOKENIZER.encode(" object is the")] == [" object", " is", " the"]


def test_words_have_a_maximum_length():
    """A text without word boundaries is split, so that encoding takes linear time."""
    assert max(map(len, split_words("a" * 100_000))) == 24


def test_the_vocabulary_is_small():
    """The vocabulary has 2,048 ids in a file of less than 100 kB."""
    assert len(TOKENIZER) == 2_048
    assert files("proxy.simulator").joinpath("vocabulary.json").stat().st_size < 100_000


def test_special_tokens_can_be_skipped():
    """`skip_special` removes special tokens and keeps added tokens."""
    ids = TOKENIZER.encode("".join(SPECIAL_TOKENS) + "x" + "".join(ADDED_TOKENS))

    assert "x" + "".join(ADDED_TOKENS) == TOKENIZER.decode(ids, skip_special=True)


@given(TEXTS.filter(lambda text: not text.endswith("\ufffd")))
def test_incremental_decoding_gives_the_same_text(text):
    """The decoder gives the same text if it is fed one id at a time."""
    ids = TOKENIZER.encode(text)
    decoder = Decoder(TOKENIZER)
    fed = "".join([decoder.feed(token) for token in ids])

    assert TOKENIZER.decode(ids, skip_special=True).rstrip("\ufffd") == fed.rstrip("\ufffd")


def test_the_last_token_of_a_character_has_its_string():
    """The tokens that begin a character have the string "", the last one has the character."""
    decoder = Decoder(TOKENIZER)
    decoded = [(decoder.string(token), decoder.feed(token)) for token in "🦊".encode()]

    assert decoded == [("", ""), ("", ""), ("", ""), ("🦊", "🦊")]


def test_invalid_bytes_become_a_replacement_character():
    """Invalid bytes become U+FFFD in the text before the next character, but not in a token's string."""
    decoder = Decoder(TOKENIZER)
    decoded = [(decoder.string(token), decoder.feed(token)) for token in b"\xf9or"]

    assert decoded == [("", ""), ("o", "\ufffdo"), ("r", "r")]


def test_a_character_after_invalid_bytes_is_complete():
    """A character of several tokens that follows invalid bytes has its own string."""
    decoder = Decoder(TOKENIZER)
    decoded = [(decoder.string(token), decoder.feed(token)) for token in b"\xf9" + "é".encode()]

    assert decoded == [("", ""), ("", ""), ("é", "\ufffdé")]
